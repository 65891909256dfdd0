"""Command ``health``."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_deploy.cli.common import JsonOption, emit_json
from dflash_deploy.cli.options import Wanted, spread
from dflash_deploy.errors import DflashError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dflash_deploy.cli.deployment import Deployment
    from dflash_deploy.health import HealthReport, Options, Rung

MARKS = {"ok": "ok", "failed": "FAILED", "starting": "starting", "skipped": "skipped", "not-run": "not run"}
STYLES = {"ok": "green", "failed": "bold red", "starting": "yellow", "skipped": "dim", "not-run": "dim"}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Job:
    """What is asked of each host."""

    level: str
    settings: Mapping[str, Any]
    options: Options
    wait: bool
    stall: Sequence[str]


def _climb(
    here: Deployment, job: _Job, tell: Callable[[Rung], None], before: HealthReport | None = None
) -> HealthReport:
    """One host's ladder."""
    from dflash_deploy.health import check

    options = job.options if job.options.key else replace(job.options, key=here.api_key())
    if options.timeout_s <= 0:
        options = replace(options, timeout_s=600.0 if here.settings.stack.device == "cpu" else 180.0)
    if options.concurrency <= 0:
        # A batch of 32 takes an interpreter minutes and proves nothing that four do not.
        options = replace(options, concurrency=4 if here.settings.stack.device == "cpu" else 32)
    return check(here.host, here.settings, job.level, tell, options=options, before=before)


def _wait(here: Deployment, job: _Job) -> None:
    from dflash_deploy.cli.start import is_serving, stall_limits, wait_until_ready

    with here.host.forward(here.settings.port) as port:

        def ready() -> bool:
            return is_serving(here, port)

        if not ready():
            wait_until_ready(here, ready, stall_limits(list(job.stall)))


class _Hosts:
    """Hosts to check. Those of a watch stay connected: to ask again what is deployed costs more than the probes do."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._kept: dict[str, tuple[ExitStack, Deployment]] = {}
        self._last: dict[str, HealthReport] = {}

    def __enter__(self) -> _Hosts:
        return self

    def __exit__(self, *exc: object) -> None:
        for name in list(self._kept):
            self._drop(name)

    def climb(self, name: str, job: _Job, tell: Callable[[Rung], None]) -> HealthReport:
        """One host's ladder, after its start when that is waited for."""
        from dflash_deploy.cli.deployment import deployed

        kept, report = None, None
        if name in self._kept:
            kept = self._kept[name][1].settings
            with suppress(DflashError):
                here = self._kept[name][1]
                report = _climb(here, job, lambda rung: tell(rung) if rung.good else None, self._last.get(name))
                if report.ok:
                    self._last[name] = report
                    return report
            self._drop(name)
        with ExitStack() as opened:
            here = opened.enter_context(deployed(name, job.settings))
            # Not as it should be, and it may be that another release serves by now.
            if report is not None and report.failed and here.settings == kept:
                tell(report.failed)
                return report
            if job.wait:
                _wait(here, job)
            report = _climb(here, job, tell)
            if self._keep and report.ok:
                self._kept[name] = (opened.pop_all(), here)
                self._last[name] = report
        return report

    def _drop(self, name: str) -> None:
        self._last.pop(name, None)
        with suppress(DflashError):
            self._kept.pop(name)[0].close()


class _Talk:
    """A line on stderr for each rung as it is done."""

    @contextmanager
    def shown(self) -> Iterator[None]:
        yield

    def rung(self, name: str, rung: Rung) -> None:
        first = rung.evidence[0] if rung.evidence else ""
        line = f"  {name}  {rung.name:<12} {MARKS[rung.status]:<8} {rung.seconds:6.1f} s  {first}"
        # On a terminal the whole of it comes in the report below.
        _say(line[: shutil.get_terminal_size().columns - 1] if sys.stderr.isatty() else line)

    def round(self, reports: Mapping[str, HealthReport], errors: Mapping[str, DflashError]) -> None: ...

    def pause(self, seconds: float) -> None:
        _say(f"-- {time.strftime('%H:%M:%S')} again in {seconds:g} s --")
        time.sleep(seconds)


