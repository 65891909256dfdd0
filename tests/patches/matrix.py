"""Every release × every set: does it apply, compile, hold its contracts? Writes the table that the README shows.

    python -m tests.patches.matrix --write [--full]

``--full`` also compiles the whole patched tree and imports the patched modules, with the Python that
``DFLASH_MATRIX_PYTHON`` names (an environment with SGLang's dependencies).
"""

from __future__ import annotations

import argparse
import compileall
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_patches import registry
from dflash_patches.releases import RELEASES, Tested
from packaging.version import Version

from dflash_deploy.assets import payload_dir
from dflash_deploy.host.local import LocalHost
from dflash_deploy.patching import engine, tree
from dflash_deploy.patching.patch import PatchSet, Present, Verdict
from tests.patches.wheels import unpack, wheel

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "data" / "patches" / "matrix.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- releases: written by tests/patches/matrix.py -->\n", "<!-- releases: end -->\n"
FIRST = Version("0.5.8")
SPEC_INFO = "srt/speculative/spec_info.py"


def published() -> list[str]:
    """Every final release of the index from 0.5.8 on, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "sglang"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"Available versions: (.*)", done.stdout)
    assert found is not None, done.stdout
    versions = (Version(text.strip()) for text in found[1].split(","))
    return [str(v) for v in sorted(versions) if v >= FIRST and not v.is_prerelease]


class Release:
    """One wheel, read as far as it is asked for."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.archive = zipfile.ZipFile(wheel("sglang", version))
        self.names = set(self.archive.namelist())

    def file(self, path: str) -> bytes | None:
        name = f"sglang/{path}"
        return self.archive.read(name) if name in self.names else None

    def torch(self) -> str:
        """The torch that the release pins."""
        (name,) = (n for n in self.names if re.fullmatch(r"sglang-[^/]+\.dist-info/METADATA", n))
        text = self.archive.read(name).decode()
        found = re.search(r"^Requires-Dist: torch *\(?==([^;)\s]+)", text, re.M)
        return found[1] if found else ""

    def has(self, name: str) -> bool:
        """Whether the release defines a name in ``spec_info.py``."""
        asked = PatchSet("asked", "sglang", "", (), superseded=Present(SPEC_INFO, name))
        return engine.superseded({SPEC_INFO: self.file(SPEC_INFO)}, asked)

    def judge(self, each: PatchSet) -> engine.Outcome | None:
        """What the set would do; None: upstream has it."""
        files = {path: self.file(path) for path in each.files}
        return None if engine.superseded(files, each) else engine.run(files, each.patches, explain=False)


engine.parsed = functools.lru_cache(maxsize=64)(engine.parsed)  # a release's files are judged by every set


def held(verdict: Verdict) -> bool:
    """The patch's anchor is there, whatever its contracts say."""
    return verdict.state.ok or verdict.detail.startswith("contract: ")


def row(version: str, generations: Mapping[str, str] | None = None) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """(row of the table, ``generation:set`` → patches whose anchor this release holds).

    Args:
        generations: set name → the only generation to try; None: all, and the one that fits best counts.
    """
    release = Release(version)
    sets: dict[str, Any] = {}
    anchors: dict[str, list[str]] = {}
    for generation, each in registry.by_generation():
        if generations is not None and generations.get(each.name) != generation:
            continue
        supported = each.supports(version)
        cell = {"state": "superseded", "generation": generation, "holds": 0, "of": len(each.patches)}
        outcome = release.judge(each)
        if outcome is not None:
            for path, data in outcome.files.items():
                compile(data, path, "exec", dont_inherit=True)
            found = anchors.setdefault(f"{generation}:{each.name}", [])
            found += [v.patch for v in outcome.verdicts if held(v) and v.patch not in found]
            cell["holds"] = sum(v.state.ok for v in outcome.verdicts)
            cell["state"] = "refused" if not outcome.ok else "applies" if supported else "untested"
        best = sets.get(each.name)
        if best is None or supported or (not best["supported"] and _fit(cell) > _fit(best)):
            sets[each.name] = {**cell, "supported": supported}
    known = RELEASES.get(version)
    return {
        "version": version,
        "torch": release.torch(),
        "dflash": release.has("SpeculativeAlgorithm.DFLASH"),
        "sets": sets,
        "tried": str(known.tested if known is not None else Tested.NONE),
        "note": known.reason if known is not None else "",
    }, anchors


