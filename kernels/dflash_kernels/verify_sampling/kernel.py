"""One program per request walks the tree and reads only the rows that it visits, in passes over the vocabulary.

The filter needs no sort: the tokens that pass it are those above a threshold, which is bisected over the logits' bits,
and the first few, by id, of those equal to it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..accepted import Accepted
from ..tree import Tree

_CHUNK = 4096
_LARGEST = tl.constexpr(3.4028234663852886e38)
_ALL = tl.constexpr(2**30)
_LOW_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Bits of the fp32 form that tell no two values of the type apart."""


@triton.jit
def _load(row, token, V):
    value = tl.load(row + token, mask=token < V, other=float("-inf")).to(tl.float32)
    return tl.where(value == value, tl.minimum(value, _LARGEST), float("-inf"))


@triton.jit
def _order(value, LOW_BITS: tl.constexpr):
    """An int32 that orders as the value does."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> LOW_BITS


@triton.jit
def _verify_sampling(
    logits,
    row_stride,
    token_ids,
    parent,
    temperature,
    top_k,
    top_p,
    min_p,
    coins,
    index,
    length,
    tokens,
    V,
    DEPTHS: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    A: tl.constexpr,
    CHUNK: tl.constexpr,
    LOW_BITS: tl.constexpr,
    FILTERED: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, P)
    up = tl.load(parent + b * N + node, mask=node < N, other=-1).to(tl.int32)
    carried = tl.load(token_ids + b * N + node, mask=node < N, other=-1).to(tl.int32)
    cold = 1.0 / tl.maximum(tl.load(temperature + b).to(tl.float32), 1e-6)
    column = tl.arange(0, CHUNK)
    if FILTERED:
        ranks = tl.load(top_k + b).to(tl.int32)
        ranks = tl.where((ranks > 0) & (ranks < _ALL), ranks, _ALL)
        share = tl.load(top_p + b).to(tl.float32)
        least = tl.load(min_p + b).to(tl.float32)

    place = tl.arange(0, A)
    path = tl.where(place == 0, 0, -1)
    emitted = tl.zeros([A], tl.int32)
    at = tl.program_id(0) * 0
    level = tl.program_id(0) * 0
    count = tl.program_id(0) * 0
    while at >= 0:
        row = logits + (b * N + at) * row_stride
        highest = tl.full([CHUNK], float("-inf"), tl.float32)
        for first in range(0, V, CHUNK):
            highest = tl.maximum(highest, _load(row, first + column, V))
        best = tl.max(highest, axis=0)
        best = tl.where(best > float("-inf"), best, 0.0)
        sums = tl.zeros([CHUNK], tl.float32)
        for first in range(0, V, CHUNK):
            sums += tl.exp((_load(row, first + column, V) - best) * cold)
        total = tl.sum(sums, axis=0)

        threshold = best.to(tl.int32) * 0
        ties = threshold
        if FILTERED:
            allowed = tl.where(share < 1.0, share * total, float("inf"))
            high = _order(best, LOW_BITS).to(tl.int64)
            low = _order(best * 0.0 - float("inf"), LOW_BITS).to(tl.int64)
            low = tl.where((ranks < V) | (share < 1.0), low, low - 1)
            high = tl.where((ranks < V) | (share < 1.0), high, low)
            above = threshold
            mass = total * 0.0
            while low < high:
                middle = (low + high) >> 1
                counts = tl.zeros([CHUNK], tl.int32)
                sums = tl.zeros([CHUNK], tl.float32)
                for first in range(0, V, CHUNK):
                    value = _load(row, first + column, V)
                    larger = _order(value, LOW_BITS).to(tl.int64) > middle
                    counts += larger.to(tl.int32)
                    sums += tl.where(larger, tl.exp((value - best) * cold), 0.0)
                above_middle = tl.sum(counts, axis=0)
                mass_above = tl.sum(sums, axis=0)
                passes = (above_middle < ranks) & (mass_above <= allowed)
                above = tl.where(passes, above_middle, above)
                mass = tl.where(passes, mass_above, mass)
                high = tl.where(passes, middle, high)
                low = tl.where(passes, low, middle + 1)
            threshold = high.to(tl.int32)
            # What equals the threshold weighs the same: the first token passes, and so many more as fit.
            heaviest = tl.zeros([CHUNK], tl.float32)
            for first in range(0, V, CHUNK):
                value = _load(row, first + column, V)
                equal = _order(value, LOW_BITS) == threshold
                heaviest = tl.maximum(heaviest, tl.where(equal, tl.exp((value - best) * cold), 0.0))
            weight = tl.max(heaviest, axis=0)
            room = tl.where(weight > 0.0, (allowed - mass) / tl.maximum(weight, 1e-38), float("inf"))
            ties = tl.minimum(ranks - above, tl.minimum(room, 1e9).to(tl.int32) + 1)
            total = total * 0.0
            seen = above * 0
            for first in range(0, V, CHUNK):
                value = _load(row, first + column, V)
                order = _order(value, LOW_BITS)
                equal = (order == threshold).to(tl.int32)
                rank = seen + tl.cumsum(equal, axis=0)
                seen += tl.sum(equal, axis=0)
                weights = tl.exp((value - best) * cold)
                keep = ((order > threshold) | ((equal == 1) & (rank <= ties))) & (weights >= least)
                total += tl.sum(tl.where(keep, weights, 0.0), axis=0)

        wanted = tl.load(coins + b * (DEPTHS + 1) + level) * total
        reached = total * 0.0
        seen = ties * 0
        drawn = ties * 0 + V
        last = ties * 0
        for first in range(0, V, CHUNK):
            token = first + column
            value = _load(row, token, V)
            weights = tl.exp((value - best) * cold)
            if FILTERED:
                order = _order(value, LOW_BITS)
                equal = (order == threshold).to(tl.int32)
                rank = seen + tl.cumsum(equal, axis=0)
                seen += tl.sum(equal, axis=0)
                keep = ((order > threshold) | ((equal == 1) & (rank <= ties))) & (weights >= least)
                weights = tl.where(keep, weights, 0.0)
            inside = weights > 0.0
            beyond = inside & (reached + tl.cumsum(weights, axis=0) > wanted)
            drawn = tl.minimum(drawn, tl.min(tl.where(beyond, token, V), axis=0))
            last = tl.maximum(last, tl.max(tl.where(inside, token, 0), axis=0))
            reached += tl.sum(weights, axis=0)
        drawn = tl.where(drawn < V, drawn, last)

        child = tl.max(tl.where((up == at) & (carried == drawn), node, -1), axis=0)
        child = tl.where(level < DEPTHS, child, -1)
        emitted = tl.where(place == level, drawn, emitted)
        level += 1
        path = tl.where(place == level, child, path)
        count += tl.where(child >= 0, 1, 0)
        at = child
    inside = place <= DEPTHS
    tl.store(index + b * (DEPTHS + 1) + place, path, mask=inside)
    tl.store(tokens + b * (DEPTHS + 1) + place, emitted, mask=inside)
    tl.store(length + b, count)


def launch_verify_sampling(
    tree: Tree,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    coins: Tensor,
    depths: int,
    filtered: bool,
    out: Accepted,
) -> None:
    """Enqueues the kernel; logits need contiguous rows and everything else must be contiguous."""
    settings = [x.contiguous() for x in (temperature, top_k, top_p, min_p)]
    if logits.stride(1) != 1 or not coins.is_contiguous() or logits.dtype not in _LOW_BITS:
        raise ValueError(f"logits must be bf16, fp16 or fp32 with contiguous rows and coins contiguous: {logits.dtype}")
    bs, vocab = coins.shape[0], logits.shape[1]
    chunk = min(_CHUNK, triton.next_power_of_2(vocab))
    _verify_sampling[(bs,)](
        logits,
        logits.stride(0),
        tree.token_ids,
        tree.parent,
        *settings,
        coins,
        out.index,
        out.length,
        out.tokens,
        vocab,
        DEPTHS=depths,
        N=tree.num_nodes,
        P=triton.next_power_of_2(tree.num_nodes),
        A=triton.next_power_of_2(depths + 1),
        CHUNK=chunk,
        LOW_BITS=_LOW_BITS[logits.dtype],
        FILTERED=filtered,
        num_warps=16 if chunk >= 4096 else 4,
    )
