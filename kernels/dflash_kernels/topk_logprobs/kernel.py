"""One program per (row, vocabulary chunk) keeps the chunk's k best and its log-sum-exp; one program per row merges.

A candidate is one int64: the logit's bits, mapped so that integers order as the floats do, above the inverted id. Its
maximum is the largest logit with the smallest id, so that k maxima give the order that a stable sort gives.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096
_NOTHING = tl.constexpr(-(2**63))
_ID_MASK = tl.constexpr(2**31 - 1)
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _packed(value, token):
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (token ^ _ID_MASK).to(tl.int64)


@triton.jit
def _value(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _chunk_topk(logits, row_stride, keys, maxima, sumexp, V, id_offset, chunks, K: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < V
    value = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, tl.minimum(value, _LARGEST), float("-inf"))
    top = tl.max(value, axis=0)
    shift = tl.where(top > float("-inf"), top, 0.0)
    at = row * chunks + chunk
    tl.store(maxima + at, top)
    tl.store(sumexp + at, tl.sum(tl.exp(value - shift), axis=0))
    key = tl.where(inside, _packed(value, token + id_offset), _NOTHING)
    for j in range(K):
        best = tl.max(key, axis=0)
        tl.store(keys + at * K + j, best)
        key = tl.where(key == best, _NOTHING, key)


@triton.jit
def _merge(
    keys,
    in_values,
    in_ids,
    in_maxima,
    in_sumexp,
    values,
    ids,
    maxima,
    sumexp,
    parts,
    part_stride,
    row_stride,
    K: tl.constexpr,
    PARTS_POW2: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PACKED: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_POW2)
    at = part * part_stride + row * row_stride
    part_max = tl.load(in_maxima + at, mask=part < parts, other=float("-inf"))
    part_sum = tl.load(in_sumexp + at, mask=part < parts, other=0.0)
    top = tl.max(part_max, axis=0)
    shift = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(part_sum * tl.exp(part_max - shift), axis=0)

    i = tl.arange(0, CANDIDATES)
    candidate = ((i // K) * part_stride + row * row_stride) * K + i % K
    inside = i < parts * K
    if PACKED:
        key = tl.load(keys + candidate, mask=inside, other=_NOTHING)
    else:
        value = tl.load(in_values + candidate, mask=inside, other=0.0)
        token = tl.load(in_ids + candidate, mask=inside, other=0)
        key = tl.where(inside, _packed(value, token), _NOTHING)
    lse = shift + tl.log(tl.where(total > 0.0, total, 1.0))
    for j in range(K):
        best = tl.max(key, axis=0)
        key = tl.where(key == best, _NOTHING, key)
        logit = _value(best)
        if NORMALISE:
            logit = tl.where(logit > float("-inf"), logit - lse, logit)
        tl.store(values + row * K + j, logit)
        tl.store(ids + row * K + j, ((best & _ID_MASK) ^ _ID_MASK).to(tl.int32))
    if not NORMALISE:
        tl.store(maxima + row, top)
        tl.store(sumexp + row, total)


def launch_topk(logits: Tensor, k: int, id_offset: int, normalise: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Enqueues both kernels: values (log-probs when ``normalise``), ids and, when not ``normalise``, max and sumexp."""
    rows, vocab = logits.shape
    chunk = min(_CHUNK, triton.next_power_of_2(vocab))
    chunks = triton.cdiv(vocab, chunk)
    device = logits.device
    keys = torch.empty((rows, chunks, k), dtype=torch.int64, device=device)
    chunk_max = torch.empty((rows, chunks), dtype=torch.float32, device=device)
    chunk_sum = torch.empty_like(chunk_max)
    values = torch.empty((rows, k), dtype=torch.float32, device=device)
    ids = torch.empty((rows, k), dtype=torch.int32, device=device)
    maxima = torch.empty(rows, dtype=torch.float32, device=device)
    sumexp = torch.empty_like(maxima)
    if rows == 0:
        return values, ids, maxima, sumexp
    _chunk_topk[(rows, chunks)](
        logits,
        logits.stride(0),
        keys,
        chunk_max,
        chunk_sum,
        vocab,
        id_offset,
        chunks,
        K=k,
        CHUNK=chunk,
        num_warps=8 if chunk >= 2048 else 4,
    )
    candidates = triton.next_power_of_2(chunks * k)
    _merge[(rows,)](
        keys,
        values,
        ids,
        chunk_max,
        chunk_sum,
        values,
        ids,
        maxima,
        sumexp,
        chunks,
        1,
        chunks,
        K=k,
        PARTS_POW2=triton.next_power_of_2(chunks),
        CANDIDATES=candidates,
        PACKED=True,
        NORMALISE=normalise,
        num_warps=_warps(candidates),
    )
    return values, ids, maxima, sumexp


def launch_merge_ranks(values: Tensor, ids: Tensor, maxima: Tensor, sumexp: Tensor) -> tuple[Tensor, Tensor]:
    """Enqueues the merge over ranks; every tensor must be contiguous."""
    if not all(x.is_contiguous() for x in (values, ids, maxima, sumexp)):
        raise ValueError("the gathered shards must be contiguous")
    ranks, rows, k = values.shape
    best = torch.empty((rows, k), dtype=torch.float32, device=values.device)
    best_ids = torch.empty((rows, k), dtype=torch.int32, device=values.device)
    if rows == 0:
        return best, best_ids
    candidates = triton.next_power_of_2(ranks * k)
    _merge[(rows,)](
        ids,
        values,
        ids,
        maxima,
        sumexp,
        best,
        best_ids,
        best,
        best,
        ranks,
        rows,
        1,
        K=k,
        PARTS_POW2=triton.next_power_of_2(ranks),
        CANDIDATES=candidates,
        PACKED=False,
        NORMALISE=True,
        num_warps=_warps(candidates),
    )
    return best, best_ids


def _warps(candidates: int) -> int:
    return max(1, min(8, candidates // 256))
