"""The machine itself: kernel, libc, memory, limits, container, init system, privileges, disks, environment."""

from __future__ import annotations

import glob
import os
import platform
import pwd
import re
import resource
from typing import Any

from dflash_deploy.facts.remote.tools import list_dir, mib, read_line, read_text, run_tool, which

ENV_NAMES = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CC",
    "CXX",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "TMPDIR",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_HOME",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCH_CUDA_ARCH_LIST",
    "TORCH_EXTENSIONS_DIR",
    "XDG_RUNTIME_DIR",
    "XDG_CACHE_HOME",
    "SHELL",
    "LANG",
    "TERM",
)
ENV_PREFIXES = ("NCCL_", "FLASHINFER_", "SGLANG_", "SGL_", "TRITON_", "CUDA_", "NVIDIA_", "PIP_", "UV_")
SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|AUTH)", re.I)
USERINFO = re.compile(r"(://)[^/@\s]+@")


def clean_environment() -> dict[str, str]:
    """Variables that rules read. Values of secret names and user:password parts of URLs never leave the host."""
    found = {}
    for name in sorted(os.environ):
        if name in ENV_NAMES or name.startswith(ENV_PREFIXES):
            value = "(set)" if SECRET.search(name) else USERINFO.sub(r"\1***@", os.environ[name])
            found[name] = value[:2000]
    return found


def os_release() -> dict[str, str]:
    text = read_text("/etc/os-release") or read_text("/usr/lib/os-release") or ""
    found = {}
    for line in text.splitlines():
        key, sep, value = line.partition("=")
        if sep:
            found[key.strip().lower()] = value.strip().strip("\"'")
    return {"id": found.get("id", ""), "version": found.get("version_id", ""), "name": found.get("pretty_name", "")}


def libc() -> dict[str, Any]:
    """Name and version of the C library, from the library itself."""
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError, AttributeError):
        text = ""
    if text.startswith("glibc"):
        return {"name": "glibc", "version": text.split()[-1]}
    if glob.glob("/lib/ld-musl-*"):
        answer = run_tool([sorted(glob.glob("/lib/ld-musl-*"))[0]], 3)
        match = re.search(r"Version\s+([\d.]+)", answer["err"] + answer["out"])
        return {"name": "musl", "version": match.group(1) if match else None}
    return {"name": None, "version": None}


def meminfo() -> dict[str, int]:
    found = {}
    for line in (read_text("/proc/meminfo") or "").splitlines():
        match = re.match(r"(\w+):\s+(\d+) kB", line)
        if match:
            found[match.group(1)] = int(match.group(2)) // 1024
    return found


def cgroup_memory_mib() -> int | None:
    """The memory limit of our control group, when there is one."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = read_line(path)
        if text and text.isdigit() and int(text) < 1 << 60:
            return mib(int(text))
    return None


def container() -> dict[str, Any]:
    """Container type and how it was told: systemd's own note first, then the marks that each kind leaves."""
    note = read_line("/run/systemd/container")
    if note:
        return {"kind": note, "evidence": "/run/systemd/container"}
    environ = read_text("/proc/1/environ") or ""
    match = re.search(r"(?:^|\0)container=([^\0]+)", environ)
    if match:
        return {"kind": match.group(1), "evidence": "container= in /proc/1/environ"}
    if os.path.exists("/.dockerenv"):
        return {"kind": "docker", "evidence": "/.dockerenv"}
    if os.path.exists("/run/.containerenv"):
        return {"kind": "podman", "evidence": "/run/.containerenv"}
    release = (read_line("/proc/sys/kernel/osrelease") or "").lower()
    if "microsoft" in release or "wsl" in release:
        return {"kind": "wsl", "evidence": "kernel " + release}
    if which("systemd-detect-virt"):
        answer = run_tool(["systemd-detect-virt", "--container"], 3)
        kind = answer["out"].strip()
        if kind and kind != "none":
            return {"kind": kind, "evidence": "systemd-detect-virt --container"}
    cgroup = read_text("/proc/1/cgroup") or ""
    for mark, kind in (("/lxc", "lxc"), ("/docker", "docker"), ("kubepods", "kubernetes")):
        if mark in cgroup:
            return {"kind": kind, "evidence": "/proc/1/cgroup"}
    mounts = read_text("/proc/mounts", 262144) or ""
    if "lxcfs" in mounts:
        return {"kind": "lxc", "evidence": "lxcfs in /proc/mounts"}
    return {"kind": None, "evidence": "no mark of a container"}


def init_system(user: str, uid: int) -> dict[str, Any]:
    pid1 = read_line("/proc/1/comm")
    system = pid1 == "systemd" or os.path.isdir("/run/systemd/system")
    return {
        "pid1": pid1,
        "systemd": system,
        "user_manager": system and os.path.exists("/run/user/%d/systemd/private" % uid),
        "linger": os.path.exists("/var/lib/systemd/linger/" + user),
    }


