"""An installed environment from one host to another, through this machine: what may travel does, the rest is made anew.

The interpreter never travels: the other host makes the venv from its own Python of the same minor, which writes
``pyvenv.cfg`` and ``bin/python`` for itself. Packages are sent in batches (each is there whole or not at all, so that a
cut goes on), scripts get the new interpreter's path, and in the end every file is held against its package's RECORD.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_deploy.errors import CommandFailed, Incompatible, UnreadableFact
from dflash_deploy.host.base import Host

BATCH_MIB = 64
SCAN_TIMEOUT_S = 300.0
VERIFY_TIMEOUT_S = 1800.0

LOOK = """
import json, os, platform, sys, sysconfig
site = sysconfig.get_path("purelib")
def size(path):
    if os.path.islink(path) or not os.path.isdir(path): return os.lstat(path).st_size
    return sum(os.lstat(os.path.join(f, n)).st_size for f, d, ns in os.walk(path) if "__pycache__" not in f for n in ns)
own = lambda name: name in ("__pycache__", "pip", ".dflash-deploy", ".incoming") or name.startswith("pip-")
stays, entries, hooks = [], [], []
for name in sorted(os.listdir(site)):
    path = os.path.join(site, name)
    if name.endswith(".dist-info"):
        try:
            with open(os.path.join(path, "direct_url.json")) as file: about = json.load(file)
        except (OSError, ValueError): about = {}
        if (about.get("dir_info") or {}).get("editable"): stays.append(name)
    if name.endswith((".pth", ".egg-link")):
        with open(path, errors="replace") as file: text = file.read()
        if any(line.startswith("/") for line in text.splitlines()): hooks.append(name)
    if not own(name): entries.append([name, size(path)])
folder = os.path.join(sys.prefix, "bin")
scripts = [n for n in sorted(os.listdir(folder)) if not n.startswith(("python", "pip", "activate", "Activate"))
           and not os.path.isdir(os.path.join(folder, n))]
present = os.path.exists(os.path.join(site, ".dflash-deploy"))
print(json.dumps({"python": list(sys.version_info[:3]), "implementation": sys.implementation.name,
    "soabi": sysconfig.get_config_var("SOABI"), "machine": platform.machine(), "site": site, "prefix": sys.prefix,
    "entries": entries, "scripts": scripts, "editable": stays, "hooks": hooks, "patched": present}))
"""
"""Runs in an environment's Python: what it consists of."""

RECEIVE = """
set -eu
mkdir -p "$1/.incoming"
cd "$1/.incoming"
find . -mindepth 1 -delete
tar -xpf - --no-same-owner
for name in * .[!.]*; do
  [ -e "$name" ] || [ -L "$name" ] || continue
  rm -rf "../$name"
  mv "$name" ..
done
"""
"""``sh -c RECEIVE sh FOLDER``: entries of a tar appear in the folder whole or not at all."""

SETTLE = r"""
import base64, csv, glob, hashlib, json, os, re, sys, sysconfig
old, new = sys.argv[1], sys.prefix
site, bin_ = sysconfig.get_path("purelib"), os.path.join(new, "bin")
def digest(path):
    h = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""): h.update(chunk)
    return base64.urlsafe_b64encode(h.digest()).rstrip(b"=").decode()
rewritten = set()
for name in os.listdir(bin_):
    path = os.path.join(bin_, name)
    if os.path.islink(path) or not os.path.isfile(path): continue
    with open(path, "rb") as file: data = file.read()
    if not data.startswith(b"#!") or os.fsencode(old) + b"/" not in data: continue
    data = re.sub(re.escape(os.fsencode(old)) + b"(?=/)", lambda m: os.fsencode(new), data)
    mode = os.stat(path).st_mode
    with open(path + ".new", "wb") as file: file.write(data)
    os.chmod(path + ".new", mode)
    os.replace(path + ".new", path)
    rewritten.add(os.path.realpath(path))
bad, checked, seen = [], 0, 0
for record in glob.glob(os.path.join(glob.escape(site), "*.dist-info", "RECORD")):
    name = os.path.basename(os.path.dirname(record))
    if name.startswith("pip-"): continue
    with open(record, newline="", encoding="utf-8") as file: rows = list(csv.reader(file))
    changed = False
    for row in rows:
        if len(row) < 3 or not row[1].startswith("sha256=") or "__pycache__" in row[0]: continue
        path = os.path.normpath(os.path.join(site, row[0]))
        if os.path.realpath(path) in rewritten:
            row[1], row[2], changed = "sha256=" + digest(path), str(os.path.getsize(path)), True
            continue
        try:
            fine = os.path.getsize(path) == int(row[2] or -1) or row[2] == ""
            fine = fine and digest(path) == row[1][7:].rstrip("=")
        except OSError: fine = False
        checked += 1
        if not fine: bad.append(row[0])
    if changed:
        with open(record + ".new", "w", newline="", encoding="utf-8") as file: csv.writer(file, lineterminator="\n").writerows(rows)
        os.replace(record + ".new", record)
for name in {path.split("/")[0] for path in bad if not path.startswith("..")}:
    # What is not whole is sent again.
    os.system("rm -rf -- '%s'" % os.path.join(site, name).replace("'", "'\\''"))
print(json.dumps({"scripts": len(rewritten), "checked": checked, "bad": sorted(bad)}))
"""  # noqa: E501
"""Runs in the new environment's Python, with the old one's path: scripts, then every RECORD."""


