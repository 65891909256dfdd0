"""``down``, ``status``, ``logs``: the running service."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from dflash_deploy.cli.common import HostArgument, JsonOption, emit_json
from dflash_deploy.cli.options import BreakLock, Place, spread
from dflash_deploy.cli.several import several


def register(app: typer.Typer) -> None:
    """Add this group's commands to ``app``."""
    for command in (down, status):
        app.command()(spread(several(command)))
    app.command()(spread(logs))


def down(
    host: HostArgument,
    place: Place,
    break_lock: BreakLock = False,
    as_json: JsonOption = False,
) -> None:
    """End exactly what was started, and keep it from starting at boot. Files stay."""
    from dflash_deploy.cli.deployment import deployed
    from dflash_deploy.cli.recap import Recap
    from dflash_deploy.model import Plan
    from dflash_deploy.plan.launch import stop_steps

    recap = Recap()
    with (
        recap.printed(host, as_json),
        deployed(host, place.given(), lock="down", break_lock=break_lock) as here,
    ):
        state = here.service()
        idle = not (state.running or state.enabled or state.orphans or state.pid)
        steps = () if idle else tuple(stop_steps(here.settings, here.facts))
        reason = "nothing runs" if idle else "the service runs or starts at boot"
        recap.run(here, lambda: Plan("down", steps, reason))
        after = here.service()
        recap.data["service"] = after.as_dict()
        if after.running or after.orphans:
            from dflash_deploy.errors import CommandFailed

            raise CommandFailed(
                f"the service still runs on {here.host.name}",
                evidence=f"processes {[after.pid, *after.orphans]}",
                hint="run the same command again",
            )


def status(
    host: HostArgument,
    place: Place,
    as_json: JsonOption = False,
) -> None:
    """Say whether the service runs. Exit 9 when it does not."""
    from dflash_deploy.cli.deployment import deployed
    from dflash_deploy.cli.patch import PACKAGE
    from dflash_deploy.execute import described
    from dflash_deploy.patching.unchanged import standing

    with deployed(host, place.given()) as here:
        state = here.seen_service()
        lock = described(here.look.lock, here.look.lock_age) if here.look.lock is not None else None
        patches = standing(here.host, here.settings.venv, PACKAGE)
    if as_json:
        emit_json(
            {
                "host": host,
                "service": here.settings.service,
                "mode": here.settings.mode,
                "lock": lock,
                "release": here.settings.release,
                "current": here.look.current,
                "patches": patches.as_dict(),
                **state.as_dict(),
            }
        )
    else:
        if state.running:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.since)) if state.since else "?"
            print(
                f"{here.settings.service} on {host}: running since {since} "
                f"(process {state.pid}, {state.restarts} restarts)"
            )
        else:
            why = f", exit code {state.exit_code}" if state.exit_code else ""
            print(f"{here.settings.service} on {host}: not running{' (given up)' if state.failed else ''}{why}")
        if here.settings.release:
            proved = here.settings.release in here.look.history
            print(f"release {here.settings.release}{'' if proved else ' (not proved: run up again)'}")
        print(
            f"kept by {here.settings.mode}{', starts at boot' if state.enabled else ''}; log {here.settings.log_file}"
        )
        if not patches.as_left:
            what = "overwritten (reinstalled?)" if patches.overwritten else "changed by somebody else"
            count, first = len((*patches.overwritten, *patches.changed)), (*patches.overwritten, *patches.changed)[0]
            print(f"patches {', '.join(patches.sets)}: {count} files {what}, first {first}: run up again")
        if state.orphans:
            print(f"left over: {', '.join(map(str, state.orphans))}")
        if lock is not None:
            print(
                f"locked by {lock.get('user')} on {lock.get('host')}: {lock.get('what')}"
                f"{' (stale)' if lock['stale'] else ''}"
            )
    if not state.running:
        raise typer.Exit(9)


def logs(
    host: HostArgument,
    place: Place,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Last lines to print.")] = 100,
    release: Annotated[
        str, typer.Option("--release", metavar="ID", help="Of another release, e.g. a failed one.")
    ] = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the service's log."""
    from dflash_deploy.cli.deployment import deployed, talk
    from dflash_deploy.launch import follow as follow_log
    from dflash_deploy.launch import log_size, tail

    with deployed(host, place.given(), release=release) as here:
        offset = log_size(here.host, here.settings)
        found = tail(here.host, here.settings, lines)
        if as_json:
            emit_json({"host": host, "log": here.settings.log_file, "lines": found})
            return
        for line in found:
            print(line)
        if follow:
            talk(f"following {here.settings.log_file} (Ctrl-C ends this, not the service)")
            for chunk in follow_log(here.host, here.settings, offset):
                sys.stdout.write(chunk.decode("utf-8", "replace"))
                sys.stdout.flush()
