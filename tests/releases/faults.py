"""Faults injected into ``up`` on a container host, one after the other; each must leave the old or the new release
serving, and the same command must complete afterwards.

    python -m tests.releases.faults INVENTORY HOST ROOT PORT COUNT SEED SECONDS     prints one JSON line per fault

A run of ``up`` is a fork of this process, so that it costs no imports. Faults strike at the n-th operation on the host,
counted over everything that a run does there.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_deploy.host import connect
from dflash_deploy.host.base import Host
from dflash_deploy.host.ssh import SshHost
from dflash_deploy.inventory import resolve
from tests.hosts.container import SCRIPT
from tests.releases import standin

KINDS = ("cut", "kill", "kill-remote", "disk-full", "read-only", "clock", "two-runs")
OPERATIONS = ("run", "read", "write", "copy_tree", "forward", "follow")
SERVES_S = 90.0


@dataclass(frozen=True)
class Wanted:
    """What is to be served; a change of each field changes another part of a release."""

    budget: int = 16
    patch: str = "one"
    big: str = "1.0"

    def environ(self) -> dict[str, str]:
        return {"STANDIN_PATCH": self.patch, "STANDIN_BIG": self.big}

    def seen_in(self, info: dict[str, Any]) -> bool:
        return (info["hook"], info["big"], info["speculative_ddtree_budget"]) == (
            self.patch,
            self.big,
            str(self.budget),
        )


@dataclass(frozen=True)
class Fault:
    kind: str
    at: int
    """Operation on the host, from 1."""
    delay_s: float


@dataclass
class Machine:
    """The container and what is deployed there."""

    inventory: str
    name: str
    root: str
    port: int

    def inside(self, script: str) -> str:
        """Run a shell script as root in the container, past SSH."""
        import subprocess

        done = subprocess.run(
            [SCRIPT, "exec", self.name, "sh", "-c", script], capture_output=True, text=True, timeout=60
        )
        return done.stdout

    def argv(self, wanted: Wanted) -> list[str]:
        return [
            "dflash-deploy", "up", self.name, "--inventory", self.inventory, "--root", self.root, "--stack", "standin",
            "--port", str(self.port), "--budget", str(wanted.budget), "--keep", "2", "--json",
        ]  # fmt: skip


class Injector:
    """Counts operations of a run and strikes at one."""

    def __init__(self, machine: Machine, fault: Fault | None) -> None:
        self.machine, self.fault = machine, fault
        self.count = 0
        self.struck = ""

    def install(self) -> None:
        """Wrap the host's operations in this process."""
        for name in OPERATIONS:
            setattr(SshHost, name, self.wrapped(name, getattr(SshHost, name)))

    def wrapped(self, name: str, original: Any) -> Any:
        def called(host: SshHost, *args: Any, **more: Any) -> Any:
            self.count += 1
            if self.fault is not None and self.count == self.fault.at:
                what = args[0] if name != "run" else " ".join(map(str, args[0]))[:160]
                self.struck = f"{name} {what}"
                print(f"@struck {self.struck!r}", file=sys.stderr, flush=True)
                self.strike(host)
            return original(host, *args, **more)

        return called

    def strike(self, host: SshHost) -> None:
        fault, machine = self.fault, self.machine
        assert fault is not None

        def later(action: Any) -> None:
            timer = threading.Timer(fault.delay_s, action)
            timer.daemon = True
            timer.start()

        if fault.kind == "cut":
            later(lambda: [transport.sock.close() for transport in list(host._chain)])
        elif fault.kind == "kill":
            later(lambda: os.kill(os.getpid(), signal.SIGKILL))
        elif fault.kind == "kill-remote":
            # What sshd started for this user, in whatever session; the service is systemd's and not among it.
            script = "for s in $(pgrep -f '^sshd: tester'); do for c in $(pgrep -P $s); do pkill -9 -s $c; done; done"
            later(lambda: machine.inside(script))
        elif fault.kind == "disk-full":
            machine.inside(f"dd if=/dev/zero of={machine.root}/.filler bs=64k 2>/dev/null")
        elif fault.kind == "read-only":
            # Laid over what is there: the log that the server has open does not stand in the way.
            script = f"mount --bind {machine.root} {machine.root} && mount -o remount,bind,ro {machine.root}"
            machine.inside(f"{script} && touch /run/read-only")


