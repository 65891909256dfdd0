"""Lossless verification with sampling: draw the target's next token at each node, follow the child that carries it."""

from __future__ import annotations

from torch import Tensor

from ..accepted import Accepted, empty_accepted
from ..backend import Backend, use_triton
from ..tree import Tree
from .coins import coins_from_seeds
from .naive import verify_sampling_naive
from .rows import verify_sampling_rows

__all__ = ["coins_from_seeds", "verify_sampling", "verify_sampling_naive", "verify_sampling_rows"]


def verify_sampling(
    tree: Tree,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    coins: Tensor,
    depths: int,
    filtered: bool = True,
    out: Accepted | None = None,
    backend: Backend = "auto",
) -> Accepted:
    """The path that the target's own samples take through the tree; the first sample outside it is the bonus.

    Every emitted token is one draw from the target's filtered distribution, whatever the tree is, so the output is
    distributed as without a tree; for a tree that is not sampled itself, no rule accepts more on average.

    logits: float [bs * N, V], row b * N + i after node i of request b. temperature, top_p, min_p: float [bs]; top_k:
    int [bs], 0 or less for all. coins: fp32 [bs, depths + 1], uniform in [0, 1), independent. The filter is SGLang's:
    softmax of logits / temperature; then, in order of (logit descending, id ascending), tokens of rank < top_k, with a
    mass before them of at most top_p, and with at least min_p times the largest probability. With ``filtered`` false
    the caller knows that no request filters, and top_k, top_p and min_p are not read. NaN counts as -inf.
    The smallest id whose cumulative filtered mass exceeds coin * total is drawn. No device-to-host copy, but for the
    naive twin, which walks Python lists and runs only when asked for by ``backend``. Tensors on the CPU go through
    torch operations: a vocabulary in Triton's interpreter takes seconds.
    """
    _check(tree, logits, (temperature, top_k, top_p, min_p), coins, depths)
    bs = coins.shape[0]
    if out is None:
        out = empty_accepted(bs, depths, logits.device)
    elif out.index.shape != (bs, depths + 1):
        raise ValueError(f"out holds paths of shape {tuple(out.index.shape)}, not {(bs, depths + 1)}")
    inputs = (tree, logits, temperature, top_k, top_p, min_p, coins, depths, filtered, out)
    if backend == "naive":
        verify_sampling_naive(*inputs)
    elif use_triton(logits, backend) and (logits.is_cuda or backend == "triton"):
        from .kernel import launch_verify_sampling

        launch_verify_sampling(*inputs)
    else:
        verify_sampling_rows(*inputs)
    return out


def _check(tree: Tree, logits: Tensor, settings: tuple[Tensor, ...], coins: Tensor, depths: int) -> None:
    bs, nodes = tree.token_ids.shape
    if logits.dim() != 2 or logits.shape[0] != bs * nodes:
        raise ValueError(f"logits {tuple(logits.shape)} are not those of {bs} trees of {nodes} nodes")
    if coins.shape != (bs, depths + 1):
        raise ValueError(f"coins have shape {tuple(coins.shape)}, not {(bs, depths + 1)}")
    for setting in settings:
        if setting.shape != (bs,):
            raise ValueError(f"temperature, top_k, top_p and min_p must be [{bs}], not {tuple(setting.shape)}")
