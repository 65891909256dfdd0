"""Commands ``health`` and ``diagnose``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_deploy.cli.common import JsonOption, emit_json
from dflash_deploy.errors import DflashError, UsageError

if TYPE_CHECKING:
    from dflash_deploy.diagnose import Diagnosis
    from dflash_deploy.health import HealthReport, Options
    from dflash_deploy.host import Host
    from dflash_deploy.settings import Settings

MARKS = {"ok": "ok", "failed": "FAILED", "starting": "starting", "skipped": "skipped", "not-run": "not run"}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _open(name: str, overrides: dict[str, Any]) -> tuple[Host, Settings]:
    """A connected host and its deployment's settings."""
    from dflash_deploy.facts.gather import gather
    from dflash_deploy.host import connect
    from dflash_deploy.inventory import resolve
    from dflash_deploy.settings import effective

    target = resolve(name)
    host = connect(target, on_notice=_say)
    try:
        facts = gather(host, discover=False)
        return host, effective(name, facts, options=overrides, entry=target.options)
    except DflashError:
        host.close()
        raise


def _check_one(name: str, level: str, overrides: dict[str, Any], options: Options, talk: bool) -> HealthReport:
    from dflash_deploy.health import Rung, check

    def tell(rung: Rung) -> None:
        if talk:
            first = rung.evidence[0] if rung.evidence else ""
            _say(f"  {name}  {rung.name:<12} {MARKS[rung.status]:<8} {rung.seconds:6.1f} s  {first}")

    host, settings = _open(name, overrides)
    try:
        return check(host, settings, level, tell, options=options)
    finally:
        host.close()


def _show(report: HealthReport) -> None:
    verdict = "healthy" if report.ok else "NOT healthy"
    print(f"{report.host}: {verdict} (level {report.level}, {report.data.get('url', '')})")
    for rung in report.rungs:
        print(f"  {MARKS[rung.status]:<9}{rung.name:<13}{rung.proves}")
        for line in rung.evidence:
            print(f"           {line}")
        if rung.diagnosis:
            print(f"           diagnosis: {rung.diagnosis}")
        if rung.hint:
            print(f"           next: {rung.hint}")


def health(
    host: Annotated[str, typer.Argument(metavar="[HOST]", help="Default: every host of hosts.toml.")] = "",
    level: Annotated[str, typer.Option(help="live, ready, generate, spec, lossless or soak.")] = "spec",
    prompt: Annotated[str, typer.Option(help="A prompt of your own for the checked completion.")] = "",
    expect: Annotated[str, typer.Option(help="What its completion must begin with.")] = "",
    reference: Annotated[Path | None, typer.Option(help="Recorded answers for the lossless rung (JSON lines).")] = None,
    record: Annotated[
        str, typer.Option(metavar="FILE", help="Record this server's answers as a reference ('-': stdout).")
    ] = "",
    prompts: Annotated[Path | None, typer.Option(help="Prompts to check or record, as JSON lines.")] = None,
    port: Annotated[int | None, typer.Option(help="The service's port.")] = None,
    model: Annotated[str | None, typer.Option(help="The planned model.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="The planned drafter.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="The planned algorithm: DDTREE, DFLASH or NONE.")] = None,
    root: Annotated[str | None, typer.Option(help="The deployment's folder on the host.")] = None,
    venv: Annotated[str | None, typer.Option(help="The deployment's virtual environment on the host.")] = None,
    stack: Annotated[str | None, typer.Option(help="The deployment's stack.")] = None,
    api_key_env: Annotated[str, typer.Option(metavar="NAME", help="Variable that holds the server's API key.")] = "",
    min_acceptance: Annotated[float, typer.Option(help="Floor of tokens per verify step.")] = 0.0,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Requests at once.")] = 4,
    soak_seconds: Annotated[float, typer.Option(help="Length of the soak in seconds.")] = 60.0,
    watch: Annotated[
        float, typer.Option(metavar="SECONDS", help="Check again every so many seconds until interrupted.")
    ] = 0.0,
    prometheus: Annotated[str, typer.Option(metavar="FILE", help="Write node-exporter text ('-': stdout).")] = "",
    json: JsonOption = False,
) -> None:
    """Check a served model, rung by rung; exit 9 when one does not hold."""
    import os
    import time

    from dflash_deploy import health as ladder
    from dflash_deploy.errors import Unhealthy
    from dflash_deploy.inventory import load_inventory

    if level not in list(ladder.Level):
        raise UsageError(f"no level {level!r}", hint="live, ready, generate, spec, lossless or soak")
    if expect and not prompt:
        raise UsageError("--expect needs --prompt")
    names = [host] if host else sorted(load_inventory().hosts)
    if not names:
        raise UsageError("no host was named and there is no hosts.toml", hint="dflash-deploy health local")
    probes = (ladder.Probe(prompt, 32, expect),) if prompt else (ladder.read_probes(prompts) if prompts else ())
    key = os.environ.get(api_key_env, "") if api_key_env else ""
    if api_key_env and not key:
        raise UsageError(f"the variable {api_key_env} is empty")
    options = ladder.Options(
        key=key, probes=probes, reference=ladder.read_probes(reference) if reference else (), concurrency=concurrency,
        min_acceptance=min_acceptance, soak_s=soak_seconds,
    )  # fmt: skip
    overrides: dict[str, Any] = {
        "port": port,
        "model": model,
        "draft_model": draft_model,
        "algorithm": algorithm,
        "root": root,
        "venv": venv,
        "stack": stack,
    }
    if record:
        _record(names[0], record, overrides, options)
        return
    while True:
        reports: list[ladder.HealthReport] = []
        errors: dict[str, DflashError] = {}
        for name in names:
            try:
                reports.append(_check_one(name, level, overrides, options, talk=not json))
            except DflashError as error:
                if len(names) == 1:
                    raise
                errors[name] = error
        if prometheus:
            _write_prometheus(prometheus, ladder.prometheus(tuple(reports)))
        if json:
            shown: list[dict[str, Any]] = [r.as_dict() for r in reports]
            shown += [
                {"host": name, "level": level, "ok": False, "failed": "connection", "error": e.as_dict()}
                for name, e in errors.items()
            ]
            emit_json(shown[0] if host else {"ok": all(r["ok"] for r in shown), "hosts": shown})
        elif prometheus != "-":
            for report in reports:
                _show(report)
            for name, fault in errors.items():
                print(f"{name}: {fault.message}")
        if not watch:
            break
        _say(f"-- {time.strftime('%H:%M:%S')} again in {watch:g} s --")
        time.sleep(watch)
    bad = next((r for r in reports if not r.ok), None)
    if json or prometheus == "-":
        if bad or errors:
            raise typer.Exit(Unhealthy.exit_code if bad else next(iter(errors.values())).exit_code)
        return
    if bad and bad.failed:
        raise Unhealthy(
            f"{bad.host}: rung '{bad.failed.name}' does not hold", evidence=bad.failed.evidence,
            hint=bad.failed.hint or f"dflash-deploy diagnose {bad.host}",
        )  # fmt: skip
    if errors:
        raise next(iter(errors.values()))


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


