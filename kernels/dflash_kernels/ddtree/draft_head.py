"""The drafter's marginals: the K best tokens of each depth with their log-probs, from the target's own head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..topk_logprobs import topk_logprobs
from .shape import TreeShape


class DraftHead:
    """Hidden states of the block to per-depth top-K log-probs, vocabulary-parallel: full logits never leave their rank."""

    def __init__(self, target_model: Any, shape: TreeShape) -> None:
        head = getattr(target_model, "lm_head", None)
        if head is None or not hasattr(head, "weight"):
            raise RuntimeError("DDTREE needs the target's lm_head with a dense weight")
        if not torch.is_floating_point(head.weight):
            raise RuntimeError(f"DDTREE needs a dense lm_head; this one is quantised to {head.weight.dtype}")
        shard = getattr(head, "shard_indices", None)
        if shard is not None and int(shard.num_added_elements):
            raise RuntimeError("DDTREE does not draft from an lm_head with added vocabulary (LoRA embeddings)")
        self._head = head
        self._rows = int(head.weight.shape[0]) if shard is None else int(shard.num_org_elements)
        self._offset = 0 if shard is None else int(shard.org_vocab_start_index)
        self._topk = shape.topk

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden: [bs, F, H]. Returns log-probs fp32 [bs, L, K], descending, and token ids int [bs, L, K]; L = F - 1."""
        from sglang.srt.distributed import get_tp_group

        bs, block, width = hidden.shape
        weight = self._head.weight[: self._rows]
        rows = hidden[:, 1:].reshape(-1, width).to(weight.dtype)
        logits = torch.matmul(rows, weight.T)
        group = get_tp_group()
        if group.world_size > 1:
            raise RuntimeError("DDTREE drafts on one rank only so far")
        logprobs, ids = topk_logprobs(logits, self._topk)
        shape = (bs, block - 1, self._topk)
        return logprobs.view(shape), ids.view(shape)
