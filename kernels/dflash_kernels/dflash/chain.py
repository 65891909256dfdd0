"""A chain of drafts as the tree that it is, so that verification, masks and sampling have one form."""

from __future__ import annotations

import torch
from torch import Tensor

from ..tree import Tree


def chain_tree(bonus: Tensor, drafts: Tensor) -> Tree:
    """bonus: int64 [bs]. drafts: int64 [bs, L]. The tree of L + 1 nodes in which each has one child.

    Scores are zero: a chain is not chosen by score.
    """
    bs, depths = drafts.shape
    nodes, device = depths + 1, drafts.device

    def rows(values: Tensor) -> Tensor:
        return values.to(device).expand(bs, nodes).contiguous()

    at = torch.arange(nodes, device=device, dtype=torch.int32)
    below = torch.where(at < depths, at + 1, -1)
    # Bits 0 to i; nodes <= 16 fit one word.
    ancestors = (1 << (at.long() + 1)) - 1
    return Tree(
        token_ids=torch.cat([bonus.unsqueeze(1), drafts], dim=1).to(torch.int32),
        parent=rows(at - 1),
        depth=rows(at),
        first_child=rows(below),
        next_sibling=rows(torch.full_like(at, -1)),
        ancestors=rows(ancestors).unsqueeze(-1),
        valid_count=torch.full((bs,), nodes, dtype=torch.int32, device=device),
        truncated=torch.zeros(bs, dtype=torch.uint8, device=device),
        score=rows(torch.zeros_like(at)),
    )
