"""Waiting for a start: ready, fatal, exited, stalled; on a real growing file, rotated and truncated on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_deploy.diagnose import (
    STALL_LIMITS,
    Event,
    Outcome,
    Phase,
    follow_until_ready,
    learned_limits,
    read_starts,
    record_start,
)
from dflash_deploy.host.local import LocalHost

BEGIN = "[2026-01-05 10:00:01] Init torch distributed begin.\n"
FATAL = (
    "[2026-01-05 10:00:02 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "a.py", line 1, in f\n    g()\nOSError: no such drafter\n'
    "[2026-01-05 10:00:02] Received sigquit from a child process. It usually means the child failed.\n"
)


def follow(log: Path, write: Callable[[], None], **more: object) -> tuple[Outcome, list[Event]]:
    events: list[Event] = []
    arguments: dict[str, object] = {
        "is_alive": lambda: True,
        "ready": lambda: False,
        "probe_s": 0.1,
        "poll_s": 0.05,
        **more,
    }
    writer = threading.Thread(target=write)
    writer.start()
    try:
        return follow_until_ready(LocalHost(name="local"), str(log), on_event=events.append, **arguments), events  # type: ignore[arg-type]
    finally:
        writer.join()


def test_stops_at_the_first_fatal_line(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    log.write_text(BEGIN)

    def write() -> None:
        time.sleep(0.3)
        with log.open("a") as file:
            file.write(FATAL)

    began = time.monotonic()
    outcome, events = follow(log, write)
    assert (outcome.kind, outcome.detail, outcome.ok) == ("fatal", "OSError: no such drafter", False)
    assert time.monotonic() - began < 5
    assert [e.kind for e in events if e.kind in ("phase", "exception", "fatal")] == ["phase", "exception", "fatal"]
    assert outcome.watcher.state.first_errors["TP0"].exception == outcome.detail


def test_ready_across_rotation_and_truncation(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    log.write_text(BEGIN)
    done = threading.Event()

    def write() -> None:
        time.sleep(0.3)
        log.rename(tmp_path / "s.log.1")
        log.write_text("[2026-01-05 10:00:03] Load weight begin. avail mem=1 GB\n")
        time.sleep(0.3)
        log.write_text("")
        time.sleep(0.3)
        with log.open("a") as file:
            file.write("[2026-01-05 10:00:04] The server is fired up and ready to roll!\n")
        time.sleep(0.2)
        done.set()

    outcome, events = follow(log, write, ready=done.is_set)
    assert outcome.ok and outcome.phase is Phase.READY
    assert [e.phase for e in events if e.kind == "phase"] == [Phase.DIST_INIT, Phase.WEIGHTS, Phase.READY]
    assert set(outcome.phases) >= {"dist-init", "weights"}


def test_exit_tells_the_first_exception(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    log.write_text("Traceback (most recent call last):\n  File 'x'\nModuleNotFoundError: No module named 'orjson'\n")
    outcome, _ = follow(log, lambda: None, is_alive=lambda: False)
    assert outcome.kind == "exited" and outcome.detail.endswith("No module named 'orjson'")


@pytest.mark.parametrize("chatty", [False, True])
def test_only_silence_stalls(tmp_path: Path, chatty: bool) -> None:
    log = tmp_path / "s.log"
    log.write_text(BEGIN)
    done = threading.Event()

    def write() -> None:
        for i in range(12):
            time.sleep(0.15)
            if chatty:
                with log.open("a") as file:
                    file.write(f"step {i}\n")
            else:
                with log.open("a") as file:  # a probe's own access line is no progress
                    file.write('INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 503 Service Unavailable\n')
        done.set()

    outcome, _ = follow(log, write, ready=done.is_set, limits={**STALL_LIMITS, Phase.DIST_INIT: 0.9})
    assert outcome.kind == ("ready" if chatty else "stalled"), outcome.detail
    if not chatty:
        assert "stalled in phase dist-init" in outcome.detail


def test_limits_learn_from_earlier_starts(tmp_path: Path) -> None:
    """Stored on the host; starts of something else, failed ones and torn lines teach nothing."""
    host, store = LocalHost(name="local"), str(tmp_path / "starts.jsonl")
    log = tmp_path / "s.log"
    log.write_text(BEGIN)

    def write() -> None:
        time.sleep(1.0)
        with log.open("a") as file:
            file.write("[2026-01-05 10:00:03] Load weight begin. avail mem=1 GB\n")

    outcome, _ = follow(log, write, ready=lambda: "weight" in log.read_text())
    assert outcome.ok and 0.8 < outcome.silences["dist-init"] < 2.0, outcome.silences
    record_start(host, store, "a", outcome)
    record_start(host, store, "b", replace(outcome, silences={"weights": 1000.0, "dist-init": 100.0}))
    record_start(host, store, "b", replace(outcome, kind="stalled", silences={"weights": 9000.0}))
    with Path(store).open("a") as file:
        file.write('{"event": "sta')
    taught = learned_limits(read_starts(host, store, "a"))
    assert taught[Phase.DIST_INIT] == STALL_LIMITS[Phase.DIST_INIT] / 3 and taught[Phase.GRAPHS] == 1800
    taught = learned_limits(read_starts(host, store, "b"))
    assert taught[Phase.WEIGHTS] == 10_000 and taught[Phase.DIST_INIT] == 1000
    assert learned_limits(read_starts(host, str(tmp_path / "none"), "a")) == STALL_LIMITS


def test_what_the_host_shows_ends_a_start(tmp_path: Path) -> None:
    """Seen twice it is believed; seen once it may have passed."""
    log = tmp_path / "s.log"
    log.write_text(BEGIN)
    looks = iter(
        [["kernel: Out of memory: Killed process 1 (python)"], [], *[["no space left on device: /l is full"]] * 9]
    )
    outcome, events = follow(log, lambda: None, look=lambda: next(looks), look_s=0.1)
    assert (outcome.kind, outcome.detail) == ("fatal", "no space left on device: /l is full")
    assert list(outcome.watcher.state.matches) == ["disk-full"] and events[-1].text == "disk-full"
