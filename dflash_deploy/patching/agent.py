"""Runs on the target, sent over stdin to its Python (3.8 or newer, standard library alone).

Reads a tree, and changes it as one transaction. All state lies in ``<site>/.dflash-deploy``:

- ``pristine/<sha256>``, ``staged/<sha256>``: the bytes before us, the bytes to come;
- ``journal.json``: written once both are on disk; from then on the next command carries the change to its end;
- ``manifest.json``: what is applied.

A request is one JSON document on stdin, the answer one on stdout: ``{"ok": true, ...}`` or ``{"ok": false, ...}``.
"""

from __future__ import annotations

import base64
import contextlib
import glob
import hashlib
import json
import os
import re
import stat
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:  # loaded by nobody here: it takes as long as all the rest
    from typing import Any, Sequence

STATE = ".dflash-deploy"


class Refused(Exception):
    """Ends the request with an answer that names the error's kind."""

    def __init__(self, kind: str, message: str, evidence: Sequence[str] = ()) -> None:
        Exception.__init__(self, message)
        self.kind, self.evidence = kind, list(evidence)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


_points = 0


def point() -> None:
    """Where tests end the process: at the point that DFLASH_DEPLOY_FAULT counts to."""
    global _points
    _points += 1
    if os.environ.get("DFLASH_DEPLOY_FAULT") == str(_points):
        os.kill(os.getpid(), 9)


_unsynced = set()  # type: set[str]
_unsynced_files = set()  # type: set[str]


