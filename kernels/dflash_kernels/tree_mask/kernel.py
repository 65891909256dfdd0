"""One program per node writes its row of the mask; it finds its block's start by adding up the prefixes itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tree import Tree


@triton.jit
def _positions(depth, prefix, out, N: tl.constexpr, P: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, P)
    inside = node < N
    at = tl.load(depth + b * N + node, mask=inside, other=0).to(tl.int64)
    tl.store(out + b * N + node, tl.load(prefix + b).to(tl.int64) + at, mask=inside)


@triton.jit
def _mask(
    ancestors,
    prefix,
    out,
    bs,
    limit,
    N: tl.constexpr,
    P: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    node = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    if FULL:
        length = tl.load(prefix + b).to(tl.int64)
        before = tl.zeros([BLOCK], tl.int64)
        for first in range(0, bs, BLOCK):
            i = first + tl.arange(0, BLOCK)
            before += tl.load(prefix + i, mask=i < b, other=0).to(tl.int64)
        row = (tl.sum(before, axis=0) + b * N) * N + node * (length + N) + length
    else:
        row = (b * N + node) * N
    column = tl.arange(0, P)
    # A padded row of a captured batch carries a stale prefix; it must not write behind the buffer.
    inside = (column < N) & (row + column < limit)
    word = tl.load(ancestors + (b * N + node) * WORDS + column // 64, mask=inside, other=0)
    tl.store(out + row + column, ((word >> (column % 64).to(tl.int64)) & 1).to(out.dtype.element_ty), mask=inside)


def launch_positions(tree: Tree, prefix: Tensor, out: Tensor) -> None:
    """Enqueues the kernel; every tensor must be contiguous."""
    bs, nodes = tree.token_ids.shape
    _positions[(bs,)](tree.depth, prefix, out, N=nodes, P=triton.next_power_of_2(nodes), num_warps=1)


def launch_mask(tree: Tree, prefix: Tensor | None, out: Tensor) -> None:
    """Enqueues the kernel: the flat full mask behind ``prefix``, or with None the dense mask."""
    bs, nodes = tree.token_ids.shape
    _mask[(nodes, bs)](
        tree.ancestors,
        tree.valid_count if prefix is None else prefix,
        out.view(torch.uint8),
        bs,
        out.numel(),
        N=nodes,
        P=triton.next_power_of_2(nodes),
        WORDS=tree.ancestors.shape[2],
        BLOCK=min(128, triton.next_power_of_2(bs)),
        FULL=prefix is not None,
        num_warps=1,
    )