@dataclass(frozen=True)
class Environment:
    """An environment as :data:`LOOK` saw it."""

    python: tuple[int, int, int]
    soabi: str
    machine: str
    site: str
    prefix: str
    entries: tuple[tuple[str, int], ...]
    """Top-level names of its packages, and their bytes."""
    scripts: tuple[str, ...]
    bound: tuple[str, ...]
    """What is tied to folders of its host: editable installs and path files."""
    patched: bool
    """Patch sets are applied in it."""

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.entries)


@dataclass(frozen=True)
class Moved:
    """What came of it."""

    sent_bytes: int
    files: int
    """Checked against their RECORD."""
    scripts: int
    """Rewritten."""


def look(host: Host, python: str) -> Environment:
    """What the environment of that interpreter consists of.

    Raises:
        CommandFailed: it does not start.
        UnreadableFact: it answers something else.
    """
    result = host.run([python, "-I", "-c", LOOK], timeout_s=SCAN_TIMEOUT_S)
    if not result.ok:
        raise CommandFailed(
            f"{python} on {host.name} does not run", evidence=result.err.strip().splitlines()[-3:],
            hint=f"dflash-deploy audit {host.name}",
        )  # fmt: skip
    try:
        raw: dict[str, Any] = json.loads(result.out)
        return Environment(
            (raw["python"][0], raw["python"][1], raw["python"][2]), str(raw["soabi"]), str(raw["machine"]),
            str(raw["site"]), str(raw["prefix"]), tuple((str(n), int(s)) for n, s in raw["entries"]),
            tuple(map(str, raw["scripts"])), (*map(str, raw["editable"]), *map(str, raw["hooks"])),
            bool(raw["patched"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UnreadableFact(f"{python} on {host.name} answers nothing readable", evidence=str(error)) from None


def refuse(source: Environment, target: Environment, problems: Sequence[str]) -> None:
    """Raise when the packages of one would not run in the other.

    Args:
        problems: what :func:`dflash_deploy.audit.compare.native_problems` says of the two hosts.

    Raises:
        Incompatible: every reason at once.
    """
    against = list(problems)
    if source.machine != target.machine:
        against.append(f"architecture {source.machine} against {target.machine}")
    if source.soabi != target.soabi:
        against.append(f"Python {source.python[0]}.{source.python[1]} ({source.soabi}) against {target.soabi}")
    against += [f"{name} is tied to a folder of its host" for name in source.bound]
    if source.patched:
        against.append("patch sets are applied in it: its files are not those of its packages")
    if against:
        raise Incompatible(
            "this environment may not travel",
            evidence=list(dict.fromkeys(against)),
            hint="provision without --from: the same pins are installed there",
        )


def batches(entries: Sequence[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    """Entries in order, up to :data:`BATCH_MIB` together; a larger one alone."""
    batch: list[tuple[str, int]] = []
    for entry in entries:
        if batch and sum(size for _, size in batch) + entry[1] > BATCH_MIB << 20:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


def transplant(
    source: Host, old: Environment, target: Host, new: Environment, python: str, say: Callable[[str], None]
) -> Moved:
    """Bring the packages and scripts of ``old`` into ``new``; goes on where it was cut off.

    Args:
        python: the new environment's interpreter.

    Raises:
        CommandFailed: a host cannot read or write; or files are not those of their packages, by name.
        HostError: a connection broke.
    """
    have = dict(new.entries)
    missing = [entry for entry in old.entries if have.get(entry[0]) != entry[1]]
    total, sent = sum(size for _, size in missing), 0
    say(f"{len(old.entries) - len(missing)} of {len(old.entries)} entries are there, {total >> 20} MiB to send")

    def carry(folder: str, into: str, names: Sequence[str]) -> None:
        nonlocal sent
        tar = ["tar", "-C", folder, "--exclude=__pycache__", "-cf", "-", "--", *names]

        def counted() -> Iterator[bytes]:
            nonlocal sent
            for chunk in source.pipe(tar):
                sent += len(chunk)
                yield chunk

        for _ in target.pipe(["/bin/sh", "-c", RECEIVE, "sh", into], counted()):
            pass

    for batch in batches(missing):
        carry(old.site, new.site, [name for name, _ in batch])
        say(f"{sent >> 20} of {total >> 20} MiB")
    if old.scripts:
        carry(f"{old.prefix}/bin", f"{new.prefix}/bin", old.scripts)
    say("checking every file against its package's RECORD")
    result = target.run([python, "-I", "-c", SETTLE, old.prefix], timeout_s=VERIFY_TIMEOUT_S)
    try:
        found: dict[str, Any] = json.loads(result.out)
    except ValueError:
        raise CommandFailed(
            f"the copy on {target.name} cannot be checked", evidence=result.err.strip().splitlines()[-3:]
        ) from None
    if found["bad"]:
        count = len(found["bad"])
        raise CommandFailed(
            f"{count} files on {target.name} are not those of their packages",
            evidence=found["bad"][:8],
            hint=f"damaged on the way: run the same command again; damaged on {source.name} already: provision "
            "without --from",
        )
    return Moved(sent, int(found["checked"]), int(found["scripts"]))
