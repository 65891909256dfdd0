"""Move an accepted path's KV rows to the front of its request's slots, in every layer with one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..backend import Backend, use_triton
from .naive import move_kv_naive

__all__ = ["KvMover", "move_kv", "move_kv_naive"]


class KvMover:
    """Knows the addresses of the KV buffers of all layers; make it once, after the buffers are allocated.

    buffers: tensors [slots, ...] of one device, each row contiguous; dtypes and row sizes may differ between buffers.
    Raises ValueError for buffers that it cannot move by rows.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        if not buffers:
            raise ValueError("there is no KV buffer to move")
        self.buffers = tuple(buffers)  # also keeps the addresses valid
        rows = []
        for buffer in self.buffers:
            if buffer.device != self.buffers[0].device or buffer.dim() < 2 or not buffer[0].is_contiguous():
                raise ValueError(
                    f"a KV buffer must be [slots, ...] with contiguous rows on one device, not {tuple(buffer.shape)} "
                    f"with strides {buffer.stride()} on {buffer.device}"
                )
            size = buffer.element_size()
            rows.append((buffer.data_ptr(), buffer[0].numel() * size, buffer.stride(0) * size))
        # The widest word that divides every address, row and stride.
        self.word = math.gcd(8, *(number for row in rows for number in row))
        table = [(address, row // self.word, stride // self.word) for address, row, stride in rows]
        self.row_words = max(words for _, words, _ in table)
        self.table = torch.tensor(table, dtype=torch.int64, device=self.buffers[0].device)

    def move(self, slots: Tensor, accept_index: Tensor, backend: Backend = "auto") -> None:
        """In every buffer row slots[b, accept_index[b, j]] goes to slots[b, j], for every j with accept_index >= 0.

        slots: int [bs, W], distinct. accept_index: int [bs, P], P <= W, -1 behind the path. All sources are read before
        the first write, so they may overlap the targets. No device-to-host copy, no allocation.
        """
        bs, width = accept_index.shape
        if slots.dim() != 2 or slots.shape[0] != bs or slots.shape[1] < width:
            raise ValueError(f"slots {tuple(slots.shape)} do not cover paths {tuple(accept_index.shape)}")
        if use_triton(self.buffers[0], backend):
            from .kernel import launch_move_kv

            launch_move_kv(self.table, self.word, self.row_words, slots, accept_index)
        else:
            move_kv_naive(self.buffers, slots, accept_index)


def move_kv(buffers: Sequence[Tensor], slots: Tensor, accept_index: Tensor, backend: Backend = "auto") -> None:
    """``KvMover(buffers).move(slots, accept_index)``; a caller with a loop keeps the mover and saves the table."""
    KvMover(buffers).move(slots, accept_index, backend=backend)
