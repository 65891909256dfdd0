"""Targets with linear attention (GDN layers: Qwen3-Next, Qwen3.5), whose recurrent state has to follow the accepted path.

SGLang verifies EAGLE's trees on them: its kernels find each node's parent from first-child and next-sibling links, keep
the convolution's window and the SSM state behind every node, and copy those of the last accepted node into the request.
Here is what it takes to have a DDTREE server do the same. SGLang 0.5.16.

The kernels read the links while they go through the nodes in order, so a node's links must lead to later nodes: first
child and next sibling in ascending order, as :class:`~dflash_kernels.tree.Tree` has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..accepted import Accepted
from ..tree import Tree

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

BRANCHES = 2
"""``speculative_eagle_topk``: whatever is above one makes SGLang's linear attention read links, and keep whole windows."""
_GIB = 2**30


def hybrid_arguments(server_args: ServerArgs) -> None:
    """Complete a DDTREE server's arguments when its target has recurrent layers; else nothing happens.

    Raises:
        ValueError: an argument that DDTREE cannot serve with such a target, named.
    """
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config

    from .shape import AUTO

    model = server_args.get_model_config()
    if mambaish_config(model) is None:
        return
    if hybrid_gdn_config(model) is None:
        kind = ", ".join(model.hf_config.architectures or [type(model.hf_config).__name__])
        raise ValueError(
            f"DDTREE verifies trees on recurrent layers of the GDN kind only; {kind} has others. Use DFLASH"
        )
    if server_args.speculative_ddtree_budget == AUTO:
        raise ValueError(
            "DDTREE keeps one width on a target with recurrent layers; give a number: --speculative-ddtree-budget 16"
        )
    if not server_args.disable_radix_cache:
        raise ValueError(
            "DDTREE is not proven with the prefix cache of a target with recurrent layers; add --disable-radix-cache"
        )
    if server_args.enable_gdn_replayssm_spec or server_args.enable_linear_replayssm:
        raise ValueError("DDTREE needs whole states; drop --enable-gdn-replayssm-spec and --enable-linear-replayssm")
    if server_args.page_size not in (None, 1):
        raise ValueError(
            f"DDTREE is not proven with pages on a target with recurrent layers; --page-size is {server_args.page_size}"
        )
    server_args.speculative_eagle_topk = BRANCHES


def refuse_hybrid(server_args: ServerArgs) -> None:
    """For releases in which DDTREE is not proven with recurrent layers.

    Raises:
        ValueError: the target has some.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config

    if mambaish_config(server_args.get_model_config()) is not None:
        raise ValueError("DDTREE serves targets with recurrent layers in SGLang 0.5.16 only; use DFLASH")


def attention_of(backend: Any) -> Any:
    """What attends in full: the backend itself, or the one that a hybrid's backend has for its attention layers."""
    return getattr(backend, "full_attn_backend", backend)


def recurrent_of(backend: Any) -> Any:
    """What a hybrid's backend has for its recurrent layers, or None."""
    return getattr(backend, "linear_attn_backend", None)


def refuse_chain_backend(backend: Any) -> None:
    """Stop the start where recurrent layers would take the tree for a chain.

    Raises:
        RuntimeError: their backend, or the layout of what it keeps, is not the one that follows a tree.
    """
    recurrent = recurrent_of(backend)
    name = type(recurrent).__name__
    if name != "GDNAttnBackend":
        raise RuntimeError(f"DDTREE verifies trees on recurrent layers of the GDN kind only; this target runs {name}")
    kept = recurrent.req_to_token_pool.mamba_pool.mamba_cache
    windows = [window.is_contiguous() for window in kept.intermediate_conv_window]
    if recurrent.topk <= 1 or kept.intermediate_ssm is None or not all(windows):
        raise RuntimeError(
            f"DDTREE needs whole states behind every node; {name} keeps a chain's (speculative_eagle_topk {recurrent.topk})"
        )


def refuse_wide_tree(model_runner: Any, nodes: int) -> None:
    """Stop the start when the states behind all nodes do not fit; called before SGLang allocates them.

    It allocates one for every node of as many requests as may run, behind what --mem-fraction-static leaves.

    Raises:
        RuntimeError: with what is needed, what there is, and the widest tree that fits.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.utils import get_available_gpu_memory

    config = mambaish_config(model_runner.model_config)
    if config is None:
        return

    args = model_runner.server_args
    free = get_available_gpu_memory(model_runner.device, model_runner.gpu_id)
    free -= model_runner.pre_model_load_memory * (1 - args.mem_fraction_static)
    check_width(
        nodes,
        config.mamba2_cache_params.mamba_cache_per_req,
        args.max_running_requests,
        args.max_mamba_cache_size,
        int(free * _GIB),
    )


def check_width(nodes: int, state: int, requests: int, states: int | None, free: int) -> None:
    """state: bytes of one request's recurrent state. states: how many are kept, or one for each request. free: bytes.

    Raises:
        RuntimeError: as :func:`refuse_wide_tree`.
    """
    requests = requests if states is None else min(requests, states)
    left = free - state * (requests if states is None else states)
    if state * requests * nodes < left:
        return
    fits = max(0, left - 1) // (state * requests)
    advice = f"Lower --speculative-ddtree-budget to {fits} or less, lower" if fits > 1 else "Lower"
    raise RuntimeError(
        f"a tree of {nodes} nodes keeps a recurrent state of {state / 2**20:.1f} MiB behind each of them: for {requests} "
        f"requests {state * requests * nodes / _GIB:.1f} GiB, and there are {max(0, left) / _GIB:.1f} GiB. "
        f"{advice} --max-running-requests, or raise --mem-fraction-static"
    )


def take_no_links() -> None:
    """SGLang's own verify passes, such as warm-ups, are chains without links: the backend asks for them all the same."""
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    for name in ("retrieve_next_token", "retrieve_next_sibling"):
        if not hasattr(DFlashVerifyInput, name):
            setattr(DFlashVerifyInput, name, None)


def link(verify_input: Any, tree: Tree) -> None:
    """Tell the recurrent layers each node's parent: int32 [bs, nodes], -1 for none."""
    verify_input.retrieve_next_token = tree.first_child.to(torch.int32)
    verify_input.retrieve_next_sibling = tree.next_sibling.to(torch.int32)


def last_nodes(accepted: Accepted) -> Tensor:
    """int64 [bs]: the last accepted node of each request, the root when no draft was accepted. No copy to the host."""
    return accepted.index.gather(1, accepted.length.to(torch.int64).unsqueeze(1)).squeeze(1).to(torch.int64)


def commit_states(model_runner: Any, accepted: Accepted) -> None:
    """The state behind the last accepted node becomes the request's. No copy to the host."""
    model_runner.attn_backend.update_mamba_state_after_mtp_verify(
        last_correct_step_indices=last_nodes(accepted),
        mamba_track_indices=None,
        mamba_steps_to_track=None,
        model=model_runner.model,
    )
