"""Waiting for a start, shown phase by phase; what it took is remembered on the host for the next one."""

from __future__ import annotations

import posixpath
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dflash_deploy.cli.deployment import Deployment, talk
from dflash_deploy.errors import CommandTimeout, UsageError

if TYPE_CHECKING:
    from dflash_deploy.diagnose import Event, Phase
    from dflash_deploy.settings import Settings


def runs(here: Deployment) -> bool:
    """The service runs, and is this release's: another one may have taken its place."""
    state = here.service()
    if not here.settings.release:
        return state.running
    found = here.look.release(here.settings.release)
    wanted = found.fingerprint[:8] if found is not None and found.fingerprint else here.settings.release[-8:]
    # Just started, the runner has not told yet.
    return state.running and (not state.fingerprint or state.fingerprint.startswith(wanted))


def is_serving(here: Deployment, port: int) -> bool:
    """This release's service runs and answers."""
    from dflash_deploy.health import is_ready

    return runs(here) and is_ready(f"http://127.0.0.1:{port}", key=here.api_key())


def starts_file(settings: Settings) -> str:
    """Where the host remembers its starts."""
    return posixpath.join(settings.root, "starts.jsonl")


def start_key(settings: Settings) -> str:
    """What was started: silences of another model or stack teach nothing."""
    return "|".join((settings.stack.name, settings.algorithm, settings.model, settings.draft_model))


def stall_limits(words: list[str]) -> dict[Phase, float]:
    """``PHASE=SECONDS`` words as limits.

    Raises:
        UsageError: another phase, or no number.
    """
    from dflash_deploy.diagnose import Phase

    limits = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            limits[Phase(name)] = float(value)
            if not 0 < limits[Phase(name)] < 1e7:
                raise ValueError(value)
        except ValueError:
            raise UsageError(
                f"--stall {word}: PHASE=SECONDS is wanted", evidence=f"phases: {', '.join(Phase)}"
            ) from None
    return limits


def wait_until_ready(here: Deployment, ready: Callable[[], bool], stall: Mapping[Phase, float] | None = None) -> None:
    """Follow the phases of a start until ``ready``.

    Raises:
        Unhealthy: a fatal line, a dead process, a fault of the host or a phase that stands still; with its cause.
    """
    from dflash_deploy.diagnose import (
        diagnose_watcher,
        follow_until_ready,
        learned_limits,
        read_starts,
        record_start,
    )
    from dflash_deploy.errors import Unhealthy
    from dflash_deploy.launch import faults, kernel_lines, load, look

    settings, host = here.settings, here.host
    path, key = starts_file(settings), start_key(settings)
    earlier = read_starts(host, path, key)
    limits = {**learned_limits(earlier), **(stall or {})}
    before: dict[str, Any] = {}
    with _shown(earlier) as show:

        def glance() -> list[str]:
            try:
                seen = look(host, settings)
            except CommandTimeout:
                return []  # a host that is busy loading a model
            if not before:
                before.update(seen)
            show.load(load(seen))
            return [] if "error" in seen else faults(seen, before)

        glance()
        outcome = follow_until_ready(
            # The runner begins a new log file with every start.
            host,
            settings.log_file,
            is_alive=lambda: runs(here),
            ready=ready,
            on_event=show.heard,
            look=glance,
            limits=limits,
            look_s=3.0,
        )
    record_start(host, path, key, outcome)
    if outcome.ok:
        talk(f"  ready after {outcome.seconds:.0f} s")
        return
    for line in kernel_lines(look(host, settings)):
        outcome.watcher.note(line)
    found = diagnose_watcher(outcome.watcher)
    cause = found.primary
    evidence = [outcome.detail]
    if cause:
        evidence += [f"cause: {cause.title} ({cause.id}): {cause.cause}"]
        evidence += [cause.evidence.strip()[:300]] if cause.evidence.strip() not in outcome.detail else []
    for error in found.first_errors[:4]:
        evidence.append(f"first exception of {error.rank or 'the main process'}: {error.exception[:300]}")
    if not cause:
        evidence += list(found.context)[-8:]
    name = host.name
    raise Unhealthy(
        f"{settings.service} on {name} does not start: {outcome.kind} in phase {outcome.phase}",
        evidence=list(dict.fromkeys(evidence)),
        hint=(cause.next.replace("HOST", name) if cause else "") or f"dflash-deploy diagnose {name} --bundle FILE",
    )


class _Lines:
    """Events as lines, for a pipe."""

    def __init__(self) -> None:
        self.last = 0.0

    def heard(self, event: Event) -> None:
        if event.kind in ("phase", "fatal", "exception"):
            talk(f"  {event.phase}: {event.text[:160]}")
        elif event.kind == "progress" and (event.done == event.total or time.monotonic() - self.last > 5):
            self.last = time.monotonic()
            talk(f"  {event.phase}: {event.done}/{event.total}")

    def load(self, text: str) -> None:
        """Not worth a line."""


class _Bars(_Lines):
    """One bar per phase, on a terminal."""

    def __init__(self, earlier: list[dict[str, Any]]) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self.progress = Progress(
            SpinnerColumn(finished_text="+"),
            TextColumn("{task.description:<11}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]:>9}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=Console(stderr=True, highlight=False),
        )
        self.usual = next((dict(s["phases"]) for s in reversed(earlier) if s["kind"] == "ready"), {})
        self.task = self._open("spawn")

    def _open(self, phase: str) -> Any:
        usual = self.usual.get(phase)
        note = f"usually {usual:.0f} s" if usual else ""
        return self.progress.add_task(phase, total=None, count="", note=note)

    def heard(self, event: Event) -> None:
        if event.kind == "phase":
            if self.progress.tasks[self.task].description == str(event.phase):
                return
            self.progress.update(self.task, total=1, completed=1, note="")
            self.progress.stop_task(self.task)
            self.task = self._open(str(event.phase))
        elif event.kind == "progress":
            self.progress.update(
                self.task, total=event.total, completed=event.done, count=f"{event.done}/{event.total}"
            )
        elif event.kind in ("fatal", "exception"):
            self.progress.update(self.task, note="")
            self.progress.console.print(f"  {event.phase}: {event.text[:300]}", style="red", markup=False)

    def load(self, text: str) -> None:
        if text:
            self.progress.update(self.task, note=text)


@contextmanager
def _shown(earlier: list[dict[str, Any]]) -> Iterator[_Lines]:
    if not sys.stderr.isatty():
        yield _Lines()
        return
    bars = _Bars(earlier)
    with bars.progress:
        yield bars
