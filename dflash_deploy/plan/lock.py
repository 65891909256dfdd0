"""Locks: every package of a stack with the hashes of its files, so that an installer takes these bytes or none.

One file per stack and Python minor lies in ``locks/``. It names the pins that it was made for; of other pins it says
nothing. :mod:`dflash_deploy.wheelhouse.lock` makes one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from dflash_deploy.audit.stacks import Stack

HEAD = "# pins: "


def lock_name(stack: Stack, python: tuple[int, int]) -> str:
    """File name of a lock."""
    return f"{stack.name}-cp{python[0]}{python[1]}.txt"


def lock_of(stack: Stack, python: tuple[int, int], arch: str) -> str:
    """The lock's text, a requirements file for pip or uv; ``""`` when there is none for this."""
    if arch != "x86_64":
        return ""
    path = resources.files("dflash_deploy.plan").joinpath("locks", lock_name(stack, python))
    text = path.read_text("utf-8") if path.is_file() else ""
    return text if text.startswith(f"{HEAD}{stack.pins}\n") else ""


def lock_text(stack: Stack, python: tuple[int, int], pylocks: Sequence[Mapping[str, Any]]) -> str:
    """A lock from what uv resolved, as ``pylock.toml`` says it: one wheel a package.

    Raises:
        ValueError: a package without a wheel for these hosts, by name.
    """
    from dflash_deploy.wheelhouse.house import Wheel, WheelTarget

    target = WheelTarget(python, "x86_64", stack.min_glibc)
    lines = {}
    for package in (each for found in pylocks for each in found["packages"]):
        wheels = package.get("wheels", ())
        named = [Wheel(str(w["url"]).rpartition("/")[2].replace("%2B", "+"), w["hashes"]["sha256"]) for w in wheels]
        fitting = [wheel.sha256 for wheel in named if wheel.fits(target)]
        if not fitting:
            raise ValueError(f"{package['name']} {package['version']}: no wheel for {target}")
        digests = "".join(f" --hash=sha256:{digest}" for digest in sorted(fitting))
        lines[package["name"]] = f"{package['name']}=={package['version']}{digests}\n"
    return f"{HEAD}{stack.pins}\n" + "".join(sorted(lines.values(), key=str.lower))
