"""The truth of the top-k ops: a stable sort and torch's own log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = torch.finfo(torch.float32).max


def _clean(logits: Tensor) -> Tensor:
    return torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)


def _normalised(values: Tensor, lse: Tensor) -> Tensor:
    return (values - lse.unsqueeze(-1)).masked_fill(values == -torch.inf, -torch.inf)


def topk_logprobs_naive(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See ``topk_logprobs``."""
    clean = _clean(logits)
    values, ids = torch.sort(clean, dim=-1, descending=True, stable=True)
    return _normalised(values[:, :k], torch.logsumexp(clean, -1)), ids[:, :k].to(torch.int32).contiguous()


def topk_partial_naive(logits: Tensor, k: int, id_offset: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``topk_partial``."""
    clean = _clean(logits)
    values, ids = torch.sort(clean, dim=-1, descending=True, stable=True)
    maxima = values[:, 0].contiguous()
    shift = maxima.masked_fill(maxima == -torch.inf, 0.0)
    sumexp = torch.exp(clean - shift.unsqueeze(1)).sum(-1)
    return values[:, :k].contiguous(), (ids[:, :k] + id_offset).to(torch.int32), maxima, sumexp


def merge_topk_naive(values: Tensor, ids: Tensor, maxima: Tensor, sumexp: Tensor) -> tuple[Tensor, Tensor]:
    """See ``merge_topk``."""
    ranks, rows, k = values.shape
    flat_values = values.transpose(0, 1).reshape(rows, ranks * k)
    flat_ids = ids.transpose(0, 1).reshape(rows, ranks * k)
    by_id = flat_ids.argsort(dim=1)
    flat_values, flat_ids = flat_values.gather(1, by_id), flat_ids.gather(1, by_id)
    best, order = torch.sort(flat_values, dim=1, descending=True, stable=True)
    lse = torch.logsumexp(maxima + sumexp.log(), 0)
    return _normalised(best[:, :k], lse), flat_ids.gather(1, order[:, :k]).contiguous()
