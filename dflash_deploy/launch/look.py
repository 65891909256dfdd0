"""The host itself, looked at while a server starts or serves: processes, port, disk, GPUs, kernel messages."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from dflash_deploy.host.base import Host
from dflash_deploy.settings import Settings

FULL_KIB = 64
"""A log folder with less free space than this is full."""


def look(host: Host, settings: Settings) -> dict[str, Any]:
    """One look. Keys: listening, owners, tree, manifest, service, disk, kernel, cgroup, gpu; or ``error`` alone.

    Raises:
        HostError: the host does not answer.
    """
    script = resources.files("dflash_deploy.launch").joinpath("remote_look.py").read_bytes()
    lib = posixpath.join(settings.venv, "lib")
    words = [str(settings.port), lib, settings.state_file, settings.log_file]
    folders = (settings.model, settings.draft_model if settings.speculative else "")
    words += [folder for folder in folders if folder.startswith("/")]
    said = ""
    for python in (settings.python, "python3"):
        result = host.run([python, "-I", "-S", "-", *words], input=script, timeout_s=60.0)
        if result.ok:
            try:
                seen = json.loads(result.out)
            except ValueError:
                seen = None
            if isinstance(seen, dict):
                return seen
        said = (result.err or result.out)[-400:]
    return {"error": said}


def faults(seen: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> list[str]:
    """What is wrong with the host or the processes, in words that the signature table knows. Stable from look to look
    as long as the fault lasts.

    Args:
        before: an earlier look: kills by a memory limit that it had counted already say nothing.
    """
    found = []
    disk = seen.get("disk") or {}
    if disk.get("error"):
        found.append(f"the log folder {disk.get('path')} cannot be used: {disk['error']}")
    elif disk.get("free_kib") is not None and disk["free_kib"] < FULL_KIB:
        found.append(f"no space left on device: the log folder {disk['path']} is full")
    elif disk.get("inodes") is not None and disk["inodes"] < 8:
        found.append(f"no space left on device: the log folder {disk['path']} has no free inodes")
    service = seen.get("service") or {}
    if service.get("log_error"):
        found.append(f"the log cannot be written: {service['log_error']}")
    for entry in service.get("family") or ():
        if entry["state"] in "Tt":
            found.append(f"scheduler process {entry['pid']} is stopped (state T): {entry['command'][:80]}")
    found += [line for line in kernel_lines(seen) if "fallen off the bus" in line]
    cgroup = seen.get("cgroup") or {}
    earlier = ((before or {}).get("cgroup") or {}).get("events_oom_kill", 0)
    # Without an earlier look only a group of the service's own counts: others hold strangers' kills as well.
    own = cgroup.get("group", "").endswith(".service") and "user@" not in posixpath.basename(cgroup.get("group", ""))
    if cgroup.get("events_oom_kill", 0) > earlier and (own or before is not None):
        found.append(f"memory cgroup out of memory: a process was killed at the limit memory.max={cgroup.get('max')}")
    for missing in (seen.get("models") or {}).values():
        found += [f"weight file missing: {path} does not exist" for path in missing]
    trouble = str((seen.get("gpu") or {}).get("error") or "")
    # A driver that is not there at all is no fault of a server without GPUs.
    if re.search(r"lost|fallen off|device handle|unknown error", trouble, re.IGNORECASE):
        found.append(f"nvidia-smi fails: {trouble}")
    return found


def kernel_lines(seen: Mapping[str, Any]) -> list[str]:
    """What the kernel said since the service was started, of memory and GPUs. It may be about another process: beside a
    failure it is evidence, alone it is none."""
    return [f"kernel: {line}" for line in (seen.get("kernel") or {}).get("lines") or ()]


def load(seen: Mapping[str, Any]) -> str:
    """Processes, memory and GPUs in one line, for whoever waits."""
    family = (seen.get("service") or {}).get("family") or seen.get("tree") or ()
    parts = []
    if family:
        gib = sum(entry["rss_kib"] for entry in family) / 2**20
        parts.append(f"{len(family)} process{'es' if len(family) > 1 else ''}, {gib:.1f} GiB")
    for gpu in (seen.get("gpu") or {}).get("gpus") or ():
        if gpu.get("used_mib") is not None:
            parts.append(f"GPU {gpu['index']} {gpu['used_mib'] / 1024:.1f} GiB {gpu.get('percent') or 0:.0f} %")
    return "; ".join(parts)