def sync(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_folders() -> None:
    """Make the renames since the last call, and what was written without waiting, survive a power failure."""
    failed = []  # type: list[OSError]

    def some(paths: list[str]) -> None:
        try:
            for path in paths:
                sync(path)
        except OSError as error:
            failed.append(error)

    # Beside each other: the disk takes many about as fast as one.
    files = sorted(_unsynced_files)
    threads = [threading.Thread(target=some, args=(files[at::8],)) for at in range(min(8, len(files)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    _unsynced_files.clear()
    while _unsynced:
        sync(_unsynced.pop())


def temporary(path: str) -> str:
    return os.path.join(os.path.dirname(path), ".%s.dflash-deploy.tmp" % os.path.basename(path))


def write(path: str, data: bytes, like: os.stat_result | None = None, mode: int = 0o644, *, wait: bool = True) -> None:
    """Write through a temporary file in the same folder; a hard link to the old file keeps the old bytes.

    ``wait``: until the bytes are on the disk; otherwise :func:`sync_folders` does that.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temp = temporary(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temp)
    handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if like is not None and (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(file.fileno(), like.st_uid, like.st_gid)
            os.fchmod(file.fileno(), stat.S_IMODE(like.st_mode) if like is not None else mode)
            if wait:
                os.fsync(file.fileno())
            else:
                _unsynced_files.add(path)
        point()
        os.replace(temp, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise
    _unsynced.add(os.path.dirname(path))


def drop_bytecode(path: str) -> None:
    folder, name = os.path.split(path)
    if name.endswith(".py"):
        for stale in glob.glob(os.path.join(glob.escape(folder), "__pycache__", glob.escape(name[:-3]) + ".*.py[co]")):
            os.unlink(stale)


def remove(site: str, path: str) -> None:
    """Remove a file of ours and the folders that it leaves empty."""
    drop_bytecode(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    folder = os.path.dirname(path)
    while folder != site and folder.startswith(site + os.sep):
        left = set(os.listdir(folder)) if os.path.isdir(folder) else set()
        if left - {"__pycache__"}:
            break
        if left:
            remove_tree(os.path.join(folder, "__pycache__"))
        if os.path.isdir(folder):
            os.rmdir(folder)
        folder = os.path.dirname(folder)


def remove_tree(folder: str) -> None:
    import shutil  # here alone: it loads four compression libraries

    shutil.rmtree(folder)


def load(site: str, name: str) -> Any:
    data = read(os.path.join(site, STATE, name))
    if data is None:
        return None
    try:
        return json.loads(data.decode())
    except ValueError as error:
        raise Refused("UnreadableFact", "%s in %s is not JSON" % (name, os.path.join(site, STATE))) from error


def save(site: str, name: str, value: Any) -> None:
    write(os.path.join(site, STATE, name), json.dumps(value, indent=1, sort_keys=True).encode())


def inside(site: str, path: str) -> str:
    full = os.path.normpath(os.path.join(site, path))
    if not full.startswith(site + os.sep):
        raise Refused("UsageError", "%s lies outside %s" % (path, site))
    return full


def stored(site: str, digest: str) -> bytes:
    for folder in ("pristine", "staged"):
        data = read(os.path.join(site, STATE, folder, digest))
        if data is not None and sha256(data) == digest:
            return data
    raise Refused("HostChanged", "the stored bytes %s are missing from %s" % (digest[:12], os.path.join(site, STATE)))


def digest_of(path: str) -> str:
    data = read(path)
    return "" if data is None else sha256(data)


def finish(site: str) -> str | None:
    """Carry the transaction in the journal to its end; refuse when a file is neither as before nor as wanted."""
    journal = load(site, "journal.json")
    if journal is None:
        return None
    todo = []
    for item in journal["files"]:
        path = inside(site, item["path"])
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary(path))
        now = digest_of(path)
        if now == item["after"]:
            continue
        if now != item["before"]:
            raise Refused(
                "ForeignEdit", "%s was changed by somebody else in the middle of a %s" % (item["path"], journal["op"])
            )
        todo.append((path, item))
    done = []
    try:
        for path, item in todo:
            like = os.stat(path) if item["before"] else None
            if item["after"]:
                data = stored(site, item["after"])
                if path.endswith(".py"):
                    compile(data, path, "exec", dont_inherit=True)
                write(path, data, like)
                done.append((path, item))
                drop_bytecode(path)
            else:
                done.append((path, item))
                remove(site, path)
            point()
    except (OSError, SyntaxError, ValueError) as error:
        for path, item in reversed(done):
            if item["before"]:
                write(path, stored(site, item["before"]), os.stat(path) if os.path.exists(path) else None)
                drop_bytecode(path)
            else:
                remove(site, path)
        clean(site)
        kind = "CommandFailed" if isinstance(error, OSError) else "InvalidResult"
        raise Refused(kind, "cannot change the tree, nothing was changed: %s" % error) from error
    if journal["manifest"] is not None:
        save(site, "manifest.json", journal["manifest"])
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(site, STATE, "manifest.json"))
    point()
    sync_folders()
    clean(site)
    return str(journal["op"])


def clean(site: str) -> None:
    """End a transaction: remove what no manifest needs, the journal last, and the folder when nothing is applied."""
    folder = os.path.join(site, STATE)
    if not os.path.isdir(folder):
        return
    manifest = load(site, "manifest.json")
    entries = [entry for entry in manifest["files"].values() if entry["pristine"]] if manifest else []
    for side, key in (("pristine", "pristine"), ("staged", "patched")):
        kept = os.path.join(folder, side)
        for name in os.listdir(kept) if os.path.isdir(kept) else ():
            if name not in {entry[key] for entry in entries}:
                os.unlink(os.path.join(kept, name))
    point()
    for name in os.listdir(folder):
        if name.startswith("."):
            os.unlink(os.path.join(folder, name))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, "journal.json"))
    point()
    if manifest is None:
        remove_tree(folder)


def unfinished(site: str) -> str:
    """What an interrupted run was doing: the journal's operation, ``preparation`` before there was one, or ``""``."""
    journal = load(site, "journal.json")
    if journal is not None:
        return str(journal["op"])
    folder = os.path.join(site, STATE)
    names = set(os.listdir(folder)) if os.path.isdir(folder) else {"manifest.json"}
    return "" if "manifest.json" in names and names <= {"manifest.json", "pristine", "staged"} else "preparation"


def begin(site: str, request: dict[str, Any]) -> None:
    """Store both sides of every file, then the journal. Nothing in the package has changed when this fails."""
    try:
        for item in request["files"]:
            path = inside(site, item["path"])
            now = read(path)
            if (sha256(now) if now is not None else "") != item["before"]:
                raise Refused("HostChanged", "%s changed since it was read" % item["path"])
            if os.path.islink(path):
                raise Refused("ForeignEdit", "%s is a symbolic link" % item["path"])
            folder = os.path.dirname(path)
            while not os.path.isdir(folder):
                folder = os.path.dirname(folder)
            if not os.access(folder, os.W_OK):
                raise Refused("CommandFailed", "cannot write in %s, nothing was changed" % folder)
            if now is not None:
                keep(site, "pristine", now)
            if item.get("data") is not None:
                keep(site, "staged", base64.b64decode(item["data"]))
        journal = {
            "schema": 1,
            "op": request["op"],
            "files": [{k: item[k] for k in ("path", "before", "after")} for item in request["files"]],
            "manifest": request["manifest"],
        }
        point()
        sync_folders()
        save(site, "journal.json", journal)
        sync_folders()
        point()
    except OSError as error:
        with contextlib.suppress(OSError, Refused):
            clean(site)
        raise Refused("CommandFailed", "cannot change the tree, nothing was changed: %s" % error) from error
    except Refused:
        clean(site)
        raise


def keep(site: str, folder: str, data: bytes) -> None:
    path = os.path.join(site, STATE, folder, sha256(data))
    if digest_of(path) != sha256(data):
        write(path, data, wait=False)  # found by its hash, and the journal waits for it


def distribution(site: str, package: str) -> tuple[str | None, dict[str, str] | None]:
    """(version, hashes by path from RECORD, or None) of the installed distribution."""
    pattern = os.path.join(glob.escape(site), re.sub(r"[-_.]+", "[-_.]", package) + "-*.dist-info")
    found = [d for d in glob.glob(pattern) if os.path.isfile(os.path.join(d, "METADATA"))]
    if len(found) != 1:
        return None, None
    text = (read(os.path.join(found[0], "METADATA")) or b"").decode("utf-8", "replace")
    version = re.search(r"^Version: *(\S+)", text, re.M)
    record = {}
    for line in (read(os.path.join(found[0], "RECORD")) or b"").decode("utf-8", "replace").splitlines():
        path, _, _ = line.rpartition(",")
        path, _, value = path.rpartition(",")
        if value.startswith("sha256="):
            raw = value[7:]
            record[path.strip('"')] = base64.urlsafe_b64decode(raw + "=" * (-len(raw) % 4)).hex()
    return (version.group(1) if version else None), (record or None)


def source_version(site: str, package: str) -> str | None:
    for name in ("_version.py", "version.py"):
        text = (read(os.path.join(site, package, name)) or b"").decode("utf-8", "replace")
        found = re.search(r"^_*version_*\b[^'\"\n]*=[^'\"\n]*['\"](\d[^'\"\n]*)['\"]", text, re.M)
        if found:
            return found.group(1)
    return None


def checkout(site: str) -> str | None:
    """The folder of the git work tree that ``site`` belongs to, unless an environment's folder lies in between."""
    folder = os.path.realpath(site)
    while folder != os.path.dirname(folder):
        if os.path.basename(folder) in ("site-packages", "dist-packages") or os.path.exists(
            os.path.join(folder, "pyvenv.cfg")
        ):
            return None
        if os.path.exists(os.path.join(folder, ".git")):
            return folder
        folder = os.path.dirname(folder)
    return None


def encoded(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def find_site(path: str, package: str) -> str:
    """The folder that holds the package: ``path`` may be the package, that folder, or an environment."""
    path = os.path.abspath(os.path.expanduser(path))
    tried = [os.path.dirname(path)] if os.path.basename(path) == package else []
    tried += [path, os.path.join(path, "python")]
    tried += sorted(glob.glob(os.path.join(glob.escape(path), "lib*", "python3*", "*-packages")))
    for site in tried:
        if os.path.isfile(os.path.join(site, package, "__init__.py")):
            return site
    raise Refused("UsageError", "there is no package %s in %s" % (package, path), ["looked in: " + t for t in tried])


def examine(request: dict[str, Any]) -> dict[str, Any]:
    package = request["package"]
    site = find_site(request["path"], package)
    version, record = distribution(site, package)
    manifest = load(site, "manifest.json")
    # Only what a manifest or a request names is read: one round trip, whatever the size of the package.
    names = set((manifest or {}).get("files", {}))
    names.update("%s/%s" % (package, f) for f in request["files"] or ())
    names.update(request["payload"] or ())
    files, links = {}, {}
    for name in sorted(names):
        path = inside(site, name)
        files[name] = encoded(read(path))
        if files[name] is not None:
            links[name] = os.stat(path).st_nlink
    pristine = {}
    for entry in (manifest or {}).get("files", {}).values():
        if entry["pristine"]:
            pristine[entry["pristine"]] = encoded(read(os.path.join(site, STATE, "pristine", entry["pristine"])))
    # What we wrote, for a diff of what somebody else made of it.
    patched = {}
    for name, entry in (manifest or {}).get("files", {}).items():
        if digest_of(inside(site, name)) not in (entry["pristine"], entry["patched"]):
            patched[entry["patched"]] = encoded(read(os.path.join(site, STATE, "staged", entry["patched"])))
    return {
        "site": site,
        "version": version or source_version(site, package),
        "record": None if record is None else {n: record[n] for n in names if n in record},
        "files": files,
        "links": links,
        "manifest": manifest,
        "unfinished": unfinished(site),
        "pristine": pristine,
        "patched": patched,
        "checkout": checkout(site),
        "gpu": has_gpu(),
        "writable": os.access(site, os.W_OK),
    }


def verify(request: dict[str, Any]) -> dict[str, Any]:
    """Hashes of what the manifest names, for a run that expects to find nothing to do."""
    site = find_site(request["path"], request["package"])
    manifest = load(site, "manifest.json") or {}
    names = [*manifest.get("files", {}), *manifest.get("seen", {})]
    return {
        "site": site,
        "version": distribution(site, request["package"])[0] or source_version(site, request["package"]),
        "manifest": manifest or None,
        "digests": {name: digest_of(inside(site, name)) for name in names},
        "unfinished": unfinished(site),
        "checkout": checkout(site),
        "gpu": has_gpu(),
    }


def has_gpu() -> bool:
    return bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/proc/driver/nvidia/gpus/*"))


def main(request: dict[str, Any]) -> dict[str, Any]:
    op = request["op"]
    if op == "examine":
        return examine(request)
    if op == "verify":
        return verify(request)
    site = request["site"]
    before = unfinished(site)
    if before and finish(site) is None:
        clean(site)
    if op == "finish" or before:
        return {"finished": before}
    begin(site, request)
    finish(site)
    return {"finished": "", "changed": len(request["files"])}


if __name__ == "__main__":
    try:
        answer = dict(main(json.loads(sys.stdin.buffer.read().decode())), ok=True)
    except Refused as refused:
        answer = {"ok": False, "kind": refused.kind, "message": str(refused), "evidence": refused.evidence}
    except OSError as error:
        answer = {"ok": False, "kind": "CommandFailed", "message": str(error), "evidence": []}
    sys.stdout.write(json.dumps(answer))
