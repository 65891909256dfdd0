"""Network namespaces for test hosts: reachable from here, joined to each other when there are several, and without a
route to anywhere else."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

_COUNT = itertools.count()


@dataclass(frozen=True)
class Network:
    """One namespace."""

    name: str
    address: str
    """Inside, on a /24 that nothing routes."""


@contextlib.contextmanager
def networks(count: int) -> Iterator[list[Network]]:
    """So many namespaces on one bridge; gone afterwards. Skips the test where none can be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a network namespace needs root and iproute2")
    number = next(_COUNT)
    tag = f"{os.getpid() % 10000}{number}"
    bridge, prefix = f"dfb{tag}", f"10.213.{100 + (os.getpid() + number) % 100}"
    found = [Network(f"dfl{tag}-{index}", f"{prefix}.{index + 2}") for index in range(count)]
    steps = [
        ["ip", "link", "add", bridge, "type", "bridge"],
        ["ip", "addr", "add", f"{prefix}.1/24", "dev", bridge],
        ["ip", "link", "set", bridge, "up"],
    ]
    for index, each in enumerate(found):
        link = f"dfv{tag}-{index}"
        steps += [
            ["ip", "netns", "add", each.name],
            ["ip", "link", "add", link, "type", "veth", "peer", "name", "host0", "netns", each.name],
            ["ip", "link", "set", link, "master", bridge, "up"],
            ["ip", "-n", each.name, "addr", "add", f"{each.address}/24", "dev", "host0"],
            ["ip", "-n", each.name, "link", "set", "host0", "up"],
            ["ip", "-n", each.name, "link", "set", "lo", "up"],
        ]
    try:
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"no network namespace: {' '.join(step)}: {done.stderr.strip()}")
        yield found
    finally:
        for each in found:
            subprocess.run(["ip", "netns", "del", each.name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)
