"""What ``--speculative-algorithm DFLASH`` and ``DDTREE`` do to the server's arguments (0.5.10.post1)."""

from __future__ import annotations

import logging
from typing import Any

from ..ddtree.shape import TreeShape, default_topk
from .capture import drafter_of

logger = logging.getLogger(__name__)

DEFAULT_NODES = {"cpu": 16}
DEFAULT_NODES_GPU = 32
BACKEND = "triton"
"""The attention backend whose non-causal draft pass and whose tree mask are proven here."""


def handle_server_args(server_args: Any) -> None:
    """Refuse what is not served, and put the step's widths where the server reads them.

    Afterwards ``speculative_num_steps`` is F - 1, ``speculative_num_draft_tokens`` the tokens of a verify pass (F for a
    chain, Q for a tree), ``speculative_ddtree_topk`` K; ``speculative_eagle_topk`` is 1: a step needs no other slots.

    Raises:
        ValueError: arguments that the algorithm cannot serve, named, all at once.
    """
    name = server_args.speculative_algorithm
    problems = [f"{flag} is not served" for flag, on in _refused(server_args).items() if on]
    if server_args.speculative_draft_model_path is None:
        problems.append("--speculative-draft-model-path is missing: give the DFlash drafter of this target")
    backends = {
        server_args.attention_backend,
        server_args.prefill_attention_backend,
        server_args.decode_attention_backend,
        server_args.speculative_draft_attention_backend,
    }
    other = sorted(backends - {None, BACKEND})
    if other:
        problems.append(f"attention backends {', '.join(other)} are not served: pass --attention-backend {BACKEND}")
    thresholds = (server_args.speculative_accept_threshold_single, server_args.speculative_accept_threshold_acc)
    if thresholds != (1.0, 1.0):
        problems.append(f"verification is lossless and takes no acceptance thresholds, got {thresholds}")
    if problems:
        raise ValueError(f"{name} cannot be served with these arguments: {'; '.join(problems)}")

    drafter = drafter_of(server_args, server_args.get_model_config())
    nodes, topk = (_chain if name == "DFLASH" else _tree)(server_args, drafter.block)
    server_args.attention_backend = server_args.speculative_draft_attention_backend = BACKEND
    server_args.speculative_num_steps = drafter.depths
    server_args.speculative_eagle_topk = 1
    server_args.speculative_num_draft_tokens = nodes
    server_args.speculative_ddtree_budget = None if name == "DFLASH" else nodes
    server_args.speculative_ddtree_topk = topk
    # This release's worker for speculation without EAGLE's draft state is its first generation: no overlap.
    server_args.disable_overlap_schedule = True
    server_args.enable_mixed_chunk = False
    if server_args.max_running_requests is None:
        server_args.max_running_requests = 48
    logger.warning("%s: overlap scheduling and mixed chunked prefill are off in this release.", name)


def _refused(server_args: Any) -> dict[str, bool]:
    return {
        "--tp-size above 1": server_args.tp_size > 1,
        "--pp-size above 1": server_args.pp_size > 1,
        "--enable-dp-attention": server_args.enable_dp_attention,
        "--enable-lora": bool(server_args.enable_lora),
        "--enable-hierarchical-cache": server_args.enable_hierarchical_cache,
        "--disaggregation-mode": server_args.disaggregation_mode != "null",
        "--enable-two-batch-overlap": server_args.enable_two_batch_overlap,
        "--enable-pdmux": server_args.enable_pdmux,
        "--enable-deterministic-inference": server_args.enable_deterministic_inference,
        "--enable-return-hidden-states": server_args.enable_return_hidden_states,
        "--enforce-piecewise-cuda-graph": server_args.enforce_piecewise_cuda_graph,
        "--speculative-draft-model-quantization": server_args.speculative_draft_model_quantization
        not in (None, "unquant", server_args.quantization),
    }


def _chain(server_args: Any, block: int) -> tuple[int, None]:
    """N, which is F."""
    for flag, given in {
        "--speculative-ddtree-budget": server_args.speculative_ddtree_budget,
        "--speculative-ddtree-topk": server_args.speculative_ddtree_topk,
    }.items():
        if given is not None:
            raise ValueError(f"{flag} is DDTREE's; DFLASH verifies a chain")
    wanted = server_args.speculative_num_draft_tokens
    if wanted is not None and int(wanted) != block:
        raise ValueError(
            f"--speculative-num-draft-tokens is {wanted}; DFLASH verifies the drafter's whole block of {block} tokens"
        )
    return block, None


def _tree(server_args: Any, block: int) -> tuple[int, int]:
    """Q and K."""
    wanted, budget = server_args.speculative_num_draft_tokens, server_args.speculative_ddtree_budget
    if wanted is not None and budget is not None and int(wanted) != int(budget):
        raise ValueError(
            f"--speculative-num-draft-tokens {wanted} and --speculative-ddtree-budget {budget} both give the number of "
            "tree nodes and differ; set one of them"
        )
    nodes = budget if budget is not None else wanted
    if nodes is None:
        nodes = max(block, DEFAULT_NODES.get(server_args.device, DEFAULT_NODES_GPU))
    topk = server_args.speculative_ddtree_topk
    shape = TreeShape(block=block, nodes=int(nodes), topk=default_topk(int(nodes)) if topk is None else int(topk))
    if shape.nodes < block:
        raise ValueError(
            f"a tree of {shape.nodes} nodes is smaller than the drafter's block of {block}: "
            f"use DFLASH, or at least {block} nodes"
        )
    return shape.nodes, shape.topk
