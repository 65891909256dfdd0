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
    """Fresh tensors: they outlive the step, because the scheduler copies them while the next step runs."""

    lens: Tensor  # int32 [bs], committed tokens, bonus included
    seq_lens: Tensor  # int64 [bs], prefix + lens
    tokens: Tensor  # int64 [bs, F], accepted drafts, then the bonus
    bonus: Tensor  # int64 [bs]
    rows: Tensor  # int64 [bs * F], row of each path node among the bs * Q verified ones; the root's behind the path


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


def commit_step(accepted: Accepted, prefix: Tensor, nodes: int) -> Committed:
    """prefix: int [bs], committed lengths before the step. nodes: Q. No copy to the host."""
    bs, block = accepted.index.shape

    def ints(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, device=prefix.device)

    out = Committed(
        torch.empty(bs, dtype=torch.int32, device=prefix.device), ints(bs), ints(bs, block), ints(bs), ints(bs * block)
    )
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
        F=block,
        Q=nodes,
        P=triton.next_power_of_2(block),
        num_warps=1,
    )
    return out
