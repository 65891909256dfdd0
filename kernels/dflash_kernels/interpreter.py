"""Triton's interpreter, for servers without a GPU."""

from __future__ import annotations

import dataclasses

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
