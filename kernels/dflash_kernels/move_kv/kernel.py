"""One program per (buffer, request, columns of a row): it alone touches these columns, so one barrier orders the move.

Buffers are reached through a table of addresses, and rows are copied as integers: any number of layers and any dtype
are one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_TILE = 4096


@triton.jit
def _move_kv(
    table,
    slots,
    slots_stride,
    index,
    index_stride,
    WIDTH: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,
):
    entry = table + tl.program_id(0) * 3
    b = tl.program_id(1).to(tl.int64)
    buffer = tl.load(entry).to(tl.pointer_type(WORD))
    words = tl.load(entry + 1)
    stride = tl.load(entry + 2)
    place = tl.arange(0, P)
    node = tl.load(index + b * index_stride + place, mask=place < WIDTH, other=-1).to(tl.int32)
    moves = (node >= 0) & (node != place)
    source = tl.load(slots + b * slots_stride + node, mask=moves, other=0).to(tl.int64)
    target = tl.load(slots + b * slots_stride + place, mask=moves, other=0).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = moves[:, None] & (column < words)[None, :]
    rows = tl.load(buffer + source[:, None] * stride + column[None, :], mask=mask, other=0)
    tl.debug_barrier()  # a source of one thread may be the target of another
    tl.store(buffer + target[:, None] * stride + column[None, :], rows, mask=mask)


def launch_move_kv(table: Tensor, word: int, row_words: int, slots: Tensor, accept_index: Tensor) -> None:
    """table: int64 [buffers, 3] of address, words of a row and words from row to row; a word has ``word`` bytes."""
    bs, width = accept_index.shape
    if bs == 0:
        return
    if slots.stride(1) != 1 or accept_index.stride(1) != 1:
        raise ValueError("slots and accept_index must have contiguous rows")
    places = triton.next_power_of_2(width)
    block = min(triton.next_power_of_2(row_words), max(32, _TILE // places))
    _move_kv[(table.shape[0], bs, triton.cdiv(row_words, block))](
        table,
        slots,
        slots.stride(0),
        accept_index,
        accept_index.stride(0),
        WIDTH=width,
        P=places,
        BLOCK=block,
        WORD=_WORDS[word],
        num_warps=4,
    )
