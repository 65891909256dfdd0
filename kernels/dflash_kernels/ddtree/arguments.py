"""What ``--speculative-algorithm DDTREE`` does to SGLang's server arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from .drafter import drafter_config, refuse_dependent_depths
from .hybrid import hybrid_arguments, refuse_hybrid
from .shape import AUTO, AUTO_TOPK, AUTO_WIDTHS, TreeShape, default_topk

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

DEFAULT_NODES = {"cpu": 16}
DEFAULT_NODES_GPU = 32
SUPPORTED_BACKENDS = ("triton",)
"""Attention backends whose tree mask is proven here. Others verify a chain silently or need more hooks."""


def handle_server_args(server_args: ServerArgs, tensor_parallel: bool = True, hybrids: bool = True) -> None:
    """SGLang 0.5.16: the arguments are read and assigned on ``server_args`` itself.

    tensor_parallel: whether the release's worker is proven on several ranks. hybrids: whether it is with recurrent layers.
    """
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
    from sglang.srt.arg_groups.speculative_hook import _handle_dflash

    tree_arguments(
        server_args,
        lambda: _handle_dflash(server_args),
        lambda: attention_backends_of(resolved_view(server_args)),
        tensor_parallel,
    )
    (hybrid_arguments if hybrids else refuse_hybrid)(server_args)


def _budget(given: int | str | None, device: str) -> tuple[int | None, bool]:
    """Nodes of the widest tree, and whether each step's width is chosen while serving.

    Raises:
        ValueError: neither a number nor ``auto``.
    """
    if given != AUTO:
        try:
            return (None if given is None else int(given)), False
        except ValueError:
            raise ValueError(f"--speculative-ddtree-budget takes a number of nodes or auto, not {given!r}") from None
    if device in DEFAULT_NODES:
        return DEFAULT_NODES[device], False
    return AUTO_WIDTHS[-1], True


def tree_arguments(
    server_args: Any,
    handle_dflash: Callable[[], None],
    attention_backends: Callable[[], Collection[str | None]],
    tensor_parallel: bool = False,
) -> None:
    """Let DFLASH's own handler do its part with the block size, then put the tree's numbers where the server reads them.

    ``server_args``: anything with the server arguments as attributes to read and to set. Afterwards
    ``speculative_num_draft_tokens`` is Q, ``speculative_dflash_block_size`` is F and ``speculative_ddtree_topk`` is K.

    Raises:
        ValueError: an argument that DDTREE cannot serve, named.
    """
    if server_args.tp_size != 1 and not tensor_parallel:
        raise ValueError(
            f"DDTREE drafts on one rank in this release; --tp-size is {server_args.tp_size}. Use DFLASH, or --tp-size 1"
        )
    if server_args.enable_lora:
        raise ValueError("DDTREE does not serve LoRA adapters; drop --enable-lora or use no speculation")
    if server_args.disaggregation_mode != "null":
        raise ValueError("DDTREE does not run disaggregated; use DFLASH, or drop --disaggregation-mode")
    if server_args.enable_unified_memory:
        raise ValueError("DDTREE moves KV rows by slot, which a unified pool renames; drop --enable-unified-memory")
    refuse_dependent_depths(drafter_config(server_args))
    wanted = server_args.speculative_num_draft_tokens
    budget, auto = _budget(server_args.speculative_ddtree_budget, server_args.device)
    if wanted is not None and budget is not None and int(wanted) != int(budget):
        raise ValueError(
            f"--speculative-num-draft-tokens {wanted} and --speculative-ddtree-budget {budget} both give the number of "
            "tree nodes and differ; set one of them"
        )
    nodes = budget if budget is not None else wanted
    if nodes is None:
        nodes = DEFAULT_NODES.get(server_args.device, DEFAULT_NODES_GPU)
    server_args.speculative_num_draft_tokens = None
    handle_dflash()
    block = int(server_args.speculative_num_draft_tokens)
    topk = server_args.speculative_ddtree_topk
    if topk is None:
        topk = AUTO_TOPK if auto else default_topk(int(nodes))
    shape = TreeShape(block=block, nodes=int(nodes), topk=int(topk))
    backends = set(attention_backends())
    if backends <= {None}:
        server_args.attention_backend = SUPPORTED_BACKENDS[0]
    for name in backends - {None}:
        if name not in SUPPORTED_BACKENDS:
            raise ValueError(
                f"DDTREE verifies trees with the attention backends {', '.join(SUPPORTED_BACKENDS)}, not {name!r}: "
                "it would ignore the tree mask. Pass --attention-backend triton"
            )
    threshold = (server_args.speculative_accept_threshold_single, server_args.speculative_accept_threshold_acc)
    if threshold != (1.0, 1.0):
        raise ValueError(
            f"DDTREE is lossless and takes no acceptance thresholds; --speculative-accept-threshold-single/-acc are {threshold}"
        )
    server_args.speculative_dflash_block_size = shape.block
    server_args.speculative_num_draft_tokens = shape.nodes
    server_args.speculative_ddtree_budget = AUTO if auto else shape.nodes
    server_args.speculative_ddtree_topk = shape.topk


def refuse_small_tree(server_args: Any) -> None:
    """For releases that size the drafter's eager buffers and its KV slots by the number of nodes.

    Raises:
        ValueError: fewer nodes than the draft block has tokens.
    """
    nodes, block = server_args.speculative_num_draft_tokens, server_args.speculative_dflash_block_size
    if nodes < block:
        raise ValueError(
            f"a tree of {nodes} nodes is smaller than the draft block of {block}; raise --speculative-ddtree-budget, "
            "or use DFLASH"
        )
