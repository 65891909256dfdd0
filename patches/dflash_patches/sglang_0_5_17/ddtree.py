"""The ``ddtree`` sets: algorithm DDTREE beside DFLASH in SGLang 0.5.17 and 0.5.18.

As that of 0.5.16. Resolved arguments are read from the process's configuration since 0.5.17, and the drafter's own copy of
them no longer decides its width. 0.5.18 looks for stops before the limit of tokens by itself.
"""

from __future__ import annotations

from dflash_deploy.patching.patch import Contract, Patch, PatchSet
from dflash_patches.shared import ddtree

WORKER = ddtree.worker(
    "worker_0_5_17",
    Contract(
        ddtree.WORKER_FILE,
        "DFlashWorkerV2.__init__",
        params=("server_args", "gpu_id", "ps", "nccl_port", "target_worker"),
    ),
    *ddtree.bounds("reserved_seq_lens_cpu", "batch_seq_lens_cpu", "reserved_seq_lens_cpu", "draft_prefix_lens", "out"),
    *ddtree.BAGS,
)
ARGUMENTS = ddtree.arguments(
    "arguments_0_5_17",
    Contract("srt/arg_groups/overrides.py", "resolved_view", params=("server_args",), positional=1),
)


def made_for(release: str, *more: Patch) -> PatchSet:
    """``more``: what the release needs beside the common hooks."""
    return ddtree.ddtree_set(
        WORKER, ARGUMENTS, ddtree.DRAFT_WINDOW, "srt/server_args.py", "ServerArgs", 'NS("spec")', release, more=more
    )


DDTREE_17 = made_for("0.5.17", ddtree.STOPS)
DDTREE_18 = made_for("0.5.18")
