"""One launch that lays out a step: the drafter's block, its positions and the KV slots that draft and verify share."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _prepare_step(
    bonus,
    prefix,
    req_pool,
    req_to_token,
    req_stride,
    mask_token,
    block_ids,
    block_positions,
    draft_slots,
    slots,
    F: tl.constexpr,
    W: tl.constexpr,
    W_POW2: tl.constexpr,
):
    b = tl.program_id(0)
    start = tl.load(prefix + b).to(tl.int64)
    row = req_to_token + tl.load(req_pool + b).to(tl.int64) * req_stride + start
    i = tl.arange(0, W_POW2)
    slot = tl.load(row + i, mask=i < W, other=0).to(tl.int64)
    tl.store(slots + b * W + i, slot, mask=i < W)
    tl.store(draft_slots + b * F + i, slot, mask=i < F)
    tl.store(block_positions + b * F + i, start + i, mask=i < F)
    tl.store(block_ids + b * F + i, tl.where(i == 0, tl.load(bonus + b).to(tl.int64), mask_token), mask=i < F)


def prepare_step(
    bonus: Tensor,
    prefix: Tensor,
    req_pool: Tensor,
    req_to_token: Tensor,
    mask_token: int,
    block_ids: Tensor,
    block_positions: Tensor,
    draft_slots: Tensor,
    slots: Tensor,
) -> None:
    """Fill the step's buffers on the device that holds them; no copy to the host.

    bonus, prefix, req_pool: int [bs]. req_to_token: int [requests, context]. block_ids, block_positions, draft_slots:
    int64 [bs, F]. slots: int64 [bs, W], the slots of positions prefix .. prefix + W - 1, W >= F.
    """
    bs, block = block_ids.shape
    width = slots.shape[1]
    _prepare_step[(bs,)](
        bonus,
        prefix,
        req_pool,
        req_to_token,
        req_to_token.stride(0),
        mask_token,
        block_ids,
        block_positions,
        draft_slots,
        slots,
        F=block,
        W=width,
        W_POW2=triton.next_power_of_2(width),
        num_warps=1,
    )
