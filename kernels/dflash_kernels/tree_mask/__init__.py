"""Positions and attention masks of a tree's nodes over a committed prefix, in the forms that SGLang's backends read."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import Backend, use_triton
from ..tree import Tree
from .naive import tree_mask_dense_naive, tree_mask_full_naive, tree_positions_naive

__all__ = [
    "tree_mask_dense",
    "tree_mask_dense_naive",
    "tree_mask_full",
    "tree_mask_full_naive",
    "tree_positions",
    "tree_positions_naive",
]


def tree_positions(tree: Tree, prefix: Tensor, out: Tensor | None = None, backend: Backend = "auto") -> Tensor:
    """int64 [bs, N]: position of each node, prefix + depth; padding is at the root's. prefix: int [bs].

    A captured graph reads positions from the buffer it was captured with: give that as ``out``.
    """
    _check_prefix(tree, prefix)
    shape = tree.token_ids.shape
    if out is None:
        out = torch.empty(shape, dtype=torch.int64, device=prefix.device)
    elif out.shape != shape or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {tuple(shape)}, not {tuple(out.shape)}")
    if use_triton(prefix, backend):
        from .kernel import launch_positions

        launch_positions(tree, prefix, out)
    else:
        tree_positions_naive(tree, prefix, out)
    return out


def tree_mask_full(tree: Tree, prefix: Tensor, out: Tensor, backend: Backend = "auto") -> Tensor:
    """Write the tree's part of SGLang's flat full mask: 1 where a query sees a key.

    out: bool or uint8 [at least N * sum(prefix + N)]. Request b's block [N, prefix_b + N] follows those of the requests
    before it. Only its last N columns are written: the prefix part is never read by the attention kernel, which skips
    it, and keeps what it has. The lengths stay on the device, so ``out`` cannot be checked against them.
    """
    _check_prefix(tree, prefix)
    if out.dim() != 1 or not out.is_contiguous() or out.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"out must be a contiguous flat bool or uint8 mask, not {out.dtype} {tuple(out.shape)}")
    if use_triton(prefix, backend):
        from .kernel import launch_mask

        launch_mask(tree, prefix, out)
    else:
        tree_mask_full_naive(tree, prefix, out)
    return out


def tree_mask_dense(tree: Tree, out: Tensor | None = None, backend: Backend = "auto") -> Tensor:
    """bool [bs, N, N]: node i (row) sees node j (column), which is itself or an ancestor."""
    bs, nodes = tree.token_ids.shape
    if out is None:
        out = torch.empty((bs, nodes, nodes), dtype=torch.bool, device=tree.token_ids.device)
    elif out.shape != (bs, nodes, nodes) or not out.is_contiguous() or out.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"out must be contiguous bool or uint8 {(bs, nodes, nodes)}, not {tuple(out.shape)}")
    if use_triton(tree.ancestors, backend):
        from .kernel import launch_mask

        launch_mask(tree, None, out)
    else:
        tree_mask_dense_naive(tree, out)
    return out


def _check_prefix(tree: Tree, prefix: Tensor) -> None:
    if prefix.shape != tree.valid_count.shape:
        raise ValueError(f"prefix has shape {tuple(prefix.shape)}, not {tuple(tree.valid_count.shape)}")
