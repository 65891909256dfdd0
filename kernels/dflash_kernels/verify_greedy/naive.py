"""The greedy walk's truth: follow the links, one request at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ..accepted import Accepted, empty_accepted
from ..tree import Tree


def verify_greedy_naive(tree: Tree, target_argmax: Tensor, depths: int, out: Accepted | None = None) -> Accepted:
    """See ``verify_greedy``. Copies to the host."""
    bs = target_argmax.shape[0]
    if out is None:
        out = empty_accepted(bs, depths, target_argmax.device)
    tokens, targets = tree.token_ids.tolist(), target_argmax.tolist()
    first_child, next_sibling = tree.first_child.tolist(), tree.next_sibling.tolist()
    for b in range(bs):
        path, accepted = [0], []
        while len(accepted) < depths:
            child = first_child[b][path[-1]]
            while child >= 0 and tokens[b][child] != targets[b][path[-1]]:
                child = next_sibling[b][child]
            if child < 0:
                break
            path.append(child)
            accepted.append(tokens[b][child])
        length = len(accepted)
        behind = depths - length
        out.index[b] = torch.tensor(path + [-1] * behind, dtype=out.index.dtype)
        out.tokens[b] = torch.tensor([*accepted, targets[b][path[-1]]] + [0] * behind, dtype=out.tokens.dtype)
        out.length[b] = length
    return out
