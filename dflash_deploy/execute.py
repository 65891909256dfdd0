"""The only mutation: a plan's steps, in order, on a host; each goes into a journal on the host, all under one lock."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import posixpath
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_deploy.errors import CommandFailed, DflashError, HostChanged, Locked
from dflash_deploy.host.base import Host
from dflash_deploy.host.send import send
from dflash_deploy.model import CopyTree, Plan, Run, Status, Step, StepOutcome, Upload, WriteFile

STALE_AFTER_S = 6 * 3600.0
"""A lock this old belongs to nobody: no step takes that long."""


@dataclass(frozen=True)
class Progress:
    """One piece of news for whoever waits."""

    step: int
    """From 1."""
    steps: int
    title: str
    line: str = ""
    """A line of the command's output; empty at the step's start and end."""
    outcome: StepOutcome | None = None
    """At the step's end."""


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Journal:
    """A JSON-lines file on the host: what was done, when, how it ended. Values of environments are not written."""

    host: Host
    path: str
    held: list[bytes] = field(default_factory=list)

    def hold(self, event: str, **data: Any) -> None:
        """Note a line that is written with the next one: how a step ended goes with the beginning of the next."""
        entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "event": event, **data}
        self.held.append(json.dumps(entry).encode() + b"\n")

    def add(self, event: str, **data: Any) -> None:
        """Append a line, and those that were held."""
        self.hold(event, **data)
        self.flush()

    def flush(self) -> None:
        """Write what is held. A journal that cannot be written (a full disk) stops nothing."""
        if not self.held:
            return
        script = 'mkdir -p "$(dirname "$1")" && cat >> "$1"'
        self.host.run(["/bin/sh", "-c", script, "sh", self.path], input=b"".join(self.held), timeout_s=30)
        self.held.clear()


def title_of(step: Step) -> str:
    """What a person reads while the step runs."""
    return step.title or step.describe()


def execute(
    plan: Plan, host: Host, *, journal: Journal | None = None, on_progress: OnProgress | None = None
) -> list[StepOutcome]:
    """Run the plan's steps in order, up to the first that fails.

    Raises:
        CommandFailed: a step failed; its last lines are the evidence. Those before it stand; the plan may be run again.
        HostChanged: a file is not the one that was planned on; nothing was written over it.
        HostError: the connection broke; the journal's last line says in which step.
    """
    outcomes: list[StepOutcome] = []
    for number, step in enumerate(plan.steps, 1):
        title = title_of(step)

        def tell(line: str = "", outcome: StepOutcome | None = None, number: int = number, title: str = title) -> None:
            if on_progress is not None:
                on_progress(Progress(number, len(plan.steps), title, line, outcome))

        tell()
        began = time.monotonic()
        if journal is not None:
            journal.add("begin", plan=plan.name, step=number, what=step.describe())
        try:
            outcome = _perform(step, host, lambda line, tell=tell: tell(line))  # type: ignore[misc]
        except DflashError as error:
            failed = StepOutcome(title, Status.FAILED, error.message, time.monotonic() - began)
            tell(outcome=failed)
            # After a lost connection the journal's open "begin" says the same.
            if journal is not None:
                with contextlib.suppress(DflashError):
                    journal.add("failed", plan=plan.name, step=number, error=error.as_dict())
            raise
        if journal is not None:
            journal.hold(str(outcome.status), plan=plan.name, step=number, seconds=round(outcome.seconds, 3))
        outcomes.append(outcome)
        tell(outcome=outcome)
    if journal is not None:
        journal.flush()
    return outcomes


