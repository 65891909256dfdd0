"""Run with the Python of a patched CPU environment: SGLang's interpreted attention kernels beside what is served.

Prints one JSON document: the largest difference by case.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import torch
from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 32, 90


def starts(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32)


def extend(draw: torch.Generator, kind: str) -> dict[str, Any]:
    """Requests as a tree's verification has them: prefixes of several tiles and none, masks below the diagonal."""
    prefixes, rows = [37, 0, 5], [16, 16, 3]
    masks = [torch.rand(n, p + n, generator=draw) < 0.5 for p, n in zip(prefixes, rows, strict=True)]
    for mask, prefix in zip(masks, prefixes, strict=True):
        itself = torch.eye(len(mask)).bool()
        mask[:, prefix:] = mask[:, prefix:].tril() | itself
    tree = kind.startswith("tree")
    return {
        **{f"{name}_extend": torch.randn(sum(rows), heads, DIM, generator=draw)
           for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))},
        **{f"{name}_buffer": torch.randn(SLOTS, KV_HEADS, DIM, generator=draw) for name in "kv"},
        "o_extend": torch.zeros(sum(rows), HEADS, DIM),
        "qo_indptr": starts(rows),
        "kv_indptr": starts(prefixes),
        "kv_indices": torch.randperm(SLOTS, generator=draw)[: sum(prefixes)],
        "custom_mask": torch.cat([mask.flatten() for mask in masks]).to(torch.uint8) if tree else None,
        "mask_indptr": starts([mask.numel() for mask in masks]) if tree else None,
        "is_causal": kind != "all",
        "skip_prefix_custom_mask": kind != "tree, prefix too",
        "max_len_extend": max(rows), "k_scale": 1.0, "v_scale": 1.0, "sm_scale": 0.2,
    }  # fmt: skip


def decode(draw: torch.Generator) -> dict[str, Any]:
    lengths = [40, 1, 17]
    return {
        "q": torch.randn(3, HEADS, DIM, generator=draw), "o": torch.zeros(3, HEADS, DIM),
        **{f"{name}_buffer": torch.randn(SLOTS, KV_HEADS, DIM, generator=draw) for name in "kv"},
        "kv_indptr": starts(lengths), "kv_indices": torch.randperm(SLOTS, generator=draw)[: sum(lengths)],
        "attn_logits": torch.zeros(3, HEADS, 1, DIM), "attn_lse": torch.zeros(3, HEADS, 1),
        "num_kv_splits": torch.ones(3, dtype=torch.int32), "max_kv_splits": 1,
        "sm_scale": 0.2, "k_scale": 1.0, "v_scale": 1.0,
    }  # fmt: skip


def main() -> None:
    draw = torch.Generator().manual_seed(11)
    found = {}
    calls = [(kind, extend_attention_fwd, "o_extend", extend(draw, kind))
             for kind in ("tree", "tree, prefix too", "causal", "all")]  # fmt: skip
    calls.append(("decode", decode_attention_fwd, "o", decode(draw)))
    for kind, served, out, call in calls:
        kernel = inspect.unwrap(served)
        assert kernel is not served, "the environment has no attention of its own"
        answers = []
        for launch in (kernel, served):
            launch(**call)
            answers.append(call[out].clone())
            call[out].fill_(float("nan"))
        found[kind] = (answers[0] - answers[1]).abs().max().item()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
