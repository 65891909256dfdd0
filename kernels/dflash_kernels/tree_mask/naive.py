"""The masks' truth: unpack the ancestor bits, one request at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ..tree import Tree


def tree_positions_naive(tree: Tree, prefix: Tensor, out: Tensor | None = None) -> Tensor:
    """See ``tree_positions``."""
    positions = prefix.unsqueeze(1).to(torch.int64) + tree.depth.to(torch.int64)
    return positions if out is None else out.copy_(positions)


def tree_mask_dense_naive(tree: Tree, out: Tensor | None = None) -> Tensor:
    """See ``tree_mask_dense``."""
    bit = torch.arange(tree.num_nodes, device=tree.ancestors.device)
    mask = (tree.ancestors[:, :, bit // 64] >> (bit % 64) & 1).bool()
    return mask if out is None else out.copy_(mask)


def tree_mask_full_naive(tree: Tree, prefix: Tensor, out: Tensor) -> Tensor:
    """See ``tree_mask_full``. Copies the lengths to the host."""
    nodes = tree.num_nodes
    dense = tree_mask_dense_naive(tree)
    start = 0
    for b, length in enumerate(prefix.tolist()):
        size = nodes * (length + nodes)
        out[start : start + size].view(nodes, length + nodes)[:, length:] = dense[b].to(out.dtype)
        start += size
    return out
