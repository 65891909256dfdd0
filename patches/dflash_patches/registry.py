"""Which sets exist: (release, set name) → :class:`~dflash_deploy.patching.patch.PatchSet`.

Ranges of one name never overlap.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

from packaging.version import Version

from dflash_deploy.errors import UnsupportedVersion, UsageError
from dflash_deploy.patching.patch import PatchSet
from dflash_patches.releases import RELEASES, Support, Tested

__all__ = ("MODULES", "RELEASES", "Support", "Tested", "all_sets", "find", "names")

GENERATIONS = ("sglang_0_5_10_post1", "sglang_0_5_16", "sglang_0_5_17", "sglang_0_5_19", "sglang_0_5_23")
MODULES = tuple(f"{generation}.{name}" for generation in GENERATIONS for name in ("ddtree", "cpu"))
"""In each, every :class:`PatchSet` at module level counts."""

SEEN = Path(__file__).with_name("seen.json")
"""``generation:set`` → patch → releases that held its anchor, oldest first; written by ``python -m tests.patches.matrix``."""


@cache
def by_generation() -> tuple[tuple[str, PatchSet], ...]:
    """(generation, set) of every set, in the order of :data:`MODULES`."""
    found: list[tuple[str, PatchSet]] = []
    seen = json.loads(SEEN.read_text("utf-8"))
    for name in MODULES:
        module = importlib.import_module(f"dflash_patches.{name}")
        generation = name.partition(".")[0]
        for value in vars(module).values():
            if isinstance(value, PatchSet):
                held = seen.get(f"{generation}:{value.name}", {})
                found.append((generation, replace(value, seen={patch: tuple(held[patch].split()) for patch in held})))
    return tuple(found)


@cache
def all_sets() -> tuple[PatchSet, ...]:
    """Every set, in the order of :data:`MODULES`."""
    return tuple(each for _, each in by_generation())


def names() -> tuple[str, ...]:
    """Names of all sets."""
    return tuple(dict.fromkeys(each.name for each in all_sets()))


def find(version: str, name: str, *, allow_untested: bool = False, package: str = "sglang") -> PatchSet:
    """The set called ``name`` for this release. ``allow_untested``: else the one written for the nearest lower release.

    Raises:
        UsageError: no set has this name.
        UnsupportedVersion: none is written for this release.
    """
    named = [each for each in all_sets() if each.name == name and each.package == package]
    if not named:
        raise UsageError(f"there is no patch set called {name}", hint=f"choose from: {', '.join(names())}")
    for each in named:
        if each.supports(version):
            return each
    if allow_untested:
        lower = [each for each in named if Version(each.tested[0]) < Version(version)]
        return lower[-1] if lower else named[0]
    known = RELEASES.get(version)
    raise UnsupportedVersion(
        f"no patch set {name} is written for {package} {version}",
        evidence=[
            *([f"{package} {version}: {known.reason}"] if known is not None and known.generation is None else []),
            *(
                f"{name} supports {package} {each.versions} (tested: {', '.join(each.tested) or 'none'})"
                for each in named
            ),
        ],
        hint="install a supported release, or try --allow-untested (only if every anchor and contract holds)",
    )
