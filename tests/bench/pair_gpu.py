"""Serve one target with several methods on one GPU and compare them in one run: tokens, tokens a step, tokens per second.

    python tests/bench/pair_gpu.py --target DIR --draft DIR --prompts FILE.jsonl [...] --out RESULT.json [--dtype bfloat16]
        [--arms none dflash ddtree:16 ddtree:64] [--concurrency 1 8 32] [--tokens 256]

Every arm is a real server of the installed SGLang (patched with the ``ddtree`` set), all started at once and measured one
after the other, so that the ratios come from one run on the same work. Ends at the first server that dies, with its log.
Prints a table; writes JSON.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

BASE_PORT = 31100
COMMON = [
    "--attention-backend",
    "triton",
    "--sampling-backend",
    "pytorch",
    "--grammar-backend",
    "none",
    "--skip-server-warmup",
    "--context-length",
    "4096",
    "--max-total-tokens",
    "160000",
    "--disable-radix-cache",
    "--sleep-on-idle",
    "--log-level",
    "info",
]


def arm_args(arm: str, draft: str) -> list[str]:
    """Server arguments of ``none``, ``dflash`` or ``ddtree:NODES[:TOPK]``."""
    name, _, rest = arm.partition(":")
    if name == "none":
        return []
    args = ["--speculative-draft-model-path", draft, "--speculative-draft-attention-backend", "triton"]
    if name == "dflash":
        return ["--speculative-algorithm", "DFLASH", *args]
    nodes, _, topk = rest.partition(":")
    args += ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", nodes]
    return [*args, "--speculative-ddtree-topk", topk] if topk else args


def post(port: int, path: str, body: dict, timeout: float = 300.0) -> dict:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)


def require_free(port: int) -> None:
    """A server left over from an earlier run would answer in place of ours."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise RuntimeError(f"port {port} is taken: end the server there first")


class Server:
    """One arm's server process and its log."""

    def __init__(self, arm: str, port: int, args: argparse.Namespace, log: Path) -> None:
        require_free(port)
        self.arm, self.port, self.log = arm, port, log
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", args.target, "--host", "127.0.0.1"]
        command += ["--port", str(port), "--dtype", args.dtype, "--mem-fraction-static", str(args.mem)]
        command += ["--cuda-graph-max-bs", str(args.max_bs), "--max-running-requests", str(args.max_bs)]
        command += [*COMMON, *arm_args(arm, args.draft), *args.server_args.split()]
        self.process = subprocess.Popen(
            command, stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True
        )

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait(self, deadline: float) -> None:
        while time.time() < deadline:
            text = self.log.read_text(errors="replace")
            if "fired up" in text:
                return
            if self.process.poll() is not None or "Traceback" in text:
                time.sleep(1)
                raise RuntimeError(f"{self.arm} died:\n{self.tail(60)}")
            time.sleep(1)
        raise RuntimeError(f"{self.arm} is not ready:\n{self.tail()}")

    def stop(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


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


def mixed(server: Server, prompts: list[str]) -> None:
    """Sampled, biased and greedy requests at once, some of them long: each is answered, and greedy ones as if alone.

    Raises:
        RuntimeError: an answer is missing, or sampling gave the greedy text in every case.
    """
    plain = {"temperature": 0, "max_new_tokens": 48}
    kinds = [plain, {**plain, "temperature": 1.0, "top_p": 0.9, "top_k": 40}, {**plain, "logit_bias": {"28": 5.0}}]
    work = [(prompt * (6 if at % 7 == 0 else 1), kinds[at % 3]) for at, prompt in enumerate(prompts[:24])]

    def one(item: tuple[str, dict]) -> list[int]:
        return post(server.port, "/generate", {"text": item[0], "sampling_params": item[1]})["output_ids"]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(one, work))
        greedy = list(pool.map(one, [(prompt, plain) for prompt, _ in work]))
    if not all(answers):
        raise RuntimeError(f"{server.arm}: an answer of the mixed load is empty")
    same = [sum(a == g for a, g in list(zip(answers, greedy, strict=True))[kind::3]) for kind in range(3)]
    print(
        f"{server.arm}: mixed load, as greedy: {same[0]} greedy, {same[1]} sampled, {same[2]} biased of 8 each",
        flush=True,
    )
    if same[1] == 8:
        raise RuntimeError(f"{server.arm}: sampling changed nothing")


def profile(server: Server, prompts: list[str], folder: Path, concurrency: int, steps: int = 12) -> None:
    """A torch profiler trace (CPU and GPU) of ``steps`` decode steps, as SGLang writes it into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
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
    deadline = time.time() + 60
    while not list(folder.glob("*.gz")) and time.time() < deadline:
        time.sleep(1)
    print(f"{server.arm}: trace in {[f.name for f in folder.iterdir()]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--template", default="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n")
    parser.add_argument("--out", required=True)
    parser.add_argument("--logs", default="/tmp/pair-logs")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--arms", nargs="+", default=["none", "dflash", "ddtree:16", "ddtree:32", "ddtree:64"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, default=0, help="first so many prompts of each file; 0: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-bs", type=int, default=32)
    parser.add_argument("--mem", type=float, default=0.3)
    parser.add_argument("--start-limit", type=float, default=240.0)
    parser.add_argument("--server-args", default="")
    parser.add_argument("--profile", nargs="*", default=[], help="arms whose decode steps are traced at the end")
    parser.add_argument("--traces", default="/tmp/pair-traces")
    args = parser.parse_args()

    prompts: list[str] = []
    for name in args.prompts:
        rows = [json.loads(line) for line in Path(name).read_text().splitlines() if line.strip()]
        prompts += [args.template.format(row["prompt"]) for row in (rows[: args.limit] if args.limit else rows)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server survives a time limit
    logs = Path(args.logs)
    logs.mkdir(parents=True, exist_ok=True)
    servers: list[Server] = []
    rows: list[dict] = []
    try:
        for i, arm in enumerate(args.arms):
            servers.append(Server(arm, BASE_PORT + 10 * i, args, logs / f"{arm.replace(':', '-')}.log"))
            time.sleep(float(os.environ.get("STAGGER_S", "4")))  # memory is measured at start, one after the other
        deadline = time.time() + args.start_limit
        for server in servers:
            server.wait(deadline)
            print(f"{server.arm} ready", flush=True)
        for server in servers:
            measure(server, prompts[:4], 32, 4)
        for concurrency in args.concurrency:
            rows += compare(servers, prompts, args.tokens, concurrency, args.rounds)
        for server in servers:
            mixed(server, prompts)
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
        for server in servers:
            server.stop()
        Path(args.out).write_text(json.dumps({"arguments": vars(args), "rows": rows}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
