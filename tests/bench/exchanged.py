"""What several ranks pass between them in a decode step: calls and bytes, counted in a real server on a CPU.

    python -m tests.bench.exchanged --venv DIR --out RESULT.json [--nodes 16 64]

``--venv``: an environment of the CPU stack, patched. Serves the tiny pair through Triton's interpreter, on gloo, without
captured graphs, so that each collective is called (:mod:`.collectives`). What is ours depends on ranks a depth and nodes,
not on the model; the layers' sums are rows x hidden size, two a layer, and are the target's own at any size. In a
server of several ranks ``DFLASH_COMPARE_RANKS`` needs graphs, so trees are compared elsewhere (:mod:`.ranks_gpu`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.e2e.server import PAIR, Server, ddtree, serve
from tests.tiny_pair.replay import read_prompts

RANKS = 2
"""As many as the tiny pair has KV heads; on a CPU SGLang loads no more."""
OURS = {"worker.py:_draft": "top-k of the drafter", "worker.py:_accept": "arg-max of the target"}
"""Who asks for our exchanges, as :mod:`.collectives` names it; everyone else is SGLang's layers."""


def counts(path: Path) -> Counter[tuple[str, str, int]]:
    time.sleep(1.5)  # written once a second at most
    return Counter({(op, who, size): calls for op, who, size, calls in json.loads(path.read_text())})


def a_step(server: Server, path: Path, prompt: list[int], tokens: int) -> list[dict[str, Any]]:
    """What a rank contributes to a decode step of one request: operation, who asked, bytes and calls a step.

    The counts of a short answer are taken from those of a long one, and so is its prefill.
    """

    def ask(limit: int) -> tuple[int, Counter[tuple[str, str, int]]]:
        before = counts(path)
        steps = server.generate(prompt, limit, ignore_eos=True).steps
        return steps, counts(path) - before

    server.generate(prompt, 2)
    (few, short), (many, long) = ask(2), ask(tokens)
    rows = []
    for (operation, who, size), calls in (long - short).items():
        # The last step may be under way when its answer is there, or one more: a few per cent of the calls.
        if each := round(calls / (many - few)):
            rows.append({"operation": operation, "for": OURS.get(who, who), "bytes": size, "calls": each})
    return sorted(rows, key=lambda row: -row["bytes"] * row["calls"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--tokens", type=int, default=400)
    args = parser.parse_args()
    prompt = list(read_prompts(PAIR / "prompts.jsonl")[0])
    rows = []
    for nodes in args.nodes:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "counts.json"
            cores = sorted(os.sched_getaffinity(0))
            environment = {
                "COLLECTIVES_OUT": str(out),
                "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[at % len(cores)]) for at in range(RANKS)),
                "SGLANG_NCCL_SO_PATH": "none",
            }
            words = [*ddtree(nodes), "--tp-size", str(RANKS), "--disable-radix-cache"]
            here = Path(__file__).with_name("collectives")
            with serve(args.venv, Path(folder) / "server.log", words, here, **environment) as server:
                passed = a_step(server, out, prompt, args.tokens)
            rows.append({"ranks": RANKS, "nodes": nodes, "requests": 1, "a_step": passed})
            print(json.dumps(rows[-1]), flush=True)
            args.out.write_text(json.dumps({"rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
