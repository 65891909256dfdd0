"""What a verifier accepted, as the KV move and the scheduler read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Accepted:
    """The accepted path of each request, at most ``depths`` drafts below the root."""

    index: Tensor  # int [bs, depths + 1], nodes on the path, root first, ascending, -1 behind the path
    length: Tensor  # int [bs], accepted drafts: without the root and without the bonus
    tokens: Tensor  # int [bs, depths + 1], accepted drafts, then the bonus at [length], 0 behind it

    @property
    def depths(self) -> int:
        return self.index.shape[1] - 1


def empty_accepted(bs: int, depths: int, device: torch.device | str, dtype: torch.dtype = torch.int32) -> Accepted:
    """Uninitialised buffers for the ``out`` of a verifier."""
    return Accepted(
        index=torch.empty((bs, depths + 1), dtype=dtype, device=device),
        length=torch.empty(bs, dtype=dtype, device=device),
        tokens=torch.empty((bs, depths + 1), dtype=dtype, device=device),
    )
