"""KV move: overlapping rows, several dtypes and row sizes, untouched rows; the kernel against gather-then-write."""

from __future__ import annotations

import pytest
import torch
from dflash_kernels.move_kv import KvMover, move_kv

BACKENDS = ["naive", "triton"]


def buffers_of(shapes: list[tuple[tuple[int, ...], torch.dtype]], device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    made = [torch.randint(-99, 99, shape, generator=generator).to(dtype).to(device) for shape, dtype in shapes]
    return made


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_move_to_the_front_and_the_rest_stays(backend: str, device: str) -> None:
    buffer = torch.arange(20.0, device=device).unsqueeze(1).repeat(1, 3)
    slots = torch.tensor([[9, 4, 5, 2, 11], [1, 3, 7, 8, 0]], device=device)
    index = torch.tensor([[0, 2, 3, 4], [0, 4, -1, -1]], dtype=torch.int32, device=device)
    move_kv([buffer], slots, index, backend=backend)
    expected = list(range(20))
    expected[4], expected[5], expected[2] = 5, 2, 11  # 5 and 2 are sources and targets
    expected[3] = 0
    assert buffer[:, 0].tolist() == expected and torch.equal(buffer[:, 0], buffer[:, 2])


SHAPES = [
    [((40, 2, 16), torch.bfloat16), ((40, 2, 16), torch.bfloat16)],
    [((40, 3, 5), torch.int8), ((40, 2, 8), torch.float16), ((40, 7), torch.float32)],
    [((40, 1, 300), torch.float64)],
    [((40, 5), torch.float32), ((40, 6), torch.bfloat16)],
]


@pytest.mark.parametrize("shapes", SHAPES)
def test_kernel_equals_naive(shapes, device: str) -> None:
    generator = torch.Generator().manual_seed(7)
    slots = torch.randperm(40, generator=generator)[:30].reshape(3, 10).to(device)
    index = torch.full((3, 7), -1, dtype=torch.int32)
    for b, length in enumerate((7, 1, 4)):
        index[b, 1:length] = torch.randperm(9, generator=generator)[: length - 1].sort().values.int() + 1
        index[b, 0] = 0
    index = index.to(device)
    kernel, naive = buffers_of(shapes, device), buffers_of(shapes, device)
    move_kv(kernel, slots, index, backend="triton")
    move_kv(naive, slots, index, backend="naive")
    assert not torch.equal(naive[0], buffers_of(shapes, device)[0])
    for left, right in zip(kernel, naive, strict=True):
        assert torch.equal(left, right)


def test_rows_of_a_padded_buffer(device: str) -> None:
    """Rows further apart than they are long, as in a pool that interleaves K and V."""
    base = torch.arange(10 * 8, dtype=torch.float32, device=device).reshape(10, 8)
    before = base.clone()
    mover = KvMover([base[:, :3]])
    slots = torch.arange(10, device=device).unsqueeze(0)
    mover.move(slots, torch.tensor([[0, 5]], dtype=torch.int32, device=device), backend="triton")
    assert base[1].tolist() == [40.0, 41.0, 42.0, *before[1, 3:].tolist()]
    base[1] = before[1]
    assert torch.equal(base, before)


def test_layouts_that_have_no_rows_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match="contiguous rows"):
        KvMover([torch.zeros(4, 3, 8, device=device).transpose(1, 2)])
    with pytest.raises(ValueError, match="no KV buffer"):
        KvMover([])
    mover = KvMover([torch.zeros(4, 3, device=device)])
    with pytest.raises(ValueError, match="do not cover"):
        mover.move(
            torch.zeros(1, 2, dtype=torch.int64, device=device), torch.zeros(1, 3, dtype=torch.int32, device=device)
        )
