"""Top-k log-probs: order, ties, missing values, shards; the kernel against a stable sort."""

from __future__ import annotations

import math

import pytest
import torch
from dflash_kernels.topk_logprobs import merge_topk, topk_logprobs, topk_partial

BACKENDS = ["naive", "triton"]


def logits_of(rows: int, vocab: int, dtype: torch.dtype, seed: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * 3).to(dtype).to(device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_logits_come_in_order_of_their_ids(backend: str, device: str) -> None:
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, 1.0], [-1.0, -1.0, -1.0, -2.0, -1.0]], device=device)
    logprobs, ids = topk_logprobs(logits, 4, backend=backend)
    assert ids.dtype == torch.int32 and ids.tolist() == [[1, 3, 4, 0], [0, 1, 2, 4]]
    expected = torch.log_softmax(logits, -1).gather(1, ids.long())
    assert torch.allclose(logprobs, expected, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_missing_and_infinite_logits(backend: str, device: str) -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[nan, 1.0, -inf, 0.0], [nan, nan, -inf, nan], [1.0, inf, 0.0, inf]], device=device)
    logprobs, ids = topk_logprobs(logits, 3, backend=backend)
    assert ids.tolist() == [[1, 3, 0], [0, 1, 2], [1, 3, 0]]
    assert logprobs[0].tolist() == pytest.approx([-math.log1p(math.exp(-1)), -math.log1p(math.e), -inf])
    assert logprobs[1].tolist() == [-inf] * 3
    assert logprobs[2, :2].tolist() == [0.0, 0.0] and logprobs[2, 2] < -1e38


@pytest.mark.parametrize(
    ("rows", "vocab", "k", "dtype"),
    [
        (2, 1, 1, torch.float32),
        (3, 8, 8, torch.float16),
        (3, 320, 8, torch.bfloat16),
        (2, 4096, 16, torch.float32),
        (2, 4097, 3, torch.bfloat16),
        (1, 9001, 63, torch.bfloat16),
    ],
)
def test_kernel_equals_the_stable_sort(rows: int, vocab: int, k: int, dtype: torch.dtype, device: str) -> None:
    logits = logits_of(rows, vocab, dtype, vocab + k, device)
    kernel, naive = (topk_logprobs(logits, k, backend=backend) for backend in ("triton", "naive"))
    assert torch.equal(kernel[1], naive[1])
    assert torch.allclose(kernel[0], naive[0], atol=1e-5)


def test_rows_of_a_wider_tensor(device: str) -> None:
    wide = logits_of(4, 500, torch.float32, 1, device)
    kernel = topk_logprobs(wide[::2, 100:420], 5, backend="triton")
    naive = topk_logprobs(wide[::2, 100:420].contiguous(), 5, backend="naive")
    assert torch.equal(kernel[1], naive[1]) and torch.allclose(kernel[0], naive[0], atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_shards_of_a_vocabulary_merge_to_the_whole(backend: str, ranks: int, device: str) -> None:
    logits = logits_of(3, 600, torch.bfloat16, ranks, device)  # bf16: ties across shards
    logits[2] = 1.0
    parts = [
        topk_partial(shard, 4, i * (600 // ranks), backend=backend)
        for i, shard in enumerate(logits.split(600 // ranks, 1))
    ]
    gathered = [torch.stack(tensors) for tensors in zip(*parts, strict=True)]
    logprobs, ids = merge_topk(*gathered, backend=backend)
    expected_logprobs, expected_ids = topk_logprobs(logits, 4, backend="naive")
    assert torch.equal(ids, expected_ids)
    assert torch.allclose(logprobs, expected_logprobs, atol=1e-5)


def test_sizes_are_checked(device: str) -> None:
    logits = torch.zeros(2, 8, device=device)
    for k in (0, 9):
        with pytest.raises(ValueError, match=r"outside 1\.\.8"):
            topk_logprobs(logits, k)
    with pytest.raises(ValueError, match="contiguous rows"):
        topk_logprobs(logits.T, 1)
    with pytest.raises(ValueError, match="belong together"):
        merge_topk(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4).int(), torch.zeros(2, 3), torch.zeros(3))
