"""A vocabulary split among tensor-parallel ranks: what is exchanged is a few numbers a row, never a row of logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .topk_logprobs import merge_topk, topk_logprobs, topk_partial

_ID_BITS = 32


@dataclass(frozen=True)
class Ranks:
    """The ranks of one model. ``group``: SGLang's ``GroupCoordinator``, or whatever has its methods."""

    group: Any

    @property
    def count(self) -> int:
        return int(self.group.world_size)

    def gather(self, mine: Tensor) -> Tensor:
        """[...] of every rank as [ranks, ...], in rank order, on the device; captured graphs may hold it."""
        if self.count == 1:
            return mine.unsqueeze(0)
        gathered: Tensor = self.group.all_gather(mine.contiguous(), dim=0)
        return gathered.view(self.count, *mine.shape)

    def whole(self, logits: Tensor, vocab: int) -> Tensor:
        """This rank's columns of logits [rows, shard] to those of all, [rows, vocab]: for sampled batches alone."""
        if self.count == 1:
            return logits
        return self.gather(logits).transpose(0, 1).reshape(logits.shape[0], -1)[:, :vocab]

    def same(self, drawn: Tensor) -> Tensor:
        """The first rank's random numbers on every rank."""
        if self.count > 1:
            self.group.broadcast(drawn, src=0)
        return drawn

    def agree(self, value: int) -> int:
        """The first rank's value on every rank, over the host: tens of microseconds."""
        if self.count == 1:
            return value
        told = torch.tensor([value], dtype=torch.int64)
        torch.distributed.broadcast(told, src=self.group.ranks[0], group=self.group.cpu_group)
        return int(told)

    @contextmanager
    def capturing(self) -> Iterator[torch.cuda.Stream | None]:
        """Around graphs that hold collectives; yields the stream to capture them on, or None for any."""
        with nullcontext() if self.count == 1 else self.group.graph_capture() as context:
            yield None if context is None else context.stream


def argmax_of_shards(logits: Tensor, offset: int, columns: int, ranks: Ranks) -> Tensor:
    """int64 [rows]: the token with the largest logit of the whole vocabulary, the smallest id among equals.

    logits: fp32 [rows, shard], this rank's columns. offset: the token id of the first. columns: how many are
    vocabulary; padding follows. Exchanged: 8 bytes a row and rank.
    """
    if columns:
        best, at = torch.max(logits[:, :columns], dim=-1)
    else:
        best, at = logits.new_full((logits.shape[0],), float("-inf")), torch.zeros_like(logits[:, 0], dtype=torch.int64)
    bits = best.to(torch.float32).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)  # compares like the floats do
    key = (ordered << _ID_BITS) | ((1 << _ID_BITS) - 1 - (at + offset))
    return (1 << _ID_BITS) - 1 - (ranks.gather(key).amax(dim=0) & ((1 << _ID_BITS) - 1))


def topk_of_shards(logits: Tensor, k: int, offset: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Log-probs fp32 [rows, k] and ids int32 [rows, k] over the whole vocabulary, the same bytes on every rank.

    logits: [rows, shard], this rank's columns without padding. Exchanged: 8 k + 8 bytes a row and rank.
    """
    if ranks.count == 1:
        return topk_logprobs(logits, k)
    values, ids, maxima, sumexp = topk_partial(logits, k, offset)
    mine = torch.cat([values, ids.view(torch.float32), maxima.unsqueeze(1), sumexp.unsqueeze(1)], dim=1)
    values, ids, maxima, sumexp = (t.contiguous() for t in ranks.gather(mine).split([k, k, 1, 1], dim=-1))
    return merge_topk(values, ids.view(torch.int32), maxima.squeeze(-1), sumexp.squeeze(-1))
