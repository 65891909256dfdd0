"""The typer command line: gather, decide, plan, execute, render; no logic.

One module per command group, each with ``register(app)``. Heavy imports happen inside the commands, so that ``--help``
stays fast.
Exit codes are documented in :mod:`dflash_deploy.errors`. Stdout is data, stderr is talk.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import typer

from dflash_deploy.errors import DflashError

app = typer.Typer(
    name="dflash-deploy",
    help="SGLang with DFlash and DDTree speculative decoding on your own hosts: audit, provision, patch, launch, "
    "health-check.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 2 usage, 3 host unreachable, 4 command failed on the host, 5 unreadable fact, "
    "6 incompatible, 7 patch, 8 host changed or locked, 9 unhealthy, 10 changes pending (dry runs), 130 interrupted.",
)

COMMAND_MODULES = (
    "audit",
    "deploy",
    "releases",
    "patch",
    "map",
    "service",
    "health",
    "diagnose",
    "bench",
    "wheelhouse",
    "router",
    "config",
)
"""Each is ``dflash_deploy.cli.<name>`` and has ``register(app)``; the order is that of ``--help``."""

for _name in COMMAND_MODULES:
    importlib.import_module(f"dflash_deploy.cli.{_name}").register(app)


def without_options() -> None:
    """Leave the commands' options out: the list of commands shows none, and building them all takes a quarter of it."""

    def bare(function: Callable[..., Any]) -> Callable[[], None]:
        def stand_in() -> None: ...

        stand_in.__name__, stand_in.__doc__ = function.__name__, function.__doc__
        return stand_in

    for command in app.registered_commands:
        if command.callback is not None:
            command.callback = bare(command.callback)


def main() -> None:
    """Entry point: turns every :class:`DflashError` into one message and its exit code."""
    from dflash_deploy.cli.common import report_error

    if sys.argv[1:] in (["--help"], ["-h"]):
        without_options()
    try:
        app()
    except SystemExit as done:
        _leave(done)
        raise
    except DflashError as error:
        sys.exit(report_error(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _leave(done: SystemExit) -> None:
    """End the process at once after a command that parsed sources: their trees take longer to free than to use."""
    if "libcst" not in sys.modules or threading.active_count() > 1 or not isinstance(done.code, int | None):
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return
    atexit._run_exitfuncs()
    os._exit(done.code or 0)
