"""Lets SGLang 0.5.16 run in float32 on a GPU: its fused norm, activation and rotary kernels take half precision only.

Not for serving: the benches that ask for equal tokens need it. Found by being first on PYTHONPATH.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def _native_layers(module: Any) -> None:
    module.MultiPlatformOp.dispatch_forward = lambda self: self.forward_native


def _separate_norms(module: Any) -> None:
    module.can_use_fused_inplace_qknorm = lambda *_: False


CHANGES = {
    "sglang.srt.layers.utils.multi_platform": _native_layers,
    "sglang.srt.models.utils": _separate_norms,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Runs a change right after its module was loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = CHANGES.get(name)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
