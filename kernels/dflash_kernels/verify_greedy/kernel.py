"""One warp per request: all edges are compared at once, then one maximum per accepted depth follows the path."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..accepted import Accepted
from ..tree import Tree


@triton.jit
def _verify_greedy(
    token_ids,
    parent,
    target,
    index,
    length,
    tokens,
    DEPTHS: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    A: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, P)
    inside = node < N
    up = tl.load(parent + b * N + node, mask=inside, other=-1).to(tl.int32)
    token = tl.load(token_ids + b * N + node, mask=inside, other=-1).to(tl.int32)
    wanted = tl.load(target + b * N + up, mask=up >= 0, other=-2).to(tl.int32)
    # The parent of a node that the target agrees with; sibling tokens are distinct, so at most one node per parent.
    agreed = tl.where((up >= 0) & (token == wanted), up, -1)

    place = tl.arange(0, A)
    path = tl.where(place == 0, 0, -1)
    at = tl.program_id(0) * 0
    count = at
    for _ in range(DEPTHS):
        child = tl.max(tl.where((agreed == at) & (at >= 0), node, -1), axis=0)
        count += tl.where(child >= 0, 1, 0)
        path = tl.where((place == count) & (child >= 0), child, path)
        at = child
    row = b * (DEPTHS + 1)
    wide = place <= DEPTHS
    chosen = tl.load(target + b * N + path, mask=wide & (path >= 0), other=0)
    tl.store(index + row + place, path, mask=wide)
    # The token that follows the node at place i is the target's choice there: the next accepted draft, or the bonus.
    tl.store(tokens + row + place, chosen, mask=wide)
    tl.store(length + b, count)


def launch_verify_greedy(tree: Tree, target_argmax: Tensor, depths: int, out: Accepted) -> None:
    """Enqueues the kernel; every tensor must be contiguous."""
    if not target_argmax.is_contiguous():
        raise ValueError("target_argmax must be contiguous")
    num_nodes = tree.num_nodes
    _verify_greedy[(target_argmax.shape[0],)](
        tree.token_ids,
        tree.parent,
        target_argmax,
        out.index,
        out.length,
        out.tokens,
        DEPTHS=depths,
        N=num_nodes,
        P=triton.next_power_of_2(num_nodes),
        A=triton.next_power_of_2(depths + 1),
        num_warps=1,
    )
