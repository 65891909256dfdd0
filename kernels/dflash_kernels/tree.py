"""The draft tree of a batch, as the tree builder leaves it and the verifier and the attention masks read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_SCORE = -(2**31)
"""Score of a padding node."""


@dataclass(frozen=True)
class Tree:
    """bs trees of N nodes. Node 0 is the root (the last committed token); a parent comes before its children.

    Nodes from ``valid_count[b]`` on are padding: token 0, parent -1, depth 0, unreachable, seeing only themselves.
    """

    token_ids: Tensor  # int [bs, N]
    parent: Tensor  # int [bs, N], -1 for the root and for padding
    depth: Tensor  # int [bs, N], 0 for the root
    first_child: Tensor  # int [bs, N], smallest child, -1 without children
    next_sibling: Tensor  # int [bs, N], next larger child of the same parent, -1 for the last
    ancestors: Tensor  # int64 [bs, N, ceil(N / 64)], bit j of row i: node j is i or an ancestor of i
    valid_count: Tensor  # int32 [bs], nodes of the tree, root included
    truncated: Tensor  # uint8 [bs], 1 when a node of the last rank was taken, so that a larger K could change the tree
    score: Tensor  # int32 [bs, N], sum of path log-probs in units of 2**-20, NO_SCORE for padding

    @property
    def num_nodes(self) -> int:
        return self.token_ids.shape[1]


def empty_tree(bs: int, num_nodes: int, device: torch.device | str, index_dtype: torch.dtype = torch.int32) -> Tree:
    """Uninitialised buffers for ``build_tree(out=...)``. ``index_dtype`` is int32, or int64 as SGLang's links are."""

    def nodes(dtype: torch.dtype) -> Tensor:
        return torch.empty((bs, num_nodes), dtype=dtype, device=device)

    return Tree(
        token_ids=nodes(index_dtype),
        parent=nodes(index_dtype),
        depth=nodes(index_dtype),
        first_child=nodes(index_dtype),
        next_sibling=nodes(index_dtype),
        ancestors=torch.empty((bs, num_nodes, -(-num_nodes // 64)), dtype=torch.int64, device=device),
        valid_count=torch.empty(bs, dtype=torch.int32, device=device),
        truncated=torch.empty(bs, dtype=torch.uint8, device=device),
        score=nodes(torch.int32),
    )
