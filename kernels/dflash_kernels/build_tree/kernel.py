"""One warp per request. Slot p holds the next child of node p that is not in the tree yet; the best slot joins it.

The children of a node come in descending order, so the slots hold exactly a heap's content in half the entries of the
sibling/first-child formulation, and the slot's index is the parent. A pop is two 32-bit maxima: the score, then among
the best the packed key (depth, parent, rank, state, last child), which breaks the tie and carries the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..tree import Tree
from .bounds import SCORE_BITS, Bounds

_SCALE = tl.constexpr(float(2**SCORE_BITS))
_NONE = tl.constexpr(-(2**31))


@triton.jit
def _quantised(logprobs, offset, FLOOR: tl.constexpr):
    value = tl.load(logprobs + offset).to(tl.float32)
    value = tl.where(value == value, value, FLOOR)
    scaled = tl.minimum(tl.maximum(value, FLOOR), 0.0) * _SCALE
    whole = tl.floor(scaled)  # floor(x + 0.5) would round wrongly above 2**23; this difference is exact
    return whole.to(tl.int32) + tl.where(scaled - whole >= 0.5, 1, 0)


@triton.jit
def _build_tree(
    logprobs,
    ids,
    root_ids,
    next_state,
    token_ids,
    parent,
    depth,
    first_child,
    next_sibling,
    ancestors,
    valid_count,
    truncated,
    score,
    L: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    WORDS: tl.constexpr,
    DEPTH_BITS: tl.constexpr,
    RANK_BITS: tl.constexpr,
    STATE_BITS: tl.constexpr,
    NODE_BITS: tl.constexpr,
    FLOOR: tl.constexpr,
    MARKOV: tl.constexpr,
):
    RANK_SHIFT: tl.constexpr = NODE_BITS + STATE_BITS
    PARENT_SHIFT: tl.constexpr = RANK_SHIFT + RANK_BITS
    DEPTH_SHIFT: tl.constexpr = PARENT_SHIFT + NODE_BITS
    NODE_MASK: tl.constexpr = (1 << NODE_BITS) - 1
    RANK_MASK: tl.constexpr = (1 << RANK_BITS) - 1
    STATE_MASK: tl.constexpr = (1 << STATE_BITS) - 1
    DEPTH_TOP: tl.constexpr = (1 << DEPTH_BITS) - 1

    b = tl.program_id(0).to(tl.int64)
    logprobs += b * (L * S * K)
    ids += b * (L * S * K)
    if MARKOV:
        next_state += b * (L * S * K)
    node = tl.arange(0, P)

    # Slot 0 starts with the root's best child; depth and parent are stored inverted, so a larger key wins the tie.
    first_key: tl.constexpr = ((DEPTH_TOP - 1) << DEPTH_SHIFT) | (NODE_MASK << PARENT_SHIFT)
    slot_score = tl.where(node == 0, _quantised(logprobs, 0, FLOOR), _NONE)
    slot_key = tl.where(node == 0, first_key, 0)
    taken_score = tl.where(node == 0, 0, _NONE)
    taken_key = tl.zeros([P], tl.int32)

    for n in range(1, N):
        best = tl.max(slot_score, axis=0)
        key = tl.max(tl.where(slot_score == best, slot_key, -1), axis=0)
        found = best > _NONE
        d = DEPTH_TOP - (key >> DEPTH_SHIFT)
        p = NODE_MASK - ((key >> PARENT_SHIFT) & NODE_MASK)
        r = (key >> RANK_SHIFT) & RANK_MASK
        if MARKOV:  # noqa: SIM108 (a compile-time branch)
            s = (key >> NODE_BITS) & STATE_MASK
        else:
            s = 0
        taken_score = tl.where(node == n, best, taken_score)
        taken_key = tl.where(node == n, key, taken_key)

        here = tl.where(found, ((d - 1) * S + s) * K + r, 0)
        has_sibling = found & (r + 1 < K)
        has_child = found & (d < L)
        sibling = tl.where(has_sibling, here + 1, here)
        if MARKOV:
            child_state = tl.load(next_state + here).to(tl.int32)
            child = tl.where(has_child, (d * S + child_state) * K, 0)
        else:
            child_state = 0
            child = tl.where(has_child, d * K, 0)
        sibling_score = best - _quantised(logprobs, here, FLOOR) + _quantised(logprobs, sibling, FLOOR)
        child_score = best + _quantised(logprobs, child, FLOOR)
        # The sibling's key: same depth, parent and state, the next rank, and node n as the last child.
        sibling_key = (key & ~NODE_MASK) + (1 << RANK_SHIFT) + n
        child_key = (
            ((DEPTH_TOP - d - 1) << DEPTH_SHIFT) + ((NODE_MASK - n) << PARENT_SHIFT) + (child_state << NODE_BITS)
        )
        at_parent = (node == p) & found
        at_child = (node == n) & found
        slot_score = tl.where(at_parent, tl.where(has_sibling, sibling_score, _NONE), slot_score)
        slot_score = tl.where(at_child, tl.where(has_child, child_score, _NONE), slot_score)
        slot_key = tl.where(at_parent, sibling_key, slot_key)
        slot_key = tl.where(at_child, child_key, slot_key)

    inside = node < N
    valid = (taken_score > _NONE) & inside
    drafted = valid & (node > 0)
    d = tl.where(drafted, DEPTH_TOP - (taken_key >> DEPTH_SHIFT), 0)
    p = tl.where(drafted, NODE_MASK - ((taken_key >> PARENT_SHIFT) & NODE_MASK), -1)
    r = (taken_key >> RANK_SHIFT) & RANK_MASK
    if MARKOV:  # noqa: SIM108
        s = (taken_key >> NODE_BITS) & STATE_MASK
    else:
        s = 0
    last = taken_key & NODE_MASK
    token = tl.load(ids + ((d - 1) * S + s) * K + r, mask=drafted, other=0)
    token = tl.where(node == 0, tl.load(root_ids + b).to(token.dtype), token)
    row = b * N
    tl.store(token_ids + row + node, token, mask=inside)
    tl.store(parent + row + node, p, mask=inside)
    tl.store(depth + row + node, d, mask=inside)
    tl.store(score + row + node, taken_score, mask=inside)
    tl.store(first_child + row + node, tl.full([P], -1, tl.int32), mask=inside)
    tl.store(next_sibling + row + node, tl.full([P], -1, tl.int32), mask=inside)
    tl.store(valid_count + b, tl.sum(valid.to(tl.int32), axis=0))
    tl.store(truncated + b, tl.max((drafted & (r == K - 1)).to(tl.int32), axis=0).to(tl.uint8))
    tl.debug_barrier()  # the links below overwrite what other threads stored above, and the walk reads their parents
    tl.store(first_child + row + p, node, mask=drafted & (r == 0))
    tl.store(next_sibling + row + last, node, mask=drafted & (r > 0))

    one = tl.full([P], 1, tl.int64)
    for w in tl.static_range(WORDS):
        word = tl.where((node >> 6) == w, one << (node & 63).to(tl.int64), 0)
        up = p
        for _ in range(L):
            word |= tl.where((up >> 6) == w, one << (up & 63).to(tl.int64), 0)
            up = tl.load(parent + row + up, mask=up >= 0, other=-1).to(tl.int32)
        tl.store(ancestors + (row + node) * WORDS + w, word, mask=inside)


def launch_build_tree(
    logprobs: Tensor, ids: Tensor, root_ids: Tensor, next_state: Tensor | None, bounds: Bounds, out: Tree
) -> None:
    """Enqueues the kernel; every tensor must be contiguous."""
    for name, tensor in (("logprobs", logprobs), ("ids", ids), ("root_ids", root_ids), ("next_state", next_state)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    _build_tree[(logprobs.shape[0],)](
        logprobs,
        ids,
        root_ids,
        ids if next_state is None else next_state,
        out.token_ids,
        out.parent,
        out.depth,
        out.first_child,
        out.next_sibling,
        out.ancestors,
        out.valid_count,
        out.truncated,
        out.score,
        L=bounds.depths,
        S=bounds.states,
        K=bounds.ranks,
        N=bounds.num_nodes,
        P=1 << bounds.node_bits,
        WORDS=-(-bounds.num_nodes // 64),
        DEPTH_BITS=bounds.depth_bits,
        RANK_BITS=bounds.rank_bits,
        STATE_BITS=bounds.state_bits,
        NODE_BITS=bounds.node_bits,
        FLOOR=bounds.floor,
        MARKOV=next_state is not None,
        num_warps=1,
    )
