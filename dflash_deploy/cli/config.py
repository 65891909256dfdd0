"""``config show|profiles|profile``: what is set for a host and where it comes from; what a kind of machine wants."""

from __future__ import annotations

from typing import Annotated

import typer

from dflash_deploy.cli.common import HostArgument, JsonOption, emit_json
from dflash_deploy.cli.options import Wanted, spread


def register(app: typer.Typer) -> None:
    """Add this group's commands to ``app``."""
    group = typer.Typer(
        help="What is set for a host and where it comes from; profiles of kinds of machines.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    group.command("show")(spread(show))
    group.command("profiles")(profiles)
    group.command("profile")(profile)
    app.add_typer(group, name="config")


def show(host: HostArgument, wanted: Wanted, as_json: JsonOption = False) -> None:
    """Print every effective setting of a host, where it came from, and the server's command line. Changes nothing; of
    variables only the names are shown."""
    from dflash_deploy.cli.connection import connected
    from dflash_deploy.facts import gather
    from dflash_deploy.settings import effective

    options = wanted.given()
    with connected(host, options) as (machine, entry):
        facts = gather(machine, discover=False)
        given = {key: value for key, value in options.items() if key != "env"}
        settings = effective(machine.name, facts, options=given, entry=entry, serving=False)
    found = settings.as_dict()
    origin = found.pop("origin")
    if as_json:
        emit_json(
            {
                "host": host,
                "settings": {key: {"value": value, "from": origin.get(key, "")} for key, value in found.items()},
                "command": list(settings.server_argv()),
            }
        )
        return
    from rich.table import Table

    from dflash_deploy.render import console

    table = Table("setting", "value", "from", title=f"settings of {host}", title_justify="left")
    for key, value in found.items():
        said = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        table.add_row(key, said, origin.get(key, ""))
    console().print(table)


def profiles(as_json: JsonOption = False) -> None:
    """List the profiles that come with the project."""
    from dflash_deploy.profiles import shipped

    about = {name: text.splitlines()[0].lstrip("# ") for name, text in shipped().items()}
    if as_json:
        emit_json({"profiles": about})
        return
    for name, line in about.items():
        print(f"{name}: {line}")


def profile(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of `config profiles`.")], as_json: JsonOption = False
) -> None:
    """Print a profile with its reasons, to be copied into ``[profiles.NAME]`` of ``hosts.toml`` and changed."""
    import tomllib

    from dflash_deploy.errors import UsageError
    from dflash_deploy.profiles import shipped

    texts = shipped()
    if name not in texts:
        raise UsageError(f"there is no profile '{name}'", evidence=f"known: {', '.join(texts)}")
    if as_json:
        emit_json({"profile": name, "settings": tomllib.loads(texts[name]), "text": texts[name]})
    else:
        print(texts[name], end="")
