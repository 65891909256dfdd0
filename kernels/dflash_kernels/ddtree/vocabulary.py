"""The target's vocabulary as this rank has it: drafts and choices over all of it, without gathering logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ranks import Ranks, argmax_of_shards, topk_of_shards
from .shape import TreeShape


class Vocabulary:
    """The target's ``lm_head``, or this rank's part of it.

    Raises:
        RuntimeError: a head that is missing, quantised or has added vocabulary.
    """

    def __init__(self, target_model: Any, shape: TreeShape, ranks: Ranks) -> None:
        head = getattr(target_model, "lm_head", None)
        if head is None or not hasattr(head, "weight"):
            raise RuntimeError("DDTREE needs the target's lm_head with a dense weight")
        if not torch.is_floating_point(head.weight):
            raise RuntimeError(f"DDTREE needs a dense lm_head; this one is quantised to {head.weight.dtype}")
        shard = getattr(head, "shard_indices", None)
        if shard is not None and int(shard.num_added_elements):
            raise RuntimeError("DDTREE does not draft from an lm_head with added vocabulary (LoRA embeddings)")
        if shard is None and ranks.count > 1:
            raise RuntimeError("DDTREE cannot tell which part of the vocabulary this rank's lm_head is")
        self._head = head
        self._columns = int(head.weight.shape[0]) if shard is None else int(shard.num_org_elements)
        self._offset = 0 if shard is None else int(shard.org_vocab_start_index)
        self._topk = shape.topk
        self._ranks = ranks
        self._keep_shards(target_model)

    def _keep_shards(self, target_model: Any) -> None:
        """Verify passes leave each rank its own columns; SGLang would gather [rows, vocab] from all of them."""
        if self._ranks.count == 1:
            return
        processor = target_model.logits_processor
        gathered = processor._get_logits

        def get_logits(hidden: Tensor, head: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
            if not metadata.forward_mode.is_target_verify():
                return gathered(hidden, head, metadata, *args, **kwargs)
            kept = processor.do_tensor_parallel_all_gather
            processor.do_tensor_parallel_all_gather = False
            try:
                return gathered(hidden, head, metadata, *args, **kwargs)
            finally:
                processor.do_tensor_parallel_all_gather = kept

        processor._get_logits = get_logits
        self._size = int(processor.vocab_size)

    def draft(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden: [bs, F, H]. Returns log-probs fp32 [bs, L, K], descending, and token ids int [bs, L, K]; L = F - 1."""
        bs, block, width = hidden.shape
        weight = self._head.weight[: self._columns]
        rows = hidden[:, 1:].reshape(-1, width).to(weight.dtype)
        logprobs, ids = topk_of_shards(torch.matmul(rows, weight.T), self._topk, self._offset, self._ranks)
        shape = (bs, block - 1, self._topk)
        return logprobs.view(shape), ids.view(shape)

    def argmax(self, logits: Tensor) -> Tensor:
        """The target's logits of a verify pass, [rows, its columns here], to token ids int64 [rows]."""
        if self._ranks.count == 1:
            return torch.argmax(logits, dim=-1)
        return argmax_of_shards(logits, self._offset, self._columns, self._ranks)

    def whole(self, logits: Tensor) -> Tensor:
        """The same logits over the whole vocabulary."""
        return logits if self._ranks.count == 1 else self._ranks.whole(logits, self._size)
