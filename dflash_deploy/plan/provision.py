"""Facts and a stack → the steps that make the deployment's venv and its models. Pure."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dflash_deploy.audit.stacks import Stack
from dflash_deploy.errors import Incompatible, UsageError
from dflash_deploy.facts import Facts, PythonInterpreter
from dflash_deploy.model import CopyTree, Plan, Remove, Run, Step, WriteFile
from dflash_deploy.plan.alone import INSTALL_TIMEOUT_S, alone
from dflash_deploy.plan.models import ModelState, fetch_steps, upload_steps
from dflash_deploy.plan.offline import offline_steps, unfitting
from dflash_deploy.releases.model import VenvLook
from dflash_deploy.settings import Settings
from dflash_deploy.wheelhouse.house import House

IMPORT_TIMEOUT_S = 600.0
SPARE_MIB = 512
"""Room left for logs and temporary files."""

IMPORT_TEST = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print("imported", *sys.argv[1:])
"""


@dataclass(frozen=True)
class VenvState:
    """What stands at the venv's path."""

    exists: bool = False
    """There is something at the path."""
    python: tuple[int, int, int] | None = None
    """None: no interpreter there that starts."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Normalized name → version, whole installations only."""
    stamp: str = ""
    """Digest of the pins that were installed to the end; ``""``: no finished installation."""

    @classmethod
    def of_look(cls, found: VenvLook) -> VenvState:
        """From what the host was seen to hold."""
        packages = {str(canonicalize_name(name)): version for name, version in found.packages.items()}
        return cls(found.exists, found.python, packages, str(found.stamp.get("pins") or ""))


def unmet(stack: Stack, packages: Mapping[str, str]) -> list[str]:
    """Requirements of the stack that the packages do not meet, as ``name==1 (found 2)``."""
    missing = []
    for text in (*stack.requirements, *stack.no_deps):
        wanted = Requirement(text)
        found = packages.get(canonicalize_name(wanted.name))
        if found is None:
            missing.append(f"{text} (absent)")
        elif not wanted.specifier.contains(found, prereleases=True):
            missing.append(f"{text} (found {found})")
    return missing


def is_complete(stack: Stack, venv: VenvState) -> bool:
    """The stack was installed there to the end, is still whole, and its interpreter starts."""
    low, high = stack.python
    fits = venv.python is not None and low <= venv.python[:2] <= high
    return fits and venv.stamp == stack.pins and not unmet(stack, venv.packages)


def plan_provision(
    settings: Settings,
    facts: Facts,
    venv: VenvState,
    house: House | None = None,
    cached: Mapping[str, int] | None = None,
) -> Plan:
    """Steps that bring the venv to the stack; none when its stamp and its packages say that it is there.

    Args:
        house: install from these wheels and ask no index.
        cached: digest → size of what the host's cache of wheels holds.

    Raises:
        Incompatible: no Python that fits and no uv, or not enough disk space; every reason at once.
        UsageError: something that is no venv stands at the venv's path, outside the deployment's root.
    """
    stack = settings.stack
    missing = unmet(stack, venv.packages)
    wanted = stack.pins
    low, high = stack.python
    fits = venv.python is not None and low <= venv.python[:2] <= high
    if is_complete(stack, venv):
        return Plan("provision", (), f"{stack.name} is installed in {settings.venv}")
    problems = []
    steps: list[Step] = []
    command: tuple[str, ...] = ()
    if house is not None:
        problems += unfitting(house, stack, facts)
        # Its wheels are for one Python.
        low = high = house.target.python
        fits = venv.python is not None and venv.python[:2] == low
    if not fits:
        if venv.exists:
            if not posixpath.normpath(settings.venv).startswith(posixpath.normpath(settings.root) + "/"):
                raise UsageError(
                    f"{settings.venv} is there and holds no Python {_span(low, high)} that starts",
                    hint="name another folder with --venv, or move this one away",
                )
            steps.append(Remove(settings.venv, title=f"remove the venv that no longer works ({settings.venv})"))
        command, env = venv_command(settings, facts, low, high, offline=house is not None)
        if not command:
            seen = ", ".join(".".join(map(str, python.version)) for python in facts.pythons) or "none"
            or_uv = "" if house is not None else ", or uv"
            problems.append(f"needs Python {_span(low, high)} with its venv module{or_uv}; the host has {seen}")
        else:
            steps.append(Run(alone(settings, command), title=f"make the venv {settings.venv}", env=env, timeout_s=600))
    need = _space(stack, missing)
    if need and house is not None:
        need += sum(wheel.size for wheel in house.wheels if wheel.sha256 not in (cached or {})) >> 20
    free = _free(facts, settings.venv)
    if free is not None and need and free < need + SPARE_MIB:
        problems.append(f"needs {need + SPARE_MIB} MiB at {settings.venv}, {free} MiB are free")
    if problems:
        raise Incompatible(
            f"{stack.name} cannot be installed on {settings.host}",
            evidence=problems,
            hint="install Python's venv module (Debian: python3-venv) or uv, free disk space, or choose another --root",
        )
    if house is not None:
        steps += offline_steps(settings, facts, house, cached or {})
    else:
        steps += _install(settings, facts, venv.python[:2] if fits and venv.python else _version(facts, command))
    steps += finish_steps(settings)
    if not venv.exists:
        reason = f"no venv at {settings.venv} yet"
    elif not venv.stamp:
        reason = "an installation was begun and not finished: it goes on"
    elif venv.stamp != wanted:
        reason = "the stack's pins have changed"
    elif not fits:
        reason = "the venv's Python does not start or does not fit"
    else:
        reason = "packages are missing or differ: " + ", ".join(missing[:6])
    return Plan("provision", tuple(steps), reason)


