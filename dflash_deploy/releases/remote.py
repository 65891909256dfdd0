# mypy: ignore-errors
# ruff: noqa
"""Runs on the target through its Python's stdin: everything that a command needs to know of a deployment, in one go.

Standard library only, Python >= 3.8; changes nothing. ``REQUEST`` and ``SERVE`` (the text of the runner, whose account of
processes is used) are set by the caller. Prints one JSON object.
"""

import glob
import hashlib
import json
import os
import subprocess
import time

NAMES = "ActiveState,SubState,UnitFileState,MainPID,NRestarts,Result,ExecMainStatus"


def read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def loaded(path):
    try:
        found = json.loads(read(path) or b"null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def digest(path):
    data = read(path)
    return "" if data is None else hashlib.sha256(data).hexdigest()


def age(path):
    try:
        return time.time() - os.stat(path).st_mtime
    except OSError:
        return 0.0


def tree(folder):
    found = {}
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files:
            path = os.path.join(parent, name)
            found[os.path.relpath(path, folder)] = digest(path)
    return found


def packages(venv):
    """Name -> version of whole installations; the version of the interpreter that made the folder."""
    found, version = {}, None
    for path in glob.glob(
        os.path.join(glob.escape(venv), "lib", "python*", "site-packages", "*.dist-info", "METADATA")
    ):
        # The installer writes RECORD last: without it the package is half there.
        if not os.path.exists(os.path.join(os.path.dirname(path), "RECORD")):
            continue
        name = number = None
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("Name:"):
                    name = line[5:].strip()
                if line.startswith("Version:"):
                    number = line[8:].strip()
                if not line.strip():
                    break
        if name and number:
            found[name] = number
    return found


def python_of(venv):
    """Version of the venv's interpreter, asked of itself: a system update may have taken it away."""
    program = os.path.join(venv, "bin", "python")
    code = "import json, sys; print(json.dumps(list(sys.version_info[:3])))"
    try:
        done = subprocess.run([program, "-I", "-S", "-c", code], capture_output=True, timeout=60)
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def patches(venv, package):
    """The patch manifest with the files that differ from it, or None."""
    for site in sorted(glob.glob(os.path.join(glob.escape(venv), "lib", "python*", "site-packages"))):
        folder = os.path.join(site, ".dflash-deploy")
        manifest = loaded(os.path.join(folder, "manifest.json"))
        names = set(os.listdir(folder)) if os.path.isdir(folder) else {"manifest.json"}
        if manifest is None:
            if names != {"manifest.json"}:
                return {"manifest": None, "differs": [], "unfinished": True, "site": site}
            continue
        files = manifest.get("files", {})
        wanted = dict(manifest.get("seen", {}), **{name: entry["patched"] for name, entry in files.items()})
        differs = [name for name, value in wanted.items() if digest(os.path.join(site, name)) != value]
        return {
            "manifest": manifest,
            "differs": sorted(differs),
            "unfinished": not names <= {"manifest.json", "pristine", "staged"},
            "site": site,
        }
    return None


def venv_of(path, package, whole):
    found = {"path": path, "stamp": loaded(os.path.join(path, ".dflash-deploy-stack.json"))}
    if whole:
        found.update(exists=os.path.lexists(path), python=python_of(path), packages=packages(path))
        found["patches"] = patches(path, package)
    return found


def show(words, service):
    try:
        done = subprocess.run(
            [*words, "show", "--property", NAMES, service + ".service"], capture_output=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode:
        return None
    return dict(line.partition("=")[::2] for line in done.stdout.decode("utf-8", "replace").splitlines())


def service_of(root, name):
    runner = {}
    exec(compile(SERVE, "serve.py", "exec"), runner)
    found = {"record": runner["status"](os.path.join(root, "service", name + ".state.json"))}
    if os.path.isdir("/run/systemd/system"):
        found["system"] = show(["systemctl"], name)
    runtime = "/run/user/%d" % os.getuid()
    if os.path.exists(os.path.join(runtime, "systemd", "private")):
        os.environ["XDG_RUNTIME_DIR"] = runtime
        found["user"] = show(["systemctl", "--user"], name)
    return found


def releases(root):
    folder = os.path.join(root, "releases")
    found = []
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if not os.path.isdir(os.path.join(folder, name)):
            continue
        manifest = loaded(os.path.join(folder, name, "manifest.json"))
        config = os.path.join(folder, name, "config")
        files = {"config/" + path: value for path, value in tree(config).items()}
        files["patched.json"] = digest(os.path.join(folder, name, "patched.json"))
        found.append(
            {
                "id": name,
                "manifest": manifest,
                "outcome": loaded(os.path.join(folder, name, "outcome.json")),
                "settings": loaded(os.path.join(config, "settings.json")),
                "launch": loaded(os.path.join(config, "launch.json")),
                "files": files,
                "venv_there": os.path.isdir(os.path.join(folder, name, "venv")),
            }
        )
    return found


def look(request):
    root, package = request["root"], request["package"]
    try:
        current = os.path.basename(os.readlink(os.path.join(root, "current")))
    except OSError:
        current = ""
    listed = releases(root)
    history = (read(os.path.join(root, "releases", "history")) or b"").decode("utf-8", "replace").split()
    services = {request["service"]} | {r["settings"]["service"] for r in listed if (r["settings"] or {}).get("service")}
    store = os.path.join(root, "venvs")
    names = os.listdir(store) if os.path.isdir(store) else ()
    venvs = [venv_of(os.path.join(store, name), package, False) for name in names]
    # Looked into: the environment that these patch sets are in already, else those that one could be made from.
    inputs = request["inputs"]
    whole = [v["path"] for v in venvs if inputs and inputs in ((v["stamp"] or {}).get("inputs") or ())]
    whole = whole or request["bases"]
    return {
        "root_exists": os.path.isdir(root),
        "writable": os.access(root, os.W_OK),
        "current": current,
        "history": history,
        "releases": listed,
        "venvs": venvs,
        "whole": {path: venv_of(path, package, True) for path in whole},
        "lock": loaded(os.path.join(root, "lock", "owner.json")),
        "lock_age": age(os.path.join(root, "lock", "owner.json")),
        "services": {name: service_of(root, name) for name in services},
        "files": {path: digest(path) for path in request["files"]},
        "trees": {path: tree(path) for path in request["trees"]},
        "models": {path: os.path.isfile(os.path.join(path, "config.json")) for path in request["models"]},
        "legacy": os.path.exists(os.path.join(root, "service", "serve.py")),
    }


print(MARK + json.dumps(look(REQUEST)) + MARK)
