"""A service from before there were releases goes on, is kept as one, and is gone back to."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_deploy.assets import templates_dir
from dflash_deploy.audit import stacks
from dflash_deploy.execute import execute
from dflash_deploy.facts import gather
from dflash_deploy.host.local import LocalHost
from dflash_deploy.plan.launch import Present, plan_launch, render
from dflash_deploy.settings import effective
from tests.releases import standin
from tests.releases.conftest import Deployed

pytestmark = [pytest.mark.waits, pytest.mark.timeout(1500)]


def test_a_service_of_the_old_layout(deployed: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "old"
    root.mkdir()
    host = LocalHost()
    monkeypatch.setattr(stacks, "STACKS", (*stacks.STACKS, standin.stack()))
    made = Path(deployed.place[1]) / "venvs" / standin.stack().pins[:12]
    subprocess.run(["cp", "-al", made, root / "venv"], check=True)
    shutil.copytree(templates_dir() / "tiny-pair", root / "models" / "tiny-pair")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    old = Deployed("local", port, ["--root", str(root)], ["--mode", "supervisor"], deployed.environ)
    facts = gather(host, discover=False)
    options = {"root": str(root), "venv": str(root / "venv"), "stack": "standin", "mode": "supervisor", "port": port}
    settings = replace(effective("local", facts, options=options), budget=5)
    try:
        files = render(settings, facts, templates_dir(), ())
        execute(plan_launch(settings, facts, files, Present({})), host)
        limit = time.monotonic() + 30
        while time.monotonic() < limit:
            try:
                assert old.serving()["speculative_ddtree_budget"] == "5"
                break
            except OSError:
                time.sleep(0.2)
        assert old.json("status")["running"]
        # What is new does not start: the old one serves again, from its own files.
        error = old.up("--server-arg=--stand-in-die", code=9)["error"]
        assert "release 0000-adopted serves again" in error["evidence"]
        limit = time.monotonic() + 30
        while time.monotonic() < limit and not answers(old):
            time.sleep(0.2)
        assert old.serving()["speculative_ddtree_budget"] == "5" and old.serving()["hook"] == "plain"
        # Nothing is installed anew: the environment that is there is what the patched one is made from.
        up = old.up()
        assert {s["name"]: s["status"] for s in up["steps"]}["provision"] == "ok"
        assert old.serving()["hook"] == "one" and not old.up()["changed"]
        assert "plain" in next((root / "venv").glob("lib/python3*/site-packages/sglang/hook.py")).read_text()
    finally:
        old.run("down", "--break-lock")


def answers(old: Deployed) -> bool:
    try:
        return bool(old.serving())
    except OSError:
        return False