def plan_models(settings: Settings, states: Mapping[str, ModelState], pair_folder: str, *, pair_differs: bool) -> Plan:
    """Steps that bring the models to the host.

    Args:
        states: per path of ``settings.model`` and ``settings.draft_model``.
        pair_folder: the shipped pair on this side.
        pair_differs: the host's copy of it is absent or differs.

    Raises:
        UsageError: a model is neither on the host nor here.
    """
    if settings.tiny_pair:
        target = posixpath.join(settings.root, "models", "tiny-pair")
        if not pair_differs:
            return Plan("models", (), "the tiny pair is there")
        return Plan(
            "models",
            (CopyTree(pair_folder, target, title="copy the tiny pair"),),
            "this host has no GPU and no model was named",
        )
    steps: list[Step] = []
    problems = []
    for path in dict.fromkeys((settings.model, settings.draft_model)):
        state = states.get(path, ModelState())
        if not path or state.on_host:
            continue
        if state.local:
            steps += upload_steps(path, state.blobs, state.present, state.local)
        elif state.repo:
            steps += fetch_steps(settings, path, state)
        else:
            problems.append(f"{path}: no such folder on {settings.host} nor here")
    if problems:
        raise UsageError(
            "a model is missing",
            evidence=problems,
            hint="give the path of a folder with config.json, on the host or on this machine, or a name of the hub "
            "(org/model)",
        )
    return Plan("models", tuple(steps), "models have to be brought" if steps else "the models are there")


def uploaded_path(settings: Settings, local: str) -> str:
    """Where a model folder of this side goes on the host."""
    digest = hashlib.sha256(posixpath.abspath(local).encode()).hexdigest()[:8]
    return posixpath.join(settings.root, "models", f"{posixpath.basename(posixpath.normpath(local))}-{digest}")


def finish_steps(settings: Settings) -> list[Step]:
    """What ends an installation: its imports work, and its stamp."""
    stamp = {"stack": settings.stack.name, "pins": settings.stack.pins}
    text = json.dumps(stamp, indent=1).encode() + b"\n"
    return [verify_imports(settings), WriteFile(settings.stamp, text, title="note that the venv is complete")]


def verify_imports(settings: Settings) -> Run:
    """The server's modules import, in a process of their own with a deadline."""
    return Run(
        (settings.python, "-c", IMPORT_TEST, *settings.stack.imports),
        title=f"import {', '.join(settings.stack.imports[:3])}",
        env={**dict(settings.stack.env), "HF_HUB_OFFLINE": "1"},
        timeout_s=IMPORT_TIMEOUT_S,
    )


