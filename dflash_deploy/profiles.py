"""Profiles: what a kind of machine wants, as TOML with the reasons; a host's table names one and adds to it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from dflash_deploy.assets import templates_dir
from dflash_deploy.errors import UsageError

ORIGIN = "profile_of"
"""Key of an expanded table: setting → the profile that it came from."""


def shipped() -> dict[str, str]:
    """The profiles that come with the project: name → text."""
    return {path.stem: path.read_text("utf-8") for path in sorted((templates_dir() / "profiles").glob("*.toml"))}


def expanded(table: Mapping[str, Any], own: Mapping[str, Any], seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """A table of ``hosts.toml`` with the profile that it names below it: arguments of the server and variables are
    added to the profile's, any other key takes its place.

    Args:
        own: ``[profiles.NAME]`` of the same file; one may name another, or a shipped one, as its own ``profile``.

    Raises:
        UsageError: there is no such profile, or they go in a circle.
    """
    name = table.get("profile")
    if name is None:
        return dict(table)
    if name in seen:
        raise UsageError("the profiles go in a circle", evidence=" -> ".join((*seen, name)))
    texts = {} if name in own else shipped()
    if name not in own and name not in texts:
        known = ", ".join((*own, *texts))
        raise UsageError(
            f"there is no profile '{name}'", evidence=f"known: {known}", hint="dflash-deploy config profiles"
        )
    below = expanded(own[name] if name in own else tomllib.loads(texts[name]), own, (*seen, name))
    from_profile = {key: name for key in below if key not in (ORIGIN, "profile")} | below.get(ORIGIN, {})
    found = {**below, **table}
    for key, value in table.items():
        if key == "server_args" and key in below:
            found[key] = [*below[key], *value]
        elif key == "env" and key in below:
            found[key] = {**below[key], **value}
        else:
            from_profile.pop(key, None)
    return {**found, ORIGIN: from_profile}