def _record(name: str, path: str, overrides: dict[str, Any], options: Options) -> None:
    import json as jsonlib

    from dflash_deploy.health import record, tiny_pair_probes

    host, settings = _open(name, overrides)
    try:
        probes = options.probes or (tiny_pair_probes() if settings.tiny_pair else ())
        if not probes:
            raise UsageError("no prompts to record", hint="--prompts FILE")
        text = "".join(
            jsonlib.dumps(row, ensure_ascii=False) + "\n" for row in record(host, settings, probes, key=options.key)
        )
    finally:
        host.close()
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, "utf-8")
        _say(f"recorded {len(probes)} answers in {path}")


def diagnose(
    source: Annotated[
        str, typer.Argument(metavar="[HOST|LOGFILE|-]", help="A log file, '-' for stdin, or a host.")
    ] = "local",
    bundle: Annotated[Path | None, typer.Option(help="Write a redacted tar.gz for someone else to look at.")] = None,
    json: JsonOption = False,
) -> None:
    """Name the cause of a failed start or a failing server from its log or from a report."""
    from dflash_deploy import diagnose as room

    parts: dict[str, Any] = {}
    if source == "-":
        log = sys.stdin.buffer.read()
    elif Path(source).is_file():
        try:
            log = Path(source).read_bytes()
        except OSError as error:
            raise UsageError(f"{source} cannot be read", evidence=str(error)) from error
    elif "/" in source and "@" not in source:
        raise UsageError(f"there is no file {source}", hint="a log file, '-' or a host")
    else:
        host, settings = _open(source, {})
        try:
            found = host.read(settings.log_file)
            parts = {
                "settings.json": settings.as_dict(),
                "state.json": (host.read(settings.state_file) or b"").decode("utf-8", "replace"),
            }
        finally:
            host.close()
        if found is None:
            raise UsageError(f"{source} has no log at {settings.log_file}", hint=f"dflash-deploy launch {source}")
        log = found
    diagnosis = room.diagnose(log)
    if bundle is not None:
        bundle.write_bytes(room.make_bundle(log, {**parts, "diagnosis.json": diagnosis.as_dict()}))
        _say(f"wrote {bundle}; keys and tokens are replaced, read it before you pass it on")
    if json:
        emit_json({"source": source, **diagnosis.as_dict()})
    else:
        _tell(source, diagnosis)


def _tell(source: str, found: Diagnosis) -> None:
    print(f"{source}: {found.lines} lines, {found.starts} start(s), phase {found.phase}")
    if not found.failed:
        print("no failure is visible in this log")
        return
    if found.primary:
        cause = found.primary
        print(f"PRIMARY  {cause.id}: {cause.title}")
        print(f"  cause     {cause.cause}")
        print(f"  evidence  line {cause.line}{' ' + cause.rank if cause.rank else ''}: {cause.evidence.strip()[:300]}")
        print(f"  act on    {cause.where}")
        print(f"  next      {cause.next}")
        if cause.ref:
            print(f"  see       {', '.join(cause.ref)}")
    else:
        print("the cause is not known")
    for other in found.others:
        print(f"also     {other.id} (line {other.line}): {other.title}")
    for error in found.first_errors:
        print(f"first exception of {error.rank or 'the main process'} (line {error.line}): {error.exception[:300]}")
    if not found.primary:
        for line in found.first_errors[0].lines[-12:] if found.first_errors else found.context[-12:]:
            print(f"  {line}")
        print(f"next: dflash-deploy diagnose {source} --bundle FILE")


def register(app: typer.Typer) -> None:
    """Add this group's commands to ``app``."""
    app.command("health")(health)
    app.command("diagnose")(diagnose)
