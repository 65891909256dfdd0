"""Each state of a server, and the rung that must name it."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace

import pytest

from dflash_deploy.errors import UsageError
from dflash_deploy.health import (
    HealthReport,
    Level,
    NoReply,
    Options,
    Probe,
    RungStatus,
    check,
    is_ready,
    prometheus,
    record,
    stream_completion,
)  # fmt: skip
from dflash_deploy.health import ladder as ladder_module
from tests.diagnose.reports import reports
from tests.health.conftest import Standin

PROBE = Probe("The opposite of hot is", 12, "cold.")
REPORTS = [report for report in reports() if "state" in report]
OPTIONS = Options(probes=(PROBE,), timeout_s=2.0)


def climb(server: Standin, level: Level = Level.SPEC, options: Options = OPTIONS) -> HealthReport:
    return check(server.host, server.settings, level, options=options)


def test_healthy(standin: Standin) -> None:
    seen = []
    report = check(standin.host, standin.settings, Level.SPEC, seen.append, options=OPTIONS)
    assert report.ok, report.as_dict()
    assert report.data["acceptance_length"] == 3.0 and report.data["acceptance_by_position"] == [1.0, 0.75, 0.25]
    assert [r.name for r in seen] == [
        "process",
        "host",
        "health",
        "arguments",
        "patches",
        "completion",
        "concurrent",
        "requests",
        "speculation",
    ]
    assert json.loads(json.dumps(report.as_dict()))["failed"] is None
    assert 'dflash_healthy{host="local",level="spec"} 1' in prometheus((report,))


@pytest.mark.parametrize(
    ("mode", "rung", "diagnosis"),
    [
        ("starting", "health", "models-endpoint-is-not-readiness"),
        ("auth", "health", "api-key-needed"),
        ("not-http", "health", ""),
        ("drift", "arguments", "stale-configuration"),
        ("garbage", "completion", "wrong-answers"),
        ("repeat", "completion", "speculation-output-degenerate"),
        ("crash", "completion", ""),
        ("collapsed", "speculation", "acceptance-collapsed"),
        ("decay", "speculation", "acceptance-window-decay"),
        ("ignored-mask", "speculation", "tree-mask-ignored"),
        ("no-spec", "speculation", ""),
        ("ignores-stop", "requests", "wrong-answers"),
        ("ignores-grammar", "requests", "wrong-answers"),
    ],
)
def test_state_is_named(standin: Standin, mode: str, rung: str, diagnosis: str) -> None:
    if mode == "ignored-mask":
        standin.patched()
        standin.settings = replace(standin.settings, algorithm="DDTREE")
    standin.mode(mode)
    report = climb(standin)
    assert not report.ok and report.failed is not None
    assert (report.failed.name, report.failed.diagnosis) == (rung, diagnosis), report.failed
    if mode == "ignored-mask":
        assert "tree mask is ignored" in report.failed.evidence[0]
    assert report.failed.status is (RungStatus.STARTING if mode == "starting" else RungStatus.FAILED)
    later = report.rungs[[r.name for r in report.rungs].index(rung) + 1 :]
    assert all(r.status is RungStatus.NOT_RUN for r in later)


@pytest.mark.parametrize("report", REPORTS, ids=[r["ref"] for r in REPORTS])
def test_reported_state(standin: Standin, report: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The state that a public report describes is named as its cause."""
    monkeypatch.setattr(ladder_module, "HEALTH_TIMEOUT_S", 1.0)
    if report["state"] == "shifted":
        assert climb(standin).ok  # the release before it, whose figures are kept
    standin.mode(report["state"])
    failed = climb(standin).failed
    assert failed and failed.diagnosis == report["want"], failed


def test_key_opens_the_door(standin: Standin) -> None:
    standin.mode("auth")
    assert climb(standin, Level.READY, replace(OPTIONS, key="right")).ok


def test_hang_is_found_by_deadline(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder_module, "HEALTH_TIMEOUT_S", 1.0)
    standin.mode("hang")
    began = time.monotonic()
    report = climb(standin, Level.READY)
    assert time.monotonic() - began < 10
    assert report.failed and report.failed.diagnosis == "scheduler-not-progressing"


