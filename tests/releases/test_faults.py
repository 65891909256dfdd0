"""Whatever breaks in the middle of ``up``: the old or the new release serves, and the same command completes.

``DFLASH_DEPLOY_FAULTS=N`` injects so many faults, in at most ``DFLASH_DEPLOY_FAULTS_SECONDS``; otherwise as many as CI
has time for.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.container import TestHost
from tests.hosts.loopback import free_port

COUNT = int(os.environ.get("DFLASH_DEPLOY_FAULTS", "0"))
SEED = int(os.environ.get("DFLASH_DEPLOY_FAULTS_SEED", "1"))
SECONDS = os.environ.get("DFLASH_DEPLOY_FAULTS_SECONDS", "")
CI_FAULTS = 7
"""One of each kind."""
TOP = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.host, pytest.mark.timeout(600 + 60 * COUNT)]


def test_faults(box: TestHost) -> None:
    count = COUNT or CI_FAULTS
    command = [sys.executable, "-m", "tests.releases.faults", str(box.hosts_toml), box.name, "/srv/d", str(free_port())]
    began = time.monotonic()
    with subprocess.Popen(
        [*command, str(count), str(SEED), SECONDS or "0"],
        cwd=TOP,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as runner:
        assert runner.stdout is not None and runner.stderr is not None
        rows = []
        for line in runner.stdout:
            rows.append(json.loads(line))
            if COUNT:
                print(line, end="", flush=True)
        said = runner.stderr.read()
    failed = [row for row in rows if not row["ok"]]
    kinds = collections.Counter(row["fault"] for row in rows)
    hit = sum(1 for row in rows if row["struck"] or row["fault"] in ("clock", "two-runs"))
    places = len({row["at"] for row in rows if row["struck"]})
    print(
        f"{len(rows)} faults injected ({hit} struck while up ran, at {places} different steps), "
        f"{len(rows) - len(failed)} left the old or the new release serving and the same command completed; "
        f"{dict(kinds)}; {time.monotonic() - began:.0f} s"
    )
    assert runner.returncode == 0, said[-4000:]
    assert not failed, json.dumps(failed[:3], indent=1)
    assert len(rows) == count or (COUNT and SECONDS)
