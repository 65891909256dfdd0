"""What a person sees: the commands in a real terminal (tmux) of 80 and of 140 columns, with and without colour."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.health.conftest import Standin, standin

__all__ = ["standin"]  # the fixture

TMUX = shutil.which("tmux")
pytestmark = pytest.mark.skipif(TMUX is None, reason="no tmux here: apt-get install tmux")
COMMAND = f"{shlex.quote(sys.executable)} -c 'from dflash_deploy.cli import main; main()'"
NUMBERS = itertools.count()
COLOURS = r"\x1b\[(?:\d;)*3[1-7]m"
LOG = (
    "[2026-01-05 10:00:01 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "a.py", line 1, in f\n    g()\n'
    "ValueError: Not enough memory. Please try to increase --mem-fraction-static. Current value: 0.62, and a line "
    "that is much longer than any terminal is wide, so that it has to be wrapped somewhere\n"
    "[2026-01-05 10:00:02] Received sigquit from a child process. It usually means the child failed.\n"
)


@dataclass
class Terminal:
    """One tmux session of a width."""

    name: str
    width: int

    def run(self, line: str, wait_for: str, *, colour: bool = True, seconds: float = 60) -> tuple[str, str]:
        """(text, text with escapes) of the screen once ``wait_for`` is on it."""
        colours = "" if colour else "NO_COLOR=1 "
        script = f"{colours}PS1= {line}; echo END-OF-IT; sleep 300"
        assert TMUX is not None
        base = [TMUX, "-L", self.name, "-f", "/dev/null"]
        environ = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        subprocess.run(
            [*base, "new-session", "-d", "-x", str(self.width), "-y", "70", "sh", "-c", script], check=True, env=environ
        )
        try:
            limit = time.monotonic() + seconds
            while True:
                plain = subprocess.run([*base, "capture-pane", "-p"], capture_output=True, text=True).stdout
                if wait_for in plain:
                    break
                assert time.monotonic() < limit, plain
                time.sleep(0.3)
            coloured = subprocess.run([*base, "capture-pane", "-e", "-p"], capture_output=True, text=True).stdout
        finally:
            subprocess.run([*base, "kill-server"], capture_output=True)
        return plain, coloured


@pytest.fixture(params=[80, 140])
def terminal(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    name = f"dflash-{os.getpid()}-{next(NUMBERS)}"
    yield Terminal(name, request.param)
    subprocess.run([str(TMUX), "-L", name, "kill-server"], capture_output=True)


def keep(name: str, text: str) -> None:
    """For whoever wants to look: a folder in ``DFLASH_KEEP_SCREENSHOTS``."""
    if folder := os.environ.get("DFLASH_KEEP_SCREENSHOTS"):
        Path(folder, name).write_text(text)


def broken_words(plain: str, width: int) -> list[str]:
    """Lines that fill the terminal and go on in the middle of a word at the next line's start."""
    lines = plain.splitlines()
    return [
        line
        for line, after in itertools.pairwise(lines)
        if len(line) >= width and line[-1:].isalnum() and after[:1].isalnum()
    ]


@pytest.mark.parametrize("colour", [True, False])
def test_diagnose(terminal: Terminal, tmp_path: Path, colour: bool) -> None:
    log = tmp_path / "s.log"
    log.write_text(LOG)
    plain, coloured = terminal.run(f"{COMMAND} diagnose {log}", "END-OF-IT", colour=colour)
    keep(f"diagnose-{terminal.width}-{'colour' if colour else 'plain'}.txt", coloured)
    assert "PRIMARY   memory-fraction-unworkable" in plain and not broken_words(plain, terminal.width)
    assert all(re.match(r"(\S.*|\s{10}\S.*|\s*)$", line) for line in plain.splitlines()), plain
    assert bool(re.search(COLOURS, coloured)) == colour


@pytest.mark.parametrize("colour", [True, False])
def test_health(terminal: Terminal, standin: Standin, tmp_path: Path, colour: bool) -> None:
    standin.mode("garbage")
    root = (
        f"--root {tmp_path} --venv {standin.settings.venv} --stack cpu --port {standin.settings.port} --mode supervisor"
    )
    line = f"{COMMAND} health local {root} --model /m/target --draft-model /m/draft --algorithm DFLASH"
    line += " --prompt 'The opposite of hot is' --expect cold. --level generate"
    plain, coloured = terminal.run(line, "END-OF-IT", colour=colour)
    keep(f"health-{terminal.width}-{'colour' if colour else 'plain'}.txt", coloured)
    # The stand-in has another grammar backend than the stack plans: the first rung that does not hold is told.
    assert "NOT healthy" in plain and "FAILED   arguments" in plain and "not run  completion" in plain
    assert not broken_words(plain, terminal.width)
    assert bool(re.search(COLOURS, coloured)) == colour


def test_watch(terminal: Terminal, standin: Standin, tmp_path: Path) -> None:
    """A live table, in its place, and a second round in it."""
    root = (
        f"--root {tmp_path} --venv {standin.settings.venv} --stack cpu --port {standin.settings.port} --mode supervisor"
    )
    line = f"{COMMAND} health local {root} --model /m/target --draft-model /m/draft --level live --watch 0.5"
    plain, coloured = terminal.run(line, "..")
    keep(f"watch-{terminal.width}.txt", coloured)
    assert plain.count("health at") == 1 and "process" in plain and "rounds" in plain
    assert max(len(row) for row in plain.splitlines()) <= terminal.width
