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
    from dflash_deploy.cli.steps import Recap, provision_steps

    recap = Recap()
    with (
        recap.printed(host, as_json),
        deployment(host, wanted.given()) as here,
        here.locked("provision", break_lock=break_lock),
    ):
        if source:
            from dflash_deploy.cli.transplant import transplant_step

            transplant_step(here, source, wanted.given(), recap)
        provision_steps(here, recap)


def launch(
    host: HostArgument,
    wanted: Wanted,
    break_lock: BreakLock = False,
    as_json: JsonOption = False,
) -> None:
    """Start the service, or restart it when something of it has changed. Does not wait for it: see ``health``."""
    from dflash_deploy.cli.deployment import deployment
    from dflash_deploy.cli.steps import Recap, launch_steps

    recap = Recap()
    with (
        recap.printed(host, as_json),
        deployment(host, wanted.given()) as here,
        here.locked("launch", break_lock=break_lock),
    ):
        launch_steps(here, recap)


def plan(
    host: HostArgument,
    wanted: Installed,
    as_json: JsonOption = False,
) -> None:
    """Show every step that ``up`` would take. Changes nothing; exits 10 when something would change."""
    from dflash_deploy.cli.deployment import deployment
    from dflash_deploy.cli.lint import lint_findings
    from dflash_deploy.model import Plan
    from dflash_deploy.plan.patch import plan_patch

    with deployment(host, wanted.given()) as here:
        plans = [here.provision_plan(), here.models_plan()]
        manifest = None
        if plans[0].empty:
            tree = here.tree_state()
            plans.append(plan_patch(tree))
            manifest = tree.manifest
        else:
            names = ", ".join(here.patch_sets())
            plans.append(Plan("patch", (), f"{names}: after SGLang is installed"))
        plans.append(here.launch_plan(here.service(), manifest))
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
                    "settings": here.settings.as_dict(),
                    "plans": [
                        {
                            "name": p.name,
                            "reason": p.reason,
                            "steps": [{"title": s.title, "does": s.describe()} for s in p.steps],
                        }
                        for p in plans
                    ],
                }
            )
        else:
            for each in plans:
                print(f"{each.name}: {each.reason}")
                for step in each.steps:
                    print(f"  + {step.title}\n      {step.describe()}" if step.title else f"  + {step.describe()}")
            for found in complaints:
                print(f"{found.severity}: {found.message}" + (f"\n      {found.remedy}" if found.remedy else ""))
            print("something would change" if pending else "nothing would change")
    if pending:
        raise typer.Exit(CHANGES_PENDING)


def up(
    host: HostArgument,
    wanted: Installed,
    break_lock: BreakLock = False,
    as_json: JsonOption = False,
) -> None:
    """Audit, provision, patch, launch and prove healthy: a bare host serves. A second run changes nothing."""
    from dflash_deploy.cli.deployment import deployment
    from dflash_deploy.cli.steps import (
        Recap,
        audit_step,
        health_step,
        launch_steps,
        patch_steps,
        provision_steps,
        stream_step,
    )

    recap = Recap()
    with recap.printed(host, as_json), deployment(host, wanted.given()) as here:
        with here.locked("up", break_lock=break_lock):
            with recap.step("audit") as note:
                note.detail = audit_step(here)
            provision_steps(here, recap)
            patch_steps(here, recap)
            launch_steps(here, recap)
            with recap.step("health") as note:
                report = health_step(here)
                note.detail = f"serving at {here.settings.url}"
                recap.data["health"] = report.as_dict()
                recap.data["streamed"] = stream_step(here)
            recap.data["url"] = here.settings.url
        recap.show_health(report)
