"""One launch that turns an accepted path into what the scheduler and the drafter take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..accepted import Accepted


@dataclass(frozen=True)
class Committed:
    """Views into one block, so that a captured step's result is made lasting by one copy.

    The scheduler reads them while the next step runs: what a graph writes must be cloned before it leaves the worker.
    """

    block: Tensor  # int64 [cap * (F + 3)]
    rows: Tensor  # int64 [cap * F], row of each path node among the bs * Q verified ones; the root's behind the path
    cap: int
    bs: int

    @classmethod
    def empty(cls, cap: int, width: int, device: torch.device | str) -> Committed:
        """width: F, tokens that a step can commit."""
        block = torch.zeros(cap * (width + 3), dtype=torch.int64, device=device)
        return cls(block, torch.zeros(cap * width, dtype=torch.int64, device=device), cap, cap)

    def first(self, bs: int) -> Committed:
        """The same block, read as ``bs`` requests."""
        return Committed(self.block, self.rows, self.cap, bs)

    def lasting(self) -> Committed:
        """A copy that no later step overwrites (``rows`` are of use within the step only)."""
        return Committed(self.block.clone(), self.rows, self.cap, self.bs)

    @property
    def width(self) -> int:
        return self.rows.numel() // self.cap

    @property
    def seq_lens(self) -> Tensor:
        """int64 [bs], prefix + lens."""
        return self.block[: self.bs]

    @property
    def bonus(self) -> Tensor:
        """int64 [bs]."""
        return self.block[self.cap : self.cap + self.bs]

    @property
    def lens(self) -> Tensor:
        """int32 [bs], committed tokens, bonus included."""
        return self.block[2 * self.cap : 3 * self.cap].view(torch.int32)[: self.bs]

    @property
    def tokens(self) -> Tensor:
        """int64 [bs, F], accepted drafts, then the bonus."""
        return self.block[3 * self.cap :][: self.bs * self.width].view(self.bs, self.width)


@triton.jit
def _commit_step(
    index,
    length,
    accepted,
    prefix,
    lens,
    seq_lens,
    tokens,
    bonus,
    rows,
    F: tl.constexpr,
    Q: tl.constexpr,
    P: tl.constexpr,
):
    b = tl.program_id(0)
    i = tl.arange(0, P)
    inside = i < F
    drafts = tl.load(length + b).to(tl.int64)
    token = tl.load(accepted + b * F + i, mask=inside, other=0).to(tl.int64)
    node = tl.load(index + b * F + i, mask=inside, other=0).to(tl.int64)
    tl.store(lens + b, (drafts + 1).to(tl.int32))
    tl.store(seq_lens + b, tl.load(prefix + b).to(tl.int64) + drafts + 1)
    tl.store(tokens + b * F + i, token, mask=inside)
    tl.store(bonus + b, tl.sum(tl.where(i == drafts, token, 0), axis=0))
    tl.store(rows + b * F + i, b.to(tl.int64) * Q + tl.maximum(node, 0), mask=inside)


def commit_step(accepted: Accepted, prefix: Tensor, nodes: int, out: Committed | None = None) -> Committed:
    """prefix: int [bs], committed lengths before the step. nodes: Q. ``out``: at least bs wide. No copy to the host."""
    bs, width = accepted.index.shape
    out = Committed.empty(bs, width, prefix.device) if out is None else out.first(bs)
    _commit_step[(bs,)](
        accepted.index,
        accepted.length,
        accepted.tokens,
        prefix,
        out.lens,
        out.seq_lens,
        out.tokens,
        out.bonus,
        out.rows,
        F=width,
        Q=nodes,
        P=triton.next_power_of_2(width),
        num_warps=1,
    )
    return out
