"""Attention of CPU servers: against the definition in float64, and which calls it leaves to the kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dflash_kernels.cpu_attention import decode_on_cpu, extend_on_cpu
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels")

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 8, 60


def extend_attention_fwd(
    q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, custom_mask,
    is_causal, mask_indptr, max_len_extend, k_scale, v_scale, sm_scale=None, logit_cap=0.0,
    skip_prefix_custom_mask=True, sliding_window_size=-1, sinks=None, window_kv_offsets=None, lse_extend=None,
    skip_prefix=False, page_size=1,
):  # fmt: skip
    o_extend.fill_(math.nan)


def decode_attention_fwd(
    q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits, max_kv_splits,
    sm_scale, k_scale, v_scale, logit_cap=0.0, sinks=None, page_size=1, enable_lean=None,
):  # fmt: skip
    o.fill_(math.nan)


def defined(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Row by row and head by head, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(q.shape[0]):
        for head in range(HEADS):
            kv = head * KV_HEADS // HEADS
            scores = (keys[seen[row], kv].double() @ q[row, head].double()) * scale
            out[row, head] = torch.softmax(scores, 0) @ values[seen[row], kv].double()
    return out


@pytest.fixture
def call() -> dict[str, Any]:
    """Three requests: a prefix and four rows, no prefix and five rows, a prefix and one row."""
    draw = torch.Generator().manual_seed(3)
    prefixes, rows = [7, 0, 12], [4, 5, 1]
    size = sum(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    masks = [torch.rand(n, p + n, generator=draw) < 0.6 for p, n in zip(prefixes, rows, strict=True)]
    for mask, prefix in zip(masks, prefixes, strict=True):
        mask[:, prefix:] |= torch.eye(len(mask), dtype=torch.bool)
        mask[:, prefix:] &= torch.ones(len(mask), len(mask)).tril().bool()

    def starts(sizes: list[int]) -> Tensor:
        return torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32)

    return {
        "q_extend": normal(size, HEADS, DIM),
        "k_extend": normal(size, KV_HEADS, DIM),
        "v_extend": normal(size, KV_HEADS, DIM),
        "o_extend": torch.zeros(size, HEADS, DIM),
        "k_buffer": normal(SLOTS, KV_HEADS, DIM),
        "v_buffer": normal(SLOTS, KV_HEADS, DIM),
        "qo_indptr": starts(rows),
        "kv_indptr": starts(prefixes),
        "kv_indices": torch.randperm(SLOTS, generator=draw)[: sum(prefixes)],
        "custom_mask": torch.cat([mask.flatten() for mask in masks]).to(torch.uint8),
        "is_causal": True,
        "mask_indptr": starts([mask.numel() for mask in masks]),
        "max_len_extend": max(rows),
        "k_scale": 1.0,
        "v_scale": 1.0,
    }


@pytest.mark.parametrize("kind", ["tree", "tree, prefix too", "causal", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extend(call: dict[str, Any], kind: str, dtype: torch.dtype) -> None:
    for name in ("q_extend", "k_extend", "v_extend", "k_buffer", "v_buffer", "o_extend"):
        call[name] = call[name].to(dtype)
    flat = call["custom_mask"]
    if not kind.startswith("tree"):
        call["custom_mask"] = call["mask_indptr"] = None
        call["is_causal"] = kind == "causal"
    call["skip_prefix_custom_mask"] = kind != "tree, prefix too"
    extend_on_cpu(extend_attention_fwd)(**call)
    at = 0
    for prefix, rows, first in ((7, 4, 0), (0, 5, 4), (12, 1, 9)):
        slots = call["kv_indices"][call["kv_indptr"].tolist()[(0, 4, 9).index(first)] :][:prefix]
        mask = flat[at : at + rows * (prefix + rows)].view(rows, -1).bool().clone()
        at += mask.numel()
        if kind in ("causal", "all"):
            mask[:] = True
        if kind == "causal":
            mask[:, prefix:].tril_()
        if kind == "tree":
            mask[:, :prefix] = True
        part = slice(first, first + rows)
        keys = torch.cat([call["k_buffer"][slots], call["k_extend"][part]])
        values = torch.cat([call["v_buffer"][slots], call["v_extend"][part]])
        wanted = defined(call["q_extend"][part], keys, values, mask, DIM**-0.5)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert torch.allclose(call["o_extend"][part].double(), wanted, atol=tolerance)


def decoding(call: dict[str, Any]) -> dict[str, Any]:
    kept = {name: call[name] for name in ("k_buffer", "v_buffer", "kv_indices", "k_scale")}
    starts = torch.tensor([0, 7, 10, 19], dtype=torch.int32)
    extra = dict.fromkeys(("attn_logits", "attn_lse", "num_kv_splits"))
    q = call["q_extend"][:3]
    sizes = {"kv_indptr": starts, "max_kv_splits": 1, "sm_scale": 0.3, "v_scale": 0.5}
    return {**kept, **extra, **sizes, "q": q, "o": q.clone()}


def test_decode(call: dict[str, Any]) -> None:
    call = decoding(call)
    decode_on_cpu(decode_attention_fwd)(**call, enable_lean=False)
    for row, (first, last) in enumerate(((0, 7), (7, 10), (10, 19))):
        slots = call["kv_indices"][first:last]
        every = torch.ones(1, last - first, dtype=torch.bool)
        wanted = defined(call["q"][row : row + 1], call["k_buffer"][slots], call["v_buffer"][slots], every, 0.3) * 0.5
        assert torch.allclose(call["o"][row].double(), wanted[0], atol=1e-5)


OTHERS = [
    {"logit_cap": 30.0},
    {"sliding_window_size": 16},
    {"sinks": torch.zeros(4)},
    {"lse_extend": torch.zeros(9, 4)},
    {"skip_prefix": True},
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
def test_what_is_not_known_goes_to_the_kernel(call: dict[str, Any], other: dict[str, Any]) -> None:
    extend_on_cpu(extend_attention_fwd)(**call, **other)
    assert call["o_extend"].isnan().all()


def test_what_means_the_default_does_not(call: dict[str, Any]) -> None:
    launch = extend_on_cpu(extend_attention_fwd)
    launch(*call.values(), logit_cap=0, sliding_window_size=None, page_size=4)
    assert not call["o_extend"].isnan().any()


def test_the_environment_and_other_buffers_choose_the_kernel(
    call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_ = {name: call[name].to(torch.float8_e4m3fn) for name in ("k_buffer", "v_buffer")}
    extend_on_cpu(extend_attention_fwd)(**{**call, **bytes_})
    assert call["o_extend"].isnan().all()
    monkeypatch.setenv("DFLASH_KERNELS_BACKEND", "triton")
    call = decoding({**call, "o_extend": torch.zeros(10, HEADS, DIM)})
    decode_on_cpu(decode_attention_fwd)(**call)
    assert call["o"].isnan().all()


def test_a_launcher_that_asks_for_more_keeps_its_kernel(call: dict[str, Any]) -> None:
    def later(*, rotate: int, **rest: Any) -> None:
        raise LookupError(rotate)

    with pytest.raises(LookupError):
        extend_on_cpu(later)(**call, rotate=1)
