"""The supervisor with real processes: it survives, restarts, gives up, and ends exactly what it started."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from dflash_deploy.assets import templates_dir
from tests.launch.conftest import Service


def eventually(holds: Callable[[], object], seconds: float = 20.0) -> bool:
    """Wait for something to become true."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if holds():
            return True
        time.sleep(0.1)
    return False


def answers(service: Service) -> bool:
    try:
        with urllib.request.urlopen(f"{service.settings.url}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def log(service: Service) -> str:
    return Path(service.settings.log_file).read_text()


def grandchild(service: Service) -> int:
    assert eventually(lambda: "child" in log(service))
    return int(log(service).split("child ")[-1].split()[0])


def test_launch_serves_twice_changes_nothing_and_down_leaves_nothing(service: Service) -> None:
    assert service.launch()
    assert eventually(lambda: answers(service))
    child = grandchild(service)
    state = service.state()
    assert state.running and alive(state.pid) and alive(state.server_pid) and alive(child)
    # Values with quotes, dollars and backslashes arrive as they are; nobody else reads them.
    assert 'token a"b $HOME `c` \\d child' in log(service)
    assert Path(service.settings.env_file).stat().st_mode & 0o777 == 0o600
    assert service.plan().empty
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        service.down()
        assert not any(alive(pid) for pid in (state.pid, state.server_pid, child))
        assert bystander.poll() is None
        assert not service.state().running
        service.down()
    finally:
        bystander.kill()
        bystander.wait()


def test_a_change_restarts_and_only_a_change(service: Service) -> None:
    service.launch()
    assert eventually(lambda: answers(service))
    before = service.state()
    service.change(server_args=("--log-level", "debug"))
    titles = [outcome.name for outcome in service.launch()]
    assert titles == ["restart the service"]
    after = service.state()
    assert after.pid != before.pid and not alive(before.pid)
    assert eventually(lambda: answers(service))
    service.change(env={"TOKEN": "other"})
    assert [step.title for step in service.plan().steps] == [
        f"write {service.settings.service}.env",
        "restart the service",
    ]


def test_a_killed_server_is_started_again(service: Service) -> None:
    service.launch()
    assert eventually(lambda: answers(service))
    first = service.state()
    os.kill(first.server_pid, signal.SIGKILL)
    assert eventually(lambda: service.state().restarts == 1 and answers(service), 30)
    again = service.state()
    assert again.pid == first.pid and again.server_pid != first.server_pid


def test_a_server_that_cannot_start_is_given_up(service: Service, tmp_path: Path) -> None:
    service.launch()
    service.down()
    command = [
        service.settings.python, service.settings.runner, "start", "--state", service.settings.state_file, "--log",
        service.settings.log_file, "--delay", "0.1", "--burst", "3", "--", service.settings.python, "-m",
        "sglang.launch_server", "--port", "1", "--die",
    ]  # fmt: skip
    assert service.host.run(command, timeout_s=30).ok
    assert eventually(lambda: service.state().failed)
    assert not service.state().running and service.state().exit_code == 3
    assert log(service).count("RuntimeError: as asked") == 3
    assert "given up after 3 failures" in log(service)


def test_between_two_tries_nothing_is_served(service: Service) -> None:
    """The runner is there, so a start replaces it; it serves nothing, so there is something to start."""
    service.change(server_args=("--die",))
    service.launch()
    assert eventually(lambda: "ended with 3" in log(service))
    state = service.state()
    assert state.running and state.pid and not state.fingerprint
    assert [step.title for step in service.plan().steps] == ["restart the service"]


def test_a_killed_supervisor_leaves_nothing_that_down_misses(service: Service) -> None:
    service.launch()
    assert eventually(lambda: answers(service))
    state, child = service.state(), grandchild(service)
    os.kill(state.pid, signal.SIGKILL)
    assert eventually(lambda: not alive(state.server_pid))
    assert alive(child) and service.state().orphans == (child,)
    service.down()
    assert not alive(child) and service.state().orphans == ()


def test_a_killed_supervisor_is_replaced_by_the_next_launch(service: Service) -> None:
    service.launch()
    assert eventually(lambda: answers(service))
    state, child = service.state(), grandchild(service)
    os.kill(state.pid, signal.SIGKILL)
    assert eventually(lambda: not alive(state.server_pid))
    service.launch()
    assert eventually(lambda: answers(service)) and not alive(child)


def test_a_recycled_process_id_is_left_alone(service: Service) -> None:
    service.launch()
    assert eventually(lambda: answers(service))
    service.down()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        path = Path(service.settings.state_file)
        record = json.loads(path.read_text())
        # The number is in use again, by a process that started at another time.
        path.write_text(json.dumps({**record, "pid": other.pid, "session": other.pid}))
        assert not service.state().running and service.state().orphans == ()
        service.down()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_logs_are_kept_and_bounded(service: Service) -> None:
    service.launch()
    assert eventually(lambda: answers(service))
    for round_ in range(7):
        service.change(server_args=("--round", str(round_)))
        service.launch()
    names = sorted(path.name for path in Path(service.settings.log_file).parent.iterdir())
    base = f"{service.settings.service}.log"
    assert names == [base, *(f"{base}.{number}" for number in range(1, 6))]
    service.down()
    chatty = "import sys\nfor i in range(40000): print('x' * 99)"
    run = [service.settings.python, service.settings.runner, "run", "--state", service.settings.state_file, "--log"]
    command = [*run, service.settings.log_file, "--max-mib", "1", "--keep", "2", "--", sys.executable, "-c", chatty]
    assert service.host.run(command, timeout_s=60).ok
    kept = [Path(service.settings.log_file + suffix) for suffix in ("", ".1", ".2")]
    assert all(path.stat().st_size < 1.2 * 2**20 for path in kept)


def test_ranks_are_told_the_address_that_leads_to_the_first() -> None:
    spec = importlib.util.spec_from_file_location("serve", templates_dir() / "serve.py")
    assert spec is not None and spec.loader is not None
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    words = ["python", "-m", "sglang.launch_server", "--nnodes", "2", "--node-rank", "1", "--dist-init-addr"]
    assert serve.meeting([*words, "127.0.0.1:20000"]) == {"SGLANG_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    for elsewhere in ("127.0.0.1:x", "127.0.0.1"):
        assert serve.meeting([*words, elsewhere]) == {}
    assert serve.meeting(["python", "-m", "sglang.launch_server", "--nnodes", "1"]) == {}