def _perform(step: Step, host: Host, say: Callable[[str], None]) -> StepOutcome:
    began = time.monotonic()
    title = title_of(step)
    if isinstance(step, Run):
        if step.unless and host.run(step.unless, timeout_s=60).ok:
            return StepOutcome(title, Status.SKIPPED, "holds already", time.monotonic() - began)
        tail: list[str] = []

        def heard(stream: str, text: str) -> None:
            text = text.rstrip()
            if text:
                tail.append(text)
                del tail[:-200]
                say(text)

        result = host.run(step.argv, env=step.env, timeout_s=step.timeout_s, on_line=heard)
        if result.exit_code not in step.ok_exits:
            raise CommandFailed(
                f"{title}: exit {result.exit_code} on {host.name}",
                evidence=[f"$ {shlex.join(step.argv)}"[:500], *_telling(tail)],
                hint="mend the cause, then run the same command again: it goes on from here",
            )
        return StepOutcome(title, Status.CHANGED, "", time.monotonic() - began)
    if isinstance(step, WriteFile):
        if step.expect_sha256 is not None:
            present = digest(host.read(step.path))
            if present == digest(step.data) and present:
                return StepOutcome(title, Status.SKIPPED, "there already", time.monotonic() - began)
            if present != step.expect_sha256:
                raise HostChanged(
                    f"{step.path} on {host.name} is not the file that was planned on",
                    evidence=[f"planned on {step.expect_sha256 or 'absence'}", f"found {present or 'absence'}"],
                    hint="look who wrote it, then run the same command again",
                )
        host.write(step.path, step.data, mode=step.mode)
    elif isinstance(step, CopyTree):
        host.copy_tree(
            step.source, step.target, on_progress=lambda done, total: say(f"{done >> 10} of {total >> 10} KiB")
        )
    elif isinstance(step, Upload):
        send(host, step.blobs, step.folder, say)
    else:
        result = host.run(["rm", "-rf", "--", step.path], timeout_s=600)
        if not result.ok:
            raise CommandFailed(f"{step.path} cannot be removed on {host.name}", evidence=result.err.splitlines()[-3:])
    return StepOutcome(title, Status.CHANGED, "", time.monotonic() - began)


def _telling(lines: Sequence[str]) -> list[str]:
    """The lines that say why: errors first, else the last ones."""
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or list(lines))[-8:]


def digest(data: bytes | None) -> str:
    """sha256 in hex; ``""`` for an absent file."""
    return "" if data is None else hashlib.sha256(data).hexdigest()


def digests(host: Host, paths: Sequence[str]) -> dict[str, str]:
    """What planners need to know of files: path → digest."""
    return {path: digest(host.read(path)) for path in paths}


