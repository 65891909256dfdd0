"""What tensor parallel costs and brings: models of 8B and 32B size on 1, 2, 4 or 8 GPUs, without speculation and with.

    python -m tests.bench.parallel_gpu --target TOKENIZER --prompts FILE.jsonl [...] --out RESULT.json
        [--shapes 8b 32b] [--ranks 1 2] [--arms none dflash ddtree:32 ddtree:64 ddtree:auto] [--concurrency 1 8 32]
        [--together 3] [--profile ddtree:64]

Random weights of that size (:mod:`.shapes`), made by the server: next to nothing is accepted, and the time of a step is
what counts: that of a wave of requests, less what the same wave takes for one token, by its verify steps. ``--together``
servers are on the GPUs at once; each lot has the first arm with it. Arms of ``--profile`` are traced at 1 request and at
the most: microseconds a step by part, as :mod:`.traces` tells them apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.pair_gpu import measure, profile
from tests.bench.serving import Server, add_arguments, read_prompts, servers_of
from tests.bench.shapes import SHAPES


def lots(arms: list[str], together: int) -> Iterator[list[str]]:
    """The arms in groups of at most ``together``, the first arm in each.

    Raises:
        ValueError: fewer than two at once leave nothing to compare with.
    """
    if together < 2 and len(arms) > 1:
        raise ValueError("--together: at least 2, one of them the first arm")
    first, *others = arms
    for at in range(0, max(1, len(others)), max(1, together - 1)):
        yield [first, *others[at : at + together - 1]]


def step_ms(server: Server, prompts: list[str], tokens: int) -> float:
    """Milliseconds of a decode step with all prompts at once, their prefill taken out."""
    first = measure(server, prompts, 1, len(prompts))
    all_of_them = measure(server, prompts, tokens, len(prompts))
    steps = all_of_them["steps"] or all_of_them["tokens"] - len(prompts)
    return 1e3 * (all_of_them["seconds"] - first["seconds"]) * len(prompts) / steps


def timed(
    servers: list[Server], prompts: list[str], tokens: int, concurrency: int, rounds: int
) -> list[dict[str, Any]]:
    """The same wave for every server in every round, in alternating order; a row each."""
    wave = (prompts * -(-concurrency // len(prompts)))[:concurrency]
    took: dict[str, list[float]] = {server.arm: [] for server in servers}
    for at in range(rounds):
        for server in servers if at % 2 == 0 else servers[::-1]:
            took[server.arm].append(step_ms(server, wave, tokens))
    rows = []
    for arm, times in took.items():
        middle, base = statistics.median(times), statistics.median(took[servers[0].arm])
        rows.append({"arm": arm, "concurrency": concurrency, "step_ms": round(middle, 3)})
        rows[-1] |= {"rounds": [round(t, 3) for t in times], "to_first": round(middle / base, 3)}
        print(
            f"c={concurrency:<3} {arm:12} step {middle:7.2f} ms  x{middle / base:.2f}  {rows[-1]['rounds']}", flush=True
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(arms=["none", "dflash", "ddtree:32", "ddtree:64", "ddtree:auto"], tokens=48, mem=0.95)
    parser.add_argument("--shapes", nargs="+", default=sorted(SHAPES, reverse=True), choices=sorted(SHAPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--together", type=int, default=3)
    parser.add_argument("--profile", nargs="*", default=["ddtree:64"])
    args = parser.parse_args([*sys.argv[1:], "--draft", ""])
    tokenizer, logs, arms, port = args.target, Path(args.logs), args.arms, args.port
    prompts = read_prompts(args)
    result: dict[str, Any] = {"arguments": vars(args).copy(), "rows": [], "parts": []}
    failed = 0
    for shape in args.shapes:
        for ranks in args.ranks:
            for number, some in enumerate(lots(arms, args.together)):
                args.target, args.shape, args.tp, args.arms, args.port = tokenizer, shape, ranks, some, port + 100
                port += 100  # a port is not free at once
                args.logs = str(logs / f"{shape}-{ranks}-{number}")
                print(f"{shape} on {ranks}: {', '.join(some)}", flush=True)
                try:
                    with servers_of(args) as servers:
                        for server in servers:
                            measure(server, prompts[:4], 16, 4)
                        for concurrency in args.concurrency:
                            for row in timed(servers, prompts, args.tokens, concurrency, args.rounds):
                                result["rows"].append({"shape": shape, "ranks": ranks, "lot": number, **row})
                        for server in (s for s in servers if s.arm in args.profile):
                            for concurrency in (1, max(args.concurrency)):
                                folder = Path(args.logs) / f"trace-{server.arm.replace(':', '-')}-{concurrency}"
                                enough = 400 if concurrency == 1 else 64
                                asked = prompts * concurrency
                                for parts in profile(server, asked, folder, concurrency, tokens=enough):
                                    about = {"shape": shape, "ranks": ranks, "arm": server.arm}
                                    result["parts"].append({**about, "concurrency": concurrency, "us": parts})
                except Exception as error:  # the other sizes can still be measured
                    failed = 1
                    print(f"FAILED: {str(error)[-2000:]}", flush=True)
                Path(args.out).write_text(json.dumps(result, indent=1))
    return failed


if __name__ == "__main__":
    sys.exit(main())
