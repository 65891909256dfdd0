"""Every kernel on a GPU: equality with its naive twin, then time per call by CUDA graph replay.

    PYTHONPATH=kernels python -m tests.bench.kernels_gpu RESULT.json

Half of the trees are of random logits, half of what the shipped drafter says at real places of real texts. Needs torch
with CUDA, Triton and safetensors; takes two minutes at most. Exit status 1 when a kernel differs.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from dflash_kernels.accepted import empty_accepted
from dflash_kernels.build_tree import build_tree
from dflash_kernels.move_kv import KvMover
from dflash_kernels.topk_logprobs import merge_topk, topk_logprobs, topk_partial
from dflash_kernels.tree import Tree, empty_tree
from dflash_kernels.tree_mask import tree_mask_dense, tree_mask_full, tree_positions
from dflash_kernels.verify_greedy import verify_greedy
from dflash_kernels.verify_sampling import verify_sampling
from torch import Tensor

from tests.tiny_pair import replay
from tests.tiny_pair.model import load_drafter, load_target

PAIR = Path(__file__).parents[2] / "templates" / "tiny-pair"
DEPTHS = 15
BATCHES, BATCH = 20, 500
BUILD_BUDGET_S, TIME_BUDGET_S = 50.0, 135.0
VOCABS = (49152, 151936)


def candidates(bs: int, ranks: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and ids [bs, DEPTHS, ranks] of bf16 logits, so that equal scores are common, and roots, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(bs, DEPTHS, 200, generator=generator) * 3).bfloat16().float()
    best = torch.log_softmax(logits, -1).topk(ranks, -1)
    return best.values.contiguous(), best.indices.int().contiguous(), torch.arange(bs, dtype=torch.int32)


def drafted(ranks: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same of the shipped pair: its drafter after BATCH beginnings of its prompts' greedy answers."""
    target, drafter = load_target(PAIR / "target"), load_drafter(PAIR / "drafter")
    prompts = replay.read_prompts(PAIR / "prompts.jsonl")
    places: list[list[int]] = []
    at = seed
    while len(places) < BATCH:
        prompt = prompts[at % len(prompts)]
        answer = list(replay.greedy(target, prompt, 100, frozenset()).tokens)
        places += [prompt + answer[:end] for end in range(1, len(answer))]
        at += BATCHES // 2
    with torch.no_grad():
        rows = torch.stack([replay.draft(target, drafter, place) for place in places[:BATCH]]).bfloat16().float()
    # In bf16, as a server's are, so that equal scores are common.
    best = rows.topk(ranks, -1)
    roots = torch.tensor([place[-1] for place in places[:BATCH]], dtype=torch.int32)
    return best.values.contiguous(), best.indices.int().contiguous(), roots


def moved(buffers: Any, device: str) -> Any:
    return type(buffers)(**{f.name: getattr(buffers, f.name).to(device) for f in fields(buffers)})


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(getattr(left, f.name).cpu(), getattr(right, f.name).cpu()) for f in fields(left))


Arrays = dict[str, Any]


def naive_trees(job: tuple[int, int, int, bool]) -> tuple[list[Any], Arrays]:
    """The candidates of a job (seed, nodes, ranks, real) and the naive twin's trees of them."""
    seed, nodes, ranks, real = job
    torch.set_num_threads(1)
    inputs = drafted(ranks, seed) if real else candidates(BATCH, ranks, seed)
    tree = build_tree(*inputs, nodes, backend="naive")
    # numpy: no shared-memory file per tensor
    return [x.numpy() for x in inputs], {f.name: getattr(tree, f.name).numpy() for f in fields(tree)}


def check_builder(
    jobs: list[tuple[int, int, int, bool]], results: Iterator[tuple[list[Any], Arrays]]
) -> tuple[int, int]:
    """Compared and different trees, as far as the time allows."""
    compared = different = 0
    start = time.monotonic()
    for (_, nodes, _, _), (given, arrays) in zip(jobs, results, strict=True):
        inputs = [torch.from_numpy(x).cuda() for x in given]
        tree = moved(build_tree(*inputs, nodes, backend="triton"), "cpu")
        wrong = torch.zeros(BATCH, dtype=torch.bool)
        for f in fields(tree):
            wrong |= (getattr(tree, f.name) != torch.from_numpy(arrays[f.name])).reshape(BATCH, -1).any(1)
        compared += BATCH
        different += int(wrong.sum())
        if time.monotonic() - start > BUILD_BUDGET_S:
            break
    return compared, different


