"""Greedy verification: follow the child that equals the target's arg-max; the first miss is the bonus token."""

from __future__ import annotations

from torch import Tensor

from ..accepted import Accepted, empty_accepted
from ..backend import Backend, use_triton
from ..tree import Tree
from .naive import verify_greedy_naive

__all__ = ["verify_greedy", "verify_greedy_naive"]


def verify_greedy(
    tree: Tree, target_argmax: Tensor, depths: int, out: Accepted | None = None, backend: Backend = "auto"
) -> Accepted:
    """The longest path from the root whose every token is the target's arg-max at its parent.

    target_argmax: int [bs, N], the target's choice after each node. depths: the most drafts to accept; a path that is
    cut there still ends in the right bonus token. No device-to-host copy; with ``out`` no allocation.
    """
    if target_argmax.shape != tree.token_ids.shape:
        raise ValueError(f"target_argmax has shape {tuple(target_argmax.shape)}, not {tuple(tree.token_ids.shape)}")
    bs = target_argmax.shape[0]
    if out is None:
        out = empty_accepted(bs, depths, target_argmax.device)
    elif out.index.shape != (bs, depths + 1):
        raise ValueError(f"out holds paths of shape {tuple(out.index.shape)}, not {(bs, depths + 1)}")
    if use_triton(target_argmax, backend):
        from .kernel import launch_verify_greedy

        launch_verify_greedy(tree, target_argmax, depths, out)
    else:
        verify_greedy_naive(tree, target_argmax, depths, out=out)
    return out