def _fit(cell: Mapping[str, Any]) -> float:
    return float(cell["holds"]) / (cell["of"] or 1)


def tried_in_full(version: str) -> dict[str, str]:
    """Apply the supported sets to the unpacked release; compile everything; import what they changed."""
    sets = [s for s in registry.all_sets() if s.supports(version)]
    if not sets:
        return {}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        site = unpack("sglang", version, Path(folder) / "site-packages")
        state = tree.inspect(LocalHost(), str(site), sets, payload=payload_dir(), device="cpu")
        tree.apply(LocalHost(), str(site), sets, payload=payload_dir(), device="cpu")
        ok = compileall.compile_dir(site / "sglang", quiet=2, workers=1, force=True)
        found["compiled"] = "all" if ok else "not all"
        python = os.environ.get("DFLASH_MATRIX_PYTHON")
        if python:
            changed = [c.path for c in state.changes if c.path.startswith("sglang/")]
            modules = [path.removesuffix(".py").replace("/", ".") for path in changed]
            found["imported"] = _imports(python, site, modules)
    return found


def _imports(python: str, site: Path, modules: Sequence[str]) -> str:
    script = (
        "import importlib, sys, traceback\n"
        "done = 0\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "        done += 1\n"
        "    except BaseException:\n"
        "        print(name, traceback.format_exc().splitlines()[-1], file=sys.stderr)\n"
        "print(done)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(site), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, "-c", script, *modules], capture_output=True, text=True, env=env, timeout=600)
    sys.stderr.write(done.stderr[-2000:])
    return f"{(done.stdout.split() or ['0'])[-1]} of {len(modules)}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The README's table."""
    lines = [
        "| SGLang | torch | own DFLASH | `ddtree` | `cpu` | tried | notes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in rows:
        cells = [_cell(each["sets"].get(name)) for name in ("ddtree", "cpu")]
        full = each.get("full", {})
        tried = "" if each["tried"] == Tested.NONE else each["tried"]
        if full.get("imported"):
            tried += f"; imports {full['imported']}"
        native = "yes" if each["dflash"] else "no"
        lines.append(
            f"| {each['version']} | {each['torch']} | {native} | {' | '.join(cells)} | {tried} | {each['note']} |"
        )
    return "\n".join(lines) + "\n"


def _cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return ""
    if cell["state"] in ("applies", "superseded"):
        return str(cell["state"])
    if cell["state"] == "untested":
        return f"untested: all {cell['of']} patches fit"
    return f"no: {cell['holds']} of {cell['of']} patches fit"


def shown() -> str:
    """The table as it stands in the README."""
    text = README.read_text("utf-8")
    assert text.count(BEGIN) == 1 and text.count(END) == 1
    return text.partition(BEGIN)[2].partition(END)[0].strip("\n") + "\n"


def stored() -> list[dict[str, Any]]:
    """The rows that are checked in."""
    rows: list[dict[str, Any]] = json.loads(TABLE.read_text("utf-8"))["releases"]
    return rows


def main() -> None:
    """Try every release and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table, the README and the anchors")
    parser.add_argument("--full", action="store_true", help="compile whole trees, import patched modules")
    parser.add_argument("versions", nargs="*", help="default: every release of the index from 0.5.8 on")
    given = parser.parse_args()
    old = {each["version"]: each for each in stored()} if TABLE.exists() else {}
    seen: dict[str, dict[str, list[str]]] = {}
    rows = []
    for version in given.versions or published():
        each, anchors = row(version)
        if given.full:
            each["full"] = tried_in_full(version)
        elif old.get(version, {}).get("full"):
            each["full"] = old[version]["full"]
        rows.append(each)
        for name, patches in anchors.items():
            for patch in patches:
                seen.setdefault(name, {}).setdefault(patch, []).append(version)
        print(
            version, {n: f"{c['state']} {c['holds']}/{c['of']}" for n, c in each["sets"].items()}, each.get("full", "")
        )
    if given.write:
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        TABLE.write_text(json.dumps({"releases": rows}, indent=1) + "\n", "utf-8")
        held = {name: {patch: " ".join(found) for patch, found in each.items()} for name, each in seen.items()}
        registry.SEEN.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n", "utf-8")
        head, _, rest = README.read_text("utf-8").partition(BEGIN)
        README.write_text(f"{head}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
