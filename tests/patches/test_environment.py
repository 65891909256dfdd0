"""A real environment with pip: patched it is as sound as before, and a reinstallation over the patches is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patches.wheels import wheel

pytestmark = [pytest.mark.wheels, pytest.mark.waits]
VERSION = "0.5.16"


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the release, and without what it depends on."""
    made = tmp_path_factory.mktemp("env") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True, timeout=120)
    pip(made, "install", "--quiet", "--no-deps", "--no-compile", str(wheel("sglang", VERSION)))
    return made


def pip(venv: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # The newest pip at hand works on any environment.
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        str(venv / "bin" / "python"),
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert words[0] == "check" or done.returncode == 0, done.stderr
    return done


def cli(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from dflash_deploy.cli import main; main()", *words]
    environ = {**os.environ, "HOME": str(home)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=home, env=environ)


def test_pip_and_patches(venv: Path, tmp_path: Path) -> None:
    patch = ("patch", "--venv", str(venv), "--set", "ddtree")
    status = ("status", "local", "--root", str(tmp_path / "root"), "--venv", str(venv), "--json")
    before = pip(venv, "check")
    assert cli(tmp_path, *patch).returncode == 0
    after = pip(venv, "check")
    assert (after.returncode, after.stdout) == (before.returncode, before.stdout)
    (missing,) = {line.split()[0] for line in after.stdout.splitlines() if "requires" in line}
    assert missing == "sglang"  # only its dependencies, which were left out on purpose
    assert pip(venv, "show", "sglang").stdout.splitlines()[1] == f"Version: {VERSION}"
    assert json.loads(cli(tmp_path, *status).stdout)["patches"] == {
        "sets": ["ddtree"],
        "overwritten": [],
        "changed": [],
    }

    pip(venv, "install", "--quiet", "--force-reinstall", "--no-deps", "--no-compile", str(wheel("sglang", VERSION)))
    told = json.loads(cli(tmp_path, *status).stdout)["patches"]
    assert "sglang/srt/speculative/spec_info.py" in told["overwritten"] and told["changed"] == []
    stands = cli(tmp_path, *patch, "--status")
    assert stands.returncode == 10 and stands.stdout.startswith("overwritten: ")
    assert "pristine again (reinstalled?): sglang/srt/speculative/spec_info.py" in stands.stdout
    assert cli(tmp_path, *patch, "--check").returncode == 10
    again = cli(tmp_path, *patch)
    assert again.returncode == 0 and again.stdout.startswith("patch: changed"), again.stderr
    assert cli(tmp_path, *patch, "--status").returncode == 0