def venv_command(
    settings: Settings, facts: Facts, low: tuple[int, int], high: tuple[int, int], *, offline: bool
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command that makes the venv from a Python between the two, and its variables; empty when there is none."""
    stack = settings.stack
    fitting = [python for python in facts.pythons if low <= python.version[:2] <= high]
    if facts.uv and (fitting or not offline):
        # The first is the system's own.
        first = next(iter(sorted(fitting, key=lambda python: not has_lock(stack, facts, python.version[:2]))), None)
        minors = [(3, minor) for minor in range(high[1], low[1] - 1, -1)]
        newest = next((each for each in minors if has_lock(stack, facts, each)), high)
        version = first.path if first is not None else f"{newest[0]}.{newest[1]}"
        return (facts.uv, "venv", "--python", version, settings.venv), {}
    best = chosen_python(facts, low, high, stack)
    return ((best.path, "-m", "venv", settings.venv), {}) if best is not None else ((), {})


def has_lock(stack: Stack, facts: Facts, python: tuple[int, int]) -> bool:
    """Every package of the stack is known to be a wheel for this Python: of others, some may have to be compiled."""
    from dflash_deploy.plan.lock import lock_of

    return bool(lock_of(stack, python, facts.arch))


def chosen_python(facts: Facts, low: tuple[int, int], high: tuple[int, int], stack: Stack) -> PythonInterpreter | None:
    """The host's interpreter that a venv is made from; None when none of those versions can make one."""
    # The system's own outlives anybody's home folder; of several the newest.
    usable = [python for python in facts.pythons if low <= python.version[:2] <= high and python.has_venv]
    return max(
        usable,
        key=lambda python: (
            has_lock(stack, facts, python.version[:2]),
            python.path.startswith(("/usr/bin/", "/usr/local/bin/")),
            python.version,
        ),
        default=None,
    )


def _version(facts: Facts, command: Sequence[str]) -> tuple[int, int]:
    """Python minor of the venv that a command of :func:`venv_command` makes; (0, 0): not known."""
    for python in facts.pythons:
        if python.path in command:
            return (python.version[0], python.version[1])
    # One that uv brings is named by its version.
    named = next((word for word in command if re.fullmatch(r"3\.\d+", word)), "0.0").split(".")
    return (int(named[0]), int(named[1]))


def _install(settings: Settings, facts: Facts, python: tuple[int, int]) -> list[Step]:
    from dflash_deploy.plan.constraints import constraints
    from dflash_deploy.plan.lock import lock_name, lock_of

    stack = settings.stack
    folder = posixpath.join(settings.root, "locks")
    if settings.lock and (text := lock_of(stack, python, facts.arch)):
        path = posixpath.join(folder, lock_name(stack, python))
        words = ("--require-hashes", "--no-deps", "-r", path)
        return [
            WriteFile(path, text.encode(), title="write the stack's lock"),
            Run(
                alone(settings, _installer(settings, facts, words)),
                title=f"install {text.count('==')} packages of {stack.name}, hashes required",
                timeout_s=INSTALL_TIMEOUT_S,
            ),
        ]
    variant = stack.torch_variant if stack.device == "cpu" else ""
    limits = constraints(stack)
    bound: tuple[str, ...] = ()
    torch = [pin for pin in stack.requirements if re.match(r"(torch|torchvision|torchaudio)==", pin)]
    steps: list[Step] = []

    if limits:
        path = posixpath.join(folder, f"{stack.name}-constraints.txt")
        lines = "".join(f"{line}\n" for line in limits)
        steps.append(WriteFile(path, lines.encode(), title="write what dependencies are held to"))
        bound = ("-c", path)

    def add(argv: Sequence[str], title: str) -> None:
        steps.append(Run(alone(settings, argv), title=title, timeout_s=INSTALL_TIMEOUT_S))

    if torch and variant:
        # A fifth of the size, but only some indexes carry it.
        special = (*torch, f"--torch-backend={variant}") if facts.uv else [f"{pin}+{variant}" for pin in torch]
        first = shlex.join(_installer(settings, facts, special))
        default = shlex.join(_installer(settings, facts, torch))
        script = f"{first} || {{ echo 'no {variant} build of torch here: taking the default one'; {default}; }}"
        add(("/bin/sh", "-c", script), f"install {' '.join(torch)} ({variant} build where there is one)")
    count = len(stack.requirements)
    add(_installer(settings, facts, (*bound, *stack.requirements)), f"install {count} packages of {stack.name}")
    if stack.no_deps:
        bare = ("--no-deps", *stack.no_deps)
        add(_installer(settings, facts, bare), f"install {' '.join(stack.no_deps)} without dependencies")
    return steps


def _installer(settings: Settings, facts: Facts, words: Sequence[str]) -> tuple[str, ...]:
    if facts.uv:
        return (facts.uv, "pip", "install", "--python", settings.python, *words)
    # Python compiles what the server really imports, once; compiling all of it here takes minutes.
    quiet = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--no-compile")
    return (settings.python, "-m", "pip", "install", *quiet, *words)


def missing_mib(stack: Stack, packages: Mapping[str, str]) -> int:
    """MiB of disk space that an installation on top of these packages takes, roughly."""
    return _space(stack, unmet(stack, packages))


def _space(stack: Stack, missing: Sequence[str]) -> int:
    """MiB still to come: the whole stack until its largest part, torch, is there."""
    if not missing:
        return 0
    return stack.installed_mib if any(entry.startswith("torch==") for entry in missing) else stack.installed_mib // 4


def _free(facts: Facts, path: str) -> int | None:
    """Free MiB of the nearest folder that facts know of."""
    while True:
        if path in facts.disk_free_mib:
            return facts.disk_free_mib[path]
        parent = posixpath.dirname(path)
        if parent == path:
            return None
        path = parent


def _span(low: tuple[int, int], high: tuple[int, int]) -> str:
    first, last = f"{low[0]}.{low[1]}", f"{high[0]}.{high[1]}"
    return first if first == last else f"{first} to {last}"
