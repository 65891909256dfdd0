"""How long an audit takes over SSH on loopback: one host, then many at once.

    python -m tests.bench.audit_speed --venv DIR [--repeat 7] [--targets 64] [--parallel 64] [--out FILE.json]

Each target is an sshd of its own, with its own port, host key and account key, on this machine: they share its cores with
the command. Every run is the command as users call it, in a process of its own. Beside the wall time: the CPU time of the
command and, over a proxy that delays every byte, how many network round trips it waits for. Read the machine's load with
the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.hosts.loopback import Sshd, start_sshd

DELAY_S = 0.05
"""One way through the proxy."""


def cores() -> int:
    return len(os.sched_getaffinity(0))


@contextmanager
def slow_port(target: int) -> Iterator[int]:
    """A port on loopback that leads to ``target``, every byte late by ``DELAY_S`` in each direction."""
    server = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        late: queue.Queue[tuple[float, bytes]] = queue.Queue()

        def deliver() -> None:
            while True:
                due, data = late.get()
                time.sleep(max(0.0, due - time.monotonic()))
                try:
                    if not data:
                        sink.shutdown(socket.SHUT_WR)
                        return
                    sink.sendall(data)
                except OSError:
                    return

        threading.Thread(target=deliver, daemon=True).start()
        while True:
            try:
                data = source.recv(65536)
            except OSError:
                data = b""
            late.put((time.monotonic() + DELAY_S, data))
            if not data:
                return

    def accept() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            upstream = socket.create_connection(("127.0.0.1", target))
            for pair in ((client, upstream), (upstream, client)):
                for end in pair:
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield int(server.getsockname()[1])
    finally:
        server.close()


def inventory(folder: Path, servers: list[Sshd], port: int = 0) -> Path:
    """``hosts.toml`` with host ``t0``, ``t1``, ..., one a server; ``port`` in place of the servers' own."""
    known, lines = [], []
    for index, sshd in enumerate(servers):
        kind, blob = sshd.host_key.with_suffix(".pub").read_text().split()[:2]
        known.append(f"[127.0.0.1]:{port or sshd.port} {kind} {blob}\n")
        lines.append(
            f'[t{index}]\naddress = "{sshd.user}@127.0.0.1:{port or sshd.port}"\n'
            f'identity_file = "{sshd.key}"\nknown_hosts = "{folder / "known_hosts"}"\n'
        )
    (folder / "known_hosts").write_text("".join(known))
    path = folder / "hosts.toml"
    path.write_text("\n".join(lines))
    return path


def audit(hosts: Path, names: list[str], venvs: list[str], parallel: int) -> dict[str, Any]:
    """One run of the command."""
    command = [sys.executable, "-c", "from dflash_deploy.cli import main; main()", "audit", *names, "--json"]
    command += ["--inventory", str(hosts), "--parallel", str(parallel), *(f"--venv={venv}" for venv in venvs)]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    wall = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 6):
        raise SystemExit(f"audit ended with {done.returncode}: {done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    hosts_ = answer["hosts"] if len(names) > 1 else [{"host": names[0], "report": answer, "error": None}]
    failed = [
        f"{host['host']}: {host['error']['message']} {host['error']['evidence']}" for host in hosts_ if host["error"]
    ]
    if failed:
        raise SystemExit("\n".join(failed))
    reports = [host["report"] for host in hosts_]
    return {
        "wall_s": round(wall, 3),
        "client_cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 3),
        "probe_s": [report["probe"]["seconds"] for report in reports],
    }


def commands_in(log: Path) -> int:
    """Commands that sshd has started so far."""
    return len(re.findall(r"Starting session: (command|subsystem)", log.read_text(errors="replace")))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    servers: list[Sshd] = []
    try:
        for index in range(options.targets):
            servers.append(start_sshd(folder / f"sshd{index}", extra="LogLevel VERBOSE"))
        hosts = inventory(folder, servers)
        audit(hosts, ["t0"], options.venv, 1)  # files into the page cache
        log = folder / "sshd0/sshd.log"
        started = commands_in(log)
        one = [audit(hosts, ["t0"], options.venv, 1) for _ in range(options.repeat)]
        commands = (commands_in(log) - started) / options.repeat
        names = [f"t{index}" for index in range(options.targets)]
        many = [audit(hosts, names, options.venv, options.parallel) for _ in range(options.rounds)]
        with slow_port(servers[0].port) as port:
            slow_hosts = inventory(folder, servers[:1], port)
            slow = min(audit(slow_hosts, ["t0"], options.venv, 1)["wall_s"] for _ in range(options.repeat))
    finally:
        for server in servers:
            server.stop()
    best = min(run["wall_s"] for run in one)
    wall = min(run["wall_s"] for run in many)
    share = options.targets / cores()
    return {
        "one": {
            "wall_s": [run["wall_s"] for run in one],
            "median_wall_s": statistics.median(run["wall_s"] for run in one),
            "client_cpu_s": min(run["client_cpu_s"] for run in one),
            "probe_s": min(run["probe_s"][0] for run in one),
            "commands": commands,
            "network_round_trips": round((slow - best) / (2 * DELAY_S), 1),
        },
        "many": {
            "targets": options.targets,
            "parallel": options.parallel,
            "wall_s": [run["wall_s"] for run in many],
            "client_cpu_s": min(run["client_cpu_s"] for run in many),
            "times_one": round(wall / best, 2),
            "times_one_per_core_in_use": round(wall / (best * max(1.0, share)), 2),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", action="append", default=[], help="environment to look into (may be repeated)")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--targets", type=int, default=64)
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    result["machine"] = {
        "cpu": cpu.group(1) if cpu else "",
        "cores": cores(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": [round(value, 2) for value in load],
        "load_after": [round(value, 2) for value in os.getloadavg()],
    }
    result["targets_are"] = "an sshd each, on ports of loopback"
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
