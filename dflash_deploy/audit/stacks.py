"""Which packages go together, as data: one stack per SGLang release and platform."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stack:
    """A set of pinned packages that is known to run together."""

    name: str
    """``sglang-0.5.16-cpu``"""
    sglang: str
    device: str
    """``cuda`` or ``cpu``"""
    torch: str
    torch_variant: str
    """PyTorch's wheel variant: ``cu128``, ``cu130``, ``cpu``."""
    requirements: tuple[str, ...]
    """Pins for pip or uv, complete when ``no_deps``."""
    no_deps: tuple[str, ...] = ()
    """Requirements installed without their dependencies (the release's own metadata asks for CUDA packages that a CPU never imports)."""
    python: tuple[tuple[int, int], tuple[int, int]] = ((3, 11), (3, 13))
    """Lowest and highest Python minor, both included."""
    min_glibc: tuple[int, int] = (2, 28)
    min_driver: tuple[int, ...] | None = None
    installed_mib: int = 0
    """Disk space that the venv takes, measured."""
    patch_sets: tuple[str, ...] = ()
    """Names of the patch sets that this stack needs."""
    server_args: tuple[str, ...] = ()
    """Arguments that the server needs on this stack."""
    env: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
