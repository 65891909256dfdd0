"""Whether speculation on a GPU changes what is served: greedy tokens, sampled distributions, a long mixed load.

    python -m tests.bench.agreement_gpu --target DIR --draft DIR --prompts FILE.jsonl [...] --out RESULT.json
        [--dtype float32] [--arms none dflash ddtree:64] [--checks greedy sampling soak]

The first arm is what the others are held against: no speculation. In float32 greedy answers have to be equal token for
token; in bfloat16 each difference is shown with the top-1/top-2 gap where the answers part. Exits 1 when a check fails.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.bench.serving import Server, add_arguments, post, read_prompts, servers_of, tokenized
from tests.e2e.server import hang_up

TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
FILTERS: dict[str, dict[str, Any]] = {"plain": {}, "top-k 20, top-p 0.9": {"top_k": 20, "top_p": 0.9}}
BIASED = 1.25
"""The control draws at this multiple of the temperature; the test has to see it."""
REJECT = 1e-4
"""A p-value below it fails; some fifty are looked at."""


def generate(server: Server, prompt: str | list[int], sampling: dict[str, Any], **more: Any) -> Any:
    key = "text" if isinstance(prompt, str) else "input_ids"
    return post(server.port, "/generate", {key: prompt, "sampling_params": sampling, **more})


def accepted(meta: list[dict[str, Any]]) -> float:
    """Tokens a verify step, bonus included, over all steps; the prefill's token is no step's."""
    steps = sum(m.get("spec_verify_ct", 0) for m in meta)
    return round((sum(m["completion_tokens"] for m in meta) - len(meta)) / steps, 4) if steps else 1.0


def greedy(servers: list[Server], prompts: list[str], tokens: int, exact: bool, first_prompts: int) -> dict[str, Any]:
    """Greedy answers of every server against the first's, 32 at a time; where they part, the first server's gap.

    Raises:
        RuntimeError: ``exact``, and an answer differs.
    """
    sampling = {"temperature": 0, "max_new_tokens": tokens}
    first = servers[0]

    def part(prompt: str, ids: list[int], other: list[int], number: int) -> dict[str, Any]:
        at = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))
        asked = tokenized(first, prompt) + ids[:at]
        answer = generate(
            first, asked, {"temperature": 0, "max_new_tokens": 1}, return_logprob=True, top_logprobs_num=2
        )
        best, second = answer["meta_info"]["output_top_logprobs"][0]
        return {
            "prompt": number,
            "at": at,
            "gap": round(best[0] - second[0], 5),
            "among_two": at < len(other) and other[at] in (best[1], second[1]),
        }

    out: dict[str, Any] = {"prompts": len(prompts), "tokens": tokens, "arms": {}, "tokens_a_step": {}}
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = {}
        for server in servers:
            rows = list(pool.map(lambda p, s=server: generate(s, p, sampling), prompts))  # type: ignore[misc]
            answers[server.arm] = [row["output_ids"] for row in rows]
            out["tokens_a_step"][server.arm] = accepted([row["meta_info"] for row in rows[:first_prompts]])
        print(f"tokens a step, first {first_prompts} prompts: {out['tokens_a_step']}", flush=True)
        for arm in [server.arm for server in servers[1:]]:
            apart = [
                (prompt, a, b, number)
                for number, (prompt, a, b) in enumerate(zip(prompts, answers[first.arm], answers[arm], strict=True))
                if a != b
            ]
            rows = list(pool.map(lambda row: part(*row), apart))
            gaps = sorted(row["gap"] for row in rows)
            out["arms"][arm] = {"equal": len(prompts) - len(rows), "different": rows}
            shown = f"; gaps there: median {gaps[len(gaps) // 2]}, largest {gaps[-1]}" if gaps else ""
            print(f"greedy {arm}: {len(prompts) - len(rows)} of {len(prompts)} as {first.arm}{shown}", flush=True)
    out["compared_tokens"] = sum(map(len, answers[first.arm]))
    if exact and any(found["different"] for found in out["arms"].values()):
        raise RuntimeError(f"greedy answers differ in {out['arms']}")
    return out


def samples(server: Server, prompt: str, sampling: dict[str, Any], count: int) -> list[tuple[int, ...]]:
    """``count`` independent answers to one prompt."""
    each = 64

    def some(_: int) -> list[tuple[int, ...]]:
        answers = generate(server, prompt, {**sampling, "n": each})
        return [tuple(answer["output_ids"]) for answer in answers]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return [row for rows in pool.map(some, range(count // each)) for row in rows]


def same_distribution(a: list[Any], b: list[Any], least: int = 10) -> tuple[float, int]:
    """p-value of a chi-square test of homogeneity, and its cells; outcomes seen less than ``least`` times are one cell."""
    x, y = Counter(a), Counter(b)
    common = [key for key in x | y if x[key] + y[key] >= 2 * least]
    cells = [(x[key], y[key]) for key in common]
    rest = (len(a) - sum(c[0] for c in cells), len(b) - sum(c[1] for c in cells))
    if sum(rest):
        cells.append(rest)
    if len(cells) < 2:
        return 1.0, len(cells)
    share = len(a) / (len(a) + len(b))
    statistic = sum(
        (got - part * (p + q)) ** 2 / (part * (p + q)) for p, q in cells for got, part in ((p, share), (q, 1 - share))
    )
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64))), len(cells)


def sampling(servers: list[Server], prompts: list[str], count: int) -> dict[str, Any]:
    """Sampled answers of every server against the first's, and a control at another temperature that must be told.

    Raises:
        RuntimeError: a distribution differs, or the control does not.
    """
    first, tree = servers[0], servers[-1]
    rows: list[dict[str, Any]] = []
    faults = []
    for at, temperature in enumerate(TEMPERATURES):
        for filters, parameters in FILTERS.items():
            asked = {"temperature": temperature, "max_new_tokens": 6, "ignore_eos": True, **parameters}
            prompt = prompts[at % len(prompts)]
            drawn = {server.arm: samples(server, prompt, asked, count) for server in servers}
            drawn["control"] = samples(tree, prompt, {**asked, "temperature": BIASED * temperature}, count)
            for arm, theirs in drawn.items():
                if arm == first.arm:
                    continue
                # The first token is the prefill's; a verify step drew the others.
                tests = {
                    "tokens 2-3": same_distribution([r[1:3] for r in drawn[first.arm]], [r[1:3] for r in theirs]),
                    "token 6": same_distribution([r[5] for r in drawn[first.arm]], [r[5] for r in theirs]),
                }
                for what, (p, cells) in tests.items():
                    rows.append(
                        {
                            "temperature": temperature,
                            "filters": filters,
                            "arm": arm,
                            "what": what,
                            "p": p,
                            "cells": cells,
                        }
                    )
                    if arm != "control" and p < REJECT:
                        faults.append(rows[-1])
                if (
                    arm == "control"
                    and all(p >= REJECT for p, _ in tests.values())
                    and max(c for _, c in tests.values()) > 2
                ):
                    faults.append({**rows[-1], "fault": "the control was not told apart"})
            line = "  ".join(
                f"{r['arm']} {r['p']:.2g}/{r['cells']}"
                for r in rows
                if (r["temperature"], r["filters"]) == (temperature, filters)
            )
            print(f"sampling T {temperature} {filters}: p/cells {line}", flush=True)
    if faults:
        raise RuntimeError(f"sampling: {faults}")
    return {"samples": count, "rows": rows}


def soak(server: Server, first: Server, prompts: list[str], seconds: float, exact: bool) -> dict[str, Any]:
    """Mixed load on one server for ``seconds``: 1 to 32 at once, long prompts, samples, hang-ups; greedy answers are checked.

    Raises:
        RuntimeError: a request failed, a greedy answer was wrong (``exact``), the server died, or it leaks.
    """
    rng = random.Random(server.port)
    plain = {"temperature": 0, "max_new_tokens": 96}
    work = [prompt if at % 5 else prompt * (1 + at % 4) + prompts[at - 1] * 4 for at, prompt in enumerate(prompts)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        expected = list(pool.map(lambda p: generate(first, p, plain)["output_ids"], work))
    memory = [torch.cuda.mem_get_info()[0]]
    tally: Counter[str] = Counter()
    faults: list[str] = []
    lock = threading.Lock()
    deadline = time.time() + seconds

    def one(kind: str, number: int, after_s: float) -> None:
        try:
            if kind == "abandoned":
                asked = {"text": work[number], "sampling_params": {"temperature": 0, "max_new_tokens": 512}}
                hang_up(server.port, asked, after_s)
                wrong = ""
            elif kind == "sampled":
                answer = generate(server, work[number], {**plain, "temperature": 1.0, "top_p": 0.9})
                wrong = "" if answer["output_ids"] else "an empty answer"
            else:
                answer = generate(server, work[number], plain)
                equal = answer["output_ids"] == expected[number]
                with lock:
                    tally["greedy equal"] += equal
                wrong = (
                    "" if equal or not exact else f"prompt {number}: {answer['output_ids']} is not {expected[number]}"
                )
        except Exception as error:
            wrong = f"{kind}: {error}"
        with lock:
            tally[kind] += 1
            if wrong:
                faults.append(wrong)

    while time.time() < deadline and not faults:
        concurrency = rng.choice((1, 2, 8, 16, 32))
        with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
            for _ in range(4 * concurrency):
                kind = rng.choices(("greedy", "sampled", "abandoned"), (6, 3, 1))[0]
                pool.submit(one, kind, rng.randrange(len(work)), rng.uniform(0.01, 0.3))
        memory.append(torch.cuda.mem_get_info()[0])
    time.sleep(2.0)  # SGLang checks its pools when it is idle
    generate(server, prompts[0], plain)
    if server.process.poll() is not None or "leak" in server.log.read_text(errors="replace"):
        faults.append(f"the server died or leaks:\n{server.tail()}")
    grown = (memory[1] - memory[-1]) / 2**20 if len(memory) > 1 else 0.0
    print(f"soak {server.arm}: {seconds:.0f} s, {dict(tally)}, GPU memory grew {grown:.0f} MiB", flush=True)
    if faults:
        raise RuntimeError(f"soak {server.arm}: {len(faults)} faults, first: {faults[0][-2000:]}")
    return {"arm": server.arm, "seconds": seconds, "requests": dict(tally), "memory_grown_mib": grown}


def soaked(servers: list[Server], prompts: list[str], seconds: float, exact: bool) -> list[dict[str, Any]]:
    """:func:`soak` on every tree server at once."""
    trees = [server for server in servers[1:] if server.arm.startswith("ddtree")]
    with concurrent.futures.ThreadPoolExecutor(len(trees)) as pool:
        return list(pool.map(lambda tree: soak(tree, servers[0], prompts, seconds, exact), trees))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--checks", nargs="+", default=["greedy", "sampling"], choices=["greedy", "sampling", "soak"])
    parser.add_argument("--samples", type=int, default=768)
    parser.add_argument("--variants", type=int, default=1, help="greedy: each prompt so many times, worded otherwise")
    parser.add_argument("--soak-seconds", type=float, default=1800.0, help="soak: all tree servers at once, so long")
    args = parser.parse_args()
    prompts = read_prompts(args)
    worded = ["", "In other words: ", "Once more, please. ", "Be brief. ", "Be thorough. "][: args.variants]
    many = [prompt.replace("user\n", f"user\n{words}", 1) for words in worded for prompt in prompts]
    exact = args.dtype == "float32"
    result: dict[str, Any] = {"arguments": vars(args)}
    faults: list[str] = []
    try:
        with servers_of(args) as servers:
            checks: dict[str, Callable[[], Any]] = {
                "greedy": lambda: greedy(servers, many, args.tokens, exact, len(prompts)),
                "sampling": lambda: sampling(servers, prompts, args.samples),
                "soak": lambda: soaked(servers, prompts, args.soak_seconds, exact),
            }
            for name in args.checks:
                try:
                    result[name] = checks[name]()
                except Exception as error:
                    faults.append(f"{name}: {str(error)[-3000:]}")
                    print(f"FAILED {faults[-1]}", flush=True)
                Path(args.out).write_text(json.dumps(result, indent=1))
    except Exception as error:
        faults.append(str(error)[-3000:])
        print(f"FAILED: {faults[-1]}", flush=True)
    finally:
        result["failed"] = faults
        Path(args.out).write_text(json.dumps(result, indent=1))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
