"""The ``cpu`` set: SGLang 0.5.16 on a CPU, its Triton kernels run by Triton's interpreter (``TRITON_INTERPRET=1``).

Without SGLang's own CPU engine (AMX kernels), no platform predicate is true on a CPU, and a few places then assume
CUDA. Every change asks for the device, so that it does nothing on CUDA; the set is never applied there all the same.
Served in float32: the interpreter computes bf16 attention wrongly.
"""

from __future__ import annotations

from dflash_deploy.patching.anchors import Stmt
from dflash_deploy.patching.edits import GuardStatement, ReplaceExpression, WrapCondition
from dflash_deploy.patching.patch import Contract, Example, Patch, PatchSet, Refusal
from dflash_patches.shared.cpu import (
    ATTENTION,
    CACHE_LOCS,
    FORK,
    INPUT_EMBEDS,
    INTERPRETER,
    WORKER_STREAM,
    WORKER_TRITON,
)

DFLASH_ON_CPU = Patch(
    name="cpu-dflash-allowed",
    file="srt/arg_groups/speculative_hook.py",
    why="DFLASH is refused unless the device is CUDA, yet its worker runs on a CPU too",
    edit=WrapCondition(
        "_handle_dflash", "not server_args.device.startswith('cuda')", "{} and server_args.device != 'cpu'"
    ),
    contract=(Contract("srt/server_args.py", "ServerArgs", attributes=("device",)),),
    examples=(
        Example(
            before="""
                def _handle_dflash(server_args):
                    if not server_args.device.startswith("cuda"):
                        raise ValueError("CUDA only")
            """,
            after="""
                def _handle_dflash(server_args):
                    if (not server_args.device.startswith('cuda')) and server_args.device != 'cpu':  # dflash-deploy: cpu-dflash-allowed
                        raise ValueError("CUDA only")
            """,  # noqa: E501
        ),
    ),
    refuses=(
        Refusal(
            before="""
                def _handle_dflash(server_args):
                    if server_args.device == 'npu':
                        raise ValueError
            """,
            error="AnchorMissing",
        ),
        Refusal(
            before="""
                def _handle_dflash(server_args):
                    if not server_args.device.startswith('cuda'):
                        raise ValueError
                    if not server_args.device.startswith('cuda'):
                        raise ValueError
            """,
            error="AnchorAmbiguous",
        ),
    ),
)

ROPE_NATIVE = Patch(
    name="cpu-rope-native",
    file="srt/layers/rotary_embedding/base.py",
    why="a CPU without AMX kernels falls through to an import of vLLM; the native forward suffices",
    edit=ReplaceExpression(
        "RotaryEmbedding.__init__", "not _is_mps", "not _is_mps and get_server_args().device != 'cpu'"
    ),
    contract=(
        Contract("srt/layers/rotary_embedding/base.py", "RotaryEmbedding.forward_native"),
        Contract("srt/runtime_context.py", "get_server_args", params=()),
        Contract("srt/server_args.py", "ServerArgs", attributes=("device",)),
    ),
    examples=(
        Example(
            before="""
                from a import get_server_args


                class RotaryEmbedding:
                    def __init__(self):
                        if (
                            not (_is_cuda)
                            and not (_is_mps)
                        ):
                            import vllm


                _is_mps = False
            """,
            after="""
                from a import get_server_args


                class RotaryEmbedding:
                    def __init__(self):
                        if (
                            not (_is_cuda)
                            and (not _is_mps and get_server_args().device != 'cpu')
                        ):  # dflash-deploy: cpu-rope-native
                            import vllm


                _is_mps = False
            """,
        ),
    ),
    refuses=(
        Refusal(
            before="""
                class RotaryEmbedding:
                    def __init__(self):
                        if not _is_cuda:
                            import vllm
            """,
            error="AnchorMissing",
        ),
    ),
)

RELAY_STREAM = Patch(
    name="cpu-relay-record-stream",
    file="srt/managers/overlap_utils.py",
    why="Tensor.record_stream raises on CPU tensors, which need no stream bookkeeping",
    edit=GuardStatement(
        "FutureMap._resolve_spec_extras", Stmt("indices.record_stream(...)"), "indices.device.type != 'cpu'"
    ),
    examples=(
        Example(
            before="""
                class FutureMap:
                    def _resolve_spec_extras(self, batch):
                        indices = batch.indices
                        # a comment
                        indices.record_stream(current())
            """,
            after="""
                class FutureMap:
                    def _resolve_spec_extras(self, batch):
                        indices = batch.indices
                        # a comment
                        if indices.device.type != 'cpu':  # dflash-deploy: cpu-relay-record-stream
                            indices.record_stream(current())
            """,
        ),
    ),
    refuses=(
        Refusal(
            before="""
                class FutureMap:
                    def _resolve_spec_extras(self, batch):
                        rows = batch.indices
                        rows.record_stream(current())
            """,
            error="AnchorMissing",
        ),
    ),
)

CPU = PatchSet(
    name="cpu",
    package="sglang",
    versions="==0.5.16",
    tested=("0.5.16",),
    patches=(
        DFLASH_ON_CPU,
        ROPE_NATIVE,
        RELAY_STREAM,
        WORKER_STREAM,
        WORKER_TRITON,
        CACHE_LOCS,
        INPUT_EMBEDS,
        INTERPRETER,
        *ATTENTION,
        FORK,
    ),
    device="cpu",
    summary="run on a CPU through Triton's interpreter, in float32",
)