class _Silent(_Talk):
    def rung(self, name: str, rung: Rung) -> None: ...

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


class _Live(_Talk):
    """One table that stays in its place: a row per host, its rungs, what each round found."""

    def __init__(self, names: Sequence[str], level: str, every: float) -> None:
        self.names, self.level, self.every = names, level, every
        self.rungs: dict[str, dict[str, Rung]] = {name: {} for name in names}
        self.verdicts: dict[str, tuple[str, str]] = dict.fromkeys(names, ("checking", "yellow"))
        self.history: dict[str, list[bool]] = {name: [] for name in names}
        self.lock = threading.Lock()
        self.live: Any = None
        self.next = 0.0

    @contextmanager
    def shown(self) -> Iterator[None]:
        from rich.console import Console
        from rich.live import Live

        console = Console(highlight=False)
        with Live(console=console, get_renderable=self.draw, refresh_per_second=4) as self.live:
            yield

    def rung(self, name: str, rung: Rung) -> None:
        with self.lock:
            self.rungs[name][rung.name] = rung

    def round(self, reports: Mapping[str, HealthReport], errors: Mapping[str, DflashError]) -> None:
        with self.lock:
            for name in self.names:
                report = reports.get(name)
                if report is None:
                    fault = errors[name].message if name in errors else "no answer"
                    self.verdicts[name] = (fault, "bold red")
                else:
                    self.rungs[name] = {rung.name: rung for rung in report.rungs}
                    words = _figures(report) if report.ok else f"{report.failed.evidence[0]}"  # type: ignore[union-attr]
                    self.verdicts[name] = (words, "green" if report.ok else "bold red")
                self.history[name] = [*self.history[name][-29:], bool(report and report.ok)]

    def pause(self, seconds: float) -> None:
        self.next = time.monotonic() + seconds
        time.sleep(seconds)
        self.next = 0.0

    def draw(self) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        left = max(0.0, self.next - time.monotonic())
        now = f"{time.strftime('%H:%M:%S')}, level {self.level}, "
        now += f"next round in {left:.0f} s" if self.next else "checking"
        table = Table(title=f"health at {now} (Ctrl-C ends this)", title_justify="left", expand=True)
        table.add_column("host", no_wrap=True)
        table.add_column("rungs", no_wrap=True)
        table.add_column("now", ratio=1)
        table.add_column("rounds", justify="right", overflow="fold", max_width=10)
        with self.lock:
            for name in self.names:
                rungs = Text()
                for rung in self.rungs[name].values():
                    style = STYLES[rung.status]
                    rungs.append(f"{MARKS[rung.status]:<9}", style=style)
                    rungs.append(f"{rung.name} {rung.seconds:.1f} s\n" if rung.seconds else f"{rung.name}\n")
                rungs.rstrip()
                text, style = self.verdicts[name]
                marks = Text()
                for good in self.history[name]:
                    marks.append("." if good else "x", style="green" if good else "bold red")
                table.add_row(Text(name), rungs, Text(text, style=style), marks)
        return table


def _figures(report: HealthReport) -> str:
    data = report.data
    parts = ["healthy"]
    if data.get("acceptance_length") is not None:
        parts.append(f"{data['acceptance_length']:.2f} tokens a step")
    if data.get("tokens_per_s") is not None:
        parts.append(f"{data['tokens_per_s']:.0f} tokens/s")
    if data.get("restarts"):
        parts.append(f"{data['restarts']} restarts")
    for gpu in data.get("gpus") or ():
        if gpu.get("used_mib") is not None:
            parts.append(f"GPU {gpu['index']} {gpu['used_mib'] / 1024:.0f} GiB")
    return ", ".join(parts)


