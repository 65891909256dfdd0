"""The ``ddtree`` set: algorithm DDTREE beside DFLASH in SGLang 0.5.17 and 0.5.18.

As that of 0.5.16. Resolved arguments are read from the process's configuration since 0.5.17, and the drafter's own copy of
them no longer decides its width.
"""

from __future__ import annotations

from dflash_deploy.patching.patch import Contract
from dflash_patches.shared import ddtree

DDTREE = ddtree.ddtree_set(
    ddtree.worker(
        "worker_0_5_17",
        Contract(
            ddtree.WORKER_FILE,
            "DFlashWorkerV2.__init__",
            params=("server_args", "gpu_id", "ps", "nccl_port", "target_worker"),
        ),
        *ddtree.bounds(
            "reserved_seq_lens_cpu", "batch_seq_lens_cpu", "reserved_seq_lens_cpu", "draft_prefix_lens", "out"
        ),
        *ddtree.BAGS,
    ),
    ddtree.arguments(
        "arguments_0_5_17",
        Contract("srt/arg_groups/overrides.py", "resolved_view", params=("server_args",), positional=1),
    ),
    ddtree.DRAFT_WINDOW,
    "srt/server_args.py",
    "ServerArgs",
    'NS("spec")',
    "0.5.17",
    "0.5.18",
)
