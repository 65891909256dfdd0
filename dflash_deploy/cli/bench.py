"""Command ``bench``: how fast the served model is, by concurrency and by method."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_deploy.cli.common import HostArgument, JsonOption, emit_json
from dflash_deploy.cli.options import BreakLock, Wanted, spread
from dflash_deploy.errors import UsageError

if TYPE_CHECKING:
    from dflash_deploy.bench import Sample, Sweep
    from dflash_deploy.cli.deployment import Deployment
    from dflash_deploy.health import Probe
    from dflash_deploy.releases.model import Release

AS_SERVED = "as served"


def bench(
    host: HostArgument,
    wanted: Wanted,
    concurrency: Annotated[str, typer.Option(help="Requests at once, a sweep.")] = "1,2,4,8",
    methods: Annotated[
        str,
        typer.Option(
            help="Compare: none, chain, tree:NODES, separated by commas. Each is served in turn by restarting the "
            "service; in the end it runs as it did before. Default: what is served now."
        ),
    ] = "",
    prompts: Annotated[Path | None, typer.Option(help="Prompts as JSON lines; the tiny pair brings its own.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests per sweep; at least two per slot are sent.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens per request.")] = 128,
    sglang_bench: Annotated[
        bool, typer.Option("--sglang-bench", help="Run SGLang's own serving bench on the host as well.")
    ] = False,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one HTML file with plots.")] = None,
    break_lock: BreakLock = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a served model: tokens a second, latency percentiles of the stream, acceptance per position."""
    from dflash_deploy import bench as room
    from dflash_deploy.assets import templates_dir
    from dflash_deploy.cli.deployment import deployed, deployment, talk
    from dflash_deploy.cli.start import start_key, starts_file
    from dflash_deploy.diagnose import read_starts

    widths, wanted_methods = _numbers(concurrency), [_method(word) for word in methods.split(",") if word.strip()]
    sweeps: list[Sweep] = []
    starts: list[dict[str, Any]] = []
    own: dict[str, Any] = {}
    # What is served is asked as it was deployed; what is to be served is planned anew.
    place = deployment if wanted_methods else deployed
    with place(host, wanted.given(), lock="bench", break_lock=break_lock) as here:
        probes = _probes(here, prompts)
        for served, name in _served(here, wanted_methods):
            settings = served.settings
            if rows := read_starts(served.host, starts_file(settings), start_key(settings)):
                starts.append({"label": name, **rows[-1]})
            with served.host.forward(settings.port) as port:
                for width in widths:
                    count = max(requests, 2 * width)
                    with _progress(f"{name}, {width} at once", count) as tick:
                        sweep = room.measure(
                            f"http://127.0.0.1:{port}", probes, method=name, concurrency=width, requests=count,
                            max_tokens=max_tokens, key=served.api_key(), on_done=tick,
                        )  # fmt: skip
                    sweeps.append(sweep)
                    _line(sweep, talk)
            if sglang_bench and not own:
                talk("SGLang's own bench ...")
                own = room.sglang_bench(
                    served.host, settings, concurrency=max(widths), requests=max(requests, 2 * max(widths)),
                    input_tokens=128, output_tokens=max_tokens,
                )  # fmt: skip
        about = _about(here, len(probes), max_tokens)
    data = room.as_dict(about, sweeps, starts=starts, sglang_bench=own)
    if report is not None:
        try:
            report.write_text(room.html(data, templates_dir()), "utf-8")
        except OSError as error:
            raise UsageError(f"{report} cannot be written", evidence=str(error)) from error
        talk(f"wrote {report}")
    if as_json:
        emit_json(data)
    else:
        _table(data)
    if sweeps and not any(sweep.good for sweep in sweeps):
        from dflash_deploy.errors import Unhealthy

        raise Unhealthy(
            "no request was answered", evidence=data["sweeps"][0]["errors"], hint=f"dflash-deploy health {host}"
        )


def _numbers(text: str) -> list[int]:
    try:
        found = sorted({int(word) for word in text.split(",") if word.strip()})
        if not found or not all(0 < number <= 1024 for number in found):
            raise ValueError
    except ValueError:
        raise UsageError(f"--concurrency {text!r}: numbers from 1 to 1024, separated by commas") from None
    return found


def _method(word: str) -> tuple[str, dict[str, Any]]:
    """A method's name and the settings that serve it."""
    name, _, nodes = word.strip().lower().partition(":")
    if name == "none" and not nodes:
        return "none", {"algorithm": "NONE"}
    if name == "chain" and not nodes:
        return "chain", {"algorithm": "DFLASH"}
    if name == "tree" and nodes.isdigit() and 0 < int(nodes) <= 1024:
        return f"tree {nodes}", {"algorithm": "DDTREE", "budget": int(nodes)}
    raise UsageError(f"--methods {word!r}", hint="none, chain, tree:16, tree:32, separated by commas")


def _probes(here: Deployment, path: Path | None) -> tuple[Probe, ...]:
    from dflash_deploy.assets import templates_dir
    from dflash_deploy.health import read_probes
    from dflash_deploy.health.probes import GENERAL

    if path is not None:
        return read_probes(path)
    return read_probes(templates_dir() / "tiny-pair" / "prompts.jsonl") if here.settings.tiny_pair else GENERAL