def _show(report: HealthReport) -> None:
    from dflash_deploy.render import print_rows

    verdict = "healthy" if report.ok else "NOT healthy"
    head = f"{report.host}: {verdict} (level {report.level}, {report.data.get('url', '')})"
    rows = [("", head, "bold green" if report.ok else "bold red")]
    for rung in report.rungs:
        rows.append((f"  {MARKS[rung.status]:<9}{rung.name}", rung.proves, STYLES[rung.status]))
        lines = [*rung.evidence]
        lines += [f"diagnosis: {rung.diagnosis}"] if rung.diagnosis else []
        lines += [f"next: {rung.hint}"] if rung.hint else []
        rows += [("          ", line, "dim" if rung.status == "ok" else "") for line in lines]
    print_rows(rows, indent=24)


def health(
    wanted: Wanted,
    host: Annotated[str, typer.Argument(metavar="[HOST]", help="Default: every host of hosts.toml.")] = "",
    level: Annotated[
        str, typer.Option(help="live, ready, generate, spec, lossless or soak. Default: spec, with --watch ready.")
    ] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Follow a start until it is ready, then check.")] = False,
    stall: Annotated[
        list[str] | None,
        typer.Option(metavar="PHASE=SECONDS", help="Silence that a phase of the start may last, repeatable."),
    ] = None,
    prompt: Annotated[str, typer.Option(help="A prompt of your own for the checked completion.")] = "",
    expect: Annotated[str, typer.Option(help="What its completion must begin with.")] = "",
    reference: Annotated[Path | None, typer.Option(help="Recorded answers for the lossless rung (JSON lines).")] = None,
    record: Annotated[
        str, typer.Option(metavar="FILE", help="Record this server's answers as a reference ('-': stdout).")
    ] = "",
    prompts: Annotated[Path | None, typer.Option(help="Prompts to check or record, as JSON lines.")] = None,
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="Variable with the server's API key. Default: the deployment's own.")
    ] = "",
    min_acceptance: Annotated[float, typer.Option(help="Floor of tokens per verify step.")] = 0.0,
    concurrency: Annotated[
        int, typer.Option(min=0, max=256, help="Requests at once beside two. Default: 32, on a CPU 4.")
    ] = 0,
    soak_seconds: Annotated[float, typer.Option(help="Length of the soak in seconds.")] = 60.0,
    timeout: Annotated[float, typer.Option(help="Deadline of one request in seconds. Default: 180, on a CPU 600.")] = 0,
    watch: Annotated[
        float, typer.Option(metavar="SECONDS", help="Check again every so many seconds until interrupted.")
    ] = 0.0,
    prometheus: Annotated[str, typer.Option(metavar="FILE", help="Write node-exporter text ('-': stdout).")] = "",
    json: JsonOption = False,
) -> None:
    """Check a served model, rung by rung.

    Exit codes: 0 every rung holds; else that of the first rung that does not: 90 process, 91 host, 92 health, 93
    arguments, 94 patches, 95 completion, 96 concurrent, 97 requests, 98 speculation, 99 lossless, 100 soak; 9 a start
    that failed.
    """
    import os

    from dflash_deploy import health as ladder
    from dflash_deploy.cli.start import stall_limits
    from dflash_deploy.inventory import load_inventory

    # Level ready is light enough for a server under load: one token of its own every HEALTH_EVERY_S.
    level = level or ("ready" if watch else "spec")
    if level not in list(ladder.Level):
        raise UsageError(f"no level {level!r}", hint="live, ready, generate, spec, lossless or soak")
    if expect and not prompt:
        raise UsageError("--expect needs --prompt")
    stall_limits(stall or [])
    names = [host] if host else sorted(load_inventory(wanted.inventory).hosts)
    if not names:
        raise UsageError("no host was named and there is no hosts.toml", hint="dflash-deploy health local")
    probes = (ladder.Probe(prompt, 32, expect),) if prompt else (ladder.read_probes(prompts) if prompts else ())
    key = os.environ.get(api_key_env, "") if api_key_env else ""
    if api_key_env and not key:
        raise UsageError(f"the variable {api_key_env} is empty")
    options = ladder.Options(
        key=key, probes=probes, reference=ladder.read_probes(reference) if reference else (), concurrency=concurrency,
        min_acceptance=min_acceptance, soak_s=soak_seconds, timeout_s=timeout, thorough=True,
    )  # fmt: skip
    settings = wanted.given()
    if record:
        _record(names[0], record, settings, options)
        return
    job = _Job(level, settings, options, wait, stall or ())
    view: _Talk = _Silent() if json else _Talk()
    if watch and not json and sys.stdout.isatty():
        view = _Live(names, level, watch)
    with view.shown(), _Hosts(keep=bool(watch)) as hosts:
        while True:
            reports, errors = _round(names, job, view, hosts)
            if prometheus:
                _write_prometheus(prometheus, ladder.prometheus(tuple(reports.values()), tuple(errors)))
            if json:
                _emit(host, level, names, reports, errors)
            elif prometheus != "-" and not isinstance(view, _Live):
                for name in names:
                    if name in reports:
                        _show(reports[name])
                    elif len(names) > 1:
                        print(f"{name}: {errors[name].message}")
            if not watch:
                break
            view.pause(watch)
    bad = next((r for r in reports.values() if not r.ok), None)
    if bad is not None:
        raise typer.Exit(bad.exit_code)
    if errors:
        if len(names) == 1 and not json:
            raise next(iter(errors.values()))
        raise typer.Exit(next(iter(errors.values())).exit_code)


