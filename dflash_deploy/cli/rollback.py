"""The steps of ``rollback``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_deploy.cli.prove import give_back, health_step, promote_step, restore_of, stream_step
from dflash_deploy.cli.recap import Recap, tell
from dflash_deploy.errors import CommandFailed, HostChanged, Unhealthy, UsageError
from dflash_deploy.model import Status

if TYPE_CHECKING:
    from dflash_deploy.cli.deployment import Deployment
    from dflash_deploy.health import HealthReport
    from dflash_deploy.releases.model import Release


def target_of(here: Deployment, named: str) -> Release:
    """The release to go back to.

    Raises:
        UsageError: there is none, it is not whole, or it has no settings of its own.
    """
    name = named or here.look.previous()
    found = here.look.release(name) if name else None
    known = ", ".join(each.id for each in here.look.releases) or "none"
    if found is None:
        what = f"there is no release {named}" if named else "there is no release to go back to"
        raise UsageError(f"{what} on {here.host.name}", evidence=f"there are: {known}")
    if not found.complete or not found.settings:
        raise UsageError(
            f"release {found.id} on {here.host.name} is not whole, or was made before there were releases",
            evidence=f"there are: {known}",
            hint="name another with --to",
        )
    return found


def check_release(here: Deployment, release: Release) -> str:
    """Its environment is still the one that it was proved with.

    Raises:
        HostChanged: packages or patches differ.
    """
    from dflash_deploy.cli.deployment import look_at
    from dflash_deploy.plan.provision import VenvState, unmet
    from dflash_deploy.plan.release import outcome_digest

    old = here.of_release(release)
    settings = old.settings
    from dataclasses import replace

    seen = look_at(here.host, here.facts, replace(settings, managed=False), "")
    found = seen.venvs.get(settings.venv)
    wrong = []
    if found is None or not found.exists or found.python is None:
        wrong.append(f"{settings.venv}: there is no interpreter that starts")
    else:
        missing = unmet(settings.stack, VenvState.of_look(found).packages)
        wrong += [f"{settings.venv}: {each}" for each in missing[:6]]
        now = outcome_digest(found.manifest) if found.manifest is not None else ""
        if release.patches and now != release.patches:
            wrong.append(f"{settings.venv}: other patches than those of the release")
        elif found.manifest is not None and not found.intact:
            wrong.append(f"{settings.venv}: patched files were changed")
    if wrong:
        raise HostChanged(
            f"release {release.id} on {here.host.name} is not what it was",
            evidence=wrong,
            hint=f"dflash-deploy up {here.host.name} with the settings of that release builds it anew",
        )
    here.look = seen
    return f"{release.id}: environment, patches and configuration are as they were proved"


def rollback_steps(here: Deployment, recap: Recap, release: Release, *, keep: int) -> HealthReport:
    """Start the release from its own files, prove it, make it current.

    Raises:
        Unhealthy, CommandFailed: what served before serves again.
    """
    from dflash_deploy.execute import execute

    before = here.look.running_release or here.look.current_release
    target = here.of_release(release)
    target.look = here.look
    try:
        with recap.step("launch") as note:
            plan = restore_of(here, release, before)
            execute(plan, here.host, journal=here.journal, on_progress=tell)
            note.status = Status.CHANGED if plan.steps else Status.OK
            note.detail = plan.reason
        with recap.step("health") as note:
            report = health_step(target)
            note.detail = f"serving at {target.settings.url}"
            recap.data["health"] = report.as_dict()
            recap.data["streamed"] = stream_step(target)
    except (Unhealthy, CommandFailed) as error:
        raise give_back(target, recap, error, served=before is not None) from None
    promote_step(target, recap, keep=keep)
    return report
