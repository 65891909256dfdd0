"""Moves the accepted path's KV rows to the front of a request's step, in every layer of the target."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..accepted import Accepted


class AcceptedMover:
    """Knows the target's KV buffers.

    Raises:
        RuntimeError: the pool keeps its rows in a layout that a row move would corrupt.
    """

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner

    def move(self, slots: Tensor, accepted: Accepted) -> None:
        """slots: int64 [bs, W], slot of each node. Row j of a path goes to slots[:, j]; rows behind the path stay."""
        pool = self._runner.token_to_kv_pool
        width = accepted.index.shape[1]
        target = slots[:, :width]
        source = slots.gather(1, accepted.index.clamp(min=0).long())
        source = source.where(accepted.index >= 0, target)
        target, source = target.reshape(-1), source.reshape(-1)
        for layer in range(pool.layer_num):
            for buffer in (pool.k_buffer[layer], pool.v_buffer[layer]):
                # The right side is read as a whole before the first write: sources and targets overlap.
                buffer[target] = buffer[source]
