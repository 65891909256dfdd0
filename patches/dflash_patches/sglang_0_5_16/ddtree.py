"""The ``ddtree`` set: algorithm DDTREE beside DFLASH in SGLang 0.5.16.

Hooks only; the worker, the arguments' handling and the kernels are in ``dflash_kernels``.
"""

from __future__ import annotations

from dflash_deploy.patching.patch import Contract, PatchSet, Present
from dflash_patches.shared import ddtree

WORKER = ddtree.worker(
    "worker",
    Contract(
        ddtree.WORKER_FILE,
        "DFlashWorkerV2.__init__",
        params=("server_args", "gpu_id", "ps", "nccl_port", "target_worker"),
    ),
    *ddtree.bounds("reserved_seq_lens_cpu", "batch_seq_lens_cpu", "reserved_seq_lens_cpu", "draft_prefix_lens", "out"),
)
ARGUMENTS = ddtree.arguments(
    "arguments", Contract("srt/arg_groups/overrides.py", "resolved_view", params=("server_args",), positional=1)
)

DDTREE = PatchSet(
    name="ddtree",
    package="sglang",
    versions="==0.5.16",
    patches=(
        ddtree.MEMBER,
        ddtree.PREDICATE,
        ddtree.FAMILY,
        WORKER,
        ARGUMENTS,
        ddtree.budget_flag("srt/server_args.py", "ServerArgs"),
        ddtree.topk_flag("srt/server_args.py", "ServerArgs"),
        ddtree.HIDDEN_STATES,
        ddtree.DRAFT_WINDOW,
        ddtree.capture_mask("get_verify_buffers_to_fill_after_draft"),
        ddtree.requests("get_server_args", "srt/server_args.py", "ServerArgs"),
        ddtree.STOPS,
    ),
    tested=("0.5.16",),
    payload=True,
    summary="algorithm DDTREE beside DFLASH: a tree of the drafter's marginals, verified in one pass",
    superseded=Present(ddtree.SPEC_INFO, "SpeculativeAlgorithm.DDTREE"),
)
