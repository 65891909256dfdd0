"""Moves the accepted path's KV rows to the front of a request's step, in every layer of the target."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..accepted import Accepted
from ..move_kv import KvMover


class AcceptedMover:
    """Knows the target's KV buffers, from the first move on: the pool may be allocated after the worker is made.

    Raises:
        RuntimeError: the pool keeps its rows in a layout that a row move would corrupt.
    """

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self._pool: Any = None
        self._mover: KvMover | None = None

    def bind(self) -> KvMover:
        """The mover of the pool as it is now; called once at start, so that a layout without rows is refused there."""
        pool = self._runner.token_to_kv_pool
        if type(pool).__name__ == "HybridLinearKVPool":  # its recurrent layers have no KV
            pool = pool.full_kv_pool
        if self._mover is None or pool is not self._pool:
            self._pool, self._mover = pool, KvMover(_row_buffers(pool))
        return self._mover

    def move(self, slots: Tensor, accepted: Accepted) -> None:
        """slots: int64 [bs, W], slot of each node. Row j of a path goes to slots[:, j]; rows behind the path stay."""
        self.bind().move(slots, accepted.index)


def _row_buffers(pool: Any) -> list[Tensor]:
    """K, V and, where the pool has them, scale buffers of all layers, each indexed by slot in its first dimension."""
    name = type(pool).__name__
    interleaved = (
        getattr(pool, "mxfp8_sf_interleaved", False) or getattr(pool, "native_k_scale_buffer", None) is not None
    )
    if getattr(pool, "use_hnd", False) or interleaved:
        raise RuntimeError(f"DDTREE moves KV by rows; the layout of {name} has none for a token")
    buffers: list[Tensor] = []
    for attribute in ("k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer"):
        layers = getattr(pool, attribute, None)
        if layers is None and attribute in ("k_buffer", "v_buffer"):
            raise RuntimeError(f"DDTREE moves KV by rows; {name} has no {attribute}")
        buffers += [] if layers is None else list(layers)
    slots = int(pool.size) + int(pool.page_size)
    for buffer in buffers:
        if buffer.shape[0] != slots:
            raise RuntimeError(
                f"DDTREE moves KV by rows; a buffer of {name} is {tuple(buffer.shape)}, not [{slots} slots, ...]"
            )
    return buffers
