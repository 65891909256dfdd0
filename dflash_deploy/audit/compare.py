"""Two hosts: what of one may travel to the other, what must be rebuilt there, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_deploy.audit.rules.base import Case, Unseen, version_of
from dflash_deploy.audit.rules.driver import MIN_DRIVER
from dflash_deploy.audit.stacks import dotted
from dflash_deploy.facts import Facts
from dflash_deploy.facts.parse import integer, pair, rows, section, version_tuple


@dataclass(frozen=True)
class Item:
    """One thing on the first host, judged for the second."""

    what: str
    verdict: str
    """``travels``, ``rebuild``, ``stays`` (belongs to the machine) or ``unknown``."""
    why: tuple[str, ...]


def minor_paths(facts: Facts, minor: str) -> list[str]:
    return [python.path for python in facts.pythons if dotted(python.version[:2]) == minor]


def native_problems(environment: Mapping[str, Any], there: Facts, here: Facts) -> list[str]:
    """Why the environment's binaries would not run on the other host, however they came there."""
    problems = []
    if here.arch != there.arch:
        problems.append(f"architecture {here.arch} against {there.arch}")
    for need in rows(section(environment, "elf").get("needs")):
        family, _, digits = str(need.get("version")).rpartition("_")
        if (
            need.get("library") == "libc.so.6"
            and family == "GLIBC"
            and there.glibc
            and (version_tuple(digits) or ()) > there.glibc
        ):
            problems.append(f"{need.get('path')} needs {need.get('version')}, glibc there is {dotted(there.glibc)}")
    cuda = str(section(environment, "torch").get("cuda") or "")
    minimum = MIN_DRIVER.get(cuda.split(".")[0])
    if minimum:
        if there.driver is None and there.gpus == ():
            problems.append(f"torch is for CUDA {cuda}, no NVIDIA driver there")
        elif there.driver is not None and there.driver < minimum:
            problems.append(
                f"torch is for CUDA {cuda} (driver >= {dotted(minimum)}), the driver there is {there.driver_text}"
            )
    return problems


def compare(here: Facts, there: Facts) -> list[Item]:
    """Judge every environment, cache and model of ``here`` for ``there``."""
    found: list[Item] = []
    try:
        environments = Case(here).environments
    except Unseen as reason:
        environments = []
        found.append(Item("environments", "unknown", (str(reason),)))
    for environment in environments:
        path = str(environment.get("path"))
        version = str(environment.get("version") or "")
        minor = ".".join(version.split(".")[:2])
        problems = native_problems(environment, there, here)
        pins = f"{path}: its list of pins"
        if problems:
            found.append(Item(pins, "rebuild", (*problems, "take the stack that the other host's audit ranks first")))
        elif not there.pythons and not there.uv:
            found.append(Item(pins, "unknown", ("no Python was seen there",)))
        else:
            found.append(Item(pins, "travels", ("install the same pins there: wheels, driver and glibc fit",)))
        reasons = list(problems)
        home = str(environment.get("home") or "")
        same_base = any(
            python.path.rpartition("/")[0] == home for python in there.pythons if dotted(python.version[:2]) == minor
        )
        if home and not same_base:
            others = minor_paths(there, minor)
            reasons.append(
                f"its base interpreter is {home}/python{minor}; there: "
                f"{', '.join(others) if others else f'no Python {minor}'}"
            )
        if environment.get("scripts_foreign"):
            reasons.append("it is itself a copy: its scripts name another path")
        if reasons:
            found.append(Item(f"{path}: the folder itself", "rebuild", tuple(reasons)))
        else:
            found.append(
                Item(
                    f"{path}: the folder itself",
                    "travels",
                    (
                        "only to the same path, with rsync -a: scripts and pyvenv.cfg name it",
                        f"same interpreter at {home}",
                    ),
                )
            )
        for dist in rows(environment.get("dists")):
            if dist.get("direct_url"):
                name = f"{dist.get('name')} {dist.get('version')}"
                capability = {gpu.compute_capability for gpu in there.gpus} - {
                    gpu.compute_capability for gpu in here.gpus
                }
                why = ["built or installed from a path, no index has it"]
                if dist.get("editable"):
                    why.append("editable: its source folder has to come too")
                if capability:
                    why.append(
                        f"GPUs of another capability there: "
                        f"{', '.join(dotted(c) for c in sorted(filter(None, capability)))}"
                    )
                found.append(
                    Item(name, "rebuild" if capability or dist.get("editable") or problems else "travels", tuple(why))
                )
    found += caches(here, there)
    for model in rows(here.raw.get("models")):
        if model.get("exists"):
            size = (integer(section(model, "weights").get("total_bytes")) or 0) >> 20
            free = there.disk_free_mib.get(there.home)
            short = free is not None and free < size
            found.append(
                Item(
                    str(model.get("path")),
                    "unknown" if short else "travels",
                    (f"{size} MiB of data" + (f", {free} MiB free there" if free is not None else ""),),
                )
            )
    found.append(
        Item(
            "NVIDIA driver",
            "stays",
            (f"{here.driver_text} here, {there.driver_text} there",),
        )
    )
    return found


def torch_versions(facts: Facts) -> set[str]:
    """Versions of torch in the environments; empty where none was seen."""
    try:
        return {str(version_of(environment, "torch")) for environment in Case(facts).environments}
    except Unseen:
        return set()


def caches(here: Facts, there: Facts) -> list[Item]:
    """JIT caches hold machine code for one GPU, one toolkit and one torch."""
    items = []
    mine = {gpu.compute_capability for gpu in here.gpus}
    theirs = {gpu.compute_capability for gpu in there.gpus}
    torch, other = torch_versions(here), torch_versions(there)
    for name, cache in section(here.raw, "python", "caches").items():
        why = []
        if mine != theirs:
            why.append(
                f"compiled for {', '.join(dotted(c) for c in sorted(filter(None, mine))) or 'no GPU'}, there "
                f"{', '.join(dotted(c) for c in sorted(filter(None, theirs))) or 'no GPU'}"
            )
        if other and torch != other:
            why.append(f"torch {', '.join(sorted(torch))} here, {', '.join(sorted(other))} there")
        if (
            here.glibc
            and there.glibc
            and pair(dotted(there.glibc)) != pair(dotted(here.glibc))
            and there.glibc < here.glibc
        ):
            why.append("compiled against a newer glibc")
        path = cache.get("path") if isinstance(cache, Mapping) else ""
        items.append(
            Item(f"{name} cache ({path})", "rebuild" if why else "travels", tuple(why) or ("same GPU and torch",))
        )
    return items
