"""Reports for people: rich tables on a terminal, plain text in a pipe, Markdown in a file. Text from hosts is never
markup."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash_deploy.audit.compare import Item
from dflash_deploy.audit.report import Report
from dflash_deploy.audit.rules import Rule
from dflash_deploy.audit.stacks import Choice, Stack
from dflash_deploy.errors import DflashError
from dflash_deploy.model import Finding, Severity

STYLES = {
    Severity.FAIL: "bold red",
    Severity.WARN: "yellow",
    Severity.OK: "green",
    Severity.UNKNOWN: "magenta",
    Severity.NOT_APPLICABLE: "dim",
}


def console() -> Console:
    """Stdout, at least 100 columns wide where it is no terminal."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)


def finding_text(finding: Finding) -> Text:
    """Message, evidence and remedy of one finding."""
    text = Text(finding.message)
    for line in finding.evidence:
        text.append(f"\n  {line}", style="dim")
    if finding.remedy:
        text.append(f"\n→ {finding.remedy}", style="cyan")
    return text


def print_report(report: Report, *, everything: bool = False) -> None:
    """The audit's table: failures, warnings and what could not be seen; all rules when ``everything``."""
    out = console()
    out.print(Text(f"{report.host}: {report.title}", style="bold green" if report.compatible else "bold red"))
    shown = [f for f in report.findings if everything or f.severity in (Severity.FAIL, Severity.WARN)]
    unseen = {} if everything else unseen_by_reason(report)
    if shown or unseen:
        table = Table(show_lines=True, expand=True)
        table.add_column("", no_wrap=True)
        table.add_column("rule", no_wrap=True)
        table.add_column("where", no_wrap=True)
        table.add_column("what", ratio=1)
        for finding in shown:
            mark = "PRIMARY" if finding.primary else ("└ follows" if finding.because_of else str(finding.severity))
            table.add_row(
                Text(mark, style=STYLES[finding.severity]),
                Text(finding.rule),
                Text(str(finding.where)),
                finding_text(finding),
            )
        for reason, rules in unseen.items():
            text = Text(reason)
            if len(rules) > 1:
                text.append(f"\n  {', '.join(rules)}", style="dim")
            name = rules[0] if len(rules) == 1 else f"{len(rules)} rules"
            table.add_row(Text("unknown", style=STYLES[Severity.UNKNOWN]), Text(name), Text(""), text)
        out.print(table)
    out.print(Text(report.coverage_line, style="dim"))
    for section, error in dict(report.probe.get("errors") or {}).items():
        out.print(Text(f"not seen: {section} ({error})", style="magenta"))
    print_choices(report.stacks, everything=everything)


def unseen_by_reason(report: Report) -> dict[str, list[str]]:
    """What could not be seen and why → the rules that it leaves open: one line, not one for every rule."""
    found: dict[str, list[str]] = {}
    for finding in report.findings:
        if finding.severity is Severity.UNKNOWN:
            found.setdefault("; ".join((finding.message, *finding.evidence)), []).append(finding.rule)
    return found


def print_fleet(rows: Sequence[tuple[str, Report | None, DflashError | None, float]]) -> None:
    """One line a host: (name, report or error, seconds)."""
    table = Table(show_lines=True, expand=True)
    for column in ("host", "", "seconds", "what"):
        table.add_column(column, no_wrap=column != "what", ratio=1 if column == "what" else None)
    for name, report, error, seconds in rows:
        what = Text()
        if report is not None:
            good = report.compatible
            mark = "can run" if good else "cannot run"
            if report.primary is not None:
                what = finding_text(report.primary)
            else:
                warned = [f.message for f in report.findings if f.severity is Severity.WARN]
                best = next((choice.stack.name for choice in report.stacks if choice.fits), "none")
                what.append("; ".join([*warned, f"best stack: {best}"]))
            what.append(f"\n{report.coverage_line}", style="dim")
        else:
            good, mark = False, "no answer"
            if error is not None:
                what = Text("\n  ".join((error.message, *error.evidence)))
                what.append(f"\n→ {error.hint}" if error.hint else "", style="cyan")
        table.add_row(Text(name), Text(mark, style="green" if good else "bold red"), f"{seconds:.1f}", what)
    console().print(table)


REFUSED_SHOWN = 6


def print_choices(choices: Sequence[Choice], *, everything: bool = False) -> None:
    """Stacks ranked for one host: all that fit, and the first of those that do not, which need the least change."""
    table = Table(title="stacks for this host", title_justify="left", expand=True)
    for column in ("stack", "fits", "why"):
        table.add_column(column, no_wrap=column != "why", ratio=1 if column == "why" else None)
    refused = [choice for choice in choices if not choice.fits]
    hidden = [] if everything else refused[REFUSED_SHOWN:]
    for choice in choices:
        if choice in hidden:
            continue
        why = "; ".join(choice.reasons) + (f"\n→ {'; '.join(choice.changes)}" if choice.changes else "")
        table.add_row(
            Text(choice.stack.name),
            Text("yes" if choice.fits else "no", style="green" if choice.fits else "red"),
            Text(why),
        )
    console().print(table)
    if hidden:
        console().print(Text(f"{len(hidden)} more do not fit (--all shows them)", style="dim"))