def agreeing_target(tree: Tree, generator: torch.Generator) -> Tensor:
    """int32 [bs, N] on the CPU: most nodes choose one of their children."""
    target = torch.randint(0, 200, tree.token_ids.shape, generator=generator, dtype=torch.int32)
    for b in range(target.shape[0]):
        for node in range(1, int(tree.valid_count[b])):
            if torch.rand((), generator=generator) < 0.5:
                target[b, tree.parent[b, node]] = tree.token_ids[b, node]
    return target


def check_rest() -> dict[str, bool]:
    """Whether each op but the builder equals its naive twin."""
    generator = torch.Generator().manual_seed(1)
    good: dict[str, bool] = {}

    def note(name: str, equal: bool) -> None:
        good[name] = good.get(name, True) and bool(equal)

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for vocab, k in ((320, 8), (5000, 63), (49152, 8), (151936, 16)):
            logits = (torch.randn(64, vocab, generator=generator) * 3).to(dtype).cuda()
            logits[3, ::5] = torch.nan
            kernel, naive = (topk_logprobs(logits, k, backend=backend) for backend in ("triton", "naive"))
            note("topk_logprobs", torch.equal(kernel[1], naive[1]) and torch.allclose(kernel[0], naive[0], atol=1e-4))
            half = vocab // 2
            parts = [topk_partial(logits[:, i * half : (i + 1) * half], k, i * half, backend="triton") for i in (0, 1)]
            merged = merge_topk(*(torch.stack(x) for x in zip(*parts, strict=True)), backend="triton")
            note("merge_topk", torch.equal(merged[1], naive[1]) and torch.allclose(merged[0], naive[0], atol=1e-4))

    for nodes in (16, 64, 100):
        bs = 32
        cpu = build_tree(*candidates(bs, 8, nodes), nodes, backend="naive")
        tree = moved(cpu, "cuda")
        target = agreeing_target(cpu, generator)
        accepted = verify_greedy(cpu, target, DEPTHS, backend="naive")
        note("verify_greedy", same(verify_greedy(tree, target.cuda(), DEPTHS, backend="triton"), accepted))

        prefix = torch.randint(0, 3000, (bs,), generator=generator).cuda()
        note("tree_positions", torch.equal(tree_positions(tree, prefix), tree_positions(tree, prefix, backend="naive")))
        dense = tree_mask_dense(tree, backend="triton")
        note("tree_mask_dense", torch.equal(dense.cpu(), tree_mask_dense(cpu, backend="naive")))
        noise = torch.rand(int((nodes * (prefix + nodes)).sum()), device="cuda") < 0.5
        masks = [tree_mask_full(tree, prefix, noise.clone(), backend=backend) for backend in ("triton", "naive")]
        note("tree_mask_full", torch.equal(*masks))

        pool = [torch.randn(bs * nodes + 1, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(6)]
        pool += [torch.randint(0, 255, (bs * nodes + 1, 3, 5), device="cuda").to(torch.uint8)]
        slots = torch.randperm(bs * nodes, generator=generator).reshape(bs, nodes).cuda()
        index = accepted.index[:, :nodes].contiguous().cuda()
        copies = [[buffer.clone() for buffer in pool] for _ in range(2)]
        for buffers, backend in zip(copies, ("triton", "naive"), strict=True):
            KvMover(buffers).move(slots, index, backend=backend)
        note("move_kv", all(map(torch.equal, *copies)))

        logits = torch.randn(bs * nodes, 300, generator=generator) * 2
        rows = torch.arange(bs * nodes)
        logits[rows, target.flatten().long()] += 6
        settings = (
            torch.rand(bs, generator=generator) + 0.3,
            torch.tensor([0, 1, 5, 1 << 30], dtype=torch.int32).repeat(bs // 4),
            torch.tensor([1.0, 0.9, 0.61, 0.95]).repeat_interleave(bs // 4),
            torch.tensor([0.0, 0.07]).repeat_interleave(bs // 2),
            torch.rand(bs, DEPTHS + 1, generator=generator),
        )
        naive = verify_sampling(cpu, logits, *settings, DEPTHS, backend="naive")
        walk = verify_sampling(tree, logits.cuda(), *(x.cuda() for x in settings), DEPTHS)
        note("verify_sampling", same(walk, naive))
    return good


def microseconds(call: Callable[[], Any], replays: int = 50) -> float:
    """Time of one call in a CUDA graph, which also shows that it can be captured and never asks the device."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / replays


def timings(deadline: float) -> list[dict[str, Any]]:
    """Rows of op, sizes and microseconds; stops at the deadline (time.monotonic). A failed capture is a row too."""
    rows: list[dict[str, Any]] = []

    def note(op: str, sizes: dict[str, int], call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if time.monotonic() > deadline:
            return
        try:
            rows.append({"op": op, **sizes, "us": round(microseconds(partial(call, *args, **kwargs)), 2)})
        except RuntimeError as error:
            rows.append({"op": op, **sizes, "us": float("nan"), "error": str(error).splitlines()[0]})

    for bs in (1, 8, 32):
        for vocab in VOCABS:
            logits = torch.randn(bs * DEPTHS, vocab, device="cuda", dtype=torch.bfloat16)
            for ranks in (8, 16):
                note("topk_logprobs", {"bs": bs, "K": ranks, "V": vocab}, topk_logprobs, logits, ranks)
        for nodes in (16, 32, 64, 128):
            for ranks in (8, 16):
                inputs = [x.cuda() for x in candidates(bs, ranks, nodes)]
                out = empty_tree(bs, nodes, "cuda")
                note("build_tree", {"bs": bs, "N": nodes, "K": ranks}, build_tree, *inputs, nodes, out=out)
            sizes = {"bs": bs, "N": nodes}
            tree = build_tree(*inputs, nodes)
            target = torch.randint(0, 200, (bs, nodes), dtype=torch.int32, device="cuda")
            target[:, 0] = tree.token_ids[:, 1]
            prefix = torch.full((bs,), 4096, device="cuda")
            mask = torch.zeros(bs * nodes * (4096 + nodes), dtype=torch.bool, device="cuda")
            positions = torch.empty((bs, nodes), dtype=torch.int64, device="cuda")
            paths = empty_accepted(bs, DEPTHS, "cuda")
            note("verify_greedy", sizes, verify_greedy, tree, target, DEPTHS, out=paths)
            note("tree_positions", sizes, tree_positions, tree, prefix, out=positions)
            note("tree_mask_full", sizes, tree_mask_full, tree, prefix, mask)
        pool = [torch.zeros(bs * 64, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(72)]
        slots = torch.randperm(bs * 64, device="cuda").reshape(bs, 64)
        index = torch.full((bs, DEPTHS + 1), -1, dtype=torch.int32, device="cuda")
        index[:, :6] = torch.tensor([0, 1, 4, 9, 20, 41], device="cuda")
        note("move_kv", {"bs": bs, "layers": 36}, KvMover(pool).move, slots, index)
        tree = build_tree(*(x.cuda() for x in candidates(bs, 8, 64)), 64)
        settings = [torch.full((bs,), value, device="cuda") for value in (1.0, 50, 0.9, 0.0)]
        coins = torch.rand(bs, DEPTHS + 1, device="cuda")
        for vocab in VOCABS:
            logits = torch.randn(bs * 64, vocab, device="cuda", dtype=torch.bfloat16)
            agreed = torch.arange(bs, device="cuda").unsqueeze(1) * 64 + tree.parent[:, 1:].long()
            logits[agreed.flatten(), tree.token_ids[:, 1:].flatten().long()] = 20.0
            for filtered in (False, True):
                sizes = {"bs": bs, "V": vocab, "filtered": int(filtered)}
                note(
                    "verify_sampling", sizes, verify_sampling, tree, logits, *settings, coins, DEPTHS, filtered=filtered
                )
    return rows


def main() -> int:
    start = time.monotonic()
    jobs = [(seed // 2, (16, 64)[seed // 2 % 2], (8, 16)[seed // 4 % 2], seed % 2 == 1) for seed in range(BATCHES)]
    with multiprocessing.get_context("fork").Pool(12) as pool:  # forked before CUDA starts
        results = pool.imap(naive_trees, jobs)
        compared, different = check_builder(jobs, results)
    checks = {"build_tree": compared > 0 and different == 0, **check_rest()}
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "trees_compared": compared,
        "trees_different": different,
        "checks": checks,
        "timings": timings(start + TIME_BUDGET_S),
    }
    report["seconds"] = round(time.monotonic() - start, 1)
    for name, equal in checks.items():
        print(f"{'ok  ' if equal else 'FAIL'} {name}")
    print(f"{compared} trees compared, {different} different; {report['device']}, torch {torch.__version__}")
    for row in report["timings"]:
        sizes = " ".join(f"{key}={value}" for key, value in row.items() if key not in ("op", "us"))
        print(f"{row['op']:16} {row['us']:10.2f} us  {sizes}")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if all(checks.values()) and not any("error" in row for row in report["timings"]) else 1


if __name__ == "__main__":
    sys.exit(main())
