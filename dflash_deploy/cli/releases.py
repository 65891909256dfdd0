"""``releases``, ``rollback``, ``prune``, ``lock``: what is kept on a host, and going back."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from dflash_deploy.cli.common import HostArgument, JsonOption, emit_json
from dflash_deploy.cli.deploy import Keep
from dflash_deploy.cli.options import BreakLock, Place, spread


class LockAction(StrEnum):
    """What to do with a host's lock."""

    STATUS = "status"
    RELEASE = "release"


def register(app: typer.Typer) -> None:
    """Add this group's commands to ``app``."""
    for command in (releases, rollback, prune, lock):
        app.command()(spread(command))


def releases(host: HostArgument, place: Place, as_json: JsonOption = False) -> None:
    """List what is kept on the host: the current release, those before it, those that failed."""
    from dflash_deploy.cli.deployment import deployed

    with deployed(host, place.given()) as here:
        rows = [each.as_dict(here.look) for each in here.look.releases]
    if as_json:
        emit_json({"host": host, "current": here.look.current, "history": list(here.look.history), "releases": rows})
        return
    for row in rows:
        marks = [word for word in ("current", "serving", "proved") if row[word]]
        if row["running"] and not row["serving"]:
            marks.append("between two tries")
        if row["failed"]:
            marks.append(f"failed: {row['failed']}")
        if not row["complete"]:
            marks.append("unfinished")
        print(f"{row['id']:<16} {row['created'] or '-':<21} {row['stack'] or '-':<24} {', '.join(marks)}".rstrip())
    if not rows:
        print(f"there is no release on {host}")


def rollback(
    host: HostArgument,
    place: Place,
    to: Annotated[
        str, typer.Option("--to", metavar="ID", help="The release to go back to. Default: the one proved before.")
    ] = "",
    keep: Keep = 3,
    break_lock: BreakLock = False,
    as_json: JsonOption = False,
) -> None:
    """Bring an earlier release back, its environment, patches and configuration together, and prove it healthy. If it
    is not, what served before serves again."""
    from dflash_deploy.cli.deployment import deployed
    from dflash_deploy.cli.recap import Recap
    from dflash_deploy.cli.rollback import check_release, rollback_steps, target_of

    recap = Recap()
    with recap.printed(host, as_json):
        with deployed(host, place.given(), lock="rollback", break_lock=break_lock) as here:
            release = target_of(here, to)
            with recap.step("check") as note:
                note.detail = check_release(here, release)
            report = rollback_steps(here, recap, release, keep=keep)
            recap.data["url"] = report.data.get("url", "")
        recap.show_health(report)


def prune(
    host: HostArgument,
    place: Place,
    keep: Keep = 3,
    break_lock: BreakLock = False,
    as_json: JsonOption = False,
) -> None:
    """Remove releases beyond the last N that were proved, and environments that none of the others uses."""
    from dflash_deploy.cli.deployment import deployed
    from dflash_deploy.cli.recap import Recap
    from dflash_deploy.plan.release import plan_prune

    recap = Recap()
    with (
        recap.printed(host, as_json),
        deployed(host, place.given(), lock="prune", break_lock=break_lock) as here,
    ):
        recap.run(here, lambda: plan_prune(here.settings, here.look, keep))


def lock(
    action: Annotated[LockAction, typer.Argument(help="status or release.")],
    host: HostArgument,
    place: Place,
    as_json: JsonOption = False,
) -> None:
    """Show who holds the host's lock, or take it away from a run that is surely gone. Exit 8: it is held."""
    from dflash_deploy.cli.connection import connected, expand
    from dflash_deploy.cli.deployment import DEFAULT_ROOT
    from dflash_deploy.execute import holder, release_lock

    with connected(host, place.given()) as (machine, entry):
        root = expand(str(place.root or entry.get("root") or DEFAULT_ROOT), machine.home)
        found = holder(machine, root)
        released = action == LockAction.RELEASE and found is not None
        if released:
            release_lock(machine, root)
    if as_json:
        emit_json({"host": host, "lock": found, "released": released})
    elif found is None:
        print(f"nobody holds the lock of {host}")
    else:
        stale = f"; stale: {found['stale']}" if found["stale"] else ""
        print(
            f"{'released' if released else 'held'}: {found.get('user', '?')} on {found.get('host', '?')} "
            f"(process {found.get('pid', '?')}) for {found['age']:.0f} s: {found.get('what', '?')}{stale}"
        )
    if found is not None and not released and not found["stale"]:
        raise typer.Exit(8)
