"""What a watched server pays for being watched, and whether it is ever called unhealthy while it is busy.

    python -m tests.bench.probe_cost --venv DIR --out RESULT.json

``DIR``: a patched environment of the CPU stack. Serves the tiny pair with the command itself and gives it the same work
again and again, ``--at-once`` streams at a time: alone, with ``health --watch``, and with requests to /health, which the
watch sends every ``HEALTH_EVERY_S``; in changing order. Both come with hardly a pause, far more often than anyone would ask:
the time lost is divided by their number, and ``cost`` is what that makes of a round every ``--every`` seconds. Then the watch
goes on under an endless load until there are ``--probes`` rounds in all, the last ``--deep`` of them at level spec, which
generates. Exits 1 when one of them called the server unhealthy or a stream failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_deploy.health import is_ready
from dflash_deploy.health.http import NoReply, stream_events
from dflash_deploy.health.ladder import HEALTH_EVERY_S
from tests.e2e.conftest import MAIN, dflash_deploy
from tests.e2e.server import PAIR

TICK = os.sysconf("SC_CLK_TCK")


def stat_of(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` after the name, so that field 3 of the manual is the first."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_of(pid: int, *, waited: bool = False) -> float:
    """CPU seconds of a process, ``waited``: and of the children that it has waited for."""
    return sum(map(int, stat_of(pid)[11 : 15 if waited else 13])) / TICK


def below(pid: int) -> list[int]:
    """The process and all its descendants."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int(stat_of(int(entry.name))[1])
        except OSError:
            continue
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


class Watch:
    """``health --watch --json`` in a process of its own, and the rounds that it has told."""

    def __init__(self, words: Sequence[str], level: str, pause_s: float) -> None:
        self.level = level
        self.rounds: list[dict[str, Any]] = []
        command = [*MAIN, "health", "local", *words, "--level", level, "--watch", str(pause_s), "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line)
            if line == "}\n":
                self.rounds.append(json.loads("".join(lines)))
                lines = []

    def wait_for(self, rounds: int, timeout_s: float = 1200.0) -> None:
        limit, told = time.monotonic() + timeout_s, len(self.rounds)
        while len(self.rounds) < rounds:
            if self.process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"health --watch stopped: {self.process.stderr and self.process.stderr.read()}")
            if len(self.rounds) >= told + 100:
                told = len(self.rounds)
                print(f"{told} of {rounds} rounds", file=sys.stderr, flush=True)
            time.sleep(0.02)

    def cpu(self) -> float:
        return cpu_of(self.process.pid, waited=True)

    def end(self) -> list[dict[str, Any]]:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        return self.rounds


class Load:
    """So many streams at once. ``tokens``: how many came; ``rounds``: how often each prompt is sent, 0: without an end."""

    def __init__(self, url: str, prompts: Sequence[str], at_once: int, max_tokens: int, rounds: int = 0) -> None:
        self.tokens = 0
        self.failed: list[str] = []
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._order = iter(list(prompts) * rounds) if rounds else itertools.cycle(prompts)
        self._threads = [
            threading.Thread(target=self._stream, args=(url, max_tokens), daemon=True) for _ in range(at_once)
        ]
        for thread in self._threads:
            thread.start()

    def _stream(self, url: str, max_tokens: int) -> None:
        sampling = {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True}
        while not self._stop.is_set():
            with self._lock:
                prompt = next(self._order, None)
            if prompt is None:
                return
            body = {"text": prompt, "stream": True, "sampling_params": sampling}
            count = 0
            try:
                for event in stream_events(url, "/generate", body, timeout_s=600.0):
                    count = int(event["meta_info"]["completion_tokens"])
                    if self._stop.is_set():
                        break
            except NoReply as error:
                self.failed.append(str(error))
                time.sleep(1)
            with self._lock:
                self.tokens += count

    def wait(self) -> None:
        """Until the work is done."""
        for thread in self._threads:
            thread.join()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


class Asking:
    """/health, asked by several at once without a pause: how often it was answered, and by what."""

    def __init__(self, url: str, at_once: int) -> None:
        self.verdicts: list[bool] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(url,), daemon=True) for _ in range(at_once)]
        for thread in self._threads:
            thread.start()

    def _ask(self, url: str) -> None:
        while not self._stop.is_set():
            self.verdicts.append(is_ready(url, timeout_s=60.0))

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


