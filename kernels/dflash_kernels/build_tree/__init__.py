"""Exact best-first draft tree (DDTree, arXiv 2604.12989) from per-depth top-k log-probs."""

from __future__ import annotations

from torch import Tensor

from ..backend import Backend, use_triton
from ..tree import Tree, empty_tree
from .bounds import check_bounds
from .naive import build_tree_naive

__all__ = ["build_tree", "build_tree_naive"]


def build_tree(
    logprobs: Tensor,
    ids: Tensor,
    root_ids: Tensor,
    num_nodes: int,
    out: Tree | None = None,
    next_state: Tensor | None = None,
    backend: Backend = "auto",
) -> Tree:
    """The ``num_nodes - 1`` most probable prefixes of a product of per-depth marginals, in order of their probability.

    logprobs: float [bs, L, K], each row descending; NaN counts as the smallest. ids: int [bs, L, K], distinct in a row.
    root_ids: int [bs]. With ``next_state`` (int [bs, L, S, K]) the model is a first-order Markov chain: logprobs and
    ids are [bs, L, S, K], row s holds the candidates after a parent in state s, a child of rank r is in state
    ``next_state[..., s, r]`` and the root is in state 0.
    Scores are int32 in units of 2**-20, so that addition is exact and every tensor-parallel rank gets the same tree.
    Ties: smaller depth, then smaller parent, then smaller rank first.
    No device-to-host copy; with ``out`` no allocation. Raises ValueError for shapes that the packed keys cannot hold.
    """
    bounds = check_bounds(logprobs, ids, root_ids, num_nodes, next_state)
    if out is None:
        out = empty_tree(logprobs.shape[0], num_nodes, logprobs.device)
    elif out.token_ids.shape != (logprobs.shape[0], num_nodes):
        raise ValueError(f"out holds trees of shape {tuple(out.token_ids.shape)}, not {(logprobs.shape[0], num_nodes)}")
    if use_triton(logprobs, backend):
        from .kernel import launch_build_tree

        launch_build_tree(logprobs, ids, root_ids, next_state, bounds, out)
    else:
        build_tree_naive(logprobs, ids, root_ids, num_nodes, out=out, next_state=next_state)
    return out
