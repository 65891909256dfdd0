"""``provision HOST --from OTHER``: the environment of another host, as far as it may travel."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash_deploy.cli.deployment import Deployment, deployment, talk
from dflash_deploy.errors import Incompatible, UsageError
from dflash_deploy.model import Plan, Status

if TYPE_CHECKING:
    from dflash_deploy.cli.recap import Recap
    from dflash_deploy.facts import Facts


def transplant_step(here: Deployment, name: str, options: Mapping[str, Any], recap: Recap) -> None:
    """Bring the finished environment of host ``name`` to this one; nothing when the stack is here already.

    Raises:
        UsageError: there is no finished environment of this stack.
        Incompatible: it may not travel; every reason at once.
        CommandFailed: what arrived is not what was sent, or does not stand the audit.
    """
    from dflash_deploy.cli.proof import audit_installed
    from dflash_deploy.execute import execute
    from dflash_deploy.plan.provision import finish_steps
    from dflash_deploy.transplant import look, refuse, transplant

    planned = here.provision_plan()
    if planned.empty:
        return
    asked = {"inventory": options.get("inventory"), "accept_new": options.get("accept_new"),
             "stack": here.settings.stack.name, "algorithm": "NONE",
             # Of a model nothing is wanted there.
             "model": here.settings.model if not here.settings.tiny_pair else None}  # fmt: skip
    with recap.step("copy") as note, deployment(name, asked) as there:
        if there.host.name == here.host.name:
            raise UsageError(f"{name} is the host itself", hint="name another host with --from")
        path = there.source()
        python = posixpath.join(path, "bin", "python")
        if not there.complete(path):
            raise UsageError(
                f"{name} has no finished {here.settings.stack.name} in {path}",
                hint=f"dflash-deploy provision {name}, then this again; or provision without --from",
            )
        old = look(there.host, python)
        against = _problems(there, here.facts, path)
        make = _make_venv(here, old.python[:2])
        if make is None:
            against.append(f"no Python {old.python[0]}.{old.python[1]} with its venv module here")
        if against or make is None:
            raise Incompatible(
                f"the environment of {name} may not travel to {here.host.name}", evidence=against,
                hint="provision without --from, or install what is missing here",
            )  # fmt: skip
        from dflash_deploy.cli.recap import tell

        execute(make, here.host, journal=here.journal, on_progress=tell)
        new = look(here.host, here.settings.python)
        refuse(old, new, ())
        moved = transplant(there.host, old, here.host, new, here.settings.python, lambda line: talk(f"  {line}"))
        execute(Plan("copy", tuple(finish_steps(here.settings))), here.host, journal=here.journal, on_progress=tell)
        report = audit_installed(here)
        here.refresh()
        note.status = Status.CHANGED
        note.detail = (
            f"{moved.sent_bytes >> 20} MiB from {name}, {moved.files} files as their packages have them, "
            f"{moved.scripts} scripts rewritten; {report}"
        )


def _problems(there: Deployment, facts: Facts, path: str) -> list[str]:
    """Why its binaries would not run here."""
    from dflash_deploy.audit.compare import native_problems
    from dflash_deploy.audit.rules import Case
    from dflash_deploy.facts import gather

    seen = gather(there.host, venvs=[path], discover=False)
    return [problem for each in Case(seen).environments for problem in native_problems(each, facts, seen)]


def _make_venv(here: Deployment, python: Sequence[int]) -> Plan | None:
    """Steps to an empty environment of that Python; none where one stands; None: there is no such Python."""
    from dflash_deploy.model import Remove, Run
    from dflash_deploy.plan.alone import alone
    from dflash_deploy.plan.provision import venv_command

    settings = here.settings
    minor = (python[0], python[1])
    script = "import sys; sys.exit(sys.version_info[:2] != tuple(map(int, sys.argv[1:])))"
    test = [settings.python, "-I", "-c", script, *map(str, minor)]
    if here.host.run(test, timeout_s=60).ok:
        return Plan("copy", (), "the environment is begun already")
    command, env = venv_command(settings, here.facts, minor, minor, offline=True)
    if not command:
        return None
    steps: list[Remove | Run] = []
    if here.host.run(["test", "-e", settings.venv], timeout_s=30).ok:
        if not settings.venv.startswith(posixpath.normpath(settings.root) + "/"):
            raise UsageError(f"{settings.venv} is there and is no Python {minor[0]}.{minor[1]}")
        steps.append(Remove(settings.venv, title=f"remove {settings.venv}, which is of another Python"))
    steps.append(Run(alone(settings, command), title=f"make the venv {settings.venv}", env=env, timeout_s=600))
    return Plan("copy", tuple(steps))
