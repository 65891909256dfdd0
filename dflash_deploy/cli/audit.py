"""``audit``, ``stacks``, ``explain``, ``compare``: read-only."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_deploy.cli.common import JsonOption, emit_json
from dflash_deploy.fleet import PARALLEL

if TYPE_CHECKING:
    from dflash_deploy.audit.report import Report
    from dflash_deploy.audit.rules import Case
    from dflash_deploy.facts import Facts
    from dflash_deploy.inventory import Target

HELP_HOST = "'local', a host or group in hosts.toml, a Host of ~/.ssh/config, or user@host:port."


def read_facts(path: Path) -> Facts:
    """Facts from a file that ``--save`` wrote.

    Raises:
        UsageError: no such file, or not JSON.
    """
    from dflash_deploy.errors import UsageError
    from dflash_deploy.facts import Facts

    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read", evidence=[str(error)]) from None
    except ValueError as error:
        raise UsageError(
            f"{path} is not JSON", evidence=[str(error)], hint="dflash-deploy audit HOST --save FILE"
        ) from None
    return Facts.from_json(raw)


@dataclass(frozen=True)
class Questions:
    """What the command line asks of every host, whatever its name."""

    venvs: tuple[str, ...] = ()
    model: str = ""
    draft: str = ""
    ports: tuple[int, ...] = ()
    stack: str = ""
    args: tuple[str, ...] = ()
    accept_new: bool = False
    connect_timeout_s: float = 10.0
    models: tuple[str, ...] = ()
    """Further model folders."""

    def facts(self, target: Target) -> Facts:
        """Ask one host; what the command line leaves open, the inventory may say.

        Raises:
            HostError, UnreadableFact: see :func:`dflash_deploy.facts.gather`.
        """
        from dflash_deploy.facts import gather
        from dflash_deploy.host import connect

        options = target.options
        venvs = self.venvs or tuple(str(options[key]) for key in ("venv",) if options.get(key))
        models = [path for path in (*self.paths(target), *self.models) if path]
        host = connect(target, accept_new=self.accept_new, connect_timeout_s=self.connect_timeout_s, on_notice=talk)
        try:
            return gather(host, venvs=venvs, models=models, ports=self.ports)
        finally:
            host.close()

    def paths(self, target: Target | None) -> tuple[str, str]:
        """Folders of the target model and the drafter."""
        options = target.options if target is not None else {}
        return (
            self.model or str(options.get("model") or ""),
            self.draft or str(options.get("draft_model") or ""),
        )

    def judge(self, facts: Facts, target: Target | None = None) -> tuple[Case, Report]:
        """Judge facts for what is asked."""
        from dflash_deploy.audit.report import audit
        from dflash_deploy.audit.request import build_case

        given = target.options.get("server_args") if target is not None else None
        args = self.args or ([str(word) for word in given] if isinstance(given, list) else [])
        model, draft = (at_home(path, facts) for path in self.paths(target))
        case = build_case(facts, stack=self.stack, model=model, draft=draft, args=args, ports=self.ports)
        return case, audit(case)


def at_home(path: str, facts: Facts) -> str:
    """The path as the probe answers it: ``~/`` is the account's home on the host."""
    return f"{facts.home}/{path[2:]}" if path.startswith("~/") and facts.home else path


def talk(text: str) -> None:
    """A line for a person, on stderr."""
    print(text, file=sys.stderr, flush=True)


def save(path: Path, document: dict[str, Any], redacted: bool) -> None:
    """Write the facts; only the owner may read them.

    Raises:
        UsageError: the file cannot be written.
    """
    from dflash_deploy.facts.redact import redact

    write(path, json.dumps(redact(document) if redacted else document, indent=1) + "\n", 0o600)


def write(path: Path, text: str, mode: int) -> None:
    """Write a text file, its folder with it.

    Raises:
        UsageError: it cannot be written.
    """
    from dflash_deploy.errors import UsageError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=mode)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written", evidence=[str(error)]) from None


