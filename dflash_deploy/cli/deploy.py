"""``provision``, ``plan``, ``launch``, ``up``: bring a host to what is wanted."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dflash_deploy.cli.common import HostArgument, JsonOption, emit_json
from dflash_deploy.errors import CHANGES_PENDING

# Imports are inside the commands: --help must not pay for them.

Root = Annotated[str | None, typer.Option("--root", help="Folder of the deployment on the host.")]
Venv = Annotated[str | None, typer.Option("--venv", help="Virtual environment on the host. Default: ROOT/venv.")]
StackOption = Annotated[
    str | None, typer.Option("--stack", help="Name of a stack; default: the best that fits the host.")
]
Port = Annotated[
    int | None, typer.Option("--port", help="Port of the served model on the host's loopback. Default: 30000.")
]
Model = Annotated[
    str | None,
    typer.Option("--model", help="Folder of the target model, on the host or here. Without a GPU: the tiny pair."),
]
Draft = Annotated[str | None, typer.Option("--draft-model", help="Folder of the drafter, on the host or here.")]
InventoryOption = Annotated[str | None, typer.Option("--inventory", help="Another hosts.toml.")]
AcceptNew = Annotated[
    bool, typer.Option("--accept-new", help="Record the key of a host that was never met; shows its fingerprint.")
]
Budget = Annotated[int | None, typer.Option("--budget", help="Nodes of the draft tree.")]
AlgorithmOption = Annotated[str | None, typer.Option("--algorithm", help="DDTREE, DFLASH or NONE. Default: DDTREE.")]
ModeOption = Annotated[str | None, typer.Option("--mode", help="systemd-system, systemd-user, supervisor or auto.")]
ServiceName = Annotated[str | None, typer.Option("--service", help="Name of the service.")]
ServerArg = Annotated[
    list[str] | None,
    typer.Option("--server-arg", help="An argument for the server, repeatable; wins over the stack's."),
]
BreakLock = Annotated[bool, typer.Option("--break-lock", help="Take over the lock of another run.")]


def register(app: typer.Typer) -> None:
    """Add this group's commands to ``app``."""
    for command in (plan, provision, launch, up):
        app.command()(command)


def provision(
    host: HostArgument,
    root: Root = None,
    venv: Venv = None,
    stack: StackOption = None,
    port: Port = None,
    model: Model = None,
    draft_model: Draft = None,
    inventory: InventoryOption = None,
    accept_new: AcceptNew = False,
    budget: Budget = None,
    algorithm: AlgorithmOption = None,
    mode: ModeOption = None,
    service: ServiceName = None,
    server_arg: ServerArg = None,
    break_lock: BreakLock = False,
    as_json: JsonOption = False,
) -> None:
    """Install the stack into the host's venv and bring the models. A second run does nothing."""
    options = dict(locals())
    from dflash_deploy.cli.deployment import deployment
    from dflash_deploy.cli.steps import Recap, provision_steps

    recap = Recap()
    with (
        recap.printed(host, as_json),
        deployment(host, settings_of(options)) as here,
        here.locked("provision", break_lock=break_lock),
    ):
        provision_steps(here, recap)


def launch(
    host: HostArgument,
    root: Root = None,
    venv: Venv = None,
    stack: StackOption = None,
    port: Port = None,
    model: Model = None,
    draft_model: Draft = None,
    inventory: InventoryOption = None,
    accept_new: AcceptNew = False,
    budget: Budget = None,
    algorithm: AlgorithmOption = None,
    mode: ModeOption = None,
    service: ServiceName = None,
    server_arg: ServerArg = None,
    break_lock: BreakLock = False,
    as_json: JsonOption = False,
) -> None:
    """Start the service, or restart it when something of it has changed. Does not wait for it: see ``health``."""
    options = dict(locals())
    from dflash_deploy.cli.deployment import deployment
    from dflash_deploy.cli.steps import Recap, launch_steps

    recap = Recap()
    with (
        recap.printed(host, as_json),
        deployment(host, settings_of(options)) as here,
        here.locked("launch", break_lock=break_lock),
    ):
        launch_steps(here, recap)


def plan(
    host: HostArgument,
    root: Root = None,
    venv: Venv = None,
    stack: StackOption = None,
    port: Port = None,
    model: Model = None,
    draft_model: Draft = None,
    inventory: InventoryOption = None,
    accept_new: AcceptNew = False,
    budget: Budget = None,
    algorithm: AlgorithmOption = None,
    mode: ModeOption = None,
    service: ServiceName = None,
    server_arg: ServerArg = None,
    as_json: JsonOption = False,
) -> None:
    """Show every step that ``up`` would take. Changes nothing; exits 10 when something would change."""
    options = dict(locals())
    from dflash_deploy.cli.deployment import deployment
    from dflash_deploy.model import Plan
    from dflash_deploy.plan.patch import plan_patch

    with deployment(host, settings_of(options)) as here:
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
        if as_json:
            emit_json(
                {
                    "host": host,
                    "changes": pending,
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
            print("something would change" if pending else "nothing would change")
    if pending:
        raise typer.Exit(CHANGES_PENDING)


def up(
    host: HostArgument,
    root: Root = None,
    venv: Venv = None,
    stack: StackOption = None,
    port: Port = None,
    model: Model = None,
    draft_model: Draft = None,
    inventory: InventoryOption = None,
    accept_new: AcceptNew = False,
    budget: Budget = None,
    algorithm: AlgorithmOption = None,
    mode: ModeOption = None,
    service: ServiceName = None,
    server_arg: ServerArg = None,
    break_lock: BreakLock = False,
    as_json: JsonOption = False,
) -> None:
    """Audit, provision, patch, launch and prove healthy: a bare host serves. A second run changes nothing."""
    options = dict(locals())
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
    with recap.printed(host, as_json), deployment(host, settings_of(options)) as here:
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


def settings_of(options: dict[str, Any]) -> dict[str, Any]:
    """A command's arguments as options of :func:`~dflash_deploy.settings.effective`."""
    options = {
        key: value
        for key, value in options.items()
        if key not in ("host", "as_json", "break_lock") and value is not None
    }
    if words := options.pop("server_arg", None):
        options["server_args"] = words
    return options
