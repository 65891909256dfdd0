"""Command ``diagnose``: from a log, a report or a host to the cause."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_deploy.cli.common import JsonOption, emit_json
from dflash_deploy.cli.options import Place, spread
from dflash_deploy.errors import DflashError, UsageError

if TYPE_CHECKING:
    from dflash_deploy.cli.deployment import Deployment
    from dflash_deploy.diagnose import Cause, Diagnosis

CHUNK = 1 << 20


def diagnose(
    place: Place,
    source: Annotated[
        str, typer.Argument(metavar="[HOST|LOGFILE|-]", help="A log file, '-' for stdin, or a host.")
    ] = "local",
    bundle: Annotated[Path | None, typer.Option(help="Write a redacted tar.gz for someone else to look at.")] = None,
    json: JsonOption = False,
) -> None:
    """Name the cause of a failed start or a failing server from its log, its host or a report."""
    from dflash_deploy import diagnose as room

    secrets: tuple[str, ...] = ()
    if source == "-":
        found, log = _stream(iter(lambda: sys.stdin.buffer.read(CHUNK), b""), keep=bundle is not None)
        parts: dict[str, Any] = {}
    elif Path(source).is_file():
        try:
            with Path(source).open("rb") as file:
                found, log = _stream(iter(lambda: file.read(CHUNK), b""), keep=bundle is not None)
        except OSError as error:
            raise UsageError(f"{source} cannot be read", evidence=str(error)) from error
        parts = {}
    elif "/" in source and "@" not in source:
        raise UsageError(f"there is no file {source}", hint="a log file, '-' or a host")
    else:
        found, log, parts, secrets = _of_host(source, place.given(), whole=bundle is not None)
    if bundle is not None:
        try:
            bundle.write_bytes(room.make_bundle(log, {**parts, "diagnosis.json": found.as_dict()}, secrets))
        except OSError as error:
            raise UsageError(f"{bundle} cannot be written", evidence=str(error)) from error
        print(
            f"wrote {bundle}; keys and tokens are replaced: read it before you pass it on",
            file=sys.stderr,
        )
    if json:
        emit_json({"source": source, **found.as_dict()})
    else:
        _tell(source, found)


def _stream(
    chunks: Iterable[bytes], *, keep: bool, notes: Sequence[str] = (), on_failure: Sequence[str] = ()
) -> tuple[Diagnosis, bytes]:
    """Diagnose without holding the whole: matched line by line while it is short, by suspicious lines when it is not.

    Args:
        keep: return the bytes for a bundle (its head and its end).
        notes: what was seen beside the log.
        on_failure: what is evidence only where something has failed.
    """
    from dflash_deploy.diagnose import Watcher, diagnose_watcher
    from dflash_deploy.diagnose.bundle import MAX_LOG
    from dflash_deploy.diagnose.diagnosis import THOROUGH_BYTES

    head, watcher, kept, tail = b"", None, bytearray(), b""

    def into(watcher: Watcher, data: bytes) -> None:
        nonlocal tail
        watcher.feed(data)
        if keep:
            room = max(0, MAX_LOG // 2 + 1 - len(kept))
            kept.extend(data[:room])
            tail = (tail + data[room:])[-MAX_LOG // 2 - 1 :]

    for chunk in chunks:
        if watcher is None:
            head += chunk
            if len(head) <= THOROUGH_BYTES:
                continue
            watcher, chunk, head = Watcher(), head, b""
        into(watcher, chunk)
    if watcher is None:
        watcher = Watcher(thorough=True)
        into(watcher, head)
    for note in notes:
        watcher.note(note)
    found = diagnose_watcher(watcher)
    if found.failed and on_failure:
        for note in on_failure:
            watcher.note(note)
        found = diagnose_watcher(watcher)
    return found, bytes(kept) + tail


def _of_host(
    name: str, options: dict[str, Any], *, whole: bool
) -> tuple[Diagnosis, bytes, dict[str, Any], tuple[str, ...]]:
    """The service's log with the one before it, judged beside what the host itself shows.

    Args:
        whole: gather what a bundle holds as well.
    """
    from dflash_deploy.cli.deployment import deployed
    from dflash_deploy.launch import faults, kernel_lines, look

    with deployed(name, options, failed=True) as here:
        settings, host = here.settings, here.host
        seen = look(host, settings)
        # systemd begins a new log with each start: what ended the start before stands in the one before.
        logs = (settings.log_file + ".1", settings.log_file)
        if not host.run(["sh", "-c", '[ -e "$1" ] || [ -e "$2" ]', "sh", *logs], timeout_s=30).ok:
            raise UsageError(
                f"{name} has no log at {settings.log_file}", evidence=faults(seen), hint=f"dflash-deploy launch {name}"
            )
        chunks = host.pipe(["sh", "-c", 'for log; do if [ -e "$log" ]; then cat "$log" || exit; fi; done', "sh", *logs])
        found, log = _stream(chunks, keep=whole, notes=faults(seen), on_failure=kernel_lines(seen))
        parts, secrets = _parts(here, seen) if whole else ({}, ())
    return found, log, parts, secrets


def _parts(here: Deployment, seen: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Arguments, environment, facts, manifest and state, each as far as it can be had; and what must not be shown."""
    from dflash_deploy.cli.start import starts_file
    from dflash_deploy.diagnose.bundle import environment
    from dflash_deploy.facts import gather
    from dflash_deploy.facts.redact import redact
    from dflash_deploy.health.http import NoReply, request

    settings, host = here.settings, here.host
    parts: dict[str, Any] = {"settings.json": settings.as_dict(), "look.json": seen}

    def add(name: str, get: Any) -> None:
        try:
            parts[name] = get()
        except (DflashError, NoReply, OSError) as error:
            parts[name] = f"not to be had: {error}\n"

    def text(path: str) -> str:
        return (host.read(path) or b"(absent)\n").decode("utf-8", "replace")

    def effective() -> Any:
        with host.forward(settings.port) as port:
            reply = request(f"http://127.0.0.1:{port}", "/server_info", key=here.api_key(), timeout_s=10)
            return reply.json() or f"HTTP {reply.status}\n"

    def unit() -> str:
        return host.run(["systemctl", "cat", f"{settings.service}.service"], timeout_s=20).out or "(no unit)\n"

    add("state.json", lambda: text(settings.state_file))
    add("service.json", lambda: here.service().as_dict())
    parts["environment.txt"], hidden = environment(text(settings.env_file))
    add("unit.txt", unit)
    add("server-info.json", effective)
    add("starts.jsonl", lambda: text(starts_file(settings)))
    add("manifest.json", lambda: text(str((seen.get("manifest") or {}).get("path") or "/nonexistent")))
    add("facts.json", lambda: redact(gather(host, venvs=[settings.venv], paths=[settings.root]).to_json()))
    return parts, (here.api_key(), *hidden)