def audit_command(
    hosts: Annotated[list[str], typer.Argument(metavar="[HOST]...", help=HELP_HOST)] = [],  # noqa: B006
    stack: Annotated[str, typer.Option(help="Judge this stack for the host; 'auto' takes the best that fits.")] = "",
    venv: Annotated[list[str], typer.Option(help="Environment to look into (may be repeated).")] = [],  # noqa: B006
    model: Annotated[str, typer.Option(help="Folder of the target model on the host.")] = "",
    draft_model: Annotated[str, typer.Option(help="Folder of the drafter on the host.")] = "",
    port: Annotated[list[int], typer.Option(help="Port that must be free (may be repeated).")] = [],  # noqa: B006
    server_arg: Annotated[list[str], typer.Option(help="Server argument to lint, e.g. --server-arg=--tp-size=2.")] = [],  # noqa: B006
    save_to: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the facts to FILE (several hosts: a folder).")
    ] = None,
    redacted: Annotated[
        bool, typer.Option("--redact", help="Without host names, accounts and addresses in FILE.")
    ] = False,
    offline: Annotated[Path | None, typer.Option(metavar="FACTS", help="Judge saved facts; no host is asked.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as Markdown too.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show the rules that are fine, too.")] = False,
    accept_new: Annotated[bool, typer.Option(help="Record the key of a host that was never met.")] = False,
    inventory: Annotated[str | None, typer.Option("--inventory", help="Another hosts.toml.")] = None,
    parallel: Annotated[int, typer.Option(min=1, metavar="N", help="Hosts at a time.")] = PARALLEL,
    connect_timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long to try to reach a host.")
    ] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Say whether hosts can run a stack, and name what stands in the way. Reads only."""
    from dflash_deploy.errors import UsageError

    if bool(hosts) == bool(offline):
        raise UsageError("give a HOST or --offline FACTS", hint="dflash-deploy audit local")
    if stack not in ("", "auto"):
        from dflash_deploy.audit.stacks import get_stack

        get_stack(stack)  # a name that nobody knows is said before a host is asked
    asked = Questions(
        tuple(venv), model, draft_model, tuple(port), stack, tuple(server_arg), accept_new, connect_timeout
    )
    output = Output(save_to, redacted, markdown, everything, as_json)
    if offline is not None:
        code = output.one(asked.judge(read_facts(offline)))
    else:
        from dflash_deploy.inventory import resolve_all

        targets = resolve_all(hosts, inventory=inventory)
        if len(targets) == 1:
            talk(f"auditing {targets[0].name} ...")
            code = output.one(asked.judge(asked.facts(targets[0]), targets[0]))
        else:
            code = audit_fleet(targets, asked, output, parallel)
    if code:
        raise typer.Exit(code)


@dataclass(frozen=True)
class Output:
    """Where the verdicts go."""

    save_to: Path | None = None
    redacted: bool = False
    markdown: Path | None = None
    everything: bool = False
    as_json: bool = False

    def one(self, judged: tuple[Case, Report]) -> int:
        """Print and write the verdict on one host; its exit code."""
        case, report = judged
        if self.save_to is not None:
            self.save(case, self.save_to)
        if self.markdown is not None:
            self.write_markdown([report])
        if self.as_json:
            emit_json(report.as_dict())
        else:
            from dflash_deploy import render

            render.print_report(report, everything=self.everything)
        return report.exit_code

    def save(self, case: Case, path: Path) -> None:
        from dflash_deploy.audit.request import request_of

        save(path, {**case.facts.to_json(), "request": request_of(case)}, self.redacted)

    def write_markdown(self, reports: Sequence[Report]) -> None:
        from dflash_deploy import render

        assert self.markdown is not None
        write(self.markdown, "\n".join(map(render.markdown, reports)), 0o644)


def audit_fleet(targets: Sequence[Target], asked: Questions, output: Output, parallel: int) -> int:
    """Audit several hosts at once and print one line each; the exit code is the worst of theirs."""
    from dflash_deploy import fleet

    by_name = {target.name: target for target in targets}
    count = 0
    talk(f"auditing {len(by_name)} hosts, {min(parallel, len(by_name))} at a time ...")

    def one(name: str) -> tuple[Case, Report]:
        return asked.judge(asked.facts(by_name[name]), by_name[name])

    def told(outcome: fleet.Outcome[tuple[Case, Report]]) -> None:
        nonlocal count
        count += 1
        said = outcome.value[1].verdict if outcome.value else outcome.error.message if outcome.error else ""
        talk(f"{count}/{len(by_name)} {outcome.name}: {said} ({outcome.seconds:.1f} s)")

    outcomes = fleet.across(list(by_name), one, parallel=parallel, on_done=told)
    if output.save_to is not None:
        for outcome in outcomes:
            if outcome.value:
                output.save(outcome.value[0], output.save_to / f"{file_name(outcome.name)}.json")
    if output.markdown is not None:
        output.write_markdown([outcome.value[1] for outcome in outcomes if outcome.value])
    code = fleet.worst(o.value[1].exit_code if o.value else o.exit_code for o in outcomes)
    if output.as_json:
        emit_json(
            {
                "schema": 1,
                "exit_code": code,
                "hosts": [
                    {
                        "host": o.name,
                        "seconds": round(o.seconds, 3),
                        "report": o.value[1].as_dict() if o.value else None,
                        "error": o.error.as_dict() if o.error else None,
                    }
                    for o in outcomes
                ],
            }
        )
    else:
        from dflash_deploy import render

        if output.everything:
            for outcome in outcomes:
                if outcome.value:
                    render.print_report(outcome.value[1], everything=True)
        render.print_fleet([(o.name, o.value[1] if o.value else None, o.error, o.seconds) for o in outcomes])
    return code


def file_name(host: str) -> str:
    """A file's name for a host's: nothing of it leads out of the folder."""
    return re.sub(r"[^\w.@-]", "_", host).lstrip(".") or "host"


def stacks_command(as_json: JsonOption = False) -> None:
    """The stacks that this tool knows."""
    from dataclasses import asdict

    from dflash_deploy.audit.stacks import STACKS

    if as_json:
        emit_json([asdict(stack) for stack in STACKS])
    else:
        from dflash_deploy import render

        render.print_stacks(STACKS)


def explain_command(
    rule: Annotated[str, typer.Argument(metavar="RULE", help="A rule's id.")], as_json: JsonOption = False
) -> None:
    """What a rule checks, why, and where it was met."""
    import difflib

    from dflash_deploy.audit.rules import RULES
    from dflash_deploy.errors import UsageError

    if rule not in RULES:
        near = difflib.get_close_matches(rule, RULES, 5, 0.3) or sorted(RULES)
        raise UsageError(f"there is no rule {rule!r}", evidence=near, hint=f"dflash-deploy explain {near[0]}")
    found = RULES[rule]
    if as_json:
        emit_json(
            {
                "rule": found.id,
                "where": str(found.where),
                "why": " ".join(found.title.split()),
                "references": list(found.references),
                "explains": list(found.explains),
            }
        )
    else:
        from dflash_deploy import render

        render.print_rule(found)


def compare_command(
    host_a: Annotated[str, typer.Argument(metavar="HOST_A", help=HELP_HOST + " Or a file of saved facts.")],
    host_b: Annotated[str, typer.Argument(metavar="HOST_B")],
    venv: Annotated[list[str], typer.Option(help="Environment on HOST_A (may be repeated).")] = [],  # noqa: B006
    model: Annotated[list[str], typer.Option(help="Model folder on HOST_A (may be repeated).")] = [],  # noqa: B006
    accept_new: Annotated[bool, typer.Option(help="Record the keys of hosts that were never met.")] = False,
    as_json: JsonOption = False,
) -> None:
    """What of HOST_A may travel to HOST_B, what must be rebuilt there, and why."""
    from dataclasses import asdict

    from dflash_deploy.audit.compare import compare
    from dflash_deploy.inventory import resolve

    def facts(name: str, venvs: Sequence[str], models: Sequence[str]) -> Facts:
        if name.endswith(".json") and Path(name).is_file():
            return read_facts(Path(name))
        talk(f"auditing {name} ...")
        return Questions(tuple(venvs), models=tuple(models), accept_new=accept_new).facts(resolve(name))

    here, there = facts(host_a, venv, model), facts(host_b, (), ())
    items = compare(here, there)
    if as_json:
        emit_json({"from": here.host, "to": there.host, "items": [asdict(item) for item in items]})
    else:
        from dflash_deploy import render

        render.print_comparison(items, here.host, there.host)


def register(app: typer.Typer) -> None:
    """Add this group's commands to ``app``."""
    app.command("audit")(audit_command)
    app.command("stacks")(stacks_command)
    app.command("explain")(explain_command)
    app.command("compare")(compare_command)