def run_up(machine: Machine, wanted: Wanted, fault: Fault | None) -> tuple[int, str, str, int]:
    """One ``up`` in a fork. Returns exit code (negative: signal), stdout, stderr, operations."""
    with contextlib.ExitStack() as held:
        # Not one of tempfile's own: a fork that ends as a process does would remove it.
        folder = Path(tempfile.mkdtemp())
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        out, err, count = (folder / name for name in ("out", "err", "count"))
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for path, fd in ((out, 1), (err, 2)):
                    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
                    os.dup2(handle, fd)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
                os.environ.update(wanted.environ())
                standin.install()
                injector = Injector(machine, fault if fault is not None and fault.kind in KINDS[:5] else None)
                injector.install()
                if fault is not None and fault.kind == "clock":
                    skew = 86400.0 * (1 if fault.at % 2 else -1)
                    now = time.time
                    time.time = lambda: now() + skew
                sys.argv = machine.argv(wanted)
                from dflash_deploy.cli import main

                try:
                    main()
                    code = 0
                except SystemExit as end:
                    code = int(end.code or 0)
                count.write_text(str(injector.count))
                sys.stdout.flush()
            finally:
                os._exit(code)
        limit = time.monotonic() + 240
        status = None
        while time.monotonic() < limit:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            time.sleep(0.05)
        else:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -99, out.read_text(), err.read_text() + "\nno end within 240 s", 0
        assert status is not None
        operations = int(count.read_text()) if count.exists() else 0
        return os.waitstatus_to_exitcode(status), out.read_text(), err.read_text(), operations


@contextlib.contextmanager
def host_of(machine: Machine) -> Iterator[Host]:
    host = connect(resolve(machine.name, inventory=machine.inventory))
    try:
        yield host
    finally:
        host.close()


def serving(machine: Machine, one_of: tuple[Wanted, ...]) -> str:
    """Wait until one of these is served; the container has this machine's network. Returns ``""``, or what was found
    instead."""
    limit, found = time.monotonic() + SERVES_S, "nothing"
    while time.monotonic() < limit:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{machine.port}/server_info", timeout=3) as reply:
                found = reply.read().decode()
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)
            continue
        if any(each.seen_in(json.loads(found)) for each in one_of):
            return ""
        time.sleep(0.1)
    return found[:400]


def transitions(seed: int) -> Iterator[tuple[Wanted, str]]:
    """What is wanted next, for ever, and what changes. Most changes are of the configuration, some of patches, few of
    pins, as they cost."""
    rng = random.Random(seed)
    now = Wanted()
    words = ("one", "two", "three")
    while True:
        kind = rng.choices(("configuration", "patches", "pins"), (10, 6, 1))[0]
        now = replace(now, budget=int(now.budget) % 61 + 1)
        if kind == "patches":
            now = replace(now, patch=rng.choice([w for w in words if w != now.patch]))
        if kind == "pins":
            now = replace(now, big="2.0" if now.big == "1.0" else "1.0")
        yield now, kind


def main() -> None:
    inventory, name, root, port, count, seed, seconds = sys.argv[1:]
    started = time.monotonic()
    machine = Machine(inventory, name, root, int(port))
    rng = random.Random(int(seed))
    for module in ("cli.steps", "patching.tree", "audit.report", "health", "plan.launch"):
        # Once for all forks.
        importlib.import_module(f"dflash_deploy.{module}")

    before = Wanted()
    code, _, err, operations = run_up(machine, before, None)
    if code:
        sys.exit(f"the first up failed: {code}\n{err[-3000:]}")
    # Operations of a run that changes something, by what it changes; learned from the runs that complete.
    usual = {"configuration": 40, "patches": 60, "pins": 70}
    del operations
    changes = transitions(int(seed))
    for number in range(int(count)):
        if float(seconds) and time.monotonic() - started > float(seconds):
            break
        wanted, change = next(changes)
        kind = KINDS[number % len(KINDS)]
        fault = Fault(kind, rng.randint(1, usual[change]), rng.choice((0.0, 0.01, 0.05, 0.2)))
        began = time.monotonic()
        second = 0
        if kind == "two-runs":
            other = os.fork()
            if other == 0:
                time.sleep(rng.random() * 4)
                code = run_up(machine, wanted, None)[0]
                os._exit(code & 255)
            code, _, err, _ = run_up(machine, wanted, None)
            second = os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
        else:
            code, _, err, _ = run_up(machine, wanted, fault)
        struck = next((line for line in err.splitlines() if line.startswith("@struck")), "")
        wrong = serving(machine, (before, wanted))
        machine.inside(f"[ ! -e /run/read-only ] || umount -l {root}; rm -f /run/read-only {root}/.filler")
        again, _, err2, done = run_up(machine, wanted, None)
        after = serving(machine, (wanted,)) if again == 0 else "not asked"
        traced = "Traceback" in err or "Traceback" in err2
        ok = not wrong and again == 0 and not after and not traced and (kind != "two-runs" or {code, second} <= {0, 8})
        row: dict[str, Any] = {
            "number": number + 1, "fault": kind, "at": fault.at, "change": change, "exit": code, "second": second,
            "again": again, "struck": struck[8:], "ok": ok, "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip
        if not ok:
            row |= {"wrong": wrong, "after": after, "stderr": err[-1500:], "stderr_again": err2[-2500:]}
        print(json.dumps(row), flush=True)
        if again:
            # The next fault needs a host that serves.
            code, _, err, _ = run_up(machine, wanted, None)
            if code:
                sys.exit(f"cannot go on: {err[-3000:]}")
        elif done:
            usual[change] = max(10, done) if code == 0 else usual[change]
        before = wanted


if __name__ == "__main__":
    main()
