"""From a host's name to the connected host: its table of ``hosts.toml``, its lock, the variables that it is given."""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_deploy.cli.common import talk

if TYPE_CHECKING:
    from dflash_deploy.host import Host


@contextlib.contextmanager
def locked(host: Host, root: str, what: str, *, break_lock: bool = False) -> Iterator[None]:
    """Hold the host's lock."""
    from dflash_deploy.execute import lock

    with lock(host, root, what, break_lock=break_lock, on_notice=talk):
        yield


def table_of(name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The host's table of ``hosts.toml``."""
    from dflash_deploy.inventory import resolve

    return resolve(name, inventory=options.get("inventory")).options


@contextlib.contextmanager
def connected(name: str, options: Mapping[str, Any]) -> Iterator[tuple[Host, dict[str, Any]]]:
    """The host, connected, and its table of ``hosts.toml``."""
    from dflash_deploy.host import connect
    from dflash_deploy.inventory import resolve

    target = resolve(name, inventory=options.get("inventory"))
    entry = dict(target.options)
    named = [*(entry.get("env_from") or ()), *(options.get("env") or ())]
    known = env_of_file(str(entry["env_file"])) if "env_file" in entry else {}
    entry["env"] = {**known, **dict(entry.get("env", {})), **env_of_names([str(each) for each in named])}
    host = connect(target, accept_new=bool(options.get("accept_new")) or target.accept_new, on_notice=talk)
    try:
        yield host, entry
    finally:
        host.close()


def expand(path: str, home: str) -> str:
    """``~`` and relative paths from the home folder of the host's user."""
    path = home + path[1:] if path == "~" or path.startswith("~/") else path
    return posixpath.normpath(posixpath.join(home, path))


def env_of_names(names: list[str]) -> dict[str, str]:
    """Variables of this process's environment.

    Raises:
        UsageError: one is not set, or was given with its value, which everyone can read on a command line.
    """
    from dflash_deploy.errors import UsageError

    if given := [name.partition("=")[0] for name in names if "=" in name]:
        raise UsageError(
            f"--env takes the name of a variable, not its value: {', '.join(given)}",
            hint=f"export {given[0]}=..., then --env {given[0]}; or env_file in hosts.toml",
        )
    if unset := [name for name in names if name not in os.environ]:
        raise UsageError(f"not set in the environment: {', '.join(unset)}", hint=f"export {unset[0]}=...")
    return {name: os.environ[name] for name in names}


def env_of_file(path: str) -> dict[str, str]:
    """``NAME=value`` lines of a file on this side.

    Raises:
        UsageError: it cannot be read, or others may read it.
    """
    from dflash_deploy.errors import UsageError

    try:
        place = Path(path).expanduser()
        if place.stat().st_mode & 0o077:
            raise UsageError(f"others may read the env_file {path}, which holds secrets", hint=f"chmod 600 {path}")
        lines = place.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the env_file {path} cannot be read", evidence=str(error)) from None
    pairs = [
        line.strip().removeprefix("export ").partition("=")
        for line in lines
        if "=" in line and not line.lstrip().startswith("#")
    ]
    return {name.strip(): value.strip().strip("\"'") for name, _, value in pairs}
