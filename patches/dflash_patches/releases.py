"""What is known of each SGLang release: which generation of sets it takes, how far that was tried, and why not.

One row a release, oldest first. A release that is not in the table is unknown, not unsupported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Tested(StrEnum):
    """How far a release was tried with the sets of its generation, most first."""

    SERVED = "served"
    """Served with DDTREE on a CPU; tokens and accepted lengths were those of the independent replay."""
    PATCHED = "patched"
    """On the release's own wheel: every set applied, compiled, reverted, and all contracts held. Not served."""
    NONE = "none"
    """Not tried, or no set is for it."""


@dataclass(frozen=True)
class Support:
    """Verdict for one release."""

    generation: str | None
    """Folder of the sets that fit it, ``sglang_0_5_16``; None: unsupported."""
    tested: Tested
    reason: str
    """Why it is unsupported, or what to know; one line."""
    sets: tuple[str, ...] = ()
    """Names of the sets that are for it."""


def _served(generation: str, note: str = "") -> Support:
    return Support(generation, Tested.SERVED, note, ("ddtree", "cpu"))


def _patched(generation: str, note: str = "") -> Support:
    return Support(generation, Tested.PATCHED, note, ("ddtree", "cpu"))


def _no(reason: str) -> Support:
    return Support(None, Tested.NONE, reason)


NO_DFLASH = "the release has no DFLASH"
FIRST_WORKER = (
    "its DFLASH worker is of the first generation, which allocates slots per step and has no overlap: a tree would need "
    "another worker; 0.5.16 has the same torch and is supported"
)
EARLY_WORKER = (
    "its DFLASH worker, the first of the second generation, has no hooks at the end of captured graphs and other names in "
    "its draft state; 0.5.16 has the same torch and is supported"
)
CUDA_TILE = "on CUDA it does not install from published wheels alone (cuda-tile==1.6.0rc5)"
RELEASES: Mapping[str, Support] = MappingProxyType(
    {
        "0.5.8": _no(NO_DFLASH),
        "0.5.8.post1": _no(NO_DFLASH),
        "0.5.9": _no(NO_DFLASH),
        "0.5.10": _no(NO_DFLASH),
        "0.5.10.post1": _served("sglang_0_5_10_post1", "DFLASH itself is injected; no overlap scheduling"),
        "0.5.11": _no(FIRST_WORKER),
        "0.5.12": _no(FIRST_WORKER),
        "0.5.12.post1": _no(FIRST_WORKER),
        "0.5.13": _no(FIRST_WORKER),
        "0.5.13.post1": _no(FIRST_WORKER),
        "0.5.14": _no(EARLY_WORKER),
        "0.5.15": _no(EARLY_WORKER),
        "0.5.15.post1": _no(EARLY_WORKER),
        "0.5.16": _served("sglang_0_5_16"),
        "0.5.17": _patched("sglang_0_5_17"),
        "0.5.18": _patched("sglang_0_5_17", CUDA_TILE),
        "0.5.19": _patched("sglang_0_5_19", CUDA_TILE),
        "0.5.20": _patched("sglang_0_5_19", CUDA_TILE),
        "0.5.21": _patched("sglang_0_5_19", CUDA_TILE),
        "0.5.22": _patched("sglang_0_5_23", CUDA_TILE),
        "0.5.23": _served("sglang_0_5_23"),
    }
)
"""Release → verdict."""
