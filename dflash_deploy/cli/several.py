"""One command on several hosts: each host in a process of its own, one recap of all.

``several(command)`` gives a command that takes hosts and groups where the original takes one host. With one host it is
the original. With more, every host gets ``COMMAND HOST --json`` with the same options, so that nothing of one host can
touch another's, and all cores are used.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from dflash_deploy.cli.common import emit_json
from dflash_deploy.cli.options import Place
from dflash_deploy.errors import DflashError

if TYPE_CHECKING:
    from dflash_deploy.fleet import Outcome

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
DEADLINE_S = 24 * 3600.0


@dataclass(frozen=True)
class Ran:
    """What one host's process said."""

    exit_code: int
    answer: dict[str, Any]
    """Its JSON document; empty when it printed none."""
    tail: tuple[str, ...] = ()
    """The last lines of its talk."""

    @property
    def changed(self) -> bool:
        return bool(self.answer.get("changed") or self.answer.get("changes"))

    @property
    def detail(self) -> str:
        """One line for the recap."""
        error = self.answer.get("error")
        if isinstance(error, dict):
            return str(error.get("message"))
        if self.exit_code not in (0, 10):
            return (self.tail or ("no answer",))[-1]
        steps = self.answer.get("steps") or [{}]
        return str(self.answer.get("url") or steps[-1].get("detail") or "")


class Failed(DflashError):
    """A host's own command failed; carries its exit code."""

    def __init__(self, ran: Ran) -> None:
        error = ran.answer.get("error")
        about = error if isinstance(error, dict) else {}
        super().__init__(
            ran.detail or f"exit {ran.exit_code}",
            evidence=[str(line) for line in about.get("evidence") or ran.tail[-3:]],
            hint=str(about.get("hint") or ""),
        )
        self.exit_code = ran.exit_code
        self.ran = ran


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

    @functools.wraps(command)
    def called(**given: Any) -> None:
        hosts, parallel = given.pop("hosts"), given.pop("parallel")
        one_by_one = given.pop("rolling", False)
        inventory = next((value.inventory for value in given.values() if isinstance(value, Place)), None)
        names = hosts
        if hosts != ["local"]:
            from dflash_deploy.inventory import resolve_all

            names = [target.name for target in resolve_all(hosts, inventory=inventory)]
        if len(names) == 1:
            command(host=names[0], **given)
            return
        as_json = given.pop("as_json")
        options = [word for name, value in given.items() for word in words_of(name, hints[name], value)]
        run_all(str(command.__name__), names, options, parallel=1 if one_by_one else parallel, stop=one_by_one,
                as_json=as_json)  # fmt: skip

    del called.__wrapped__  # typer would look through it
    parameters = [shown[0], *extra, *shown[1:]]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


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


def run_all(
    command: str, names: Sequence[str], options: Sequence[str], *, parallel: int, stop: bool, as_json: bool
) -> None:
    """Run ``command`` on every host and print one recap.

    Args:
        stop: at the first failure; the hosts after it are not begun.

    Raises:
        typer.Exit: with the highest exit code of the hosts, when it is not 0.
    """
    from dflash_deploy import fleet
    from dflash_deploy.cli.deployment import talk
    from dflash_deploy.host.local import LocalHost

    cancelled = threading.Event()
    here = LocalHost(cancelled=cancelled)
    # As this process was started, whatever way that was; in its folder, where hosts.toml may lie.
    start = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]]
    talk(f"{command} on {len(names)} hosts, {min(parallel, len(names))} at a time ...")
    failed = threading.Event()

    def one(name: str) -> Ran | None:
        if stop and failed.is_set():
            return None
        tail: list[str] = []

        def heard(stream: str, text: str) -> None:
            if stream == "stderr" and text.strip():
                tail.append(text.rstrip())
                del tail[:-20]
                if text.endswith(" ...") and not text.startswith(" "):
                    talk(f"  {name}: {text}")

        words = [*start, command, name, *options, "--json"]
        inside = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()), *words]
        result = here.run(inside, timeout_s=DEADLINE_S, on_line=heard)
        try:
            answer = json.loads(result.out)
        except ValueError:
            answer = {}
        ran = Ran(result.exit_code, answer if isinstance(answer, dict) else {}, tuple(tail))
        if ran.exit_code not in (0, 10):
            failed.set()
            raise Failed(ran)
        return ran

    count = 0

    def told(outcome: Outcome[Ran | None]) -> None:
        nonlocal count
        count += 1
        if outcome.ok and outcome.value is None:
            return
        said = f"failed: {outcome.error.message}" if outcome.error else "done"
        talk(f"{count}/{len(names)} {outcome.name}: {said} ({outcome.seconds:.1f} s)")

    try:
        outcomes = fleet.across(list(names), one, parallel=parallel, on_done=told)
    except BaseException:
        # Their processes are ended, and given a moment to let go of the hosts' locks.
        cancelled.set()
        here.wait_idle(5.0)
        raise
    report(command, outcomes, as_json)


def report(command: str, outcomes: Sequence[Outcome[Ran | None]], as_json: bool) -> None:
    """The recap, and the exit code.

    Raises:
        typer.Exit: when it is not 0.
    """
    from dflash_deploy import fleet

    codes = [o.value.exit_code if o.value is not None else o.exit_code for o in outcomes]
    code = fleet.worst(codes)
    rows = []
    for outcome, own in zip(outcomes, codes, strict=True):
        begun = outcome.value is not None or outcome.error is not None
        status = "not begun" if not begun else "failed" if outcome.error else "ok"
        if outcome.value is not None and outcome.value.changed:
            status = "changes" if own == 10 else "changed"
        row: dict[str, Any] = {"host": outcome.name, "status": status, "exit_code": own,
                               "seconds": round(outcome.seconds, 3)}  # fmt: skip
        if outcome.error is not None:
            row["error"] = outcome.error.as_dict() | {"exit_code": own}
        elif outcome.value is not None:
            row["answer"] = outcome.value.answer
            row["detail"] = outcome.value.detail
        rows.append(row)
    done = sum(row["status"] not in ("failed", "not begun") for row in rows)
    if as_json:
        emit_json({"ok": code == 0, "command": command, "exit_code": code, "done": done, "hosts": rows})
    else:
        from dflash_deploy.render import print_hosts

        print_hosts(command, rows)
    if code:
        raise typer.Exit(code)
