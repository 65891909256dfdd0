"""The service as it stands on the host: what runs, since when, made from what."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_deploy.errors import CommandFailed
from dflash_deploy.execute import digests
from dflash_deploy.facts import Facts
from dflash_deploy.host.base import Host
from dflash_deploy.launch.look import faults, kernel_lines, load, look
from dflash_deploy.plan.launch import Present, paths, systemctl
from dflash_deploy.settings import Mode, Settings

__all__ = ["ServiceState", "faults", "follow", "kernel_lines", "load", "log_size", "look", "observe", "present", "tail"]


@dataclass(frozen=True)
class ServiceState:
    """What is known of a service without asking it anything."""

    running: bool = False
    enabled: bool = False
    """systemd starts it at boot. Always False for the supervisor, which a reboot ends."""
    pid: int = 0
    """The runner's process id; the server is its child."""
    server_pid: int = 0
    since: float = 0.0
    """Unix time of the start."""
    restarts: int = 0
    fingerprint: str = ""
    """Of the files and settings that the serving process was started with; empty between two tries of the runner."""
    failed: bool = False
    """Given up after too many failures."""
    exit_code: int | None = None
    orphans: tuple[int, ...] = ()
    """Processes of the service that outlived their runner."""
    detail: str = ""
    """systemd's own words, e.g. ``active (running)``."""

    def as_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {**self.__dict__, "orphans": list(self.orphans)}


def observe(host: Host, settings: Settings, facts: Facts) -> ServiceState:
    """Read the service's state; a service that was never launched is one that does not run."""
    recorded = _recorded(host, settings)
    if settings.mode == Mode.SUPERVISOR:
        return state_of(settings, {"record": recorded})
    names = ("ActiveState", "SubState", "UnitFileState", "MainPID", "NRestarts", "Result", "ExecMainStatus")
    command = systemctl(settings.mode, facts, "show", "--property", ",".join(names), f"{settings.service}.service")
    result = host.run(command, timeout_s=30)
    if not result.ok:
        raise CommandFailed(
            f"systemd does not answer on {host.name}",
            evidence=result.err.strip().splitlines()[-3:],
            hint="--mode supervisor keeps the service without systemd",
        )
    show = dict(line.partition("=")[::2] for line in result.out.splitlines())
    return state_of(settings, {"record": recorded, "system": show, "user": show})


def state_of(settings: Settings, seen: Mapping[str, Any]) -> ServiceState:
    """A service's state from what was seen of it: the runner's ``record``, systemd's properties."""
    recorded = seen.get("record") or {}
    if settings.mode == Mode.SUPERVISOR:
        return _from_record(recorded, running=bool(recorded.get("running")))
    show = seen.get("user" if settings.mode == Mode.USER else "system") or {}
    pid = int(show.get("MainPID") or 0)
    running = show.get("ActiveState") == "active"
    # The record is that of the present process only when it names it.
    mine = recorded if recorded.get("pid") == pid else {}
    state = _from_record(mine, running=running)
    return ServiceState(
        running=running,
        enabled=show.get("UnitFileState") == "enabled",
        pid=pid,
        server_pid=state.server_pid,
        since=state.since,
        restarts=int(show.get("NRestarts") or 0),
        fingerprint=state.fingerprint,
        failed=show.get("ActiveState") == "failed",
        exit_code=None if running else int(show.get("ExecMainStatus") or 0),
        detail=f"{show.get('ActiveState', '?')} ({show.get('SubState', '?')}, {show.get('Result', '?')})",
    )


def present(host: Host, settings: Settings, facts: Facts, state: ServiceState) -> Present:
    """What :func:`dflash_deploy.plan.launch.plan_launch` needs to know of the host."""
    return Present(digests(host, paths(settings, facts)), state.enabled, state.running, state.fingerprint)


def tail(host: Host, settings: Settings, lines: int) -> list[str]:
    """The last lines of the service's log, across its last rotation.

    Raises:
        CommandFailed: there is no log.
    """
    log = settings.log_file
    script = 'cat "$1.1" "$1" 2>/dev/null | tail -n "$2"; test -e "$1"'
    result = host.run(["/bin/sh", "-c", script, "sh", log, str(lines)], timeout_s=60)
    if not result.ok:
        raise CommandFailed(
            f"there is no log of {settings.service} on {host.name}", evidence=log, hint="dflash-deploy up HOST"
        )
    return result.out.splitlines()


def log_size(host: Host, settings: Settings) -> int:
    """Bytes in the log now: where to follow from; 0 when there is none."""
    result = host.run(["stat", "-c", "%s", settings.log_file], timeout_s=30)
    return int(result.out) if result.ok and result.out.strip().isdigit() else 0


def follow(host: Host, settings: Settings, offset: int) -> Iterator[bytes]:
    """Chunks of the log from ``offset`` on, until the caller stops."""
    return host.follow(settings.log_file, offset=offset)


def _recorded(host: Host, settings: Settings) -> dict[str, Any]:
    """The runner's own account; empty when there is none."""
    command = [settings.python, "-I", settings.runner, "status", "--state", settings.state_file]
    result = host.run(
        ["/bin/sh", "-c", 'test -x "$1" && test -e "$3" || exit 0; exec "$@"', "sh", *command], timeout_s=30
    )
    try:
        found = json.loads(result.out or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _from_record(record: dict[str, Any], *, running: bool) -> ServiceState:
    # Not the record's own ``serves``: whether the runner is there is systemd's to say where systemd started it.
    serves = running and not record.get("waiting")
    return ServiceState(
        running=running,
        pid=int(record.get("pid", 0)) if running else 0,
        server_pid=int(record.get("server", 0)) if running else 0,
        since=float(record.get("since", 0.0)),
        restarts=int(record.get("restarts", 0)),
        fingerprint=str(record.get("fingerprint", "")) if serves else "",
        failed=bool(record.get("failed", False)),
        exit_code=record.get("exit_code"),
        orphans=tuple(record.get("orphans", ())),
        detail="supervisor",
    )
