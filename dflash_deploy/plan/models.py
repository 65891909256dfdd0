"""Models → the steps that bring them to the host, whole: from the hub with the hub's own client, or from here. Pure.

A folder appears under its name only when every file in it has the digest that it should have; until then it is
``NAME.part``, and the same steps go on from there.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dflash_deploy.model import Blob, Run, Step, Upload, WriteFile
from dflash_deploy.settings import Settings

NOTE = ".dflash-deploy-model.json"
"""In a folder that was brought here: where it is from, and each file's size and sha256."""
FETCH_TIMEOUT_S = 24 * 3600.0
HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?\Z")
HUB_VARIABLES = ("HF_TOKEN", "HF_ENDPOINT", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "REQUESTS_CA_BUNDLE")
"""Of the deployment's variables, those that the hub's client needs. They travel as variables, never on a command
line."""

FETCH = r"""
import hashlib, json, os, sys, threading
repo, revision, target, note = sys.argv[1:5]
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
part = target + ".part"
def fail(text):
    print("error: " + " ".join(str(text).split())[:600], flush=True)
    sys.exit(1)
try:
    from huggingface_hub import HfApi, snapshot_download
except ImportError as error:
    fail("no huggingface_hub in this environment: %s" % error)
def names(folder):
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != ".cache"]
        for name in files:
            if name != note: yield os.path.join(where, name)
def digest(path, kind, data=b""):
    found = hashlib.new(kind, data)
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 22), b""): found.update(chunk)
    return found.hexdigest()
ended = threading.Event()
def tell(total):
    while not ended.wait(5):
        here = sum(os.lstat(os.path.join(w, n)).st_size for w, _, ns in os.walk(part) for n in ns if os.path.exists(os.path.join(w, n)))
        print("%d of %d MiB" % (here >> 20, total >> 20), flush=True)
try:
    about = HfApi().model_info(repo, revision=revision or None, files_metadata=True)
    total = sum(file.size or 0 for file in about.siblings)
    print("%s at %s: %d files, %d MiB" % (repo, about.sha, len(about.siblings), total >> 20), flush=True)
    threading.Thread(target=tell, args=(total,), daemon=True).start()
    os.makedirs(part, exist_ok=True)
    snapshot_download(repo, revision=about.sha, local_dir=part)
except Exception as error:
    fail("%s: %s" % (type(error).__name__, error))
ended.set()
files, bad = {}, []
for file in about.siblings:
    path = os.path.join(part, file.rfilename)
    try:
        size = os.path.getsize(path)
        if file.lfs is not None: fine = digest(path, "sha256") == file.lfs.sha256
        else: fine = digest(path, "sha1", b"blob %d\0" % size) == file.blob_id
    except OSError: size, fine = 0, False
    if fine: files[file.rfilename] = [size, digest(path, "sha256")]
    else:
        bad.append(file.rfilename)
        if os.path.exists(path): os.remove(path)
if bad: fail("not what the hub says, removed: " + ", ".join(bad))
with open(os.path.join(part, note), "w") as out:
    json.dump({"repo": repo, "revision": about.sha, "files": files}, out, indent=1)
os.rename(part, target)
print("%d files have the digests that the hub names" % len(files), flush=True)
"""  # noqa: E501
"""``python -c FETCH REPO REVISION TARGET NOTE``: the hub's client downloads; every file is held against the hub's
record (sha256 of large files, git's object id of the others)."""

ASSEMBLE = r"""
set -u
cd "$2" || exit 1
while read -r sum name; do
  case $name in */*) mkdir -p "${name%/*}" ;; esac
  ln -f "$1/$sum" "$name" 2>/dev/null || cp "$1/$sum" "$name" || { echo "error: $name is not in the cache"; exit 1; }
done < .SHA256SUMS
said=$(sha256sum -c .SHA256SUMS 2>/dev/null) || {
  echo "$said" | sed -n 's/: FAILED.*//p' | while read -r name; do
    sum=$(sed -n "s|  $name\$||p" .SHA256SUMS)
    rm -f "$1/$sum" "$name"
    echo "error: $name: wrong hash on this host, removed; it is uploaded again"
  done
  exit 1
}
rm -f .SHA256SUMS
cd / && mv -T "$2" "${2%.part}" && rm -rf "$1"
"""
"""``sh -c ASSEMBLE sh CACHE FOLDER.part``: links by name, every digest, then the folder's name."""


@dataclass(frozen=True)
class ModelState:
    """Where a model's folder was found."""

    on_host: bool = False
    local: str = ""
    """A folder of that name on this side, to be uploaded."""
    blobs: tuple[Blob, ...] = ()
    """Its files; ``name`` is the path inside the folder."""
    present: Mapping[str, int] = field(default_factory=dict)
    """Digest → size of what an earlier attempt brought to the host."""
    repo: str = ""
    """Of the hub, to be fetched by the host."""
    revision: str = ""


def hub_parts(text: str) -> tuple[str, str] | None:
    """(repository, revision or ``""``) of ``org/name[@revision]``; None: it is a path."""
    found = HUB_ID.match(text)
    return (found["repo"], found["revision"] or "") if found else None


def fetched_path(root: str, repo: str, revision: str) -> str:
    """Where a model of the hub lies on the host."""
    name = repo.replace("/", "--") + (f"@{revision.replace('/', '-')}" if revision else "")
    return posixpath.join(root, "models", name)


def fetch_steps(settings: Settings, path: str, state: ModelState) -> list[Step]:
    """The host fetches a model with the client in its own environment."""
    env = {name: settings.env[name] for name in HUB_VARIABLES if settings.env.get(name)}
    argv = (settings.python, "-I", "-c", FETCH, state.repo, state.revision, path, NOTE)
    return [Run(argv, title=f"fetch {state.repo}", env={**env, "HF_HUB_OFFLINE": "0"}, timeout_s=FETCH_TIMEOUT_S)]


def upload_steps(path: str, blobs: Sequence[Blob], present: Mapping[str, int], source: str) -> list[Step]:
    """A folder of this side, file by file, goes on where it was cut off.

    Args:
        path: the folder on the host.
        present: digest → size of what an earlier attempt brought.
    """
    cache, part = f"{path}.blobs", f"{path}.part"
    missing = tuple({blob.sha256: blob for blob in blobs if present.get(blob.sha256) != blob.size}.values())
    mib = sum(blob.size for blob in missing) / (1 << 20)
    steps: list[Step] = []
    if missing:
        title = f"upload {len(missing)} of {len(blobs)} files of {source} ({mib:.1f} MiB)"
        steps.append(Upload(missing, cache, title=title))
    sums = "".join(f"{blob.sha256}  {blob.name}\n" for blob in blobs)
    note = {"source": posixpath.basename(source), "files": {blob.name: [blob.size, blob.sha256] for blob in blobs}}
    steps += [
        WriteFile(posixpath.join(part, NOTE), json.dumps(note, indent=1).encode(), title="write the model's digests"),
        WriteFile(posixpath.join(part, ".SHA256SUMS"), sums.encode(), title="write the list of files"),
        Run(("/bin/sh", "-c", ASSEMBLE, "sh", cache, part), title=f"check and place {posixpath.basename(path)}",
            timeout_s=3600.0),
    ]  # fmt: skip
    return steps