@contextmanager
def served(venv: Path, root: Path) -> Iterator[tuple[str, int]]:
    """The tiny pair behind a tree, deployed and ended by the command: (URL, the server's process)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--root", str(root), "--venv", str(venv), "--stack", "cpu", "--mode", "supervisor", "--port", str(port)]
    pair = ["--model", str(PAIR / "target"), "--draft-model", str(PAIR / "drafter")]
    try:
        dflash_deploy("launch", "local", *words, *pair)
        dflash_deploy("health", "local", "--root", str(root), "--wait", "--level", "ready")
        status = dflash_deploy("status", "local", "--root", str(root))
        yield f"http://127.0.0.1:{port}", int(status["server_pid"])
    finally:
        subprocess.run([*MAIN, "down", "local", "--root", str(root), "--break-lock"], capture_output=True, timeout=300)


def idle(words: Sequence[str], server: Sequence[int], rounds: int, level: str) -> dict[str, float]:
    """CPU seconds of one round while nothing else is asked: the server then generates a token for each."""
    watch = Watch(words, level, 0.05)
    watch.wait_for(2)
    before, own, first = sum(map(cpu_of, server)), watch.cpu(), len(watch.rounds)
    began = time.monotonic()
    watch.wait_for(first + rounds)
    count, took = len(watch.rounds) - first, time.monotonic() - began
    spent, spent_own = sum(map(cpu_of, server)) - before, watch.cpu() - own
    watch.end()
    return {
        "rounds": count, "round_s": round(took / count, 4), "server_cpu_s": round(spent / count, 5),
        "probe_cpu_s": round(spent_own / count, 5),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--level", default="ready", help="of the watch; that of health --watch itself")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between rounds whose cost is told")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between the rounds that are measured")
    parser.add_argument("--turns", type=int, default=6, help="how often the work is done in each way")
    parser.add_argument("--repeat", type=int, default=1, help="how often each prompt is sent in one turn")
    parser.add_argument(
        "--askers", type=int, default=4, help="requests to /health at a time; each takes a second or more"
    )
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--probes", type=int, default=1000)
    parser.add_argument("--deep", type=int, default=3)
    args = parser.parse_args()
    rows = [json.loads(line) for line in (PAIR / "prompts.jsonl").read_text().splitlines()]
    prompts = [str(row["prompt"] if "prompt" in row else row["messages"][-1]["content"]) for row in rows]
    rounds: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    answers: list[bool] = []
    failed: list[str] = []

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder, served(args.venv, Path(folder) / "root") as (url, pid):
        words = ["--root", str(Path(folder) / "root")]
        server = below(pid)
        say(f"serves, {len(server)} processes")
        alone = idle(words, server, 30, args.level)
        say(f"idle: {alone}")
        Load(url, prompts, args.at_once, args.max_tokens, 1).wait()
        arms = ("alone", "watch", "health")
        for number in range(args.turns):
            for arm in arms[number % 3 :] + arms[: number % 3]:
                watch = Watch(words, args.level, args.pause) if arm == "watch" else None
                if watch:
                    watch.wait_for(2)
                first, own = (len(watch.rounds), watch.cpu()) if watch else (0, 0.0)
                busy, began = sum(map(cpu_of, server)), time.monotonic()
                asking = Asking(url, args.askers) if arm == "health" else None
                load = Load(url, prompts, args.at_once, args.max_tokens, args.repeat)
                load.wait()
                took, failed = time.monotonic() - began, failed + load.failed
                row: dict[str, Any] = {
                    "arm": arm, "seconds": round(took, 3), "tokens": load.tokens,
                    "server_cpu_s": round(sum(map(cpu_of, server)) - busy, 2),
                }  # fmt: skip
                if watch:
                    row |= {"probes": len(watch.rounds) - first, "probe_cpu_s": round(watch.cpu() - own, 2)}
                    rounds += watch.end()
                if asking:
                    row["probes"] = len(asking.verdicts)
                    asking.end()
                    answers += asking.verdicts
                turns.append(row)
                say(json.dumps(row))
        load = Load(url, prompts, args.at_once, args.max_tokens)
        for level, count in ((args.level, args.probes - args.deep), ("spec", args.probes)):
            if len(rounds) < count:
                more = ["--prompts", str(PAIR / "probe.json"), "--concurrency", "2"] if level == "spec" else []
                watch = Watch([*words, *more], level, args.pause)
                watch.wait_for(count - len(rounds))
                rounds += watch.end()
                say(f"{len(rounds)} rounds, {sum(not r['ok'] for r in rounds)} unhealthy")
        load.end()
        failed += load.failed
    alone_s = [row["seconds"] for row in turns if row["arm"] == "alone"]
    cost: dict[str, Any] = {"every_s": args.every, "health_every_s": HEALTH_EVERY_S}
    shares = []
    for arm, every in (("watch", args.every), ("health", HEALTH_EVERY_S)):
        rows = [row for row in turns if row["arm"] == arm]
        lost = [(row["seconds"] - a) / row["probes"] for row, a in zip(rows, alone_s, strict=True)]
        cost[f"{arm}_lost_s"] = {"median": round(statistics.median(lost), 5), "each": [round(each, 5) for each in lost]}
        shares.append(statistics.median(lost) / every)
    cost["share"] = round(sum(shares), 5)
    unhealthy = [row for row in rounds if not row["ok"]]
    levels = [row["level"] for row in rounds]
    result = {
        "at_once": args.at_once, "cpu_count": os.cpu_count(), "level": args.level, "idle": alone, "turns": turns,
        "tokens_per_s": {arm: round(sum(r["tokens"] for r in turns if r["arm"] == arm)
                                    / sum(r["seconds"] for r in turns if r["arm"] == arm), 1) for arm in arms},
        "cost": cost, "probes": {level: levels.count(level) for level in dict.fromkeys(levels)},
        "called_unhealthy": len(unhealthy), "unhealthy": unhealthy[:5],
        "health_asked": len(answers), "health_denied": answers.count(False), "streams_failed": failed,
    }  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "turns"}))
    return 1 if unhealthy or failed or not all(answers) else 0


if __name__ == "__main__":
    sys.exit(main())
