"""Locks: every package of a stack with the hashes of its files, so that an installer takes these bytes or none.

One file per stack and Python minor lies in ``locks/``. It names the pins that it was made for; of other pins it says
nothing. Made by ``python -m dflash_deploy.plan.lock STACK REPORT``, from the report of a ``pip install --dry-run``.
"""

from __future__ import annotations

import json
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from dflash_deploy.audit.stacks import Stack, get_stack

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


def lock_text(stack: Stack, report: dict[str, Any]) -> str:
    """A lock from pip's installation report."""
    lines = []
    for item in report["install"]:
        about, found = item["metadata"], item["download_info"]["archive_info"]
        digest = (found.get("hashes") or {}).get("sha256") or str(found["hash"]).partition("=")[2]
        lines.append(f"{about['name']}=={about['version']} --hash=sha256:{digest}\n")
    return f"{HEAD}{stack.pins}\n" + "".join(sorted(lines, key=str.lower))


if __name__ == "__main__":
    sys.stdout.write(lock_text(get_stack(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text("utf-8"))))
