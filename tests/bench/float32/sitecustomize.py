"""Lets SGLang 0.5.16 and 0.5.23 run in float32 on a GPU: their fused norm, activation and rotary kernels take half
precision only, and so do 0.5.16's of experts and of a linear attention's prefill.

Not for serving: the benches that ask for equal tokens need it. Found by being first on PYTHONPATH.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def _native_layers(module: Any) -> None:
    module.MultiPlatformOp.dispatch_forward = lambda self: self.forward_native


def _native_operators(module: Any) -> None:
    """The same in 0.5.23, whose layers are these; 0.5.16's are not yet."""
    import torch

    if not issubclass(module.BaseFusedOp, torch.nn.Module):
        return
    fused = module.BaseFusedOp.forward

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        try:
            return self.forward_native(*args, **{key: value for key, value in named.items() if key != "backend"})
        except NotImplementedError:
            return fused(self, *args, **named)

    module.BaseFusedOp.forward = forward


def _no_dual_gemm(module: Any) -> None:
    """0.5.23 imports its half-precision kernel only to learn that it does not apply."""
    module.DualGemm._select_mode = lambda *_: None


def _separate_norms(module: Any) -> None:
    module.can_use_fused_inplace_qknorm = lambda *_: False


def _recurrent_prefill(module: Any) -> None:
    """The gated delta rule token by token, as the decode kernel has it; the chunked kernel refuses float32."""
    import torch

    def extend(
        self: Any,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        *,
        ssm_states: Any,
        cache_indices: Any,
        query_start_loc: Any,
        **_: Any,
    ) -> tuple[Any, None, None]:
        heads = v.shape[2] // q.shape[2]
        q, k = (x[0] / (x[0].square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(heads, 1).float() for x in (q * q.shape[-1] ** -0.5, k))
        out = torch.empty_like(v)
        starts = query_start_loc.tolist()
        for at, slot in enumerate(cache_indices.tolist()):
            state = ssm_states[slot].float()  # [heads, V, K]
            for t in range(starts[at], starts[at + 1]):
                state = state * g[0, t].exp()[:, None, None]
                new = (v[0, t] - torch.einsum("hvk,hk->hv", state, k[t])) * beta[0, t][:, None]
                state = state + new[:, :, None] * k[t][:, None, :]
                out[0, t] = torch.einsum("hvk,hk->hv", state, q[t])
            ssm_states[slot] = state
        return out, None, None

    module.TritonGDNKernel.extend = extend
    if _without_gpu():  # a kernel that the interpreter cannot run; the one it fuses can
        module.TritonGDNKernel.supports_packed_decode = False


def _dense_experts(module: Any) -> None:
    """Every expert over every token: few experts, no copy to the host, captured like the kernel."""
    import torch

    def forward(self: Any, layer: Any, dispatch_output: Any) -> Any:
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        x, (weights, ids, *_) = dispatch_output.hidden_states, dispatch_output.topk_output
        share = x.new_zeros(x.shape[0], layer.w13_weight.shape[0])
        share.scatter_(1, ids.long(), weights.to(x.dtype))
        out = torch.zeros_like(x)
        for expert in range(share.shape[1]):
            gate, up = torch.nn.functional.linear(x, layer.w13_weight[expert]).chunk(2, -1)
            down = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, layer.w2_weight[expert])
            out += share[:, expert, None] * down
        return StandardCombineInput(hidden_states=out)

    module.UnquantizedFusedMoEMethod.forward_native = forward


def _boolean_masks(module: Any) -> None:
    from dflash_kernels.interpreter import keep_masks_boolean

    keep_masks_boolean()


CHANGES = {
    "sglang.kernels.fused_op": _native_operators,
    "sglang.kernels.ops.mamba.causal_conv1d_triton": _boolean_masks,
    "sglang.srt.layers.attention.linear.kernels.gdn_triton": _recurrent_prefill,
    "sglang.srt.layers.dual_gemm": _no_dual_gemm,
    "sglang.srt.layers.quantization.unquant": _dense_experts,
    "sglang.srt.layers.utils.multi_platform": _native_layers,
    "sglang.srt.models.utils": _separate_norms,
}

ON_CPU = {
    "sglang.srt.mem_cache.memory_pool": ('device="cuda"', 'device="cpu"'),
    "sglang.kernels.ops.mamba.mamba_state_scatter_triton": (".is_cuda", ".is_cpu"),
    "sglang.srt.models.qwen3_next": ("torch.get_device_module().current_device()", '"cpu"'),
}
"""Without a GPU: what a linear attention's states name CUDA for, as text in the module's source."""


def _without_gpu() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


class _Finder(importlib.abc.MetaPathFinder):
    """Runs a change right after its module was loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change, texts = CHANGES.get(name), ON_CPU.get(name) if _without_gpu() else None
        if change is None and texts is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            if change is not None:
                change(module)

        def get_code(fullname: str) -> Any:
            assert texts is not None
            source = loader.get_source(fullname)
            if texts[0] not in source:
                raise ImportError(f"{fullname} has no {texts[0]}")
            return compile(source.replace(*texts), spec.origin or fullname, "exec", dont_inherit=True)

        if texts is not None:
            loader.get_code = get_code
        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
