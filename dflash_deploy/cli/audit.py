"""``audit``, ``stacks``, ``explain``, ``compare``: read-only."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_deploy.cli.common import JsonOption, emit_json

if TYPE_CHECKING:
    from dflash_deploy.facts import Facts

HELP_HOST = "'local', a name in hosts.toml, a Host of ~/.ssh/config, or user@host:port."


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


def ask_host(
    name: str, *, venvs: Sequence[str], models: Sequence[str], ports: Sequence[int], accept_new: bool
) -> tuple[Facts, dict[str, Any]]:
    """Facts of a host by name, and what the inventory says of it."""
    from dflash_deploy.facts import gather
    from dflash_deploy.host import connect
    from dflash_deploy.inventory import resolve

    target = resolve(name)
    options = dict(target.options)
    known = [str(options[key]) for key in ("model", "draft_model") if options.get(key)]
    print(f"auditing {target.name} ...", file=sys.stderr, flush=True)
    host = connect(target, accept_new=accept_new, on_notice=lambda text: print(text, file=sys.stderr, flush=True))
    try:
        found = [str(options["venv"])] if options.get("venv") and not venvs else list(venvs)
        wanted = [
            place.replace("~", host.home, 1) if place.startswith("~/") else place
            for place in [*found, *(models or known)]
        ]
        return gather(host, venvs=wanted[: len(found)], models=wanted[len(found) :], ports=ports), options
    finally:
        host.close()


def save(path: Path, document: dict[str, Any], redacted: bool) -> None:
    """Write the facts; only the owner may read them.

    Raises:
        UsageError: the file cannot be written.
    """
    from dflash_deploy.errors import UsageError
    from dflash_deploy.facts.redact import redact

    text = json.dumps(redact(document) if redacted else document, indent=1) + "\n"
    try:
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written", evidence=[str(error)]) from None


def audit_command(
    host: Annotated[str, typer.Argument(metavar="[HOST]", help=HELP_HOST)] = "",
    stack: Annotated[str, typer.Option(help="Judge this stack for the host; 'auto' takes the best that fits.")] = "",
    venv: Annotated[list[str], typer.Option(help="Environment to look into (may be repeated).")] = [],  # noqa: B006
    model: Annotated[str, typer.Option(help="Folder of the target model on the host.")] = "",
    draft_model: Annotated[str, typer.Option(help="Folder of the drafter on the host.")] = "",
    port: Annotated[list[int], typer.Option(help="Port that must be free (may be repeated).")] = [],  # noqa: B006
    server_arg: Annotated[list[str], typer.Option(help="Server argument to lint, e.g. --server-arg=--tp-size=2.")] = [],  # noqa: B006
    save_to: Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Write the facts to FILE.")] = None,
    redacted: Annotated[
        bool, typer.Option("--redact", help="Without host names, accounts and addresses in FILE.")
    ] = False,
    offline: Annotated[Path | None, typer.Option(metavar="FACTS", help="Judge saved facts; no host is asked.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as Markdown too.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show the rules that are fine, too.")] = False,
    accept_new: Annotated[bool, typer.Option(help="Record the key of a host that was never met.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether this host can run a stack, and name what stands in the way. Reads only."""
    from dflash_deploy.audit.report import audit
    from dflash_deploy.audit.request import build_case, request_of
    from dflash_deploy.errors import UsageError

    if bool(host) == bool(offline):
        raise UsageError("give a HOST or --offline FACTS", hint="dflash-deploy audit local")
    options: dict[str, Any] = {}
    if offline is not None:
        facts = read_facts(offline)
    else:
        facts, options = ask_host(
            host, venvs=venv, models=[m for m in (model, draft_model) if m], ports=port, accept_new=accept_new
        )
    given = options.get("server_args")
    args = server_arg or ([str(word) for word in given] if isinstance(given, list) else [])
    case = build_case(
        facts,
        stack=stack,
        model=model or str(options.get("model") or ""),
        draft=draft_model or str(options.get("draft_model") or ""),
        args=args,
        ports=port,
    )
    report = audit(case)
    if save_to is not None:
        save(save_to, {**facts.to_json(), "request": request_of(case)}, redacted)
    if markdown is not None:
        from dflash_deploy import render

        markdown.write_text(render.markdown(report), encoding="utf-8")
    if as_json:
        emit_json(report.as_dict())
    else:
        from dflash_deploy import render

        render.print_report(report, everything=everything)
    if not report.compatible:
        raise typer.Exit(6)


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

    def facts(name: str, venvs: Sequence[str], models: Sequence[str]) -> Facts:
        if name.endswith(".json") and Path(name).is_file():
            return read_facts(Path(name))
        return ask_host(name, venvs=venvs, models=models, ports=(), accept_new=accept_new)[0]

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
