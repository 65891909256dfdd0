# mypy: ignore-errors
# ruff: noqa
"""Runs on the target through its Python's stdin, changes nothing: who owns the port, in which state the service's
processes are, whether patched files are unchanged, space below the log, GPU memory and use, what the kernel said.

    python -I -S - PORT SITE_PARENT [STATE_FILE LOG_FILE MODEL_FOLDER...]

Standard library only, Python >= 3.8. Prints one JSON object.
"""

import os

# Where a server uses every core, it goes first.
os.nice(10)

import hashlib
import json
import re
import sys
import time

KERNEL = re.compile(
    r"out of memory|oom-kill|oom_reaper|NVRM: Xid|segfault at|traps: |I/O error|fallen off the bus", re.I
)
OURS = re.compile(r"sglang|python|pt_main_thread|NVRM|fallen off", re.I)


def listeners(port):
    inodes = set()
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(name) as file:
                rows = file.read().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            part = row.split()
            if part[3] == "0A" and int(part[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(part[9])
    return inodes


def processes():
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open("/proc/%s/stat" % name, "rb") as file:
                stat = file.read().rpartition(b")")[2].split()
            with open("/proc/%s/cmdline" % name, "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        text = b" ".join(w for w in words if w).decode("utf-8", "replace")
        found[int(name)] = {
            "pid": int(name),
            "parent": int(stat[1]),
            "state": stat[0].decode(),
            "command": text[:300],
            "rss_kib": int(stat[21]) * os.sysconf("SC_PAGE_SIZE") // 1024,
            "start": int(stat[19]),
        }
    return found


def owners(inodes, pids):
    wanted = {"socket:[%s]" % i for i in inodes}
    result = []
    for pid in pids:
        try:
            names = os.listdir("/proc/%d/fd" % pid)
        except OSError:
            continue
        for name in names:
            try:
                if os.readlink("/proc/%d/fd/%s" % (pid, name)) in wanted:
                    result.append(pid)
                    break
            except OSError:
                continue
    return result


def manifest(lib):
    for root in sorted(os.listdir(lib)) if os.path.isdir(lib) else ():
        site = os.path.join(lib, root, "site-packages")
        path = os.path.join(site, ".dflash-deploy", "manifest.json")
        if not os.path.isfile(path):
            continue
        try:
            with open(path, "rb") as file:
                data = json.loads(file.read())
            files = {name: entry["patched"] for name, entry in data["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return {"path": path, "error": repr(error)}
        changed, missing = [], []
        for name, digest in sorted(files.items()):
            try:
                with open(os.path.join(site, name), "rb") as file:
                    if hashlib.sha256(file.read()).hexdigest() != digest:
                        changed.append(name)
            except OSError:
                missing.append(name)
        return {
            "path": path,
            "sets": data.get("sets", []),
            "version": data.get("version"),
            "files": len(files),
            "changed": changed,
            "missing": missing,
            "payload": data.get("payload", ""),
            "mtime": os.stat(path).st_mtime,
        }
    return None


def runner(path):
    """The service's recorded runner, when it is still the same process of the same boot."""
    try:
        with open(path) as file:
            state = json.load(file)
        with open("/proc/sys/kernel/random/boot_id") as file:
            here = file.read().strip() == state["boot_id"]
        return state if here else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def below(tops, table):
    tree, queue = [], list(tops)
    while queue and len(tree) < 512:
        pid = queue.pop(0)
        tree.append(table[pid])
        queue += [p for p, entry in table.items() if entry["parent"] == pid]
    return tree


def disk(path):
    """Free space where the log lies, in MiB and in inodes, for this account."""
    folder = os.path.dirname(path)
    while folder != "/" and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    try:
        stat = os.statvfs(folder)
    except OSError as error:
        return {"path": folder, "error": str(error)}
    free = (stat.f_bfree if os.geteuid() == 0 else stat.f_bavail) * stat.f_frsize
    # Some file systems count no inodes.
    inodes = stat.f_favail if stat.f_files else None
    return {"path": folder, "free_kib": free // 1024, "inodes": inodes}


def missing_files(folder):
    """Files that the folder's weight index names and that are not there. SGLang loads the others and serves."""
    try:
        there = set(os.listdir(folder))
    except OSError:
        return []  # a server that has loaded it serves on; one that has not says so itself
    wanted = set()
    for name in there:
        if name.endswith(".index.json"):
            try:
                with open(os.path.join(folder, name), "rb") as file:
                    wanted.update(json.load(file)["weight_map"].values())
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
    missing = sorted(str(name) for name in wanted if name not in there)
    if not any(name.endswith((".safetensors", ".bin", ".pt", ".gguf")) for name in there):
        missing = missing or ["*.safetensors"]
    return [os.path.join(folder, name) for name in missing[:10]]


def gpus():
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if not any(os.access(os.path.join(folder, "nvidia-smi"), os.X_OK) for folder in folders):
        return {"gpus": []}
    import subprocess  # a fifth of what a look costs where there is no GPU

    query = "index,memory.used,memory.total,utilization.gpu,power.draw"
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=" + query, "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=8,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {"gpus": []}  # slow without persistence mode: no fault
    if done.returncode:
        return {"gpus": [], "error": (done.stdout + done.stderr).decode("utf-8", "replace").strip()[:300]}
    found = []
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        cells = [c.strip() for c in line.split(",")]
        if len(cells) == 5 and cells[0].isdigit():
            number = [float(c) if re.match(r"^[0-9.]+$", c) else None for c in cells]
            found.append(
                {
                    "index": int(cells[0]),
                    "used_mib": number[1],
                    "total_mib": number[2],
                    "percent": number[3],
                    "watt": number[4],
                }
            )
    return {"gpus": found}


def kernel(since):
    """Kernel messages about memory and GPUs after ``since`` (unix time). ``readable`` False: this account may not."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return {"readable": False, "lines": []}
    with open("/proc/uptime") as file:
        boot = time.time() - float(file.read().split()[0])
    lines, budget = [], time.time() + 2
    try:
        while time.time() < budget:
            try:
                record = os.read(fd, 8192).decode("utf-8", "replace")
            except BlockingIOError:
                break
            except OSError:  # overwritten while it was read
                continue
            head, _, text = record.partition(";")
            text = text.split("\n")[0]
            try:
                when = boot + int(head.split(",")[2]) / 1e6
            except (IndexError, ValueError):
                continue
            if when >= since and KERNEL.search(text) and OURS.search(text):
                lines.append(text[:300])
    finally:
        os.close(fd)
    return {"readable": True, "lines": lines[-20:]}


def memory_events(pid):
    """What the process's control group counts: its memory limit and the kills at it."""
    try:
        with open("/proc/%d/cgroup" % pid) as file:
            rows = [row.split(":", 2) for row in file.read().splitlines()]
    except OSError:
        return {}
    paths = {names: path for number, names, path in rows}
    found = {}

    def text(*parts):
        try:
            with open(os.path.join("/sys/fs/cgroup", *(part.lstrip("/") for part in parts))) as file:
                return file.read().strip()
        except OSError:
            return ""

    if "memory" in paths:  # version 1
        path = paths["memory"]
        events = text("memory", path, "memory.oom_control")
        found = {"group": path, "max": text("memory", path, "memory.limit_in_bytes")}
    else:
        path = paths.get("", "/")
        events = text(path, "memory.events")
        found = {"group": path, "max": text(path, "memory.max"), "current": text(path, "memory.current")}
    for row in events.splitlines():
        words = row.split()
        if len(words) == 2 and words[1].isdigit():
            found["events_" + words[0]] = int(words[1])
    return {key: value for key, value in found.items() if value != ""}


def main():
    port, lib = int(sys.argv[1]), sys.argv[2]
    state, log = (sys.argv[3], sys.argv[4]) if len(sys.argv) > 4 else ("", "")
    models = sys.argv[5:]
    table = processes()
    inodes = listeners(port)
    owner = owners(inodes, table)
    # A listening socket is inherited: the topmost owner is the server, what it started is below.
    top = [p for p in owner if table[p]["parent"] not in owner]
    answer = {"listening": bool(inodes), "owners": top, "tree": below(top, table), "manifest": manifest(lib)}
    if state:
        mine = runner(state)
        pid = mine.get("pid")
        same = pid in table and table[pid]["start"] == mine.get("start")
        record = {
            k: mine.get(k) for k in ("since", "restarts", "server", "waiting", "failed", "exit_code", "log_error")
        }
        record["family"] = below([pid], table) if same else []
        answer["service"] = record
        answer["disk"] = disk(log)
        answer["kernel"] = kernel(float(mine.get("since") or time.time() - 600))
        answer["cgroup"] = memory_events(pid) if same else {}
        answer["gpu"] = gpus()
        answer["models"] = {folder: missing_files(folder) for folder in models}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
