"""Make a wheelhouse: pip resolves once, the answer is kept with its hashes, and the wheels are downloaded one small
batch after the other. A build that is cut off goes on from what is there. The index is the one that pip is set up for.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dflash_deploy.audit.stacks import Stack, dotted
from dflash_deploy.errors import CommandFailed, Incompatible, UsageError
from dflash_deploy.facts import Facts
from dflash_deploy.facts.parse import version_tuple
from dflash_deploy.host.base import Host
from dflash_deploy.plan.constraints import constraints, torch_pins
from dflash_deploy.plan.lock import lock_of
from dflash_deploy.plan.provision import chosen_python
from dflash_deploy.wheelhouse.check import check
from dflash_deploy.wheelhouse.closure import lacking, requires
from dflash_deploy.wheelhouse.house import MANIFEST, House, Wheel, WheelTarget, file_sha256

LOCK = "lock.json"
BATCH = 6
"""Wheels that one pip brings: it writes them down together, when the last one is there."""
AT_ONCE = 3
RESOLVE_TIMEOUT_S = 1800.0
DOWNLOAD_TIMEOUT_S = 3 * 3600.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Pip:
    """A pip on this machine."""

    argv: tuple[str, ...]
    python: tuple[int, int]
    """Of the interpreter that it runs in: it evaluates markers for that one."""


def find_pip(here: Host, python: tuple[int, int], scratch: Path) -> Pip:
    """A pip, best one that runs in the wanted Python; where no interpreter has one, one in a venv of its own.

    Raises:
        UsageError: none, and no Python that could make one.
    """
    names = dict.fromkeys([sys.executable, f"python{python[0]}.{python[1]}", "python3"])
    script = "import sys; print(*sys.version_info[:2]); import pip; print(pip.__version__)"
    bare: list[tuple[str, tuple[int, int]]] = []
    usable: list[Pip] = []
    for name in names:
        lines = here.run([name, "-I", "-c", script], timeout_s=60).out.split()
        if len(lines) < 2:
            continue
        version = (int(lines[0]), int(lines[1]))
        if len(lines) == 3 and int(lines[2].split(".")[0]) >= 23:
            usable.append(Pip((name, "-m", "pip"), version))
        elif len(lines) == 2:
            bare.append((name, version))
    usable.sort(key=lambda pip: pip.python != python)
    if usable and usable[0].python == python:
        return usable[0]
    for name, version in sorted(bare, key=lambda each: each[1] != python):
        if usable and version != python:
            break
        venv = scratch / "pip"
        if here.run([name, "-m", "venv", str(venv)], timeout_s=300).ok:
            return Pip((str(venv / "bin" / "python"), "-m", "pip"), version)
    if usable:
        return usable[0]
    raise UsageError(
        "there is no pip on this machine",
        hint="install pip (Debian: python3-pip), or run this with a Python that has it",
    )


def build(here: Host, stack: Stack, target: WheelTarget, out: Path, say: Say) -> House:
    """Bring the folder ``out`` to a finished wheelhouse. A second run reads the files and downloads nothing.

    Args:
        here: this machine, which reaches the index.

    Raises:
        UsageError: ``out`` holds something else, or there is no pip.
        CommandFailed: pip cannot resolve or download; or the wheels are not all that the target needs.
    """
    out = out.expanduser().resolve()
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is no folder", hint="name another one with --out")
    if out.is_dir() and any(out.iterdir()) and not any((out / name).exists() for name in (MANIFEST, LOCK)):
        raise UsageError(f"{out} holds something else", hint="name an empty or a new folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dflash-wheelhouse-") as scratch:
        tool = _Tool(here, stack, target, out, Path(scratch), say)
        wheels = tool.locked()
        wheels = tool.download(wheels)
    needs = {wheel.file: requires(out / wheel.file) for wheel in wheels}
    short = lacking(wheels, needs, target, wanted=stack.requirements, bare=stack.no_deps)
    if short:
        raise CommandFailed(
            f"the wheels of {stack.name} are not all that Python {target.dotted} needs",
            evidence=short,
            hint=f"run the same command with a Python {target.dotted} and its pip on PATH",
        )
    house = House(str(out), stack.name, stack.pins, target, tuple(wheels))
    kept = {wheel.file for wheel in wheels}
    for stale in out.glob("*.whl"):
        if stale.name not in kept:
            stale.unlink()
    _write(out / MANIFEST, json.dumps(house.to_json(), indent=1) + "\n")
    return house


def target_for(stack: Stack, facts: Facts, python: str = "") -> WheelTarget:
    """What the wheels are to run on.

    Args:
        facts: of the host; without any, what the stack asks for at least, and this Python where it fits.
        python: ``3.12`` wins over both.

    Raises:
        UsageError: not a Python of this stack.
        Incompatible: the host has no Python of this stack that can make a venv.
    """
    low, high = stack.python
    if python:
        found = version_tuple(python) or ()
        if len(found) != 2 or not low <= (found[0], found[1]) <= high:
            raise UsageError(f"{stack.name} runs on Python {dotted(low)} to {dotted(high)}, not {python!r}")
        chosen = (found[0], found[1])
    elif facts.pythons:
        there = chosen_python(facts, low, high, stack)
        if there is None:
            raise Incompatible(
                f"{facts.host} has no Python {dotted(low)} to {dotted(high)} with its venv module",
                evidence=[f"{each.path} {dotted(each.version)}" for each in facts.pythons],
                hint="install one there (Debian: python3-venv), or name the one that will be there with --python",
            )
        chosen = there.version[:2]
    else:
        here = sys.version_info[:2]
        chosen = here if low <= here <= high else high
    return WheelTarget(chosen, facts.arch or stack.arch[0], facts.glibc or stack.min_glibc)


class _Tool:
    """One build: pip with the target's options."""

    def __init__(self, here: Host, stack: Stack, target: WheelTarget, out: Path, scratch: Path, say: Say) -> None:
        self.here, self.stack, self.target, self.out, self.scratch, self.say = here, stack, target, out, scratch, say
        self._pip: Pip | None = None
        self._lock = threading.Lock()

    @property
    def pip(self) -> Pip:
        if self._pip is None:
            self._pip = find_pip(self.here, self.target.python, self.scratch)
            if self._pip.python != self.target.python:
                here = f"{self._pip.python[0]}.{self._pip.python[1]}"
                self.say(f"pip runs in Python {here}: markers are checked for {self.target.dotted} afterwards")
        return self._pip

    def options(self) -> list[str]:
        words = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", self.target.dotted]
        for platform in self.target.platforms():
            words += ["--platform", platform]
        return [*words, "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]

    def locked(self) -> list[Wheel]:
        """The resolved wheels with their digests, from the lock file when it still answers the same question."""
        lock = lock_of(self.stack, self.target.python, self.target.arch)
        question = json.dumps([self.stack.pins, constraints(self.stack), repr(self.target), lock])
        key = hashlib.sha256(question.encode()).hexdigest()
        try:
            known = json.loads((self.out / LOCK).read_text("utf-8"))
            if known["key"] == key:
                return [Wheel(str(w["file"]), str(w["sha256"])) for w in known["wheels"]]
        except (OSError, ValueError, KeyError, TypeError):
            pass
        wheels = self.resolve()
        text = {"key": key, "wheels": [{"file": wheel.file, "sha256": wheel.sha256} for wheel in wheels]}
        _write(self.out / LOCK, json.dumps(text, indent=1) + "\n")
        return wheels

    def resolve(self) -> list[Wheel]:
        if wheels := self._as_locked():
            return wheels
        stack, torch = self.stack, torch_pins(self.stack)
        found: dict[str, Wheel] | None = None
        if torch and stack.device == "cpu" and stack.torch_variant:
            # A fifth of the size, but only some indexes carry it.
            special = [f"{pin}+{stack.torch_variant}" if pin in torch else pin for pin in stack.requirements]
            self.say(f"resolving {len(special)} requirements of {stack.name} ({stack.torch_variant} build of torch)")
            # The variant alone first: an index without it says so at once.
            variant = [f"{pin}+{stack.torch_variant}" for pin in torch]
            if self._report(["--no-deps", *variant], optional=True) is not None:
                found = self._report(special, optional=True)
            if found is None:
                self.say(f"no {stack.torch_variant} build of torch on this index: taking the default one")
        if found is None:
            self.say(
                f"resolving {len(stack.requirements)} requirements of {stack.name} for Python {self.target.dotted}"
            )
            found = self._report(list(stack.requirements)) or {}
        if stack.no_deps:
            found |= self._report(["--no-deps", *stack.no_deps]) or {}
        return [found[name] for name in sorted(found)]

    def _as_locked(self) -> list[Wheel]:
        """The files that the stack's own lock names, so that a host without a network gets what one with a network
        gets; none where there is no lock for the target, or the index has other files."""
        text = lock_of(self.stack, self.target.python, self.target.arch)
        pins = [line.split() for line in text.splitlines() if "--hash=" in line]
        if not pins:
            return []
        self.say(f"looking up the {len(pins)} packages of the lock of {self.stack.name}")
        found = self._report(["--no-deps", *(words[0] for words in pins)], optional=True) or {}
        digests = {digest.rpartition(":")[2] for words in pins for digest in words[1:]}
        other = sorted(wheel.file for wheel in found.values() if wheel.sha256 not in digests)
        if other or len(found) != len(pins):
            self.say(f"the index has other files than the lock ({', '.join(other[:3]) or 'some are absent'})")
            return []
        return [found[name] for name in sorted(found)]

    def _report(self, words: Sequence[str], *, optional: bool = False) -> dict[str, Wheel] | None:
        """What pip would install: normalized name → wheel. None when it cannot and that is ``optional``."""
        report, limits = self.scratch / "report.json", self.scratch / "constraints.txt"
        report.unlink(missing_ok=True)
        limits.write_text("".join(f"{line}\n" for line in constraints(self.stack)))
        command = [*self.pip.argv, "install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
        command += ["--target", str(self.scratch / "nowhere"), *self.options(), "--constraint", str(limits), *words]
        result = self.here.run(command, timeout_s=RESOLVE_TIMEOUT_S)
        if not result.ok or not report.is_file():
            if optional:
                return None
            raise _pip_failed(f"pip cannot resolve {self.stack.name} for Python {self.target.dotted}", result.err)
        wheels = {}
        for entry in json.loads(report.read_text("utf-8"))["install"]:
            about = entry["download_info"]
            file = unquote(urlsplit(about["url"]).path.rpartition("/")[2])
            digest = about.get("archive_info", {}).get("hashes", {}).get("sha256", "")
            if not digest:
                raise CommandFailed(f"the index gives no sha256 of {file}", hint="another index, or a newer pip")
            wheel = Wheel(file, digest)
            wheels[wheel.name] = wheel
        return wheels

    def download(self, wheels: Sequence[Wheel]) -> list[Wheel]:
        """Bring what is missing or differs; give all with their sizes."""
        have: dict[str, int] = {}
        for wheel in wheels:
            path = self.out / wheel.file
            if path.is_file() and file_sha256(path) == wheel.sha256:
                have[wheel.file] = path.stat().st_size
        missing = [wheel for wheel in wheels if wheel.file not in have]
        if missing:
            (self.out / MANIFEST).unlink(missing_ok=True)
            self.say(f"{len(have)} of {len(wheels)} wheels are there, {len(missing)} to download")
        batches = [missing[start : start + BATCH] for start in range(0, len(missing), BATCH)]

        def bring(number_batch: tuple[int, list[Wheel]]) -> None:
            number, batch = number_batch
            folder = self.scratch / f"batch-{number}"
            self._batch(folder, batch)
            with self._lock:
                for wheel in batch:
                    path = folder / wheel.file
                    if not path.is_file() or file_sha256(path) != wheel.sha256:
                        raise CommandFailed(f"pip did not bring {wheel.file} with the hash that was resolved")
                    have[wheel.file] = path.stat().st_size
                    fresh = self.out / f".{wheel.file}.new"
                    shutil.move(path, fresh)
                    fresh.replace(self.out / wheel.file)
                mib = sum(have.values()) >> 20
                self.say(f"{len(have)} of {len(wheels)} wheels, {mib} MiB")

        with ThreadPoolExecutor(AT_ONCE) as pool:
            jobs = [pool.submit(bring, each) for each in enumerate(batches)]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [replace(wheel, size=have[wheel.file]) for wheel in wheels]

    def _batch(self, folder: Path, batch: Sequence[Wheel]) -> None:
        folder.mkdir()
        wanted = folder / "requirements.txt"
        wanted.write_text("".join(f"{w.name}=={w.version} --hash=sha256:{w.sha256}\n" for w in batch))
        command = [*self.pip.argv, "download", "--no-deps", "--require-hashes", "--dest", str(folder)]
        command += [*self.options(), "-r", str(wanted)]

        def heard(stream: str, text: str) -> None:
            if text.lstrip().startswith("Downloading"):
                # Only the file's name and size: an address may hold a password.
                words = text.split()
                self.say("  " + " ".join(["downloading", words[1].rpartition("/")[2].partition("#")[0], *words[2:]]))

        result = self.here.run(command, timeout_s=DOWNLOAD_TIMEOUT_S, on_line=heard)
        if not result.ok:
            raise _pip_failed(f"pip cannot download {', '.join(w.file for w in batch)}", result.err)


def verify(house: House, say: Say) -> None:
    """Raise when a freshly built house does not stand its own check.

    Raises:
        CommandFailed
    """
    found = check(house, lambda done, total: None)
    if found.problems:
        raise CommandFailed("the wheelhouse does not hold", evidence=found.problems)
    say(f"checked {len(house.wheels)} wheels, {found.bytes_read >> 20} MiB")


def _pip_failed(message: str, err: str) -> CommandFailed:
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "conflict" in line.lower()]
    return CommandFailed(
        message, evidence=(errors or lines)[-6:], hint="the same command goes on from what is downloaded already"
    )


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text, "utf-8")
    fresh.replace(path)
