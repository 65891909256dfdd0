"""What one look at a host says to be wrong, and what it does not."""

from __future__ import annotations

from pathlib import Path

from dflash_deploy.host.local import LocalHost
from dflash_deploy.launch import faults, look
from tests.launch.conftest import Service


def test_a_healthy_host_shows_no_fault(service: Service) -> None:
    seen = look(LocalHost(), service.settings)
    assert "error" not in seen and faults(seen) == [], seen
    assert seen["disk"]["free_kib"] > 0 and seen["service"]["family"] == []


def test_faults_are_told_from_strangers_troubles() -> None:
    stopped = {"pid": 7, "state": "T", "command": "sglang::scheduler", "rss_kib": 1}
    assert "is stopped" in faults({"service": {"family": [stopped]}})[0]
    assert "is full" in faults({"disk": {"path": "/l", "free_kib": 0, "inodes": 9000}})[0]
    assert "inodes" in faults({"disk": {"path": "/l", "free_kib": 9000, "inodes": 0}})[0]
    # Kills in a group that is not the service's own count only when they are new.
    group = {"group": "/user.slice/user@0.service", "events_oom_kill": 3, "max": "1"}
    assert faults({"cgroup": group}) == [] and faults({"cgroup": group}, {"cgroup": group}) == []
    assert "out of memory" in faults({"cgroup": {**group, "events_oom_kill": 4}}, {"cgroup": group})[0]
    assert faults({"cgroup": {**group, "group": "/system.slice/dflash-sglang.service"}}) != []
    # Another process's memory kill, a machine without a driver: no fault of this server.
    assert faults({"kernel": {"lines": ["Out of memory: Killed process 1 (python)"]}}) == []
    assert faults({"gpu": {"error": "NVIDIA-SMI has failed because it couldn't communicate with the driver"}}) == []
    assert "GPU is lost" in faults({"gpu": {"error": "Unable to determine the device handle: GPU is lost"}})[0]


def test_missing_shards_are_seen(service: Service, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}'
    )
    (folder / "m-1.safetensors").write_bytes(b"")
    service.change(model=str(folder), draft_model="")
    assert faults(look(LocalHost(), service.settings)) == [
        f"weight file missing: {folder}/m-2.safetensors does not exist"
    ]
    (folder / "m-2.safetensors").write_bytes(b"")
    assert faults(look(LocalHost(), service.settings)) == []
