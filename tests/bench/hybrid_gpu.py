"""DDTREE on a hybrid target (GDN linear attention, Qwen3-Next's architecture) on a GPU: equal tokens, and speed.

    python -m tests.bench.hybrid_gpu --out RESULT.json [--dtype float32] [--size quarter] [--arms none dflash ddtree:16]
        [--concurrency 1 8] [--prompts 16] [--tokens 128]

Target and drafter are made here, at random, with a small vocabulary (:mod:`.hybrid_pair`): tokens a step say that
drafts are accepted along branches, not what a trained drafter would reach. In float32 each greedy answer has to be that
of the first arm, token for token; in bfloat16 each difference is shown with the top-1/top-2 gap where the answers part.
Exits 1 when an answer differs in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.bench.agreement_gpu import greedy
from tests.bench.hybrid_pair import SIZES, make_hybrid_pair
from tests.bench.pair_gpu import measure
from tests.bench.serving import BASE_PORT, servers_of


def prompts_of(count: int, vocab: int, seed: int = 1) -> list[str]:
    """Words of the pair's tokenizer: prompts of 4 to 40 tokens."""
    draw = random.Random(seed)
    return [" ".join(f"w{draw.randrange(vocab - 1)}" for _ in range(draw.randint(4, 40))) for _ in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--logs", default="/tmp/hybrid-logs", help="folder of the pair and of the servers' logs")
    parser.add_argument("--size", choices=sorted(SIZES), help="default: narrow in float32, quarter otherwise")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--arms", nargs="+", default=["none", "dflash", "ddtree:16", "ddtree:32"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-bs", type=int, default=8)
    parser.add_argument("--mem", type=float, default=0.6, help="high: the servers start while others still allocate")
    parser.add_argument("--kv-tokens", type=int, default=40000)
    parser.add_argument("--start-limit", type=float, default=400.0)
    parser.add_argument("--server-args", default="--disable-prefill-cuda-graph --disable-shared-experts-fusion")
    parser.add_argument("--port", type=int, default=BASE_PORT)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    args.size = args.size or ("narrow" if args.dtype == "float32" else "quarter")
    if args.dtype == "float32":  # otherwise the convolution's window is rounded, and not at the same steps in every arm
        os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float32"
    began = time.monotonic()
    target, drafter = make_hybrid_pair(Path(args.logs) / f"pair-{args.size}-{args.dtype}", args.size, dtype)
    print(f"pair made in {time.monotonic() - began:.0f} s", flush=True)
    args.target, args.draft, args.shape, args.tp = str(target), str(drafter), None, 1
    args.graph_flag = "--cuda-graph-max-bs"
    prompts = prompts_of(args.prompts, SIZES[args.size]["vocab_size"])
    result: dict[str, Any] = {"size": args.size, "dtype": args.dtype, "speed": []}
    rc = 0
    with servers_of(args) as servers:
        for server in servers:  # graphs, kernels and caches ready
            measure(server, prompts[:2], 16, 2)
        try:
            result["greedy"] = greedy(servers, prompts, args.tokens, args.dtype == "float32", len(prompts))
        except RuntimeError as error:
            print(error, flush=True)
            result["greedy"], rc = str(error), 1
        for concurrency in args.concurrency:
            for server in servers:
                row = measure(server, prompts, args.tokens, concurrency)
                row = {"arm": server.arm, "concurrency": concurrency, "tok_s": row["tok_s"], "tau": row["tau"]}
                result["speed"].append(row)
                print(
                    "{arm:12} bs {concurrency:3} {tok_s:8.1f} tok/s {tau:6.3f} tokens a step".format(**row), flush=True
                )
    Path(args.out).write_text(json.dumps(result, indent=1))
    return rc


if __name__ == "__main__":
    sys.exit(main())