def _served(here: Deployment, methods: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[tuple[Deployment, str]]:
    """The deployment as it is, or restarted for one method after the other, and in the end as it was.

    Raises:
        Unhealthy: nothing is served, or a method does not start.
    """
    from dflash_deploy.cli.deployment import talk
    from dflash_deploy.cli.prove import launch_steps
    from dflash_deploy.cli.recap import Recap

    if not methods:
        _ready(here, start=False)
        yield here, AS_SERVED
        return
    before = here.look.current_release
    served_before = here.seen_service().running
    base = here.of_release(before) if before is not None and before.settings else here
    last = base
    try:
        for name, change in methods:
            last = replace(base, settings=replace(base.settings, **change), look=base.refresh())
            talk(f"{name}: starting")
            launch_steps(last, Recap())
            _ready(last, start=True)
            yield last, name
    finally:
        _restore(last, before if served_before else None)


def _restore(here: Deployment, before: Release | None) -> None:
    """What served before serves again, or nothing does."""
    from dflash_deploy.cli.deployment import talk
    from dflash_deploy.cli.prove import restore_of
    from dflash_deploy.errors import DflashError
    from dflash_deploy.execute import execute
    from dflash_deploy.model import Plan
    from dflash_deploy.plan.launch import stop_steps

    look = here.refresh()
    if before is None:
        execute(Plan("down", tuple(stop_steps(here.settings, here.facts))), here.host, journal=here.journal)
        return
    talk(f"starting {before.id} again")
    ours = here.settings.release if here.settings.release != before.id else ""
    execute(restore_of(here, before, look.release(ours) if ours else None), here.host, journal=here.journal)
    try:
        _ready(here.of_release(before), start=True)
    except DflashError as error:
        talk(f"{error.message}: {'; '.join(error.evidence[:2])}")


def _ready(here: Deployment, *, start: bool) -> None:
    """The deployment answers.

    Raises:
        Unhealthy
    """
    from dflash_deploy.cli.start import is_serving, wait_until_ready
    from dflash_deploy.errors import Unhealthy

    with here.host.forward(here.settings.port) as port:
        if is_serving(here, port):
            return
        if not start:
            raise Unhealthy(
                f"nothing is served on {here.host.name} at port {here.settings.port}",
                hint=f"dflash-deploy up {here.host.name}; dflash-deploy health {here.host.name}",
            )
        wait_until_ready(here, lambda: is_serving(here, port))


@contextmanager
def _progress(what: str, count: int) -> Iterator[Callable[[Sample], None]]:
    """A bar on a terminal; nothing in a pipe, where each sweep is a line."""
    if not sys.stderr.isatty():
        yield lambda sample: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=count)
        yield lambda sample: bar.advance(task)


def _line(sweep: Sweep, talk: Callable[[str], None]) -> None:
    accepted = sweep.acceptance
    length = f", {accepted.length:.2f} tokens a step" if accepted.steps else ""
    failed = len(sweep.samples) - len(sweep.good)
    trouble = f", {failed} FAILED: {next(s.error for s in sweep.samples if s.error)}" if failed else ""
    talk(f"  {sweep.method}, {sweep.concurrency} at once: {sweep.tokens_per_s:.1f} tokens/s{length}{trouble}")


def _about(here: Deployment, prompts: int, max_tokens: int) -> dict[str, Any]:
    settings, facts = here.settings, here.facts
    gpus = ", ".join(gpu.name for gpu in facts.gpus)
    return {
        "host": settings.host,
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "stack": settings.stack.name,
        "model": settings.model,
        "draft_model": settings.draft_model if settings.speculative else "-",
        "machine": gpus or f"{facts.cpu_count or '?'} CPU cores, no GPU",
        "prompts": f"{prompts}, up to {max_tokens} output tokens each, greedy, streamed",
    }


def _table(data: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    title = f"bench of {data['about']['host']}, times in ms"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("method", no_wrap=True)
    # Two rows of names: figures of six digits must fit into 80 columns.
    names = ["at\nonce", "tokens\n/s", "\n/step"]
    names += [f"{what}\n{at}" for what in ("first", "gap", "whole") for at in ("p50", "p99")]
    trouble = any(sweep["failed"] for sweep in data["sweeps"])
    for name in [*names, "\nfail"] if trouble else names:
        table.add_column(name, justify="right", no_wrap=True)
    for sweep in data["sweeps"]:
        length = sweep["acceptance_length"]
        cells = [str(sweep["concurrency"]), f"{sweep['tokens_per_s']:.1f}", f"{length:.2f}" if length else "-"]
        for key in ("first_token_s", "gap_s", "whole_s"):
            cells += [f"{sweep[key][p] * 1000:.0f}" for p in ("p50", "p99")]
        table.add_row(sweep["method"], *cells, *([str(sweep["failed"])] if trouble else []))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for name, value in data["sglang_bench"].items():
        console.print(f"sglang {name}: {value}")


def register(app: typer.Typer) -> None:
    """Add this command to ``app``."""
    app.command("bench")(spread(bench))
