"""Whether several ranks grow the same trees and serve the same tokens as one GPU without speculation.

    python -m tests.bench.ranks_gpu --pair templates/tiny-pair --tp 2 --out RESULT.json [--seconds 300]

Serves the project's own tiny pair in float32 twice: on one GPU without speculation, and on ``--tp`` GPUs with DDTREE and
``DFLASH_COMPARE_RANKS=1``, which gathers every step's trees from all ranks and compares them bit for bit. Exits 1 when a
tree or a token differs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import sys
import time
from pathlib import Path

from tests.bench.serving import Server, add_arguments, post, servers_of
from tests.tiny_pair.replay import read_prompts

COUNT = re.compile(r"trees differed in (\d+) of (\d+) steps")


def answers(server: Server, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    body = {"temperature": 0, "max_new_tokens": tokens}

    def one(prompt: list[int]) -> list[int]:
        return list(post(server.port, "/generate", {"input_ids": prompt, "sampling_params": body})["output_ids"])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, prompts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--pair", required=True)
    parser.add_argument("--seconds", type=float, default=300.0)
    args = parser.parse_args(
        [*sys.argv[1:], "--dtype", "float32", "--target", "", "--draft", "", "--prompts", "", "--kv-tokens", "40000"]
    )
    pair = Path(args.pair).resolve()
    args.target, args.draft = str(pair / "target"), str(pair / "drafter")
    args.server_args += " --context-length 2048"
    prompts = read_prompts(pair / "prompts.jsonl")
    os.environ["DFLASH_COMPARE_RANKS"] = "1"
    ranks, result = args.tp, {"arguments": vars(args)}  # type: dict[str, Any]
    try:
        args.arms = ["ddtree:16"]
        with servers_of(args) as (tree,):
            args.arms, args.tp = ["none"], 1
            with servers_of(args, 100) as (plain,):
                wanted = answers(plain, prompts, 64)
            began, rounds, wrong = time.time(), 0, 0
            while time.time() - began < args.seconds and not wrong:
                wrong = sum(a != b for a, b in zip(answers(tree, prompts, 64), wanted, strict=True))
                rounds += 1
            counts = COUNT.findall(tree.log.read_text(errors="replace"))
            differing, steps = map(int, counts[-1]) if counts else (0, 0)
        result |= {"ranks": ranks, "prompts": len(prompts), "rounds": rounds, "seconds": time.time() - began}
        result |= {"answers_wrong": wrong, "steps_compared": steps, "steps_differing": differing}
        print(json.dumps({key: value for key, value in result.items() if key != "arguments"}), flush=True)
        return 0 if steps and not differing and not wrong else 1
    except Exception as error:
        print(f"FAILED: {str(error)[-3000:]}", flush=True)
        return 1
    finally:
        Path(args.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    sys.exit(main())
