"""The ``ddtree`` sets: algorithm DDTREE beside DFLASH in SGLang 0.5.22 and 0.5.23.

As that of 0.5.19. A forward pass is told its KV slots by a plan since 0.5.22; since 0.5.23 the drafter may run on ranks of
its own, and a verify pass may leave the logits in parts.
"""

from __future__ import annotations

from dflash_deploy.patching.edits import ReplaceExpression
from dflash_deploy.patching.patch import Contract, Example, Patch, Refusal
from dflash_patches.shared import ddtree

FIELDS = "srt/arg_groups/fields/spec.py"
ARGUMENTS = ddtree.arguments(
    "arguments_0_5_19",
    Contract("srt/arg_groups/overrides.py", "declare_resolution", params=("server_args", "source"), positional=2),
    Contract("srt/arg_groups/model_override_base.py", "resolving_view", params=("server_args",), positional=1),
    Contract("srt/arg_groups/model_override_base.py", "attention_backends_of", params=("cfg",), positional=1),
)


def worker(module: str, *contract: Contract) -> Patch:
    """``module``, ``contract``: as in :func:`~dflash_patches.shared.ddtree.worker`."""
    return ddtree.worker(
        module,
        Contract(
            ddtree.WORKER_FILE,
            "DFlashWorkerV2.__init__",
            params=("server_args", "gpu_id", "nccl_port", "target_worker"),
        ),
        Contract(
            ddtree.WORKER_FILE,
            "DFlashWorkerV2.forward_batch_generation",
            params=("batch", "on_publish", "grammar_barrier", "pp_proxy_tensors"),
            positional=2,
        ),
        Contract(
            ddtree.WORKER_FILE,
            "DFlashWorkerV2",
            attributes=("_is_domino", "_noise_embed_scale", "lilicorr", "prewarm_sampling", "selector"),
        ),
        *ddtree.bounds("nxt_kv_lens_cpu", "batch_seq_lens_cpu", "nxt_kv_lens_cpu", "out"),
        *ddtree.BAGS,
        Contract(
            "srt/mem_cache/kv_index_translator.py",
            "KVIndexTranslator.plan",
            params=("req_pool_indices", "seq_lens", "seq_lens_cpu", "write_virtual", "read_extent"),
        ),
        Contract("srt/mem_cache/kv_loc_plan.py", "KVLocPlan.bind", params=("batch", "reader"), positional=2),
        Contract("srt/layers/attention/verify_mask.py", "VerifyMask", attributes=("buffer",)),
        *contract,
    )


DRAFT_WINDOW = Patch(
    name="ddtree-draft-window",
    file="srt/arg_groups/speculative_hook.py",
    why="--speculative-draft-window-size works for DDTREE and must not be called ineffective",
    edit=ReplaceExpression(
        "handle_speculative_decoding",
        'cfg.speculative_algorithm not in ("EAGLE", "EAGLE3", "DFLASH")',
        'cfg.speculative_algorithm not in ("EAGLE", "EAGLE3", "DFLASH", "DDTREE")',
    ),
    examples=(
        Example(
            before="""
                def handle_speculative_decoding(server_args):
                    cfg = resolving_view(server_args)
                    if cfg.speculative_algorithm not in ("EAGLE", "EAGLE3", "DFLASH"):
                        warn()
            """,
            after="""
                def handle_speculative_decoding(server_args):
                    cfg = resolving_view(server_args)
                    if cfg.speculative_algorithm not in ("EAGLE", "EAGLE3", "DFLASH", "DDTREE"):  # dflash-deploy: ddtree-draft-window
                        warn()
            """,
        ),
    ),
    refuses=(
        Refusal(
            """
            def handle_speculative_decoding(server_args):
                cfg = resolving_view(server_args)
                if cfg.speculative_algorithm not in ("EAGLE", "EAGLE3"):
                    warn()
            """,
            "AnchorMissing",
        ),
    ),
)

DDTREE_22 = ddtree.ddtree_set(
    worker(
        "worker_0_5_22",
        Contract(ddtree.WORKER_FILE, "DFlashWorkerV2", attributes=("draft_owns_attention",)),
        Contract("srt/speculative/spec_utils.py", "draft_tp_context", params=("owns_attention",), positional=1),
    ),
    ARGUMENTS,
    DRAFT_WINDOW,
    FIELDS,
    "Spec",
    "",
    "0.5.22",
)
DDTREE_23 = ddtree.ddtree_set(
    worker(
        "worker_0_5_23",
        Contract(
            ddtree.WORKER_FILE,
            "DFlashWorkerV2",
            attributes=("_defer_target_verify_gather", "draft_parallel_layout"),
        ),
        Contract("srt/speculative/spec_utils.py", "draft_tp_context", params=("layout",), positional=1),
    ),
    ARGUMENTS,
    DRAFT_WINDOW,
    FIELDS,
    "Spec",
    "",
    "0.5.23",
)
