"""The CPU stack itself without a network: wheels built here, and a container without a route that serves from them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BootHost
from tests.e2e.conftest import dflash_deploy
from tests.hosts.container import TestHost, power_off
from tests.hosts.network import networks
from tests.scope import costly

pytestmark = [pytest.mark.e2e, pytest.mark.host, pytest.mark.timeout(7200), costly]


@pytest.fixture(scope="module")
def house() -> Path:
    """Kept between runs: gigabytes."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dflash-deploy" / "e2e"
    began = time.monotonic()
    answer = dflash_deploy("wheelhouse", "build", "--stack", "cpu", "--python", "3.11", "--out", str(cache / "wheels"))
    mib, count = answer["bytes"] >> 20, len(answer["wheels"])
    print(f"wheelhouse: {count} wheels, {mib} MiB, built or checked in {time.monotonic() - began:.0f} s")
    return Path(answer["folder"])


def beyond_health(answer: dict[str, Any], taken: float) -> float:
    """Seconds of a run without those of its health probe."""
    return taken - sum(step["seconds"] for step in answer["steps"] if step["name"] == "health")


def up(machine: TestHost, house: Path) -> tuple[dict[str, Any], float]:
    began = time.monotonic()
    words = ("--inventory", str(machine.hosts_toml), "--wheelhouse", str(house))
    return dflash_deploy("up", machine.name, *words, timeout_s=6000), time.monotonic() - began


def test_a_host_without_a_route_serves_a_tree(test_host: BootHost, house: Path) -> None:
    with networks(1) as (network,):
        machine = test_host(
            "airgap-cpu", netns=network.name, address=network.address, options='root = "/srv/d"\nstack = "cpu"\n'
        )
        try:
            machine.exec("install", "-d", "-o", machine.user, "/srv/d")
            routes = machine.exec("ip", "route").stdout.splitlines()
            assert len(routes) == 1 and "default" not in routes[0], routes
            first, taken = up(machine, house)
            rungs = [rung["name"] for rung in first["health"]["rungs"] if rung["status"] == "ok"]
            print(f"up without a route: {taken:.0f} s; steps {[(s['name'], s['seconds']) for s in first['steps']]}")
            print(f"rungs that hold: {', '.join(rungs)}")
            assert first["ok"] and first["changed"]
            data = first["health"]["data"]
            assert data["acceptance_length"] > 1.5 and data["completion"]
            again, taken = up(machine, house)
            print(f"a second up takes {beyond_health(again, taken):.1f} s beyond the health probe")
            assert not again["changed"]
            if os.getloadavg()[0] < (os.cpu_count() or 1):
                assert beyond_health(again, taken) <= 5.0
        finally:
            power_off(machine.name)
