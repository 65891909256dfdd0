"""The ``patch`` command on the real release, as a user calls it: exit codes, stdout as data, stderr as talk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patches.wheels import unpack

pytestmark = pytest.mark.wheels


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("sglang", "0.5.16", tmp_path_factory.mktemp("command") / "site-packages")


def patch(site: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from dflash_deploy.cli import main; main()", "patch", "--sglang-path", str(site)]
    # The set is named: what a machine with a GPU would choose differs.
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)


def test_a_session(site: Path) -> None:
    path = "sglang/srt/speculative/spec_info.py"
    assert patch(site, "--set", "ddtree", "--check").returncode == 10
    diff = patch(site, "--set", "ddtree", "--diff")
    assert diff.returncode == 10 and f"+++ b/{path}" in diff.stdout and "\n+    DDTREE = auto()" in diff.stdout
    done = patch(site / "sglang", "--set", "ddtree")
    assert done.returncode == 0 and done.stdout.startswith("patch: changed: ddtree"), done.stderr
    again = patch(site, "--set", "ddtree", "--json")
    assert again.returncode == 0 and json.loads(again.stdout)["steps"][0]["status"] == "ok"
    assert patch(site, "--set", "ddtree", "--check").returncode == 0
    status = patch(site, "--status", "--json")
    assert status.returncode == 0, status.stderr
    assert {p["state"] for p in json.loads(status.stdout)["patches"]} == {"applied"}
    text = (site / path).read_text()
    (site / path).write_text(text + "# mine\n")
    for options in (("--set", "ddtree"), ("--revert",), ("--status",)):
        refused = patch(site, *options)
        assert refused.returncode == 7 and "+# mine" in refused.stdout + refused.stderr, options
        assert "Traceback" not in refused.stderr
    (site / path).write_text(text)
    assert patch(site, "--revert").returncode == 0
    assert patch(site, "--set", "ddtree", "--status").returncode == 10
    assert not (site / ".dflash-deploy").exists() and not (site / "dflash_kernels").exists()


def test_bad_input(site: Path, tmp_path: Path) -> None:
    assert patch(tmp_path).returncode == 2
    assert patch(site, "--set", "nope").returncode == 2
    assert patch(site, "--check", "--revert").returncode == 2
