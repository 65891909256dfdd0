"""The k best tokens of each row of logits with their log-probs, in one pass over the vocabulary."""

from __future__ import annotations

from torch import Tensor

from ..backend import Backend, use_triton
from .naive import merge_topk_naive, topk_logprobs_naive, topk_partial_naive

__all__ = [
    "merge_topk",
    "merge_topk_naive",
    "topk_logprobs",
    "topk_logprobs_naive",
    "topk_partial",
    "topk_partial_naive",
]

MAX_K = 64


def topk_logprobs(logits: Tensor, k: int, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """Log-probs fp32 [rows, k] and token ids int32 [rows, k], ordered by (logit descending, id ascending).

    logits: bf16, fp16 or fp32 [rows, V], rows contiguous. NaN counts as -inf and +inf as the largest fp32; an entry of
    -inf has the log-prob -inf. No device-to-host copy. Raises ValueError for k outside 1..min(64, V).
    """
    _check(logits, k)
    if not use_triton(logits, backend):
        return topk_logprobs_naive(logits, k)
    from .kernel import launch_topk

    logprobs, ids, _, _ = launch_topk(logits, k, 0, normalise=True)
    return logprobs, ids


def topk_partial(
    logits: Tensor, k: int, id_offset: int, backend: Backend = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One shard of a vocabulary: values fp32 [rows, k], ids int32 [rows, k], max fp32 [rows], sumexp fp32 [rows].

    ids are the shard's columns plus ``id_offset``; sumexp is the sum of exp(logit - max) over the shard. Gathering
    these from every rank and giving them to ``merge_topk`` equals ``topk_logprobs`` of the whole vocabulary.
    """
    _check(logits, k)
    if not use_triton(logits, backend):
        return topk_partial_naive(logits, k, id_offset)
    from .kernel import launch_topk

    return launch_topk(logits, k, id_offset, normalise=False)


def merge_topk(
    values: Tensor, ids: Tensor, maxima: Tensor, sumexp: Tensor, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Log-probs fp32 [rows, k] and ids int32 [rows, k] from the shards of ``topk_partial``.

    values: fp32 [ranks, rows, k], ids: int32 [ranks, rows, k], maxima and sumexp: fp32 [ranks, rows], all contiguous.
    The same input bytes give the same output bytes, so every rank gets the same tree.
    """
    if (
        values.dim() != 3
        or values.shape != ids.shape
        or maxima.shape != values.shape[:2]
        or sumexp.shape != maxima.shape
    ):
        shapes = ", ".join(str(tuple(x.shape)) for x in (values, ids, maxima, sumexp))
        raise ValueError(f"values, ids, maxima and sumexp of shapes {shapes} do not belong together")
    if not use_triton(values, backend):
        return merge_topk_naive(values, ids, maxima, sumexp)
    from .kernel import launch_merge_ranks

    return launch_merge_ranks(values, ids, maxima, sumexp)


def _check(logits: Tensor, k: int) -> None:
    if logits.dim() != 2 or logits.stride(1) != 1 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating point [rows, V] with contiguous rows, not {tuple(logits.shape)}")
    if not 1 <= k <= min(MAX_K, logits.shape[1]):
        raise ValueError(f"k = {k} is outside 1..{min(MAX_K, logits.shape[1])}")