def _round(
    names: Sequence[str], job: _Job, view: _Talk, hosts: _Hosts
) -> tuple[dict[str, HealthReport], dict[str, DflashError]]:
    """Every host once, all at the same time."""
    reports: dict[str, HealthReport] = {}
    errors: dict[str, DflashError] = {}

    def one(name: str) -> None:
        try:
            reports[name] = hosts.climb(name, job, lambda rung: view.rung(name, rung))
        except DflashError as error:
            errors[name] = error

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(16, len(names))) as pool:
        list(pool.map(one, names))
    view.round(reports, errors)
    return {n: reports[n] for n in names if n in reports}, {n: errors[n] for n in names if n in errors}


def _emit(
    host: str, level: str, names: Sequence[str], reports: Mapping[str, HealthReport], errors: Mapping[str, DflashError]
) -> None:
    shown: list[dict[str, Any]] = [
        reports[name].as_dict()
        if name in reports
        else {
            "host": name, "level": level, "ok": False,
            "failed": "start" if errors[name].exit_code == 9 else "connection",
            "exit_code": errors[name].exit_code, "error": errors[name].as_dict(),
        }
        for name in names
    ]  # fmt: skip
    emit_json(shown[0] if host else {"ok": all(r["ok"] for r in shown), "hosts": shown})


def _write_prometheus(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
        return
    target = Path(path)
    part = target.with_name(target.name + ".part")  # node-exporter must never read half a file
    try:
        part.write_text(text, "utf-8")
        part.replace(target)
    except OSError as error:
        raise UsageError(f"{path} cannot be written", evidence=str(error)) from error


def _record(name: str, path: str, settings: Mapping[str, Any], options: Options) -> None:
    import json as jsonlib

    from dflash_deploy.cli.deployment import deployed
    from dflash_deploy.health import record, tiny_pair_probes

    with deployed(name, settings) as here:
        probes = options.probes or (tiny_pair_probes() if here.settings.tiny_pair else ())
        if not probes:
            raise UsageError("no prompts to record", hint="--prompts FILE")
        rows = record(here.host, here.settings, probes, key=options.key or here.api_key())
    text = "".join(jsonlib.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written", evidence=str(error)) from error
    _say(f"recorded {len(probes)} answers in {path}")


def register(app: typer.Typer) -> None:
    """Add this command to ``app``."""
    app.command("health")(spread(health))
