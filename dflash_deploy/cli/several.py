"""One command on several hosts: each host in a process of its own, one recap of all.

``several(command)`` gives a command that takes hosts and groups where the original takes one host. With one host it is
the original. With more, every host gets ``COMMAND HOST --json`` with the same options, so that nothing of one host can
touch another's, and all cores are used.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from dflash_deploy.cli.options import Place
from dflash_deploy.errors import UsageError

if TYPE_CHECKING:
    from dflash_deploy.inventory import Target

HostsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="HOST...",
        help="'local', names or groups of hosts.toml, a Host of ~/.ssh/config, or user@host:port.",
        show_default=False,
    ),
]
Parallel = Annotated[int, typer.Option("--parallel", min=1, metavar="N", help="Several hosts: so many at a time.")]
Rolling = Annotated[
    bool, typer.Option("--rolling", help="Several hosts: one after the other, each healthy before the next; stop at the first failure.")  # noqa: E501
]  # fmt: skip

Part = Annotated[bool, typer.Option("--part", hidden=True, help="The other hosts of a run over several: their own.")]


def several(command: Callable[..., None], *, rolling: bool = False) -> Callable[..., None]:
    """The command for one host or several.

    Args:
        command: its first parameter is ``host``; has a ``as_json`` one.
        rolling: offer ``--rolling``.
    """
    hints = get_type_hints(command, include_extras=True)
    shown = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
    ]
    keyword = inspect.Parameter.KEYWORD_ONLY
    shown[0] = inspect.Parameter("hosts", keyword, annotation=HostsArgument)
    extra = [inspect.Parameter("parallel", keyword, default=16, annotation=Parallel)]
    if rolling:
        extra.append(inspect.Parameter("rolling", keyword, default=False, annotation=Rolling))
        extra.append(inspect.Parameter("part", keyword, default=False, annotation=Part))

    @functools.wraps(command)
    def called(**given: Any) -> None:
        hosts, parallel = given.pop("hosts"), given.pop("parallel")
        one_by_one, part = given.pop("rolling", False), given.pop("part", False)
        inventory = next((value.inventory for value in given.values() if isinstance(value, Place)), None)
        names = hosts
        if hosts != ["local"]:
            from dflash_deploy.inventory import resolve_all

            targets = resolve_all(hosts, inventory=inventory)
            names = [target.name for target in targets]
            if rolling and not part:
                together(targets, 1 if one_by_one else parallel)
        if len(names) == 1:
            command(host=names[0], **given)
            return
        as_json = given.pop("as_json")
        from dflash_deploy.cli.running import run_all

        options = [word for name, value in given.items() for word in words_of(name, hints[name], value)]
        options += ["--part"] if rolling else []
        run_all(str(command.__name__), names, options, parallel=1 if one_by_one else parallel, stop=one_by_one,
                as_json=as_json)  # fmt: skip

    del called.__wrapped__  # typer would look through it
    parameters = [shown[0], *extra, *shown[1:]]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def together(targets: Sequence[Target], parallel: int) -> None:
    """Hosts of a cluster wait for each other when they start: all of them are started at once, or none.

    Raises:
        UsageError: some of a cluster are not named, or not so many are started at a time.
    """
    sizes = Counter(str(target.options.get("dist_init_addr")) for target in targets if "nnodes" in target.options)
    for target in targets:
        size = int(target.options.get("nnodes", 1))
        if size > 1 and sizes[str(target.options.get("dist_init_addr"))] != size:
            raise UsageError(
                f"{target.name} serves a model together with other hosts, which are not all named",
                evidence=f"{size} hosts meet at {target.options.get('dist_init_addr')}",
                hint="name the cluster of hosts.toml instead",
            )
        if size > parallel:
            raise UsageError(
                f"the {size} hosts of {target.name}'s cluster wait for each other",
                hint=f"start them at once: --parallel {size} or more, without --rolling",
            )


def words_of(name: str, kind: Any, value: Any) -> list[str]:
    """A parameter's value as it stands on a command line."""
    if isinstance(value, Place):
        inner = get_type_hints(type(value), include_extras=True)
        return [
            word for each in fields(value) for word in words_of(each.name, inner[each.name], getattr(value, each.name))
        ]
    if value is None or value is False:
        return []
    about = next((a for a in get_args(kind)[1:] if isinstance(a, typer.models.OptionInfo)), None)
    # In an annotation typer keeps the first name in the place of the default.
    names = [about.default, *(about.param_decls or ())] if about is not None else []
    flag = next((n for n in names if isinstance(n, str) and n.startswith("--")), f"--{name.replace('_', '-')}")
    if value is True:
        return [flag]
    return [f"{flag}={each}" for each in (value if isinstance(value, (list, tuple)) else [value])]
