"""One command on several hosts, each in a process of its own: run them all, and tell what came of it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from dflash_deploy import fleet
from dflash_deploy.cli.common import emit_json
from dflash_deploy.cli.deployment import talk
from dflash_deploy.errors import DflashError
from dflash_deploy.fleet import Outcome
from dflash_deploy.host.local import LocalHost

DEADLINE_S = 24 * 3600.0


@dataclass(frozen=True)
class Ran:
    """What one host's process said."""

    exit_code: int
    answer: dict[str, Any]
    """Its JSON document; empty when it printed none."""
    tail: tuple[str, ...] = ()
    """The last lines of its talk."""

    @property
    def changed(self) -> bool:
        return bool(self.answer.get("changed") or self.answer.get("changes"))

    @property
    def detail(self) -> str:
        """One line for the recap."""
        error = self.answer.get("error")
        if isinstance(error, dict):
            return str(error.get("message"))
        if self.exit_code not in (0, 10):
            return (self.tail or ("no answer",))[-1]
        steps = self.answer.get("steps") or [{}]
        return str(self.answer.get("url") or steps[-1].get("detail") or self.answer.get("release") or "")


class Failed(DflashError):
    """A host's own command failed; carries its exit code."""

    def __init__(self, ran: Ran) -> None:
        error = ran.answer.get("error")
        about = error if isinstance(error, dict) else {}
        super().__init__(
            ran.detail or f"exit {ran.exit_code}",
            evidence=[str(line) for line in about.get("evidence") or ran.tail[-3:]],
            hint=str(about.get("hint") or ""),
        )
        self.exit_code = ran.exit_code
        self.ran = ran


def run_all(
    command: str, names: Sequence[str], options: Sequence[str], *, parallel: int, stop: bool, as_json: bool
) -> None:
    """Run ``command`` on every host and print one recap.

    Args:
        stop: at the first failure; the hosts after it are not begun.

    Raises:
        typer.Exit: with the highest exit code of the hosts, when it is not 0.
    """
    cancelled = threading.Event()
    here = LocalHost(cancelled=cancelled)
    # As this process was started, whatever way that was; in its folder, where hosts.toml may lie.
    start = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]]
    talk(f"{command} on {len(names)} hosts, {min(parallel, len(names))} at a time ...")
    failed = threading.Event()

    def one(name: str) -> Ran | None:
        if stop and failed.is_set():
            return None
        tail: list[str] = []

        def heard(stream: str, text: str) -> None:
            if stream == "stderr" and text.strip():
                tail.append(text.rstrip())
                del tail[:-20]
                if text.endswith(" ...") and not text.startswith(" "):
                    talk(f"  {name}: {text}")

        words = [*start, command, name, *options, "--json"]
        inside = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()), *words]
        result = here.run(inside, timeout_s=DEADLINE_S, on_line=heard)
        try:
            answer = json.loads(result.out)
        except ValueError:
            answer = {}
        ran = Ran(result.exit_code, answer if isinstance(answer, dict) else {}, tuple(tail))
        if ran.exit_code not in (0, 10):
            failed.set()
            raise Failed(ran)
        return ran

    count = 0

    def told(outcome: Outcome[Ran | None]) -> None:
        nonlocal count
        count += 1
        if outcome.ok and outcome.value is None:
            return
        said = f"failed: {outcome.error.message}" if outcome.error else "done"
        talk(f"{count}/{len(names)} {outcome.name}: {said} ({outcome.seconds:.1f} s)")

    try:
        outcomes = fleet.across(list(names), one, parallel=parallel, on_done=told)
    except BaseException:
        # Their processes are ended, and given a moment to let go of the hosts' locks.
        cancelled.set()
        here.wait_idle(5.0)
        raise
    report(command, outcomes, as_json)


def report(command: str, outcomes: Sequence[Outcome[Ran | None]], as_json: bool) -> None:
    """The recap, and the exit code.

    Raises:
        typer.Exit: when it is not 0.
    """
    codes = [o.value.exit_code if o.value is not None else o.exit_code for o in outcomes]
    code = fleet.worst(codes)
    rows = []
    for outcome, own in zip(outcomes, codes, strict=True):
        begun = outcome.value is not None or outcome.error is not None
        status = "not begun" if not begun else "failed" if outcome.error else "ok"
        if outcome.value is not None and outcome.value.changed:
            status = "changes" if own == 10 else "changed"
        row: dict[str, Any] = {"host": outcome.name, "status": status, "exit_code": own,
                               "seconds": round(outcome.seconds, 3)}  # fmt: skip
        if outcome.error is not None:
            row["error"] = outcome.error.as_dict() | {"exit_code": own}
        elif outcome.value is not None:
            row["answer"] = outcome.value.answer
            row["detail"] = outcome.value.detail
        rows.append(row)
    done = sum(row["status"] not in ("failed", "not begun") for row in rows)
    if as_json:
        emit_json({"ok": code == 0, "command": command, "exit_code": code, "done": done, "hosts": rows})
    else:
        from dflash_deploy.render import print_hosts

        print_hosts(command, rows)
    if code:
        raise typer.Exit(code)
