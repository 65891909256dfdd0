"""Options that several commands share, each written down once.

A command takes one parameter of such a type, and :func:`spread` shows its fields to typer as options::

    def up(host: HostArgument, wanted: Wanted, as_json: JsonOption = False) -> None: ...

    app.command()(spread(up))
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

BreakLock = Annotated[bool, typer.Option("--break-lock", help="Take over the lock of another run.")]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which deployment on the host."""

    root: Annotated[str | None, typer.Option("--root", help="Folder of the deployment on the host.")] = None
    inventory: Annotated[str | None, typer.Option("--inventory", help="Another hosts.toml.")] = None
    accept_new: Annotated[
        bool, typer.Option("--accept-new", help="Record the key of a host that was never met; shows its fingerprint.")
    ] = False
    service: Annotated[str | None, typer.Option("--service", help="Name of the service.")] = None
    mode: Annotated[str | None, typer.Option("--mode", help="systemd-system, systemd-user, supervisor or auto.")] = None
    venv: Annotated[
        str | None,
        typer.Option("--venv", help="A virtual environment of your own on the host. Default: one that is made."),
    ] = None

    def given(self) -> dict[str, Any]:
        """What was named on the command line, as options of :func:`dflash_deploy.settings.effective`."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        found = {name: value for name, value in found.items() if value is not None}
        if words := found.pop("server_arg", None):
            found["server_args"] = words
        if found.pop("no_lock", False):
            found["lock"] = False
        return found


@dataclass(frozen=True, kw_only=True)
class Wanted(Place):
    """What is to be served there."""

    stack: Annotated[
        str | None, typer.Option("--stack", help="Name of a stack; default: the best that fits the host.")
    ] = None
    port: Annotated[
        int | None, typer.Option("--port", help="Port of the served model on the host's loopback. Default: 30000.")
    ] = None
    model: Annotated[
        str | None,
        typer.Option("--model", help="Folder of the target model, on the host or here. Without a GPU: the tiny pair."),
    ] = None
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", help="Folder of the drafter, on the host or here.")
    ] = None
    budget: Annotated[str | None, typer.Option("--budget", help="Nodes of the draft tree, or auto.")] = None
    algorithm: Annotated[str | None, typer.Option("--algorithm", help="DDTREE, DFLASH or NONE. Default: DDTREE.")] = (
        None
    )
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env", metavar="NAME", help="A variable of this environment that the server gets, repeatable: HF_TOKEN."
        ),
    ] = None
    server_arg: Annotated[
        list[str] | None,
        typer.Option("--server-arg", help="An argument for the server, repeatable; wins over the stack's."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Installed(Wanted):
    """What is to be served there, and where its packages come from."""

    wheelhouse: Annotated[
        str | None,
        typer.Option("--wheelhouse", metavar="DIR", help="Install from this folder of wheels; ask no index."),
    ] = None
    no_lock: Annotated[
        bool, typer.Option("--no-lock", help="Install by version alone what the stack's lock has hashes for.")
    ] = False


class _Spread:
    """A command whose options are worked out when typer builds it: the list of commands needs none of them."""

    def __init__(self, command: Callable[..., None]) -> None:
        # No more than this: typer would look through ``__wrapped__``.
        self.__name__, self.__doc__, self.__module__ = command.__name__, command.__doc__, command.__module__
        self._command = command

    @functools.cached_property
    def _groups(self) -> dict[str, type[Place]]:
        return {
            name: kind
            for name, kind in get_type_hints(self._command, include_extras=True).items()
            if isinstance(kind, type) and issubclass(kind, Place)
        }

    @functools.cached_property
    def __signature__(self) -> inspect.Signature:
        hints, shown = get_type_hints(self._command, include_extras=True), []
        for name, parameter in inspect.signature(self._command).parameters.items():
            kind = self._groups.get(name)
            if kind is None:
                shown.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            inner = get_type_hints(kind, include_extras=True)
            shown += [
                inspect.Parameter(
                    each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=inner[each.name]
                )
                for each in fields(kind)
            ]
        return inspect.Signature(shown)

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]
        return {each.name: each.annotation for each in self.__signature__.parameters.values()}

    def __call__(self, **given: Any) -> None:
        for name, kind in self._groups.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
        self._command(**given)


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer is to see it: each field of its option types an option of its own."""
    return _Spread(command)
