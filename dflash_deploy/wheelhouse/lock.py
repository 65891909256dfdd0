"""Makes a stack's lock, to be put into ``plan/locks/``: ``python -m dflash_deploy.wheelhouse.lock STACK X.Y``.

With uv, which resolves for a Python that is not here.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from dflash_deploy.audit.stacks import Stack, get_stack
from dflash_deploy.plan.constraints import constraints
from dflash_deploy.plan.lock import lock_text


def resolve(stack: Stack, python: tuple[int, int], uv: str) -> list[dict[str, Any]]:
    """Let uv resolve a stack for a Python, from the index that it is set up for: what its dependencies bring, and what
    is installed without them."""
    glibc = f"x86_64-manylinux_{stack.min_glibc[0]}_{stack.min_glibc[1]}"
    command = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--only-binary",
        ":all:",
        "--generate-hashes",
        "--format",
        "pylock.toml",
    ]
    command += ["--python-version", f"{python[0]}.{python[1]}", "--python-platform", glibc]
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, pins, more in (("all", stack.requirements, ()), ("bare", stack.no_deps, ("--no-deps",))):
            if not pins:
                continue
            wanted, limits, out = folder / f"{name}.in", folder / "limits", folder / f"pylock.{name}.toml"
            wanted.write_text("\n".join(pins))
            limits.write_text("\n".join(constraints(stack)))
            subprocess.run([*command, *more, "-c", limits, "-o", out, wanted], check=True, stdout=subprocess.DEVNULL)
            found.append(tomllib.loads(out.read_text("utf-8")))
    return found


if __name__ == "__main__":
    chosen, minor = get_stack(sys.argv[1]), (3, int(sys.argv[2].partition(".")[2]))
    sys.stdout.write(lock_text(chosen, minor, resolve(chosen, minor, "uv")))
