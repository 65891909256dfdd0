"""``provision``, ``plan``, ``launch``, ``up``: bring a host to what is wanted."""

from __future__ import annotations

from typing import Annotated

import typer

from dflash_deploy.cli.common import HostArgument, JsonOption, emit_json
from dflash_deploy.cli.options import BreakLock, Installed, Wanted, spread
from dflash_deploy.cli.several import several
from dflash_deploy.errors import CHANGES_PENDING

CopyFrom = Annotated[
    str, typer.Option("--from", metavar="HOST", help="Copy the environment of this host, where it may travel.")
]

# Imports are inside the commands: --help must not pay for them.

Keep = Annotated[int, typer.Option("--keep", min=1, metavar="N", help="Proved releases that stay on the host.")]


def register(app: typer.Typer) -> None:
    """Add this group's commands to ``app``."""
    for command in (plan, provision, launch, up):
        app.command()(spread(several(command, rolling=command in (launch, up))))


def provision(
    host: HostArgument,
    wanted: Installed,
    source: CopyFrom = "",
    break_lock: BreakLock = False,
    as_json: JsonOption = False,
) -> None:
    """Install the stack into the host's venv and bring the models. A second run does nothing."""
    from dflash_deploy.cli.deployment import deployment
    from dflash_deploy.cli.recap import Recap
    from dflash_deploy.cli.steps import provision_steps

    recap = Recap()
    with (
        recap.printed(host, as_json),
        deployment(host, wanted.given(), lock="provision", break_lock=break_lock) as here,
    ):
        if source:
            from dflash_deploy.cli.transplant import transplant_step

            transplant_step(here, source, wanted.given(), recap)
            here.refresh()
            here.choose_venv()
        provision_steps(here, recap)


def launch(
    host: HostArgument,
    wanted: Wanted,
    break_lock: BreakLock = False,
    as_json: JsonOption = False,
) -> None:
    """Start the service, or restart it when something of it has changed. Does not wait for it, and so proves nothing:
    ``up`` does."""
    from dflash_deploy.cli.deployment import deployment
    from dflash_deploy.cli.prove import launch_steps
    from dflash_deploy.cli.recap import Recap
    from dflash_deploy.errors import Incompatible

    recap = Recap()
    with (
        recap.printed(host, as_json),
        deployment(host, wanted.given(), lock="launch", break_lock=break_lock) as here,
    ):
        if here.settings.managed and here.patch_sets() and here.patched is None:
            raise Incompatible(
                f"{here.host.name} has no environment with these patches",
                evidence=f"{', '.join(here.patch_sets())} on {here.settings.stack.name}",
                hint=f"dflash-deploy up {here.host.name} makes one and proves it",
            )
        launch_steps(here, recap)


def plan(host: HostArgument, wanted: Installed, as_json: JsonOption = False) -> None:
    """Show every step that ``up`` would take, each file's diff, and what would be downloaded. Changes nothing; exits 10
    when something would change."""
    from dflash_deploy.cli.deployment import deployment
    from dflash_deploy.cli.lint import lint_findings
    from dflash_deploy.cli.preview import all_plans, shown

    with deployment(host, wanted.given()) as here:
        plans = all_plans(here)
        # Patches that cannot be computed yet are changes all the same.
        pending = not all(each.empty for each in plans)
        # Before the patches are in, the release does not know the arguments that they add.
        complaints = lint_findings(here) if plans[2].empty else []
        if as_json:
            emit_json(
                {
                    "host": host,
                    "changes": pending,
                    "arguments": [
                        {"severity": str(f.severity), "message": f.message, "remedy": f.remedy} for f in complaints
                    ],
                    "release": here.settings.release,
                    "current": here.look.current,
                    "settings": here.settings.as_dict(),
                    "plans": [shown(here, each) for each in plans],
                }
            )
        else:
            for each in plans:
                data = shown(here, each)
                print(f"{each.name}: {each.reason}")
                for step in data["steps"]:
                    print(f"  + {step['title']}")
                    print(f"      {step['does'].splitlines()[0][:300]}")
                    if step["diff"]:
                        print("\n".join(f"      {line}" for line in step["diff"].splitlines()))
                if data["download_mib"]:
                    print(f"  about {data['download_mib']} MiB come from the package index or this machine")
            for found in complaints:
                print(f"{found.severity}: {found.message}" + (f"\n      {found.remedy}" if found.remedy else ""))
            print("something would change" if pending else "nothing would change")
    if pending:
        raise typer.Exit(CHANGES_PENDING)


def up(
    host: HostArgument,
    wanted: Installed,
    keep: Keep = 3,
    break_lock: BreakLock = False,
    as_json: JsonOption = False,
) -> None:
    """Audit, provision, patch, launch and prove healthy: a bare host serves. A second run changes nothing. If what is
    new does not become healthy, what served before serves again."""
    from dflash_deploy.cli.deployment import deployment
    from dflash_deploy.cli.prove import prove_steps
    from dflash_deploy.cli.recap import Recap
    from dflash_deploy.cli.steps import audit_step, patch_steps, provision_steps

    recap = Recap()
    with recap.printed(host, as_json):
        with deployment(host, wanted.given(), lock="up", break_lock=break_lock) as here:
            with recap.step("audit") as note:
                note.detail = audit_step(here)
            provision_steps(here, recap)
            patch_steps(here, recap)
            report = prove_steps(here, recap, keep=keep)
            recap.data["url"] = here.settings.url
        recap.show_health(report)
