"""The move's truth: read every source, then write."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def move_kv_naive(buffers: Sequence[Tensor], slots: Tensor, accept_index: Tensor) -> None:
    """See ``KvMover.move``. Copies to the host."""
    chosen = accept_index.tolist()
    pairs = [(b, j, i) for b, path in enumerate(chosen) for j, i in enumerate(path) if i >= 0 and i != j]
    if not pairs:
        return
    rows, targets, sources = (list(column) for column in zip(*pairs, strict=True))
    source, target = slots[rows, sources].long(), slots[rows, targets].long()
    for buffer in buffers:
        buffer[target] = buffer[source].clone()
