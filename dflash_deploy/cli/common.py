"""What every command shares: JSON output, error reports, the host option."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from dflash_deploy.errors import DflashError

JsonOption = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON on stdout.")]
HostArgument = Annotated[
    str,
    typer.Argument(metavar="HOST", help="'local', a name in hosts.toml, a Host of ~/.ssh/config, or user@host:port."),
]


def talk(text: str) -> None:
    """A line for a person, on stderr."""
    print(text, file=sys.stderr, flush=True)


def emit_json(data: Any) -> None:
    """One JSON document on stdout."""
    json.dump(data, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")
    sys.stdout.flush()  # Whoever reads a watch through a pipe waits for it.


def report_error(error: DflashError) -> int:
    """Print the error (JSON on stdout when the command line asked for ``--json``), return its exit code."""
    if "--json" in sys.argv[1:]:
        emit_json({"ok": False, "error": error.as_dict()})
    lines = [f"error: {error.message}", *(f"  {line}" for line in error.evidence)]
    if error.hint:
        lines.append(f"next: {error.hint}")
    print("\n".join(lines), file=sys.stderr)
    return error.exit_code