def test_stopped_process(standin: Standin) -> None:
    os.kill(standin.process.pid, signal.SIGSTOP)
    try:
        time.sleep(0.2)
        report = climb(standin, Level.LIVE)
    finally:
        os.kill(standin.process.pid, signal.SIGCONT)
    assert report.failed and report.failed.name == "process" and "stopped" in report.failed.evidence[0]
    assert report.failed.diagnosis == "scheduler-not-progressing"


def test_dead_process(standin: Standin) -> None:
    standin.process.kill()
    standin.process.wait()
    report = climb(standin, Level.LIVE)
    assert report.failed and "nothing listens" in report.failed.evidence[0]
    assert not is_ready(f"http://127.0.0.1:{standin.settings.port}")


def test_foreign_owner(standin: Standin) -> None:
    report = check(standin.host, replace(standin.settings, venv="/elsewhere/venv"), Level.LIVE)
    assert report.failed and report.failed.diagnosis == "port-in-use"


def test_patch_manifest(standin: Standin) -> None:
    standin.settings = replace(standin.settings, stack=replace(standin.settings.stack, patch_sets=("ddtree",)))
    report = climb(standin, Level.READY)
    assert report.failed and (report.failed.name, report.failed.diagnosis) == ("patches", "patches-missing")
    target = standin.patched()
    assert climb(standin, Level.READY).ok
    target.write_bytes(b"x = 2\n")
    report = climb(standin, Level.READY)
    assert report.failed and report.failed.evidence == ("patch manifest: sglang/x.py differs",)
    target.unlink()
    report = climb(standin, Level.READY)
    assert report.failed and report.failed.evidence == ("patch manifest: sglang/x.py is missing",)


def test_baseline_is_kept(standin: Standin) -> None:
    assert climb(standin).ok
    standin.mode("collapsed")
    report = climb(standin, options=replace(OPTIONS, min_acceptance=0.5))
    assert report.failed and "recorded for sglang-0.5.16-cpu: 3.00" in report.failed.evidence[0]


def test_lossless(standin: Standin) -> None:
    with pytest.raises(UsageError):
        climb(standin, Level.LOSSLESS)
    rows = record(standin.host, standin.settings, [PROBE])
    assert rows == [{"prompt": PROBE.prompt, "max_tokens": 12, "text": " cold.", "speculative_tokens": True}]
    same = replace(OPTIONS, reference=(Probe(PROBE.prompt, 12, " cold."),))
    assert climb(standin, Level.LOSSLESS, same).ok
    other = replace(OPTIONS, reference=(Probe(PROBE.prompt, 12, " coal."),))
    report = climb(standin, Level.LOSSLESS, other)
    assert report.failed and (report.failed.name, report.failed.diagnosis) == ("lossless", "wrong-answers")


def test_soak(standin: Standin) -> None:
    report = climb(standin, Level.SOAK, replace(OPTIONS, soak_s=1.0))
    assert report.ok and report.data["soak"]["requests"] >= 4


def test_a_watch_asks_for_few_tokens(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    """/health is asked again after a while, after a fault, and of other processes; the scheduler is asked each time."""
    first = climb(standin, Level.READY)
    standin.mode("hang")
    monkeypatch.setattr(ladder_module, "HEALTH_TIMEOUT_S", 1.0)
    report = check(standin.host, standin.settings, Level.READY, options=OPTIONS, before=first)
    assert report.failed and (report.failed.name, report.failed.diagnosis) == ("arguments", "scheduler-not-progressing")
    standin.mode("starting")
    assert check(standin.host, standin.settings, Level.READY, options=OPTIONS, before=first).ok
    assert not check(standin.host, standin.settings, Level.READY, options=OPTIONS, before=report).ok
    other = replace(first, data={**first.data, "processes": [{"pid": 1}]})
    assert not check(standin.host, standin.settings, Level.READY, options=OPTIONS, before=other).ok
    monkeypatch.setattr(ladder_module, "HEALTH_EVERY_S", 0.0)
    assert not check(standin.host, standin.settings, Level.READY, options=OPTIONS, before=first).ok


def test_a_thousand_probes_never_lie(standin: Standin) -> None:
    base = f"http://127.0.0.1:{standin.settings.port}"
    assert all(is_ready(base) for _ in range(1000))


def test_stream(standin: Standin) -> None:
    base = f"http://127.0.0.1:{standin.settings.port}"
    assert list(stream_completion(base, "The opposite of hot is")) == [" co", "ld."]
    standin.mode("crash")
    with pytest.raises(NoReply):
        list(stream_completion(base, "x"))
