"""A real SGLang of a test, on loopback, started as the CPU stack starts it, and always ended with all its processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAIR = Path(__file__).resolve().parents[2] / "templates" / "tiny-pair"
READY_S = 400.0
ANSWER_S = 900.0

# Float32 because Triton's interpreter computes bf16 attention wrongly.
ARGUMENTS = [
    *("--model-path", str(PAIR / "target"), "--device", "cpu", "--dtype", "float32"),
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-cuda-graph", "--skip-server-warmup", "--mem-fraction-static", "0.3", "--max-total-tokens", "16384"),
    *("--max-running-requests", "8", "--context-length", "2048", "--host", "127.0.0.1"),
    # Each split is one more program for the interpreter to run.
    *("--triton-attention-num-kv-splits", "1"),
    # An idle scheduler would keep a core busy, which the test wants.
    "--sleep-on-idle",
]
# PR_SET_PDEATHSIG: the server dies with a test run that is killed; its schedulers watch the server the same way.
BOUND = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
DFLASH = [
    *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(PAIR / "drafter")),
    *("--speculative-draft-attention-backend", "triton"),
]


def ddtree(nodes: int) -> list[str]:
    """Arguments of a tree of ``nodes`` nodes, the root included."""
    words = [*DFLASH, "--speculative-ddtree-budget", str(nodes)]
    words[words.index("DFLASH")] = "DDTREE"
    return words


@dataclass(frozen=True)
class Answer:
    """What ``/generate`` says. ``histogram[k]``: verify steps that accepted k drafts, the bonus not counted."""

    tokens: tuple[int, ...]
    text: str
    cached: int
    finish: str
    steps: int = 0
    histogram: tuple[int, ...] = ()

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Answer:
        meta = body["meta_info"]
        return cls(
            tokens=tuple(body["output_ids"]),
            text=body["text"],
            cached=meta["cached_tokens"],
            finish=meta["finish_reason"]["type"],
            steps=meta.get("spec_verify_ct", 0),
            # Older releases have the first name, later ones the second.
            histogram=tuple(meta.get("spec_accept_histogram") or meta.get("spec_correct_drafts_histogram") or ()),
        )


@dataclass(frozen=True)
class Server:
    """A served pair. ``started_s``: how long it took until it was ready."""

    url: str
    log: Path
    started_s: float

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Status and decoded JSON (or text) of the answer; an HTTP error is an answer too."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
                status, text = reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def generate(self, tokens: Sequence[int], limit: int, **sampling: Any) -> Answer:
        """Greedy unless ``sampling`` says otherwise."""
        sampling = {"temperature": 0, "max_new_tokens": limit, **sampling}
        status, body = self.post("/generate", {"input_ids": list(tokens), "sampling_params": sampling})
        assert status == 200, f"{status} {body}\n{self.tail()}"
        return Answer.of(body)

    def generate_all(self, prompts: Sequence[Sequence[int]], limit: int, **sampling: Any) -> list[Answer]:
        """The answers in the prompts' order; eight requests at once."""
        pool = ThreadPoolExecutor(8)
        try:
            return list(pool.map(lambda prompt: self.generate(prompt, limit, **sampling), prompts))
        finally:  # An interrupt or a failure must not wait for the other answers.
            pool.shutdown(wait=False, cancel_futures=True)

    def tail(self, lines: int = 25) -> str:
        return "\n".join(line[:300] for line in self.log.read_text(errors="replace").splitlines()[-lines:])


def hang_up(port: int, body: Mapping[str, Any], after_s: float) -> None:
    """Ask a server on loopback for a stream, and cut the connection ``after_s`` later, in the middle of it."""
    data = json.dumps({**body, "stream": True}).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(head.encode() + data)
        until = time.monotonic() + after_s
        while (left := until - time.monotonic()) > 0:
            connection.settimeout(left)
            with suppress(TimeoutError):
                if not connection.recv(65536):
                    return


@contextmanager
def serve(
    venv: Path, log: Path, words: Sequence[str] = (), python_path: Path | None = None, **environment: str
) -> Iterator[Server]:
    """Serve with the Python of ``venv``; ``python_path`` goes before its own modules. ``environment`` is added.

    Raises AssertionError with the end of the log when the server ends, or is not ready in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A clean environment: a backend or an engine that the caller's shell chose must not change what is compared.
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    env = {
        **keep,
        "TRITON_INTERPRET": "1",
        "DFLASH_KERNELS_BACKEND": "naive",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **({"PYTHONPATH": str(python_path)} if python_path else {}),
        **environment,
    }
    python = str(venv / "bin" / "python")
    argv = [python, "-c", BOUND, python, "-m", "sglang.launch_server", *ARGUMENTS, "--port", str(port), *words]
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv,
            env=env,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        server = Server(f"http://127.0.0.1:{port}", log, 0.0)
        while not _ready(server.url):
            assert process.poll() is None, f"the server ended with {process.returncode}\n{server.tail()}"
            assert time.monotonic() - began < READY_S, f"not ready after {READY_S:.0f} s\n{server.tail()}"
            time.sleep(0.5)
        yield Server(server.url, log, time.monotonic() - began)
    finally:
        _end(process)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=10) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """The session that ``process`` leads, its schedulers included: asked to end, then killed."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and _alive(process):
            time.sleep(0.2)
    process.wait(timeout=30)


def _alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
