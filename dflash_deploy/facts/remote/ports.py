"""Listening TCP ports and, where this account may see it, who owns them."""

from __future__ import annotations

import os
import re
from typing import Any

from dflash_deploy.facts.remote.system import USERINFO
from dflash_deploy.facts.remote.tools import list_dir, read_text

SECRET_WORDS = frozenset(
    ("token", "secret", "password", "passwd", "credential", "credentials", "key", "apikey", "auth")
)
"""Of an option's name; ``--tokenizer-path`` and ``--max-tokens`` hold none of them."""


def listening() -> dict[int, list[tuple[str, str]]]:
    """Port -> [(local address in hex, socket inode)] of sockets in state LISTEN."""
    found: dict[int, list[tuple[str, str]]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (read_text(table, 4 << 20) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == "0A":
                address, _, port = fields[1].rpartition(":")
                found.setdefault(int(port, 16), []).append((address, fields[9]))
    return found


def owners(inodes: set[str]) -> dict[str, int]:
    """Socket inode -> pid, for processes whose descriptors we may read."""
    found: dict[str, int] = {}
    for pid in list_dir("/proc", 100000):
        if not pid.isdigit() or len(found) == len(inodes):
            continue
        folder = "/proc/%s/fd" % pid
        for name in list_dir(folder):
            try:
                target = os.readlink(os.path.join(folder, name))
            except OSError:
                continue
            if target.startswith("socket:[") and target[8:-1] in inodes:
                found[target[8:-1]] = int(pid)
    return found


def without_secrets(words: list[str]) -> str:
    """A command line in which the values of ``--api-key`` and its like are hidden: they never leave the host."""
    shown = []
    hide = False
    for word in words:
        name, sep, _ = word.partition("=")
        secret = word.startswith("-") and not SECRET_WORDS.isdisjoint(re.split("[-_]", name.lower()))
        shown.append("***" if hide else (name + "=***" if secret and sep else USERINFO.sub(r"\1***@", word)))
        hide = secret and not sep
    return " ".join(shown).strip()[:1000]


def port_facts(ports: list[int]) -> dict[str, Any]:
    """``{"listening": [...], "asked": {port: {free, pid, command}}}``."""
    table = listening()
    wanted = {inode for port in ports for _, inode in table.get(port, [])}
    pids = owners(wanted) if wanted else {}
    asked: dict[str, Any] = {}
    for port in ports:
        holders = table.get(port, [])
        pid = next((pids[inode] for _, inode in holders if inode in pids), None)
        command = without_secrets((read_text("/proc/%d/cmdline" % pid, 2000) or "").split("\0")) if pid else None
        asked[str(port)] = {"free": not holders, "pid": pid, "command": command}
    return {"listening": sorted(table), "asked": asked}