def privileges(uid: int) -> dict[str, Any]:
    groups = []
    try:
        import grp

        for gid in os.getgroups():
            try:
                groups.append(grp.getgrgid(gid).gr_name)
            except KeyError:
                groups.append(str(gid))
    except (ImportError, OSError):
        pass
    sudo = False
    if uid != 0 and which("sudo"):
        sudo = run_tool(["sudo", "-n", "true"], 3)["status"] == "ok"
    return {"sudo": sudo, "groups": sorted(groups)}


def limits() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in (
        ("memlock", "RLIMIT_MEMLOCK"),
        ("nofile", "RLIMIT_NOFILE"),
        ("nproc", "RLIMIT_NPROC"),
        ("stack", "RLIMIT_STACK"),
    ):
        number = getattr(resource, kind, None)
        if number is not None:
            # -1 is "unlimited"; memlock and stack are bytes.
            found[name] = [-1 if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(number)]
    return found


def pids_max() -> int | None:
    """Threads and processes that our control group may have; None: no limit."""
    for path in ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"):
        text = read_line(path)
        if text and text.isdigit():
            return int(text)
    return None


def disk(path: str) -> dict[str, Any] | None:
    """Free space where ``path`` is or would be made."""
    place = path
    while place and not os.path.exists(place):
        parent = os.path.dirname(place)
        if parent == place:
            break
        place = parent
    try:
        stat = os.statvfs(place or "/")
    except (OSError, ValueError):
        return None
    return {
        "at": place,
        "exists": place == path,
        "free_mib": mib(stat.f_bavail * stat.f_frsize),
        "total_mib": mib(stat.f_blocks * stat.f_frsize),
        "inodes_free": stat.f_favail,
        "inodes_total": stat.f_files,
        "read_only": bool(stat.f_flag & os.ST_RDONLY),
        "noexec": bool(stat.f_flag & getattr(os, "ST_NOEXEC", 8)),
        "writable": os.access(place or "/", os.W_OK),
    }


def home_folder() -> tuple[str, str, int]:
    uid = os.getuid()
    try:
        entry = pwd.getpwuid(uid)
        return os.environ.get("HOME") or entry.pw_dir, entry.pw_name, uid
    except KeyError:
        return os.environ.get("HOME", "/"), os.environ.get("USER", str(uid)), uid


def system_facts(paths: list[str]) -> dict[str, Any]:
    """All of the above; ``paths`` are the folders whose free space is wanted."""
    home, user, uid = home_folder()
    memory = meminfo()
    uname = os.uname()
    cgroup = cgroup_memory_mib()
    total = memory.get("MemTotal")
    wanted = {path: disk(path) for path in [home, "/tmp", *paths]}
    return {
        "hostname": uname.nodename,
        "arch": uname.machine,
        "system": uname.sysname,
        "kernel": uname.release,
        "platform": platform.platform(),
        "distribution": os_release(),
        "libc": libc(),
        "home": home,
        "user": user,
        "uid": uid,
        "shell": os.environ.get("SHELL"),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_mib": min(total, cgroup) if total and cgroup else total,
        "memory_available_mib": memory.get("MemAvailable"),
        "swap_mib": memory.get("SwapTotal"),
        "container": container(),
        "init": init_system(user, uid),
        "privileges": privileges(uid),
        "limits": limits(),
        "pids_max": pids_max(),
        "shm": disk("/dev/shm") if os.path.isdir("/dev/shm") else None,
        "disk": wanted,
        "cpu_flags": cpu_flags(),
        "cwd_shadows": [
            name
            for name in ("sglang", "torch", "sgl_kernel", "triton", "flashinfer")
            if os.path.isdir(os.path.join(home, name))
        ],
    }


def cpu_flags() -> list[str]:
    """The vector extensions that CPU kernels ask for."""
    match = re.search(r"^flags\s*:\s*(.*)$", read_text("/proc/cpuinfo", 32768) or "", re.M)
    have = set(match.group(1).split()) if match else set()
    return [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8") if flag in have]


def iommu_facts() -> dict[str, Any]:
    """IOMMU mode and PCIe ACS of the bridges: a translated IOMMU or ACS redirection breaks peer-to-peer between
    GPUs."""
    groups = list_dir("/sys/kernel/iommu_groups")
    kinds = sorted({read_line("/sys/kernel/iommu_groups/%s/type" % group) or "unknown" for group in groups[:512]})
    command_line = read_text("/proc/cmdline") or ""
    options = re.findall(r"\S*iommu\S*|pcie_acs_override\S*", command_line)
    acs: list[str] | None = None
    if which("lspci"):
        answer = run_tool(["lspci", "-vvv"], 4)
        if answer["status"] == "ok" and "ACSCtl" in answer["out"]:
            acs = []
            device = ""
            for line in answer["out"].splitlines():
                if line and not line[0].isspace():
                    device = line
                elif "ACSCtl" in line and "ReqRedir+" in line:
                    acs.append(device)
    return {"groups": len(groups), "types": kinds, "options": options, "acs_redirect": acs}
