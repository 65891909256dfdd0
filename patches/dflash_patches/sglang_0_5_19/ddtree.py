"""The ``ddtree`` sets: algorithm DDTREE beside DFLASH in SGLang 0.5.19 to 0.5.21.

As that of 0.5.17. Arguments are declared since 0.5.19; their fields moved in 0.5.20; the worker lost an argument in 0.5.21.
"""

from __future__ import annotations

from dflash_deploy.patching.patch import Contract, Patch
from dflash_patches.shared import ddtree

FIELDS = "srt/arg_groups/fields/spec.py"
BEFORE_0_5_21 = ("server_args", "gpu_id", "ps", "nccl_port", "target_worker")


def worker(*params: str) -> Patch:
    """``params``: what the scheduler makes a worker with."""
    return ddtree.worker(
        "worker_0_5_19",
        Contract(ddtree.WORKER_FILE, "DFlashWorkerV2.__init__", params=params),
        *ddtree.bounds("nxt_kv_lens_cpu", "batch_seq_lens_cpu", "nxt_kv_lens_cpu", "draft_prefix_lens", "out"),
        *ddtree.BAGS,
    )


ARGUMENTS = ddtree.arguments(
    "arguments_0_5_19",
    Contract("srt/arg_groups/overrides.py", "declare_resolution", params=("server_args", "source"), positional=2),
    Contract("srt/arg_groups/model_override_base.py", "resolving_view", params=("server_args",), positional=1),
    Contract("srt/arg_groups/model_override_base.py", "attention_backends_of", params=("cfg",), positional=1),
)

DDTREE_19 = ddtree.ddtree_set(
    worker(*BEFORE_0_5_21),
    ARGUMENTS,
    ddtree.DRAFT_WINDOW,
    "srt/server_args.py",
    "ServerArgs",
    'NS("spec")',
    "0.5.19",
)
DDTREE_20 = ddtree.ddtree_set(worker(*BEFORE_0_5_21), ARGUMENTS, ddtree.DRAFT_WINDOW, FIELDS, "Spec", "", "0.5.20")
DDTREE_21 = ddtree.ddtree_set(
    worker("server_args", "gpu_id", "nccl_port", "target_worker"),
    ARGUMENTS,
    ddtree.DRAFT_WINDOW,
    FIELDS,
    "Spec",
    "",
    "0.5.21",
)
