"""Triton's interpreter, for servers without a GPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from .backend import interpreting


def skip_overflow_checks() -> None:
    """Let interpreted kernels add, subtract and multiply integers once, not again in int64 to find overflows.

    The checks only assert, and take half of a kernel's time (measured: attention over 16 nodes, Triton 3.8).
    Nothing happens where kernels are compiled, or where the interpreter has no such option.
    """
    if not interpreting():
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if "sanitize_overflow" in {field.name for field in dataclasses.fields(builder.options)}:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def keep_masks_boolean() -> None:
    """Let interpreted kernels load and store under a mask that is ``&`` of a scalar and a block.

    The interpreter makes integers of it, which its own loads and stores refuse (seen: Triton 3.8 and 3.9). SGLang's
    convolution for linear attention has such masks. Nothing happens where kernels are compiled.
    """
    if not interpreting():
        return
    from triton.runtime import interpreter

    for name, at in (("create_masked_load", 1), ("create_masked_store", 2)):
        plain = getattr(interpreter.InterpreterBuilder, name)
        if hasattr(plain, "__wrapped__"):
            continue

        @functools.wraps(plain)
        def masked(self: Any, *args: Any, plain: Any = plain, at: int = at) -> Any:
            args[at].data = args[at].data.astype(bool)
            return plain(self, *args)

        setattr(interpreter.InterpreterBuilder, name, masked)
