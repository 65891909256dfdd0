"""One launch that lays out a step: the drafter's block, its positions and the KV slots that draft and verify share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class StepBuffers:
    """What a step reads, ``cap`` requests wide; captured graphs keep the addresses, so it is reused."""

    prefix: Tensor  # int64 [cap], committed lengths before the step
    roots: Tensor  # int64 [cap], the last committed tokens
    block_ids: Tensor  # int64 [cap, F]
    block_positions: Tensor  # int64 [cap, F]
    draft_slots: Tensor  # int64 [cap, F]
    slots: Tensor  # int64 [cap, W]
    req_pool: Tensor  # int64 [cap], rows of req_to_token
    seq_lens_cpu: Tensor  # int32 [cap], host

    @classmethod
    def empty(cls, cap: int, block: int, width: int, device: torch.device | str) -> StepBuffers:
        """block: F, the drafter's tokens. width: W >= F, the slots that a step touches."""

        def ints(*size: int) -> Tensor:
            return torch.zeros((cap, *size), dtype=torch.int64, device=device)

        return cls(
            prefix=ints(),
            roots=ints(),
            block_ids=ints(block),
            block_positions=ints(block),
            draft_slots=ints(block),
            slots=ints(width),
            req_pool=ints(),
            seq_lens_cpu=torch.zeros(cap, dtype=torch.int32),
        )

    @property
    def cap(self) -> int:
        return self.prefix.shape[0]

    def rows(self, bs: int) -> StepBuffers:
        """Views of the first ``bs`` requests."""
        return StepBuffers(
            *(
                t[:bs]
                for t in (
                    self.prefix,
                    self.roots,
                    self.block_ids,
                    self.block_positions,
                    self.draft_slots,
                    self.slots,
                    self.req_pool,
                    self.seq_lens_cpu,
                )
            )
        )


@triton.jit
def _prepare_step(
    bonus,
    prefix,
    req_pool,
    req_to_token,
    req_stride,
    mask_token,
    bs,
    prefixes,
    roots,
    block_ids,
    block_positions,
    draft_slots,
    slots,
    req_pools,
    F: tl.constexpr,
    W: tl.constexpr,
    W_POW2: tl.constexpr,
):
    b = tl.program_id(0)
    real = b < bs
    at = tl.minimum(b, bs - 1)  # padding reads what the last request has, and keeps none of it
    start = tl.where(real, tl.load(prefix + at).to(tl.int64), 0)
    root = tl.where(real, tl.load(bonus + at).to(tl.int64), 0)
    pool = tl.load(req_pool + at).to(tl.int64)
    row = req_to_token + pool * req_stride + start
    i = tl.arange(0, W_POW2)
    slot = tl.where(real, tl.load(row + i, mask=i < W, other=0).to(tl.int64), 0)
    tl.store(prefixes + b, start)
    tl.store(roots + b, root)
    tl.store(req_pools + b, tl.where(real, pool, 0))
    tl.store(slots + b * W + i, slot, mask=i < W)
    tl.store(draft_slots + b * F + i, slot, mask=i < F)
    tl.store(block_positions + b * F + i, start + i, mask=i < F)
    tl.store(block_ids + b * F + i, tl.where(i == 0, root, mask_token), mask=i < F)


def prepare_step(
    bonus: Tensor, prefix: Tensor, req_pool: Tensor, req_to_token: Tensor, mask_token: int, out: StepBuffers
) -> None:
    """Fill the step's buffers on the device that holds them; no copy to the host.

    bonus, prefix, req_pool: int [bs], bs <= out.cap. req_to_token: int [requests, context]. ``out.slots`` gets the slots
    of positions prefix .. prefix + W - 1. Rows from bs on, which captured graphs compute as padding, get SGLang's dummy
    slot 0 and length 0, so that whatever they write lands where nothing is read.
    """
    block, width = out.block_ids.shape[1], out.slots.shape[1]
    _prepare_step[(out.cap,)](
        bonus,
        prefix,
        req_pool,
        req_to_token,
        req_to_token.stride(0),
        mask_token,
        prefix.shape[0],
        out.prefix,
        out.roots,
        out.block_ids,
        out.block_positions,
        out.draft_slots,
        out.slots,
        out.req_pool,
        F=block,
        W=width,
        W_POW2=triton.next_power_of_2(width),
        num_warps=1,
    )
