"""The same work on several hosts: order, bounds, errors beside each other."""

from __future__ import annotations

import threading
import time

import pytest

from dflash_deploy.errors import CommandFailed, ConnectError
from dflash_deploy.fleet import Outcome, across, worst


def test_outcomes_keep_the_order_and_errors_hide_nothing() -> None:
    def work(name: str) -> str:
        time.sleep({"a": 0.05, "b": 0.0, "c": 0.02}[name])
        if name == "b":
            raise ConnectError("no route")
        return name.upper()

    told: list[str] = []
    outcomes = across(["a", "b", "c"], work, on_done=lambda outcome: told.append(outcome.name))
    assert [outcome.value for outcome in outcomes] == ["A", None, "C"]
    assert [outcome.exit_code for outcome in outcomes] == [0, 3, 0]
    assert told == ["b", "c", "a"]
    assert worst(outcome.exit_code for outcome in outcomes) == 3
    assert all(0 <= outcome.seconds < 5 for outcome in outcomes)


def test_no_more_at_a_time_than_asked() -> None:
    running = most = 0
    lock = threading.Lock()

    def work(name: str) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    assert len(across([str(i) for i in range(20)], work, parallel=3)) == 20
    assert most == 3


def test_a_fault_of_ours_is_raised_and_stops_the_rest() -> None:
    seen: list[str] = []

    def work(name: str) -> None:
        seen.append(name)
        raise ZeroDivisionError(name)

    with pytest.raises(ZeroDivisionError):
        across([str(i) for i in range(50)], work, parallel=2)
    assert len(seen) < 5


def test_an_interrupt_while_reporting_does_not_wait_for_hosts_that_hang() -> None:
    release = threading.Event()

    def work(name: str) -> None:
        if name == "hangs":
            release.wait(30)

    def told(outcome: Outcome[None]) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        across(["hangs", "answers"], work, on_done=told)
    assert time.monotonic() - began < 5
    release.set()


def test_nobody_is_no_work() -> None:
    assert across([], lambda name: 1) == []
    assert worst([]) == 0


def test_exit_codes_of_a_mixed_fleet() -> None:
    outcome: Outcome[int] = Outcome("a", 0.0, error=CommandFailed("x"))
    assert not outcome.ok
    assert worst([0, outcome.exit_code, 3]) == 4
