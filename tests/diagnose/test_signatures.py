"""Logs as files, causes as answers; reports worded differently from the table's own examples as well."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dflash_deploy.audit.rules import RULES
from dflash_deploy.diagnose import by_id, diagnose, make_bundle, redact, table
from dflash_deploy.diagnose.bundle import environment
from dflash_deploy.diagnose.signatures import KINDS
from tests.diagnose.reports import DATA, reports

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "diagnose" / "cases.jsonl").read_text("utf-8").splitlines()
]

LOGS = [report for report in reports() if "log" in report]


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{c['want']}" for i, c in enumerate(CASES)])
@pytest.mark.parametrize("thorough", [True, False])
def test_primary_cause(case: dict[str, Any], thorough: bool) -> None:
    found = diagnose(case["log"].encode(), thorough=thorough)
    if not thorough and case.get("report"):
        return  # a verdict of ours or a person's words, never a line of a log
    assert (found.primary.id if found.primary else None) == case["want"]


@pytest.mark.parametrize("report", LOGS, ids=[r.get("ref", "") or f"{i}-{r['want']}" for i, r in enumerate(LOGS)])
def test_reported_log(report: dict[str, Any]) -> None:
    """Alone, and at the end of a real start's log."""
    log = report["log"].encode()
    start = (DATA / "cpu-0.5.16-ready.log").read_bytes().partition(b"Load weight end")[0].rpartition(b"\n")[0] + b"\n"
    for text in (log,) if report.get("words") else (log, start + log):
        for thorough in (True,) if report.get("words") else (True, False):
            found = diagnose(text, thorough=thorough)
            named = found.primary.id if found.primary else ""
            assert named == report["want"], (thorough, [c.id for c in found.others])


def test_table_is_sound() -> None:
    assert len({s.id for s in table()}) == len(table())
    for s in table():
        assert not s.rule or s.rule in RULES, s.id
        assert s.kind in KINDS and s.where in ("host", "container", "venv", "model", "service"), s.id
        assert re.fullmatch(r"[a-z0-9-]+", s.id) and s.title and s.cause and s.next, s.id
        assert not any(p.search("") for p in s.patterns), s.id
    with pytest.raises(KeyError):
        by_id("no-such-thing")


def test_unknown_failure_gives_the_first_exception() -> None:
    log = (
        b"[2026-01-05 10:00:01 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        b'  File "a.py", line 1, in f\n    g()\nQuirkError: the flux is off\n'
        b"[2026-01-05 10:00:02 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        b'  File "a.py", line 1, in f\n    g()\nOtherError: consequence\n'
    )
    found = diagnose(log)
    assert found.primary is None and found.failed
    assert [(e.rank, e.exception) for e in found.first_errors] == [
        ("TP1", "QuirkError: the flux is off"),
        ("TP0", "OtherError: consequence"),
    ]
    log += (
        b"\nDuring handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):\n"
    )
    log += b'  File "a.py", line 1, in f\n    g()\nThirdError: of the same rank\n'
    log += b"[2026-01-05 10:00:02] Received sigquit from a child process. It usually means the child failed.\n"
    for thorough in (True, False):
        told = diagnose(log, thorough=thorough)
        assert told.primary is None and [c.id for c in told.others] == ["child-failed"]
        assert told.first_errors == found.first_errors


def test_bundle_holds_no_secret() -> None:
    secret = "hf_" + "a1B2c3D4e5F6g7H8i9J0"
    log = f"--api-key s3cr3tvalue {secret} HF_TOKEN={secret} http://bob:pa55word@proxy:3128 max_total_tokens=4096\n"
    log += "the client said: open sesame\n"
    shown, hidden = environment('# x\nCUDA_VISIBLE_DEVICES="0"\nDOOR="open sesame"\nSGLANG_API_KEY="k2k2k2"\n')
    assert hidden == ("open sesame", "k2k2k2") and "sesame" not in shown and 'CUDA_VISIBLE_DEVICES="0"' in shown
    parts = {"settings.json": {"api_key": "s3cr3tvalue", "port": 1, "argv": ["--api-key", "4n0th3r"]}, "env": shown}
    data = make_bundle(log.encode(), parts, hidden)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        text = "".join((tar.extractfile(m) or io.BytesIO()).read().decode() for m in tar.getmembers())
    for gone in ("s3cr3tvalue", secret, "pa55word", "4n0th3r", "open sesame", "k2k2k2"):
        assert gone not in text
    assert "max_total_tokens=4096" in redact(log) and '"port": 1' in text
    assert redact("--api-key-env NAME --tokenizer-path /m") == "--api-key-env NAME --tokenizer-path /m"


def test_a_server_that_was_told_to_end() -> None:
    """An optional module was missing, it served, SIGTERM ended it: nothing failed. What comes after ready counts."""
    served = (
        b"ModuleNotFoundError: No module named 'openai_harmony'\n"
        b"[2026-01-05 10:00:12] The server is fired up and ready to roll!\n"
        b"[2026-01-05 10:00:30] DFLASH speculative decoding does not support return_logprob yet., self.rid='a9'\n"
    )
    ended = (
        b"[2026-01-05 10:01:10] Subprocess scheduler_0 (pid=21059) crashed with exit code -15. Triggering SIGQUIT\n"
        b"[2026-01-05 10:01:10] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n"
    )
    for thorough in (True, False):
        assert not diagnose(served + ended, thorough=thorough).failed
        found = diagnose(served + ended.replace(b"-15", b"-9"), thorough=thorough)
        assert found.primary and found.primary.id == "child-killed"
        again = served + b"ModuleNotFoundError: No module named 'openai_harmony'\n"
        found = diagnose(again, thorough=thorough)
        assert found.primary and found.primary.id == "package-missing"


def test_earlier_starts_are_told() -> None:
    """A crash, a restart by the runner, and a healthy server after it: the crash is not forgotten."""
    log = (
        b"[serve 2026-01-05 10:00:00] start: python\n"
        b"[2026-01-05 10:00:01] Scheduler hit an exception: Traceback (most recent call last):\n"
        b'  File "a.py", line 1, in f\n    g()\nOSError: [Errno 28] No space left on device\n'
        b"[serve 2026-01-05 10:00:03] ended with -3\n[serve 2026-01-05 10:00:08] start: python\n"
        b"[2026-01-05 10:00:12] The server is fired up and ready to roll!\n"
    )
    for thorough in (True, False):
        found = diagnose(log, thorough=thorough)
        assert not found.failed and found.starts == 2
        assert [c.id if c else None for c in found.earlier] == ["disk-full"]
    gate = b"[serve 2026-01-05 10:00:00] not started: port 30000 is in use by pid 7: python3 -m http.server\n"
    found = diagnose(log + gate, thorough=False)
    assert found.primary and found.primary.id == "port-in-use"
