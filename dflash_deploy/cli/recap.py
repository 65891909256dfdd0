"""What the steps of a command came to: one line each, printed in the end, also after a failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dflash_deploy.cli.common import emit_json, talk
from dflash_deploy.cli.deployment import Deployment
from dflash_deploy.errors import DflashError
from dflash_deploy.model import Plan, Status, StepOutcome

if TYPE_CHECKING:
    from dflash_deploy.execute import Progress
    from dflash_deploy.health import HealthReport


class Note:
    """What a step says of itself while it runs."""

    def __init__(self) -> None:
        self.status = Status.OK
        self.detail = ""


class Recap:
    """Collects one line per step; prints them in the end, also after a failure."""

    def __init__(self) -> None:
        self.outcomes: list[StepOutcome] = []
        self.data: dict[str, Any] = {}
        self.lines: list[str] = []

    @contextmanager
    def step(self, name: str) -> Iterator[Note]:
        """Time a step and take its outcome; a failure is a line too."""
        note, began = Note(), time.monotonic()
        talk(f"{name} ...")
        try:
            yield note
        except BaseException as error:
            detail = error.message if isinstance(error, DflashError) else type(error).__name__
            self.outcomes.append(StepOutcome(name, Status.FAILED, detail, time.monotonic() - began))
            raise
        self.outcomes.append(StepOutcome(name, note.status, note.detail, time.monotonic() - began))

    def run(self, here: Deployment, make: Callable[[], Plan]) -> bool:
        """Make one plan and execute it. True when it changed something."""
        from dflash_deploy.execute import execute

        # The plan's name is known only afterwards; every plan of ours is named like the step.
        planned = make()
        with self.step(planned.name) as note:
            outcomes = execute(planned, here.host, journal=here.journal, on_progress=tell)
            changed = any(outcome.status == Status.CHANGED for outcome in outcomes)
            note.status = Status.CHANGED if changed else Status.OK
            note.detail = planned.reason
        return changed

    @contextmanager
    def printed(self, host: str, as_json: bool) -> Iterator[None]:
        """Print the recap when the steps are over, whatever became of them."""
        failed: DflashError | None = None
        try:
            yield
        except DflashError as error:
            failed = error
            raise
        finally:
            if as_json and failed is None and self.outcomes:
                emit_json(
                    {
                        "ok": all(o.status != Status.FAILED for o in self.outcomes),
                        "host": host,
                        "changed": any(o.status == Status.CHANGED for o in self.outcomes),
                        "steps": [
                            {
                                "name": o.name,
                                "status": str(o.status),
                                "detail": o.detail,
                                "seconds": round(o.seconds, 3),
                            }
                            for o in self.outcomes
                        ],
                        **self.data,
                    }
                )
            else:
                self._table(host, failed is not None)
                if not as_json:
                    for line in self.lines:
                        print(line)

    def _table(self, host: str, failed: bool) -> None:
        if not self.outcomes:
            return
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        styles = {Status.OK: "green", Status.CHANGED: "yellow", Status.SKIPPED: "cyan", Status.FAILED: "bold red"}
        title = f"recap of {host}"
        table = Table("step", "status", title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("seconds", justify="right")
        table.add_column("detail", overflow="fold")  # A path's end says the most.
        for each in self.outcomes:
            status = Text(str(each.status), style=styles[each.status])
            table.add_row(each.name, status, f"{each.seconds:.1f}", Text(each.detail))
        console = Console(stderr=True)
        console.print(table)
        changed = sum(o.status == Status.CHANGED for o in self.outcomes)
        if not failed:
            console.print(
                f"{changed} of {len(self.outcomes)} steps changed something" if changed else "nothing changed",
                highlight=False,
            )

    def show_health(self, report: HealthReport) -> None:
        """The proof, for people: URL, the completion, acceptance."""
        self.lines += health_lines(self.data["url"], report.data)


QUIET = ("{", "Requirement already satisfied", "WARNING: Location", "Looking in", "Obtaining dependency information")
"""Lines of installers that tell a person nothing."""


def tell(news: Progress) -> None:
    """A step's progress as lines on stderr."""
    mark = f"  [{news.step}/{news.steps}]"
    if news.outcome is not None:
        talk(f"{mark} {news.title}: {news.outcome.status} ({news.outcome.seconds:.1f} s)")
    elif news.line and not news.line.lstrip().startswith(QUIET):
        talk(f"{mark}   {news.line[:160]}")
    elif not news.line:
        talk(f"{mark} {news.title}")


def health_lines(url: str, data: Mapping[str, Any]) -> list[str]:
    """The lines that end ``up``."""
    lines = [f"url: {url}"]
    if data.get("completion"):
        lines.append(f"completion: {data['completion']!r}")
    if data.get("acceptance_length") is not None:
        lines.append(
            f"acceptance length: {data['acceptance_length']:.2f} tokens a step, {data.get('verify_steps')} steps"
        )
    histogram = data.get("acceptance_histogram") or []
    if histogram:
        peak = max(histogram) or 1
        lines.append("accepted drafts a step:")
        lines += [f"  {depth:>3} {count:>6} {'#' * round(40 * count / peak)}" for depth, count in enumerate(histogram)]
    positions = data.get("acceptance_by_position") or []
    if positions:
        lines.append(
            "accepted at each position: " + " ".join(f"{depth}:{share:.0%}" for depth, share in enumerate(positions, 1))
        )
    return lines
