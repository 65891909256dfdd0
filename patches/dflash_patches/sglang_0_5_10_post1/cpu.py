"""The ``cpu`` set: SGLang 0.5.10.post1 on a CPU, its Triton kernels run by Triton's interpreter (``TRITON_INTERPRET=1``).

Without SGLang's own CPU engine no platform predicate is true on a CPU, and two places then take it for a GPU without
kernels. The set is never applied on CUDA. Served in float32: the interpreter computes bf16 attention wrongly.
"""

from __future__ import annotations

from dflash_deploy.patching.edits import ReplaceExpression, WrapCondition
from dflash_deploy.patching.patch import Contract, Example, Patch, PatchSet, Refusal
from dflash_patches.shared.cpu import FORK, attention

HOST_POOL = Patch(
    name="cpu-host-pool-kernels",
    file="srt/mem_cache/memory_pool_host.py",
    why="copies between GPU and host memory need the kernel package; nothing calls them on a CPU",
    edit=WrapCondition("", "not (_is_npu or _is_xpu or _is_mps)", "{} and torch.cuda.is_available()"),
    examples=(
        Example(
            before="""
                import torch

                _is_npu = _is_xpu = _is_mps = False
                if not (_is_npu or _is_xpu or _is_mps):
                    from sgl_kernel.kvcacheio import transfer_kv_direct
            """,
            after="""
                import torch

                _is_npu = _is_xpu = _is_mps = False
                if (not (_is_npu or _is_xpu or _is_mps)) and torch.cuda.is_available():  # dflash-deploy: cpu-host-pool-kernels
                    from sgl_kernel.kvcacheio import transfer_kv_direct
            """,  # noqa: E501
        ),
    ),
    refuses=(
        Refusal(
            """
            import torch

            _is_npu = False
            if not _is_npu:
                from sgl_kernel.kvcacheio import transfer_kv_direct
            """,
            "AnchorMissing",
        ),
    ),
)

ROPE_NATIVE = Patch(
    name="cpu-rope-native",
    file="srt/layers/rotary_embedding/base.py",
    why="a CPU without AMX kernels falls through to an import of vLLM; the native forward suffices",
    edit=ReplaceExpression(
        "RotaryEmbedding.__init__", "not _is_mps", "not _is_mps and get_global_server_args().device != 'cpu'"
    ),
    contract=(
        Contract("srt/layers/rotary_embedding/base.py", "RotaryEmbedding.forward_native"),
        Contract("srt/server_args.py", "get_global_server_args", params=()),
        Contract("srt/server_args.py", "ServerArgs", attributes=("device",)),
    ),
    examples=(
        Example(
            before="""
                from a import get_global_server_args


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
                from a import get_global_server_args


                class RotaryEmbedding:
                    def __init__(self):
                        if (
                            not (_is_cuda)
                            and (not _is_mps and get_global_server_args().device != 'cpu')
                        ):  # dflash-deploy: cpu-rope-native
                            import vllm


                _is_mps = False
            """,
        ),
    ),
    refuses=(
        Refusal(
            """
            class RotaryEmbedding:
                def __init__(self):
                    if not _is_cuda:
                        import vllm
            """,
            "AnchorMissing",
        ),
    ),
)

CPU = PatchSet(
    name="cpu",
    package="sglang",
    versions="==0.5.10.post1",
    tested=("0.5.10.post1",),
    patches=(HOST_POOL, ROPE_NATIVE, *attention("srt/layers/attention/triton_ops"), FORK),
    device="cpu",
    summary="run on a CPU through Triton's interpreter, in float32",
)