def print_stacks(stacks: Sequence[Stack]) -> None:
    """The stack table."""
    table = Table(expand=True)
    for column in (
        "stack",
        "torch",
        "CUDA",
        "kernel",
        "flashinfer",
        "transformers",
        "Python",
        "glibc",
        "driver",
        "DFLASH",
    ):
        table.add_column(column, no_wrap=column == "stack")
    for stack in stacks:
        table.add_row(
            stack.name,
            stack.torch,
            stack.cuda or "-",
            stack.kernel or "-",
            stack.flashinfer or "-",
            stack.transformers,
            "–".join(f"{major}.{minor}" for major, minor in stack.python),
            ".".join(map(str, stack.min_glibc)),
            ".".join(map(str, stack.min_driver)) if stack.min_driver else "-",
            "yes" if stack.native_dflash else "no",
        )
    console().print(table)


def print_rule(rule: Rule) -> None:
    """One rule for ``explain``."""
    out = console()
    out.print(Text(rule.id, style="bold"))
    out.print(Text(" ".join(rule.title.split())))
    out.print(Text(f"applies to: {rule.where}"))
    if rule.explains:
        out.print(Text(f"explains failures of: {', '.join(rule.explains)}"))
    for reference in rule.references:
        out.print(Text(f"seen in: {reference}", style="dim"))


def print_comparison(items: Sequence[Item], here: str, there: str) -> None:
    """What may travel from ``here`` to ``there``."""
    table = Table(title=f"from {here} to {there}", title_justify="left", show_lines=True, expand=True)
    for column in ("what", "verdict", "why"):
        table.add_column(column, no_wrap=column == "verdict", ratio=2 if column == "why" else None)
    colours = {"travels": "green", "rebuild": "red", "stays": "dim", "unknown": "magenta"}
    for item in items:
        table.add_row(Text(item.what), Text(item.verdict, style=colours[item.verdict]), Text("\n".join(item.why)))
    console().print(table)


def cell(text: str) -> str:
    """Text that cannot break out of a Markdown table cell."""
    escaped = "".join("\\" + char if char in "\\`*_[]<>|" else char for char in text)
    return escaped.replace("\n", "<br>")


def markdown(report: Report) -> str:
    """The audit as a Markdown document."""
    lines = [
        f"# Audit of {cell(report.host)}",
        "",
        f"{cell(report.title[:1].upper() + report.title[1:])}. {report.coverage_line}.",
        "",
        "| | rule | where | what | remedy |",
        "| --- | --- | --- | --- | --- |",
    ]
    for finding in report.findings:
        if finding.severity is Severity.NOT_APPLICABLE:
            continue
        mark = "**PRIMARY**" if finding.primary else str(finding.severity)
        what = "<br>".join(cell(line) for line in (finding.message, *finding.evidence))
        follows = f"<br>follows from {finding.because_of}" if finding.because_of else ""
        lines.append(f"| {mark} | {finding.rule} | {finding.where} | {what}{follows} | {cell(finding.remedy)} |")
    lines += ["", "## Stacks", "", "| stack | fits | why |", "| --- | --- | --- |"]
    for choice in report.stacks:
        lines.append(
            f"| {choice.stack.name} | {'yes' if choice.fits else 'no'} | "
            f"{cell('; '.join((*choice.reasons, *choice.changes)))} |"
        )
    return "\n".join(lines) + "\n"


def print_hosts(command: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """What came of a command on several hosts: one line each, then every error in full."""
    styles = {"ok": "green", "changed": "yellow", "changes": "yellow", "failed": "bold red", "not begun": "magenta"}
    out = console()
    table = Table("host", "status", "seconds", "detail", title=f"{command} on {len(rows)} hosts", title_justify="left")
    for row in rows:
        detail = row["error"]["message"] if "error" in row else row.get("detail", "")
        status = Text(row["status"], style=styles.get(row["status"], ""))
        table.add_row(row["host"], status, f"{row['seconds']:.1f}", Text(str(detail)))
    out.print(table)
    for row in rows:
        if "error" in row:
            out.print(Text(f"{row['host']}: exit {row['exit_code']}: {row['error']['message']}", style="bold red"))
            for line in row["error"]["evidence"]:
                out.print(Text(f"  {line}"))
            if row["error"]["hint"]:
                out.print(Text(f"  next: {row['error']['hint']}", style="cyan"))
    failed = sum(row["status"] == "failed" for row in rows)
    left = sum(row["status"] == "not begun" for row in rows)
    done = len(rows) - failed - left
    out.print(f"{done} done, {failed} failed" + (f", {left} not begun" if left else ""))


def print_rows(rows: Iterable[tuple[str, str, str]], indent: int = 10) -> None:
    """Lines of a label, a text and a style: plain in a pipe; on a terminal wrapped beside the label. A label of words
    keeps the style to itself; one in capitals, ``next`` and an empty one share it with their text.
    """
    if not sys.stdout.isatty():
        for label, text, _ in rows:
            print(f"{label:<{indent}}{text}" if label else text)
        return
    out = console()
    for label, text, style in rows:
        if not label:
            out.print(Text(text, style))
            continue
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=max(indent - 1, len(label)), no_wrap=True)
        grid.add_column(overflow="fold")
        shared = label.isupper() or not label.strip() or label in ("next", "see", "|")
        grid.add_row(Text(label, style or "bold"), Text(text, style if shared else ""))
        out.print(grid)
