"""Real servers of the installed SGLang, one for each method, for the benches that compare them on one GPU."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.shapes import DUMMY, SHAPES, make_pair

FLOAT32 = Path(__file__).with_name("float32")
"""Goes in front of PYTHONPATH where servers run in float32."""
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
        command += ["--max-total-tokens", str(args.kv_tokens)]
        command += [args.graph_flag, str(args.max_bs), "--max-running-requests", str(args.max_bs)]
        command += ["--tp-size", str(args.tp), *COMMON, *arm_args(arm, args.draft), *args.server_args.split()]
        command += DUMMY if args.shape else []
        env = dict(os.environ)
        if args.dtype == "float32":
            env["PYTHONPATH"] = os.pathsep.join([str(FLOAT32), *filter(None, [env.get("PYTHONPATH")])])
            # Otherwise attention's products are TF32. "ieee" is as exact and, without tensor cores, twenty times slower.
            env.setdefault("TRITON_F32_DEFAULT", "tf32x3")
            command.append("--disable-prefill-cuda-graph")  # half a minute for each of its fifty sizes
        self.process = subprocess.Popen(
            command, stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True, env=env, cwd=log.parent
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


def tokenized(server: Server, text: str) -> list[int]:
    """Token ids of a text, as the server reads it."""
    return list(post(server.port, "/tokenize", {"model": "", "prompt": text})["tokens"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every bench over servers takes."""
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--template", default="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n")
    parser.add_argument("--out", required=True)
    parser.add_argument("--logs", default="/tmp/pair-logs")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--arms", nargs="+", default=["none", "dflash", "ddtree:16", "ddtree:32", "ddtree:64"])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, default=0, help="first so many prompts of each file; 0: all")
    parser.add_argument("--max-bs", type=int, default=32)
    parser.add_argument(
        "--graph-flag", default="--cuda-graph-max-bs", help="later releases: --cuda-graph-max-bs-decode"
    )
    parser.add_argument("--mem", type=float, default=0.3)
    parser.add_argument("--kv-tokens", type=int, default=160000, help="KV slots of each server")
    parser.add_argument("--start-limit", type=float, default=240.0)
    parser.add_argument("--server-args", default="")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="random weights of this size; --target has the tokenizer"
    )
    parser.add_argument("--port", type=int, default=BASE_PORT, help="of the first server; the others' are ten apart")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of each server")


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of all files, in the chat template."""
    prompts: list[str] = []
    for name in args.prompts:
        rows = [json.loads(line) for line in Path(name).read_text().splitlines() if line.strip()]
        prompts += [args.template.format(row["prompt"]) for row in (rows[: args.limit] if args.limit else rows)]
    return prompts


@contextmanager
def servers_of(args: argparse.Namespace, ports_on: int = 0) -> Iterator[list[Server]]:
    """The servers of ``args.arms``, ready, ten ports apart, ``ports_on`` behind ``args.port``; ended in any case.

    Raises:
        RuntimeError: one died or was not ready in time, with the end of its log.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server survives a time limit
    logs = Path(args.logs)
    logs.mkdir(parents=True, exist_ok=True)
    if args.shape:
        args.target, args.draft = map(str, make_pair(args.shape, Path(args.target), logs))
    servers: list[Server] = []
    try:
        for i, arm in enumerate(args.arms):
            servers.append(Server(arm, args.port + ports_on + 10 * i, args, logs / f"{arm.replace(':', '-')}.log"))
            time.sleep(float(os.environ.get("STAGGER_S", "4")))  # memory is measured at start, one after the other
        deadline = time.time() + args.start_limit
        for server in servers:
            server.wait(deadline)
            print(f"{server.arm} ready", flush=True)
        yield servers
    finally:
        for server in servers:
            server.stop()
