"""``wheelhouse build|check``: the wheels of a stack in a folder, for hosts without a network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_deploy.cli.common import JsonOption, emit_json

if TYPE_CHECKING:
    from dflash_deploy.facts import Facts
    from dflash_deploy.wheelhouse import House


def register(app: typer.Typer) -> None:
    """Add this group's commands to ``app``."""
    group = typer.Typer(
        help="The wheels of a stack in one folder, for hosts without a network: build it here, then provision HOST "
        "--wheelhouse DIR.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    group.command("build")(build)
    group.command("check")(check)
    app.add_typer(group, name="wheelhouse")


def build(
    stack: Annotated[str, typer.Option("--stack", help="Name of a stack; default with --for: the best for HOST.")] = "",
    for_host: Annotated[str, typer.Option("--for", metavar="HOST", help="Take Python and platform from HOST.")] = "",
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Default: ./wheelhouse-STACK.")] = None,
    python: Annotated[str, typer.Option("--python", metavar="X.Y", help="Python of the hosts.")] = "",
    inventory: Annotated[str | None, typer.Option("--inventory", help="Another hosts.toml.")] = None,
    accept_new: Annotated[bool, typer.Option("--accept-new", help="Record the key of a host never met.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Resolve a stack and download its wheels, with this machine's pip. Goes on where it was cut off."""
    from dflash_deploy.cli.deployment import talk
    from dflash_deploy.errors import UsageError
    from dflash_deploy.facts import Facts
    from dflash_deploy.host.local import LocalHost
    from dflash_deploy.settings import find_stack
    from dflash_deploy.wheelhouse.build import build as make
    from dflash_deploy.wheelhouse.build import target_for, verify

    if not stack and not for_host:
        raise UsageError("for which stack?", hint="--stack NAME (see: dflash-deploy stacks), or --for HOST")
    facts = _facts(for_host, inventory, accept_new) if for_host else Facts("", "", "", "", "", 0)
    chosen = find_stack(stack or None, facts)
    target = target_for(chosen, facts, python)
    folder = out or Path(f"wheelhouse-{chosen.name}-py{target.dotted}")
    house = make(LocalHost(), chosen, target, folder, talk)
    verify(house, talk)
    if as_json:
        emit_json({"ok": True, **_about(house)})
    else:
        print(f"{house.folder}: {len(house.wheels)} wheels of {house.stack}, {house.bytes >> 20} MiB")
        talk(f"next: dflash-deploy provision {for_host or 'HOST'} --wheelhouse {folder}")


def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that wheelhouse build made.")],
    as_json: JsonOption = False,
) -> None:
    """Read every wheel: its digest, its platform, and that none is missing. Exit 2 when something is wrong."""
    from dflash_deploy.cli.deployment import talk
    from dflash_deploy.wheelhouse.check import check as prove
    from dflash_deploy.wheelhouse.house import read_house

    house = read_house(folder)
    talk(f"checking {len(house.wheels)} wheels, {house.bytes >> 20} MiB ...")
    found = prove(house)
    if as_json:
        emit_json({"ok": not found.problems, **_about(house), "problems": list(found.problems)})
    else:
        for line in found.problems:
            print(line)
        if not found.problems:
            print(f"{house.folder}: {len(house.wheels)} wheels of {house.stack} are whole, {house.bytes >> 20} MiB")
    if found.problems:
        talk(f"next: dflash-deploy wheelhouse build --stack {house.stack} --out {folder}, which mends it")
        raise typer.Exit(2)


def _facts(name: str, inventory: str | None, accept_new: bool) -> Facts:
    from dflash_deploy.cli.deployment import talk
    from dflash_deploy.facts import gather
    from dflash_deploy.host import connect
    from dflash_deploy.inventory import resolve

    target = resolve(name, inventory=inventory)
    talk(f"asking {target.name} for its Python and platform ...")
    host = connect(target, accept_new=accept_new or target.accept_new, on_notice=talk)
    try:
        return gather(host, discover=False)
    finally:
        host.close()


def _about(house: House) -> dict[str, object]:
    about = house.to_json()
    return {"folder": house.folder, "bytes": house.bytes, "digest": house.digest, **about}
