"""SGLang's two attention kernels over paged KV in PyTorch, for servers without a GPU.

Triton's interpreter takes a second for what these take milliseconds, and computes bf16 wrongly. ``extend_on_cpu`` and
``decode_on_cpu`` wrap SGLang's launchers: calls that they know run here, in float32, all others go to the kernel. With
``DFLASH_KERNELS_BACKEND=triton`` every call goes to the kernel.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .backend import ENVIRONMENT

Launcher = Callable[..., None]

_LAYOUT = frozenset({"k_buffer", "v_buffer", "kv_indptr", "kv_indices", "k_scale", "v_scale", "sm_scale", "page_size"})
_EXTEND = frozenset({
    *_LAYOUT, "q_extend", "k_extend", "v_extend", "o_extend", "qo_indptr",
    "custom_mask", "mask_indptr", "is_causal", "skip_prefix_custom_mask",
    # How a kernel would split the work; where the mask's window begins, which no call without a window has.
    "max_len_extend", "extend_seq_lens_cpu", "window_kv_offsets",
})  # fmt: skip
_DECODE = frozenset({
    *_LAYOUT, "q", "o",
    # How a kernel would split the work, and where it keeps the parts.
    "attn_logits", "attn_lse", "num_kv_splits", "max_kv_splits", "use_pdl", "uneven_batch",
    "lean_Mp", "lean_Lp", "lean_Op", "lean_locks",
})  # fmt: skip
_OFF: Mapping[str, tuple[Any, ...]] = {
    "sliding_window_size": (None, -1, 0),
    "logit_cap": (None, 0),
    "xai_temperature_len": (None, -1, 0),
    # Another way to split the work.
    "enable_lean": (None, False, True),
}
"""Values that mean the same as a parameter's default."""


def extend_on_cpu(kernel: Launcher) -> Launcher:
    """``extend_attention_fwd``: queries of each request over its cached prefix, then over themselves."""
    return _before(kernel, _EXTEND, _extend)


def decode_on_cpu(kernel: Launcher) -> Launcher:
    """``decode_attention_fwd``: one query of each request over its KV."""
    return _before(kernel, _DECODE, _decode)


def _before(kernel: Launcher, known: frozenset[str], ours: Callable[[Mapping[str, Any]], None]) -> Launcher:
    if torch.cuda.is_available():
        return kernel
    signature = inspect.signature(kernel)
    defaults = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if name not in known and parameter.default is not inspect.Parameter.empty
    }
    # A release whose launcher asks for more than this is not known here.
    fits = known.issuperset(signature.parameters.keys() - defaults.keys())

    @functools.wraps(kernel)
    def launch(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        call = given.arguments
        plain = fits and all(_off(name, call[name], default) for name, default in defaults.items())
        if plain and _served(call["k_buffer"], call["v_buffer"]):
            ours(call)
        else:
            kernel(*args, **kwargs)

    return launch


def _off(name: str, value: Any, default: Any) -> bool:
    if value is default:
        return True
    return any(value is off or (isinstance(value, int | float) and value == off) for off in _OFF.get(name, (default,)))


def _served(*buffers: Tensor) -> bool:
    if os.environ.get(ENVIRONMENT, "auto") == "triton":
        return False
    return all(b.device.type == "cpu" and b.ndim == 3 and b.dtype.is_floating_point and b.itemsize > 1 for b in buffers)


def _factor(scale: Any) -> float:
    return 1.0 if scale is None else float(scale)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q: [M, heads, D]; k, v: [N, KV heads, D]; mask: bool [M, N], true where seen. Returns float32 [M, heads, D]."""
    out = scaled_dot_product_attention(
        *(t.float().transpose(0, 1).unsqueeze(0) for t in (q, k, v)), attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out.squeeze(0).transpose(0, 1)


def _extend(call: Mapping[str, Any]) -> None:
    q, k, v, out = (call[name] for name in ("q_extend", "k_extend", "v_extend", "o_extend"))
    starts, prefixes = call["qo_indptr"].tolist(), call["kv_indptr"].tolist()
    masks = None if call["custom_mask"] is None else call["mask_indptr"].tolist()
    scale = call["sm_scale"] or q.shape[-1] ** -0.5
    for at, (first, last) in enumerate(itertools.pairwise(starts)):
        rows = last - first
        slots = call["kv_indices"][prefixes[at] : prefixes[at + 1]]
        prefix = slots.shape[0]
        if rows == 0:
            continue
        mask = torch.ones(rows, prefix + rows, dtype=torch.bool)
        if masks is not None:
            flat = call["custom_mask"][masks[at] : masks[at] + mask.numel()].view(mask.shape).bool()
            seen = prefix if call["skip_prefix_custom_mask"] else 0
            mask[:, seen:] = flat[:, seen:]
        elif call["is_causal"]:
            mask[:, prefix:].tril_()
        keys = torch.cat([call["k_buffer"][slots].float() * _factor(call["k_scale"]), k[first:last].float()])
        values = torch.cat([call["v_buffer"][slots].float() * _factor(call["v_scale"]), v[first:last].float()])
        out[first:last] = _attend(q[first:last], keys, values, mask, scale)


def _decode(call: Mapping[str, Any]) -> None:
    q, out, prefixes = call["q"], call["o"], call["kv_indptr"].tolist()
    scale = call["sm_scale"] * _factor(call["k_scale"])
    for at in range(q.shape[0]):
        slots = call["kv_indices"][prefixes[at] : prefixes[at + 1]]
        seen = _attend(q[at : at + 1], call["k_buffer"][slots], call["v_buffer"][slots], None, scale)
        out[at : at + 1] = seen * _factor(call["v_scale"])
