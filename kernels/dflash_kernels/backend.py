"""Which implementation an op runs: one rule for all ops."""

from __future__ import annotations

import os
from typing import Literal

from torch import Tensor

Backend = Literal["auto", "triton", "naive"]
ENVIRONMENT = "DFLASH_KERNELS_BACKEND"


def interpreting() -> bool:
    """True when Triton runs its kernels through the interpreter (decided by the environment, as Triton does)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "yes", "on", "y"}


def use_triton(tensor: Tensor, backend: Backend = "auto") -> bool:
    """Triton for tensors it can reach (a GPU, or the CPU under its interpreter), else the naive twin.

    The caller's ``backend`` wins over the environment variable ``DFLASH_KERNELS_BACKEND``, which wins over the rule.
    Raises ValueError for an unknown backend or for Triton on a CPU tensor without the interpreter.
    """
    choice = backend if backend != "auto" else os.environ.get(ENVIRONMENT, "auto")
    reachable = tensor.is_cuda or interpreting()
    if choice == "auto":
        return reachable
    if choice not in {"triton", "naive"}:
        raise ValueError(f"unknown kernel backend {choice!r}: use auto, triton or naive")
    if choice == "triton" and not reachable:
        raise ValueError("Triton reaches CPU tensors only through its interpreter: set TRITON_INTERPRET=1")
    return choice == "triton"
