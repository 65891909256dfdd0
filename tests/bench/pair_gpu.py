"""Serve one target with several methods on one GPU and compare them in one run: tokens, tokens a step, tokens per second.

    python -m tests.bench.pair_gpu --target DIR --draft DIR --prompts FILE.jsonl [...] --out RESULT.json [--dtype bfloat16]
        [--arms none dflash ddtree:16 ddtree:64] [--concurrency 1 8 32] [--tokens 256]

Every arm is a real server of the installed SGLang (patched with the ``ddtree`` set), all started at once and measured one
after the other, so that the ratios come from one run on the same work. Ends at the first server that dies, with its log.
Prints a table; writes JSON.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import sys
import time
import urllib.request
from pathlib import Path

from tests.bench.serving import Server, add_arguments, post, read_prompts, servers_of
from tests.bench.traces import Trace


def measure(server: Server, prompts: list[str], tokens: int, concurrency: int) -> dict:
    """All prompts, ``concurrency`` at a time, greedy: seconds, tokens, verify steps, the token ids of each."""
    sampling = {"temperature": 0, "max_new_tokens": tokens}

    def one(prompt: str) -> dict:
        return post(server.port, "/generate", {"text": prompt, "sampling_params": sampling})

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(one, prompts))
    seconds = time.perf_counter() - start
    meta = [a["meta_info"] for a in answers]
    made = sum(m["completion_tokens"] for m in meta)
    steps = sum(m.get("spec_verify_ct", 0) for m in meta)
    return {
        "seconds": seconds,
        "tokens": made,
        "steps": steps,
        "tok_s": made / seconds,
        "tau": (made - len(prompts)) / steps if steps else 1.0,
        "ids": [a["output_ids"] for a in answers],
    }


def compare(servers: list[Server], prompts: list[str], tokens: int, concurrency: int, rounds: int) -> list[dict]:
    """The same work for every server in every round, in alternating order: what disturbs one round disturbs all arms.

    One request at a time shares the prompts out among the rounds; more take them all, repeated to four waves at least.
    """
    total: dict[str, dict] = {}
    reference: dict[int, list[list[int]]] = {}
    for at in range(rounds):
        work = prompts[at::rounds] if concurrency == 1 else prompts * -(-4 * concurrency // len(prompts))
        for server in servers if at % 2 == 0 else servers[::-1]:
            row = measure(server, work, tokens, concurrency)
            ids = row.pop("ids")
            if server is servers[0]:
                reference[at] = ids
            row["answers"] = ids
            row["at"] = at
            total.setdefault(server.arm, {"arm": server.arm, "concurrency": concurrency, "rounds": []})[
                "rounds"
            ].append(row)
    out = []
    for arm, entry in total.items():
        parts = entry["rounds"]
        seconds, made, steps = (sum(part[key] for part in parts) for key in ("seconds", "tokens", "steps"))
        requests = sum(len(part["answers"]) for part in parts)
        same = sum(a == b for part in parts for a, b in zip(part["answers"], reference[part["at"]], strict=True))
        row = {
            "arm": arm,
            "concurrency": concurrency,
            "requests": requests,
            "seconds": seconds,
            "tok_s": made / seconds,
            "tok_s_rounds": [round(part["tok_s"], 1) for part in parts],
            "tau": (made - requests) / steps if steps else 1.0,
            "step_ms": 1e3 * seconds * concurrency / (steps or made),
            "identical": same,
        }
        out.append(row)
        row["ratio"] = row["tok_s"] / out[0]["tok_s"]
        print(
            f"c={concurrency:<3} {arm:14} {row['tok_s']:8.0f} tok/s  x{row['ratio']:.2f}  tau {row['tau']:.3f}  "
            f"step {row['step_ms']:.2f} ms  identical {same}/{requests}  rounds {row['tok_s_rounds']}",
            flush=True,
        )
    return out


def profile(
    server: Server, prompts: list[str], folder: Path, concurrency: int, steps: int = 12, tokens: int = 1500
) -> list[dict[str, float]]:
    """A torch profiler trace (CPU and GPU) of ``steps`` decode steps, as SGLang writes it into ``folder``.

    ``tokens``: of each request, enough to last through them. Returns :meth:`Trace.parts` of each rank, where the arm is
    a tree.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        answers = [
            pool.submit(post, server.port, "/generate", {"text": prompt, "sampling_params": sampling})
            for prompt in prompts[:concurrency]
        ]
        time.sleep(0.3)
        wanted = {"output_dir": str(folder), "num_steps": steps, "activities": ["CPU", "GPU"], "with_stack": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/start_profile",
            json.dumps(wanted).encode(),
            {"content-type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=120).read()
        for answer in answers:
            answer.result()
    deadline, written = time.time() + 60, {}  # type: ignore[var-annotated]
    while time.time() < deadline:
        time.sleep(1)
        before, written = written, {trace: trace.stat().st_size for trace in folder.glob("*.gz")}
        if written and written == before:
            break
    told = []
    for trace in sorted(folder.glob("*.gz")):
        found: object = trace.name
        if server.arm.startswith("ddtree"):
            try:
                read = Trace(trace)
                told.append(read.parts())
                found = f"{read.copies_to_host()}, microseconds {told[-1]}"
            except ValueError as error:
                found = f"{trace.name}: {error}"
        print(f"{server.arm}, {concurrency} requests: trace {found}", flush=True)
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", nargs="*", default=[], help="arms whose decode steps are traced at the end")
    parser.add_argument("--traces", default="/tmp/pair-traces")
    args = parser.parse_args()
    prompts = read_prompts(args)
    rows: list[dict] = []
    try:
        with servers_of(args) as servers:
            for server in servers:
                measure(server, prompts[:4], 32, 4)
            for concurrency in args.concurrency:
                rows += compare(servers, prompts, args.tokens, concurrency, args.rounds)
            for server in servers:
                if server.arm in args.profile:
                    for concurrency in (1, 32):
                        folder = Path(args.traces) / f"{server.arm.replace(':', '-')}-{concurrency}"
                        profile(server, prompts, folder, concurrency)
        return 0
    except Exception as error:
        print(f"FAILED: {str(error)[-3000:]}", flush=True)
        return 1
    finally:
        Path(args.out).write_text(json.dumps({"arguments": vars(args), "rows": rows}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
