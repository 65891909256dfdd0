"""What a watched server pays for being watched, and whether it is ever called unhealthy while it is busy.

    python -m tests.bench.probe_cost --venv DIR --out RESULT.json

``DIR``: a patched environment of the CPU stack. Serves the tiny pair with the command itself and keeps ``--at-once``
streams running all the time. ``health --watch`` comes and goes in windows of ``--seconds``, in the order off, on, on, off.
It probes with hardly a pause between the rounds, far more often than anyone would: the loss is divided by the rounds, and
``cost`` is what that makes of a round every ``--every`` seconds. Then it goes on under the same load until there are
``--probes`` rounds in all, the last ``--deep`` of them at level spec, which generates. Exits 1 when one of them called the
server unhealthy or a stream failed.
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

from dflash_deploy.health.http import NoReply, stream_events
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
        limit = time.monotonic() + timeout_s
        while len(self.rounds) < rounds:
            if self.process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"health --watch stopped: {self.process.stderr and self.process.stderr.read()}")
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
    """So many streams at once, without an end; ``tokens``: (moment, how many came)."""

    def __init__(self, url: str, prompts: Sequence[str], at_once: int, max_tokens: int) -> None:
        self.tokens: list[tuple[float, int]] = []
        self.failed: list[str] = []
        self._stop, self._order = threading.Event(), itertools.cycle(prompts)
        self._threads = [
            threading.Thread(target=self._stream, args=(url, max_tokens), daemon=True) for _ in range(at_once)
        ]
        for thread in self._threads:
            thread.start()

    def _stream(self, url: str, max_tokens: int) -> None:
        sampling = {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True}
        while not self._stop.is_set():
            body = {"text": next(self._order), "stream": True, "sampling_params": sampling}
            so_far = 0
            try:
                for event in stream_events(url, "/generate", body, timeout_s=600.0):
                    count = int(event["meta_info"]["completion_tokens"])
                    self.tokens.append((time.monotonic(), count - so_far))
                    so_far = count
                    if self._stop.is_set():
                        break
            except NoReply as error:
                self.failed.append(str(error))
                time.sleep(1)

    def rate(self, began: float, ended: float) -> float:
        """Tokens a second between two moments."""
        return sum(count for moment, count in self.tokens if began <= moment < ended) / (ended - began)

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
    parser.add_argument("--pairs", type=int, default=6, help="windows without and with the watch")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a window")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--probes", type=int, default=1000)
    parser.add_argument("--deep", type=int, default=3)
    args = parser.parse_args()
    rows = [json.loads(line) for line in (PAIR / "prompts.jsonl").read_text().splitlines()]
    prompts = [str(row["prompt"] if "prompt" in row else row["messages"][-1]["content"]) for row in rows]
    rounds: list[dict[str, Any]] = []
    windows: list[dict[str, Any]] = []

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder, served(args.venv, Path(folder) / "root") as (url, pid):
        words = ["--root", str(Path(folder) / "root")]
        server = below(pid)
        say(f"serves, {len(server)} processes")
        alone = idle(words, server, 30, args.level)
        say(f"idle: {alone}")
        load = Load(url, prompts, args.at_once, args.max_tokens)
        time.sleep(5)
        for number in range(args.pairs):
            for watched in (False, True) if number % 2 == 0 else (True, False):
                watch = Watch(words, args.level, args.pause) if watched else None
                if watch:
                    watch.wait_for(2)
                time.sleep(1)
                first, own = (len(watch.rounds), watch.cpu()) if watch else (0, 0.0)
                busy, began = sum(map(cpu_of, server)), time.monotonic()
                time.sleep(args.seconds)
                ended = time.monotonic()
                row: dict[str, Any] = {
                    "watched": watched, "seconds": round(ended - began, 3),
                    "tokens_per_s": round(load.rate(began, ended), 3),
                    "server_cpu_s": round(sum(map(cpu_of, server)) - busy, 2),
                }  # fmt: skip
                if watch:
                    row |= {"rounds": len(watch.rounds) - first, "probe_cpu_s": round(watch.cpu() - own, 2)}
                    rounds += watch.end()
                windows.append(row)
                say(json.dumps(row))
        for level, count in ((args.level, args.probes - args.deep), ("spec", args.probes)):
            if len(rounds) < count:
                more = ["--prompts", str(PAIR / "probe.json"), "--concurrency", "2"] if level == "spec" else []
                watch = Watch([*words, *more], level, args.pause)
                watch.wait_for(count - len(rounds))
                rounds += watch.end()
                say(f"{len(rounds)} rounds, {sum(not r['ok'] for r in rounds)} unhealthy")
        load.end()
    off = [row for row in windows if not row["watched"]]
    on = [row for row in windows if row["watched"]]
    losses = [
        (1 - b["tokens_per_s"] / a["tokens_per_s"]) * b["seconds"] / b["rounds"] for a, b in zip(off, on, strict=True)
    ]
    lost, error = statistics.fmean(losses), statistics.stdev(losses) / len(losses) ** 0.5
    unhealthy = [row for row in rounds if not row["ok"]]
    levels = [row["level"] for row in rounds]
    result = {
        "at_once": args.at_once, "cpu_count": os.cpu_count(), "level": args.level, "idle": alone, "windows": windows,
        "tokens_per_s": {"without": round(statistics.fmean(row["tokens_per_s"] for row in off), 3),
                         "with": round(statistics.fmean(row["tokens_per_s"] for row in on), 3)},
        "lost_s_per_round": {"mean": round(lost, 5), "standard_error": round(error, 5)},
        "cost": {"every_s": args.every, "share": round(lost / args.every, 5),
                 "share_at_most": round((lost + 2 * error) / args.every, 5)},
        "probes": {level: levels.count(level) for level in dict.fromkeys(levels)},
        "called_unhealthy": len(unhealthy), "unhealthy": unhealthy[:5], "streams_failed": load.failed,
    }  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "windows"}))
    return 1 if unhealthy or load.failed else 0


if __name__ == "__main__":
    sys.exit(main())
