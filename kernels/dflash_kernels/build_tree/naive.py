"""The tree builder's truth: a heap of Python integers, one request at a time."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from ..tree import NO_SCORE, Tree, empty_tree
from .bounds import SCORE_BITS, check_bounds


def quantise(logprobs: Tensor, floor: float) -> Tensor:
    """int64 log-probs in units of 2**-20: NaN to ``floor``, clamped to [floor, 0], rounded half up (in float64)."""
    clamped = torch.nan_to_num(logprobs.double(), nan=floor, posinf=0.0, neginf=floor).clamp(floor, 0.0)
    return torch.floor(clamped * 2**SCORE_BITS + 0.5).long()


def build_tree_naive(
    logprobs: Tensor,
    ids: Tensor,
    root_ids: Tensor,
    num_nodes: int,
    out: Tree | None = None,
    next_state: Tensor | None = None,
) -> Tree:
    """See ``build_tree``. Copies to the host; the kernel must equal it exactly in every field."""
    bounds = check_bounds(logprobs, ids, root_ids, num_nodes, next_state)
    bs, shape = logprobs.shape[0], (bounds.depths, bounds.states, bounds.ranks)
    if out is None:
        out = empty_tree(bs, num_nodes, logprobs.device)
    table = quantise(logprobs, bounds.floor).reshape(bs, *shape).tolist()
    tokens = ids.reshape(bs, *shape).tolist()
    states = None if next_state is None else next_state.reshape(bs, *shape).tolist()
    roots = root_ids.tolist()
    for b in range(bs):
        _build_one(b, table[b], tokens[b], roots[b], None if states is None else states[b], out)
    return out


def _build_one(
    b: int,
    table: list[list[list[int]]],
    tokens: list[list[list[int]]],
    root_id: int,
    states: list[list[list[int]]] | None,
    out: Tree,
) -> None:
    depths, ranks, num_nodes = len(table), len(table[0][0]), out.num_nodes
    token, parent, depth, score, state = [root_id], [-1], [0], [0], [0]
    seen = [[0]]  # per node: itself and its ancestors
    truncated = 0
    heap: list[tuple[int, int, int, int]] = [(-table[0][0][0], 1, 0, 0)]  # (-score, depth, parent, rank)
    while heap and len(token) < num_nodes:
        negative, d, p, r = heapq.heappop(heap)
        node, row = len(token), table[d - 1][state[p]]
        token.append(tokens[d - 1][state[p]][r])
        parent.append(p)
        depth.append(d)
        score.append(-negative)
        state.append(0 if states is None else states[d - 1][state[p]][r])
        seen.append([*seen[p], node])
        truncated |= r == ranks - 1
        if r + 1 < ranks:
            heapq.heappush(heap, (negative + row[r] - row[r + 1], d, p, r + 1))
        if d < depths:
            heapq.heappush(heap, (negative - table[d][state[node]][0], d + 1, node, 0))
    valid = len(token)
    padding = num_nodes - valid
    first_child, next_sibling, last_child = [-1] * num_nodes, [-1] * num_nodes, [-1] * num_nodes
    for node in range(1, valid):
        p = parent[node]
        if last_child[p] < 0:
            first_child[p] = node
        else:
            next_sibling[last_child[p]] = node
        last_child[p] = node
    seen += [[node] for node in range(valid, num_nodes)]
    words = out.ancestors.shape[2]
    bits = [[_signed(sum(1 << (j - 64 * w) for j in row if j // 64 == w)) for w in range(words)] for row in seen]
    out.token_ids[b] = _row(token + [0] * padding, out.token_ids)
    out.parent[b] = _row(parent + [-1] * padding, out.parent)
    out.depth[b] = _row(depth + [0] * padding, out.depth)
    out.score[b] = _row(score + [NO_SCORE] * padding, out.score)
    out.first_child[b] = _row(first_child, out.first_child)
    out.next_sibling[b] = _row(next_sibling, out.next_sibling)
    out.ancestors[b] = torch.tensor(bits, dtype=torch.int64, device=out.ancestors.device)
    out.valid_count[b] = valid
    out.truncated[b] = truncated


def _row(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
