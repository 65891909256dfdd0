"""Lets a server of several ranks count what it passes between them: calls and bytes, by operation and by who asked.

Found by being first on PYTHONPATH. The first rank writes ``COLLECTIVES_OUT`` (JSON: [operation, who, bytes it
contributes, calls] each), once a second at most. Meant for a server without captured graphs, since a replay calls nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

OPERATIONS = (
    "all_reduce",
    "fused_allreduce_rmsnorm",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
)
PLACE = "sglang.srt.distributed.parallel_state"
PASSED_ON = ("parallel_state.py", "communication_op.py", "sitecustomize.py", "ranks.py", "vocabulary.py", "_ops.py")
"""Files between a collective and whoever wants it."""

counted: Counter[tuple[str, str, int]] = Counter()
_written = 0.0
_within = False
"""One operation may call another: what was asked for is counted."""


def _who() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and Path(frame.f_code.co_filename).name in PASSED_ON:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"


def _count(operation: str, group: Any, tensor: Any) -> None:
    global _written
    counted[operation, _who(), tensor.numel() * tensor.element_size()] += 1
    if group.rank_in_group == 0 and time.monotonic() - _written > 1:
        into = Path(os.environ["COLLECTIVES_OUT"])
        text = json.dumps([[*key, calls] for key, calls in counted.items()])
        into.with_suffix(".new").write_text(text)
        into.with_suffix(".new").replace(into)
        _written = time.monotonic()


def _wrapped(operation: str, method: Callable[..., Any]) -> Callable[..., Any]:
    at = 1 if operation in ("all_gather_into_tensor", "reduce_scatter_tensor") else 0  # these take the output first

    def counting(self: Any, *args: Any, **keywords: Any) -> Any:
        global _within
        if _within or self.world_size == 1 or len(args) <= at:
            return method(self, *args, **keywords)
        _count(operation, self, args[at])
        _within = True
        try:
            return method(self, *args, **keywords)
        finally:
            _within = False

    return counting


def _change(module: ModuleType) -> None:
    group: Any = module.GroupCoordinator
    for operation in OPERATIONS:
        setattr(group, operation, _wrapped(operation, getattr(group, operation)))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name == PLACE else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "COLLECTIVES_OUT" in os.environ:
    sys.meta_path.insert(0, _Finder())
