"""GPUs and their driver: from the kernel, from the driver's own files and from nvidia-smi, which may be absent, broken
or hang."""

from __future__ import annotations

import errno
import glob
import os
import re
import threading
from typing import Any

from dflash_deploy.facts.remote.tools import list_dir, read_line, read_text, run_tool, which

FIELDS = (
    "index,name,memory.total,memory.free,ecc.mode.current,pci.bus_id,uuid,driver_version,"
    "persistence_mode,utilization.gpu,power.draw"
)
LIBRARY_DIRS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
    "/usr/lib64/nvidia",
    "/usr/lib/nvidia",
)


def number(text: str) -> int | None:
    match = re.search(r"\d+", text)
    return int(match.group()) if match else None


def module_version() -> dict[str, Any]:
    """Version of the loaded kernel module: /proc when the GPU nodes are there, /sys otherwise."""
    text = read_text("/proc/driver/nvidia/version") or ""
    match = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    if match:
        return {
            "version": match.group(1),
            "source": "/proc/driver/nvidia/version",
            "open": "Open Kernel Module" in text,
        }
    version = read_line("/sys/module/nvidia/version")
    if version:
        return {"version": version, "source": "/sys/module/nvidia/version", "open": None}
    return {"version": None, "source": None, "open": None}


def installed_module() -> str | None:
    """Version of the module file on disk, which a reboot would load."""
    if not which("modinfo"):
        return None
    answer = run_tool(["modinfo", "-F", "version", "nvidia"], 3)
    return answer["out"].strip() or None if answer["status"] == "ok" else None


def user_libraries() -> dict[str, list[dict[str, str]]]:
    """Every libcuda and libnvidia-ml on the library path, with the version that its file name carries."""
    folders = list(LIBRARY_DIRS)
    for conf in ["/etc/ld.so.conf", *sorted(glob.glob("/etc/ld.so.conf.d/*.conf"))]:
        for line in (read_text(conf) or "").splitlines():
            if line.startswith("/"):
                folders.append(line.strip())
    search = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    found: dict[str, list[dict[str, str]]] = {"libcuda": [], "libnvidia-ml": []}
    seen = set()
    for folder in search + folders + sorted(glob.glob("/usr/local/cuda*/compat")):
        for name in found:
            path = os.path.join(folder, name + ".so.1")
            real = os.path.realpath(path)
            if not os.path.exists(path) or (name, path) in seen:
                continue
            seen.add((name, path))
            match = re.search(r"\.so\.(\d+\.\d+(?:\.\d+)?)$", real)
            found[name].append(
                {
                    "path": path,
                    "real": real,
                    "version": match.group(1) if match else "",
                    "from": "LD_LIBRARY_PATH" if folder in search else ("compat" if "compat" in folder else "system"),
                }
            )
    return found


def pci_devices() -> list[dict[str, Any]]:
    """NVIDIA display controllers and NVSwitch bridges that the kernel sees, driver or not."""
    found = []
    for name in list_dir("/sys/bus/pci/devices"):
        base = "/sys/bus/pci/devices/" + name
        if read_line(base + "/vendor") != "0x10de":
            continue
        kind = read_line(base + "/class") or ""
        if kind.startswith("0x03") or kind.startswith("0x0680"):
            driver = os.path.join(base, "driver")
            found.append(
                {
                    "bus": name,
                    "device": read_line(base + "/device"),
                    "kind": "gpu" if kind.startswith("0x03") else "nvswitch",
                    "driver": os.path.basename(os.path.realpath(driver)) if os.path.exists(driver) else None,
                    "numa": read_line(base + "/numa_node"),
                    "link": "%s x%s"
                    % (read_line(base + "/current_link_speed"), read_line(base + "/current_link_width")),
                }
            )
    return found


def rows(text: str) -> list[list[str]]:
    """Fields of nvidia-smi's CSV; one line per GPU, so never one value."""
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def parse_gpus(text: str, capabilities: dict[str, str]) -> list[dict[str, Any]]:
    """GPUs from the ``FIELDS`` query; ``capabilities`` maps index to ``"9.0"``."""
    found = []
    for row in rows(text):
        if len(row) < 8 or not row[0].isdigit():
            continue
        found.append(
            {
                "index": int(row[0]),
                "name": row[1],
                "memory_mib": number(row[2]),
                "memory_free_mib": number(row[3]),
                "ecc": row[4],
                "bus": row[5],
                "uuid": row[6],
                "driver_version": row[7],
                "persistence": row[8] if len(row) > 8 else None,
                "utilization": number(row[9]) if len(row) > 9 else None,
                "power_w": number(row[10]) if len(row) > 10 else None,
                "compute_capability": capabilities.get(row[0]),
            }
        )
    return found


