"""``lock``: who holds it, and taking it away."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from tests.cli.test_deploy_cli import cli


def test_status_and_release(tmp_path: Path) -> None:
    root = tmp_path / "root"
    words = ("local", "--root", str(root), "--json")
    done = cli("lock", "status", *words, home=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["lock"] is None
    owner = root / "lock" / "owner.json"
    owner.parent.mkdir(parents=True)
    owner.write_text(json.dumps({"user": "ann", "host": "elsewhere", "pid": 7, "what": "up", "since": 0}))
    done = cli("lock", "status", *words, home=tmp_path)
    found = json.loads(done.stdout)["lock"]
    assert done.returncode == 8 and (found["user"], found["what"], found["stale"]) == ("ann", "up", "")
    os.utime(owner, (time.time() - 7 * 3600,) * 2)
    done = cli("lock", "status", *words, home=tmp_path)
    assert done.returncode == 0 and "older than" in json.loads(done.stdout)["lock"]["stale"]
    done = cli("lock", "release", *words, home=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["released"] and not owner.exists()
