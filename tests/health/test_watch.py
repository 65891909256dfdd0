"""``health --watch`` through a pipe: each round is told when it is done, and what goes wrong between two rounds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.health.conftest import Standin


def rounds(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line == "}\n":
            yield json.loads("".join(lines))
            lines = []


def test_watch(standin: Standin, tmp_path: Path) -> None:
    settings = standin.settings
    command = [
        sys.executable, "-c", "from dflash_deploy.cli import main; main()", "health", "local", "--root", str(tmp_path),
        "--venv", settings.venv, "--stack", "cpu", "--port", str(settings.port), "--mode", "supervisor",
        "--model", "/m/target", "--draft-model", "/m/draft", "--level", "live", "--watch", "0.1", "--json",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        told = rounds(process)
        assert next(told)["ok"] and next(told)["ok"]
        standin.process.send_signal(signal.SIGSTOP)
        bad = next(report for report in told if not report["ok"])
        assert (bad["failed"], bad["exit_code"]) == ("process", 90)
        standin.process.send_signal(signal.SIGCONT)
        assert next(report for report in told if report["ok"])
        standin.process.kill()
        bad = next(report for report in told if not report["ok"])
        assert "nothing listens" in bad["rungs"][0]["evidence"][0]
    finally:
        process.kill()
        process.communicate()
