"""Facts of a machine without a GPU."""

from __future__ import annotations

import pytest

from dflash_deploy.facts import Facts, PythonInterpreter


@pytest.fixture
def facts() -> Facts:
    pythons = (
        PythonInterpreter("/home/me/.pyenv/versions/3.13.0/bin/python3", (3, 13, 0), True),
        PythonInterpreter("/usr/bin/python3", (3, 11, 2), True),
    )
    return Facts(
        "h",
        "x86_64",
        "Linux",
        "/home/me",
        "me",
        1000,
        glibc=(2, 36),
        pythons=pythons,
        disk_free_mib={"/home/me": 50_000},
    )