Row = tuple[str, str, str]
"""Label, text, style."""


def _tell(source: str, found: Diagnosis) -> None:
    from dflash_deploy.render import print_rows

    print_rows(rows(source, found))


def rows(source: str, found: Diagnosis) -> Iterator[Row]:
    """The diagnosis for people."""
    yield "", f"{source}: {found.lines} lines, {found.starts} start(s), phase {found.phase}", "bold"
    for number, old in enumerate(found.earlier, 1):
        told = f"{old.id}: {old.title}" if old else "cause not known"
        yield "", f"failed start {number} of {len(found.earlier)} before: {told}", "yellow"
    if not found.failed:
        since = " since the last start" if found.earlier else ""
        yield "", f"no failure is visible in this log{since}", "green"
        if found.earlier and (last := found.earlier[-1]):
            yield from _cause(source, "LAST FAILURE", last)
        return
    if found.primary:
        yield from _cause(source, "PRIMARY", found.primary)
    else:
        yield "", "the cause is not known", "bold red"
    for other in found.others:
        yield "also", f"{other.id} (line {other.line}): {other.title}", ""
    for error in found.first_errors:
        who = error.rank or "the main process"
        yield "first", f"exception of {who} (line {error.line}): {error.exception[:300]}", ""
    if not found.primary or found.primary.kind != "cause":
        for line in found.first_errors[0].lines[-12:] if found.first_errors else found.context[-12:]:
            yield "|", line, "dim"
    if not found.primary:
        yield "next", f"dflash-deploy diagnose {source} --bundle FILE", "cyan"


def _cause(source: str, mark: str, cause: Cause) -> Iterator[Row]:
    host = source if source != "-" and not Path(source).is_file() else "HOST"
    yield mark, f"{cause.id}: {cause.title}", "bold red"
    yield "cause", cause.cause, ""
    where = f"line {cause.line}{' ' + cause.rank if cause.rank else ''}" if cause.line else "seen on the host"
    yield "evidence", f"{where}: {cause.evidence.strip()[:300]}", ""
    yield "act on", cause.where, ""
    yield "next", cause.next.replace("HOST", host), "cyan"
    if cause.ref:
        yield "see", ", ".join(cause.ref), "dim"


def register(app: typer.Typer) -> None:
    """Add this command to ``app``."""
    app.command("diagnose")(spread(diagnose))