def local_tree(folder: Path) -> dict[str, str]:
    """Relative path → sha256 of the files of a folder on this side; no bytecode."""
    return {
        path.relative_to(folder).as_posix(): digest(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def remote_tree(host: Host, folder: str) -> dict[str, str]:
    """The same of a folder on the host; empty when there is none."""
    script = 'cd "$1" 2>/dev/null || exit 0; find . -type f ! -path "*/__pycache__/*" -exec sha256sum {} +'
    result = host.run(["/bin/sh", "-c", script, "sh", folder], timeout_s=300)
    found = {}
    for line in result.out.splitlines():
        value, _, name = line.partition("  ")
        found[name.removeprefix("./")] = value
    return found


@contextlib.contextmanager
def lock(
    host: Host, root: str, what: str, *, break_lock: bool = False, on_notice: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Hold the deployment's lock: ``<root>/lock``, a folder that only one can put there.

    A lock is stale when its owner ran on this machine and is gone, or when it is of another machine and older than
    :data:`STALE_AFTER_S` by the host's own clock; a stale lock is taken over and said so. Any other needs
    ``break_lock``.

    Raises:
        Locked: another run holds it; the evidence says who, since when, for what.
    """
    folder = posixpath.join(root, "lock")
    owner = {
        "user": getpass.getuser(), "host": socket.gethostname(), "boot": _boot_id(), "pid": os.getpid(),
        "start": _start_time(os.getpid()), "what": what, "since": time.time(),
    }  # fmt: skip
    text = json.dumps(owner).encode()
    # A folder with the owner's name in it is renamed into place, which fails when one is there: no lock is nameless
    # however slow the host. (An empty folder is nobody's and gives way.)
    take = 'mkdir -p "$2" && cat > "$2/owner.json" && mv -T "$2" "$1" 2>/dev/null || { rm -rf "$2"; exit 1; }'
    fresh = f"{folder}.new-{os.getpid()}-{time.time_ns()}"
    for _ in range(3):
        result = host.run(["/bin/sh", "-c", take, "sh", folder, fresh], input=text, timeout_s=30)
        if result.ok:
            break
        seen = host.read(posixpath.join(folder, "owner.json"))
        holder = _parsed(seen)
        if holder is None:
            if result.err.strip() or not host.run(["test", "-w", root], timeout_s=30).ok:
                raise CommandFailed(
                    f"{root} on {host.name} cannot be written",
                    evidence=result.err.strip().splitlines()[-2:],
                    hint="another --root, or mend its owner and space",
                )
            # Released between the two looks.
            continue
        age = _age_there(host, folder)
        why = _stale(holder, age)
        if not why and not break_lock:
            raise Locked(
                f"another run holds the lock of {host.name}",
                evidence=[
                    f"{holder.get('user', '?')} on {holder.get('host', '?')} (process {holder.get('pid', '?')}): "
                    f"{holder.get('what', '?')}, for {age:.0f} s"
                ],
                hint="wait for it, or --break-lock when that run is surely gone",
            )
        if on_notice is not None:
            on_notice(
                f"taking over the lock of {holder.get('user', '?')} ({holder.get('what', '?')}): "
                f"{why or '--break-lock'}"
            )
        _remove_stale(host, folder, seen)
    else:
        raise Locked(f"the lock of {host.name} changes hands all the time", hint="run the same command again")
    try:
        yield
    finally:
        # Only our own: it may have been broken meanwhile.
        with contextlib.suppress(DflashError):
            if host.read(posixpath.join(folder, "owner.json")) == text:
                host.run(["rm", "-rf", "--", folder], timeout_s=30)


def holder(host: Host, root: str) -> Mapping[str, Any] | None:
    """Who holds the lock, with ``stale`` (a reason or ``""``); None when nobody does."""
    folder = posixpath.join(root, "lock")
    found = _parsed(host.read(posixpath.join(folder, "owner.json")))
    return None if found is None else described(found, _age_there(host, folder))


def described(found: Mapping[str, Any], age: float) -> Mapping[str, Any]:
    """A lock's owner with its age in seconds, and ``stale``: a reason, or ``""``."""
    return {**found, "age": age, "stale": _stale(found, age)}


def release_lock(host: Host, root: str) -> None:
    """Take the lock away from whoever holds it."""
    folder = posixpath.join(root, "lock")
    _remove_stale(host, folder, host.read(posixpath.join(folder, "owner.json")))


def _remove_stale(host: Host, folder: str, seen: bytes | None) -> None:
    """Remove the lock if it still is the one that was judged. Those that take over go one by one, or the second would
    remove the first one's new lock."""
    script = (
        'exec 9>"$1.flock" && if command -v flock >/dev/null 2>&1; then flock -w 10 9 || exit 0; fi; '
        'present=$(cat "$1/owner.json" 2>/dev/null); [ "$present" = "$(cat)" ] && rm -rf "$1"'
    )
    host.run(["/bin/sh", "-c", script, "sh", folder], input=seen or b"\n", timeout_s=30)


def _parsed(data: bytes | None) -> dict[str, Any] | None:
    if data is None:
        return None
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _stale(holder: Mapping[str, Any], age: float) -> str:
    if not holder:
        return "its owner cannot be read"
    if holder.get("host") == socket.gethostname():
        if holder.get("boot") != _boot_id():
            return "this machine was rebooted since"
        if _start_time(int(holder.get("pid", 0))) != holder.get("start"):
            return f"process {holder.get('pid')} is gone"
        return ""
    return f"older than {STALE_AFTER_S / 3600:.0f} h" if age > STALE_AFTER_S else ""


def _age_there(host: Host, folder: str) -> float:
    """Seconds since the lock was taken, by the host's own clock: that of its owner may go wrong, and so may ours."""
    script = 'echo $(( $(date +%s) - $(stat -c %Y "$1/owner.json") ))'
    result = host.run(["/bin/sh", "-c", script, "sh", folder], timeout_s=30)
    return float(result.out) if result.ok and result.out.strip().lstrip("-").isdigit() else 0.0


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _start_time(pid: int) -> str:
    """Start of a process of this machine in clock ticks since boot; ``""`` when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
