"""Speed and memory of the log watcher: a log of 2 GB read whole, and one that grows by 50,000 lines a second.

    python -m tests.bench.log_watch --out RESULT.json [--folder DIR]

``--folder`` needs as much room as the log. Each measurement runs in a process of its own; memory is its resident set before
the first byte and at its highest. Lines are those of a serving SGLang, access lines among them, and one in ten thousand is
an error with a number of its own. Exits 1 below 50,000 lines a second or above 32 MiB of growth.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_deploy.diagnose import follow_until_ready
from dflash_deploy.host.local import LocalHost

HEAD = b"[2026-01-05 10:00:01 TP0] Init torch distributed begin.\n"
DECODE = b"[2026-01-05 10:%02d:%02d TP0] Decode batch, #running-req: 12, #token: %d, accept len: 3.10, #queue-req: 0\n"
ACCESS = b'[2026-01-05 10:%02d:%02d] INFO:     10.0.0.7:%d - "POST /generate HTTP/1.1" 200 OK\n'
ERROR = b"[2026-01-05 10:59:59 TP0] ERROR request %d failed: timeout while reading\n"
PLENTY, MEMORY_MIB = 50_000, 32


def block(number: int, lines: int = 10_000) -> bytes:
    """So many lines of a serving log; the last one is an error."""
    rows = [
        (DECODE if at % 4 else ACCESS) % (number // 60 % 60, number % 60, (number * lines + at) % 60_000)
        for at in range(lines - 1)
    ]
    return b"".join(rows) + ERROR % number


def write_log(path: Path, size: int) -> int:
    """A log of at least ``size`` bytes; the number of its lines."""
    blocks = [block(number) for number in range(50)]
    written, lines = 0, 1
    with path.open("wb") as file:
        file.write(HEAD)
        while written < size:
            written += file.write(blocks[lines // 10_000 % len(blocks)])
            lines += 10_000
    return lines


def resident_mib(key: str = "VmRSS") -> float:
    """Of this process; ``VmHWM``: the highest so far."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return round(int(next(row for row in rows if row.startswith(key)).split()[1]) / 1024, 1)


def whole(path: Path) -> Callable[[], int]:
    """``diagnose FILE`` as the command does it."""
    from dflash_deploy.cli.diagnose import CHUNK, _stream

    def work() -> int:
        with path.open("rb") as file:
            return _stream(iter(lambda: file.read(CHUNK), b""), keep=True)[0].lines

    return work


def followed(path: Path, alive: Callable[[], bool]) -> Callable[[], int]:
    """As a start is watched: a file that may grow, until all its lines were seen."""

    def work() -> int:
        seen = [0]

        def ready() -> bool:
            return not alive() and path.stat().st_size == seen[0]

        host = LocalHost()
        stream = host.follow

        def counted(name: str, *, offset: int = 0, poll_s: float = 0.25) -> Any:
            for chunk in stream(name, offset=offset, poll_s=poll_s):
                seen[0] += len(chunk)
                yield chunk

        host.follow = counted  # type: ignore[method-assign]
        outcome = follow_until_ready(host, str(path), is_alive=lambda: True, ready=ready, probe_s=0.05, poll_s=0.02)
        assert outcome.ok, outcome
        return outcome.watcher.state.lines

    return work


def measured(work: Callable[[], int]) -> dict[str, Any]:
    before = resident_mib()
    began, cpu = time.monotonic(), time.process_time()
    lines = work()
    took = time.process_time() - cpu
    return {
        "lines": lines, "seconds": round(time.monotonic() - began, 2), "cpu_s": round(took, 2),
        "lines_per_cpu_s": round(lines / took), "rss_mib_before": before, "rss_mib_most": resident_mib("VmHWM"),
        "rss_mib_after": resident_mib(),
    }  # fmt: skip


def growing(path: Path, rate: int, seconds: float) -> dict[str, Any]:
    """A writer adds ``rate`` lines a second; how far behind is the watcher when the writer has ended?"""
    path.write_bytes(HEAD)
    blocks = [block(number, 1000) for number in range(20)]
    ended: list[float] = []

    def write() -> None:
        began, at = time.monotonic(), 0
        with path.open("ab", buffering=0) as file:
            while (now := time.monotonic() - began) < seconds:
                while at * 1000 < now * rate:
                    file.write(blocks[at % len(blocks)])
                    at += 1
                time.sleep(0.01)
        ended.append(time.monotonic())

    writer = threading.Thread(target=write)
    writer.start()
    found = measured(followed(path, writer.is_alive))
    late = time.monotonic() - ended[0]
    writer.join()
    return {**found, "asked_per_s": rate, "came_per_s": round(found["lines"] / seconds), "behind_s": round(late, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--bytes", type=int, default=2 << 30)
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "FILE"), help="one measurement, in this process")
    args = parser.parse_args()
    if args.one:
        what, path = args.one[0], Path(args.one[1])
        work = {"whole": lambda: measured(whole(path)), "followed": lambda: measured(followed(path, lambda: False)),
                "growing": lambda: growing(path, PLENTY, 20.0)}[what]  # fmt: skip
        print(json.dumps(work()))
        return 0
    if args.out is None:
        parser.error("--out is wanted")
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for name, size in (("small", 20_000_000), ("large", args.bytes)):
            log = Path(folder) / f"{name}.log"
            lines = write_log(log, size)
            for what in ("whole", "followed"):
                row = _one(what, log)
                assert row["lines"] == lines, (row, lines)
                result[f"{what}, {name}"] = {"bytes": log.stat().st_size, **row}
                print(f"{what}, {name}: {row}", file=sys.stderr, flush=True)
            log.unlink()
        result["growing"] = _one("growing", Path(folder) / "growing.log")
        print(f"growing: {result['growing']}", file=sys.stderr, flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    good = all(
        row["lines_per_cpu_s"] >= PLENTY and row["rss_mib_most"] - row["rss_mib_before"] <= MEMORY_MIB
        for row in result.values()
    )
    return 0 if good and result["growing"]["behind_s"] < 2 else 1


def _one(what: str, path: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.log_watch", "--one", what, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


if __name__ == "__main__":
    sys.exit(main())
