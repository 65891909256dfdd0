"""SGLang's own router in front of two stand-in servers: started, proved, one of them ended, ended."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_deploy.audit.stacks import ROUTER, get_stack
from dflash_deploy.errors import UsageError
from dflash_deploy.inventory import Target, resolve_all
from dflash_deploy.plan.router import RouterSettings, replica_urls
from dflash_deploy.settings import Mode, Settings
from tests.hosts import standin
from tests.hosts.loopback import free_port
from tests.wheelhouse.conftest import Cli, cli

__all__ = ["cli"]


def target(name: str, address: str, **options: object) -> Target:
    return Target(name, address=address, options=options)


def test_where_the_router_reaches_its_replicas() -> None:
    router = target("front", "10.0.0.1")
    far = target("a", "10.0.0.2", bind="0.0.0.0", port=30001)
    same = target("b", "10.0.0.1")
    named = target("c", "gateway", bind="10.1.0.3")
    rank = target("d", "10.0.0.9", bind="0.0.0.0", node_rank=1)
    assert replica_urls([far, same, named, rank, far], router) == [
        "http://10.0.0.2:30001", "http://127.0.0.1:30000", "http://10.1.0.3:30000",
    ]  # fmt: skip
    with pytest.raises(UsageError) as caught:
        replica_urls(
            [target("x", "10.0.0.3"), replace(far, options={**far.options, "env": {"SGLANG_API_KEY": "k"}})], router
        )
    assert len(caught.value.evidence) == 2 and not any("secret-k" in line for line in caught.value.evidence)
    with pytest.raises(UsageError, match="one router"):
        replica_urls([], router)


def base() -> Settings:
    return Settings(
        host="h", stack=get_stack("sglang-0.5.16-cpu"), root="/srv/d", venv="/srv/d/v", service="s", bind="0.0.0.0",
        port=1, model="/m", draft_model="", algorithm="DDTREE", budget=16, server_args=("--x",), env={"A": "b"},
        mode=Mode.SUPERVISOR, tiny_pair=True,
    )  # fmt: skip


def test_its_command_line() -> None:
    made = {"port": 30080, "bind": "127.0.0.1", "policy": "round_robin", "args": ["--log-level", "warn"]}
    settings = RouterSettings.of(base(), replicas=["http://a:1", "http://b:2"], **made)  # type: ignore[arg-type]
    words = " ".join(settings.server_argv())
    assert "-m sglang_router.launch_router --host 127.0.0.1 --port 30080 --policy round_robin" in words
    assert words.endswith("--worker-urls http://a:1 http://b:2 --log-level warn") and "--x" not in words
    assert settings.stack is ROUTER and settings.python.startswith("/srv/d/venvs/") and not settings.env
    with pytest.raises(UsageError) as caught:
        RouterSettings.of(base(), replicas=[], **{**made, "port": 0, "policy": "magic"})  # type: ignore[arg-type]
    assert len(caught.value.evidence) == 2


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[tuple[int, subprocess.Popen[bytes]]]]:
    script = tmp_path / "server.py"
    script.write_text(standin.SERVER)
    found = []
    for _ in range(2):
        port = free_port()
        command = [sys.executable, str(script), "--model-path", "/m/target", "--port", str(port)]
        found.append((port, subprocess.Popen(command, stdout=subprocess.DEVNULL)))
    try:
        yield found
    finally:
        for _, process in found:
            process.kill()
            process.wait()


@pytest.mark.wheels
@pytest.mark.waits
@pytest.mark.timeout(900)
def test_two_replicas_behind_the_real_router(
    cli: Cli, replicas: list[tuple[int, subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    inventory = tmp_path / "hosts.toml"
    text = '[groups]\nfarm = ["r0", "r1"]\n'
    text += "".join(f'[r{n}]\naddress = "127.0.0.1"\nport = {port}\n' for n, (port, _) in enumerate(replicas))
    inventory.write_text(text)
    assert len(resolve_all(["farm"], inventory=inventory)) == 2
    place = ("local", "--root", str(tmp_path / "root"), "--mode", "supervisor", "--inventory", str(inventory))
    port = str(free_port())
    words = ("router", "up", *place, "--replica", "farm", "--port", port, "--policy", "round_robin",
             "--router-arg=--health-check-interval-secs=2")  # fmt: skip
    try:
        first = cli.json(*words, timeout_s=600)
        assert first["changed"] and "2 replicas healthy" in first["steps"][-1]["detail"]
        again = cli.json(*words, timeout_s=600)
        assert not again["changed"] and {step["status"] for step in again["steps"]} == {"ok"}
        assert len(cli.json("router", "status", *place, "--port", port)["workers"]) == 2
        # One goes: the router says so, and the answers come from the other.
        replicas[0][1].kill()
        deadline = time.monotonic() + 120
        while True:
            done = cli.run("router", "status", *place, "--port", port, "--json")
            health = {w["url"]: w["is_healthy"] for w in json.loads(done.stdout)["workers"]}
            if not health.get(f"http://127.0.0.1:{replicas[0][0]}", True) or time.monotonic() > deadline:
                break
            time.sleep(1)
        assert done.returncode == 9 and health[f"http://127.0.0.1:{replicas[1][0]}"]
    finally:
        ended = cli.run("router", "down", *place, "--break-lock")
    assert ended.returncode == 0, ended.stderr
    left = subprocess.run(["pgrep", "-f", str(tmp_path / "root")], capture_output=True, text=True).stdout
    assert left == ""