def smi_facts(timeout_s: float) -> dict[str, Any]:
    """What nvidia-smi says. Its questions run side by side under one deadline; a hang is the status ``timeout``."""
    program = which("nvidia-smi") or next(
        (p for p in ("/usr/lib/wsl/lib/nvidia-smi", "/usr/bin/nvidia-smi") if os.access(p, os.X_OK)), None
    )
    if program is None:
        return {"status": "absent", "gpus": [], "processes": []}
    questions = {
        "gpus": ["--query-gpu=" + FIELDS, "--format=csv,noheader,nounits"],
        "capability": ["--query-gpu=index,compute_cap", "--format=csv,noheader,nounits"],
        "modes": ["--query-gpu=index,compute_mode,mig.mode.current", "--format=csv,noheader,nounits"],
        "processes": ["--query-compute-apps=pid,gpu_uuid,used_memory,process_name", "--format=csv,noheader,nounits"],
        "head": ["-q", "-d", "COMPUTE"],
        "topology": ["topo", "-m"],
        "p2p": ["topo", "-p2p", "r"],
    }
    answers: dict[str, dict[str, Any]] = {}

    def ask(name: str, arguments: list[str]) -> None:
        answers[name] = run_tool([program, *arguments], timeout_s)

    threads = [threading.Thread(target=ask, args=item, daemon=True) for item in questions.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 1)
    answers = dict(answers)
    main = answers.get("gpus", {"status": "timeout", "out": "", "err": ""})
    capability = answers.get("capability", {"status": "timeout", "out": ""})
    capabilities = (
        {row[0]: row[1] for row in rows(capability["out"]) if len(row) > 1} if capability["status"] == "ok" else {}
    )
    modes = {row[0]: row[1:] for row in rows(answers.get("modes", {}).get("out", "")) if len(row) == 3}
    gpus = parse_gpus(main["out"], capabilities) if main["status"] == "ok" else []
    for gpu in gpus:
        gpu["compute_mode"], gpu["mig"] = modes.get(str(gpu["index"]), [None, None])
    processes = []
    for row in rows(answers.get("processes", {}).get("out", "")):
        if len(row) >= 4 and row[0].isdigit():
            processes.append({"pid": int(row[0]), "gpu": row[1], "memory_mib": number(row[2]), "name": row[3]})
    cuda = re.search(r"CUDA Version\s*:\s*([\d.]+)", answers.get("head", {}).get("out", ""))
    return {
        "status": main["status"],
        "error": "" if main["status"] == "ok" else (main["out"] + main["err"]).strip()[:1000],
        "path": program,
        "gpus": gpus,
        "processes": processes,
        "cuda": cuda.group(1) if cuda else None,
        "topology": (answers.get("topology", {}).get("out") or "")[:8000],
        "p2p": (answers.get("p2p", {}).get("out") or "")[:8000],
    }


def fabric() -> dict[str, Any]:
    """NVSwitch machines need a fabric manager of exactly the driver's version."""
    version = None
    program = which("nv-fabricmanager")
    if program:
        match = re.search(r"(\d+\.\d+(?:\.\d+)?)", run_tool([program, "--version"], 3)["out"])
        version = match.group(1) if match else None
    running = any(
        read_line("/proc/%s/comm" % pid) == "nv-fabricmanage" for pid in list_dir("/proc", 100000) if pid.isdigit()
    )
    return {"nvswitch": bool(glob.glob("/dev/nvidia-nvswitch*")), "installed": version, "running": running}


def device_nodes() -> list[dict[str, Any]]:
    """The /dev/nvidia* nodes and whether this account may use them."""
    nodes = sorted(glob.glob("/dev/nvidia*") + glob.glob("/dev/dxg") + glob.glob("/dev/nvidia-caps/*"))
    return [{"path": path, "usable": usable(path)} for path in nodes if not os.path.isdir(path)]


def usable(path: str) -> bool:
    """Permission bits allow it and, for the nodes that wake no GPU, so does the container's device list."""
    if not os.access(path, os.R_OK | os.W_OK):
        return False
    if os.path.basename(path) not in ("nvidiactl", "nvidia-uvm"):
        return True
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return error.errno not in (errno.EPERM, errno.EACCES)
    return True


def gpu_facts(timeout_s: float) -> dict[str, Any]:
    """Driver, libraries, devices, GPUs, processes and topology."""
    smi = smi_facts(timeout_s)
    driver = module_version()
    if driver["version"] is None and os.path.exists("/dev/dxg") and smi["gpus"]:
        # WSL: the kernel module is Windows' own.
        driver = {"version": smi["gpus"][0]["driver_version"], "source": "nvidia-smi, under WSL", "open": None}
    return {
        "driver": dict(driver, installed=installed_module()),
        "user_libraries": user_libraries(),
        "pci": pci_devices(),
        "devices": device_nodes(),
        "fabric": fabric(),
        "smi": smi,
        "xid": xid_lines(),
    }


def xid_lines() -> list[str] | None:
    """Recent Xid lines of the kernel log, where this account may read it."""
    answer = run_tool(["dmesg"], 3) if which("dmesg") else {"status": "absent", "out": ""}
    if answer["status"] != "ok":
        return None
    return [line.strip() for line in answer["out"].splitlines() if "NVRM: Xid" in line][-20:]
