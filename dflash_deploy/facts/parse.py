"""The probe's JSON, or the shell fallback's lines, as :class:`Facts`. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dflash_deploy.errors import UnreadableFact
from dflash_deploy.facts import Facts, Gpu, PythonInterpreter

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def clean(value: Any) -> Any:
    """Text without control characters, lone surrogates and direction marks (file names are chosen by others), at any
    depth."""
    if isinstance(value, str):
        return CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", value)
    if isinstance(value, Mapping):
        return {clean(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    return value


def version_tuple(text: object) -> tuple[int, ...] | None:
    """``"580.159.04"`` as (580, 159, 4); None when it does not start with a number."""
    parts: list[int] = []
    for part in re.split(r"[.\-+]", text if isinstance(text, str) else ""):
        if not re.fullmatch(r"[0-9]{1,9}", part):
            break
        parts.append(int(part))
    return tuple(parts) or None


def pair(text: object) -> tuple[int, int] | None:
    """The first two numbers of a version."""
    found = version_tuple(text)
    return (found[0], found[1]) if found and len(found) > 1 else None


def section(raw: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """``raw[a][b]...`` as a mapping, empty when any step is missing."""
    value: Any = raw
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def rows(value: Any) -> list[Mapping[str, Any]]:
    """The mappings of a list; empty for anything else."""
    # A dict is a Mapping; asking for it first is four times as fast.
    return [item for item in value if isinstance(item, (dict, Mapping))] if isinstance(value, list) else []


def texts(value: Any) -> list[str]:
    """The texts of a list; empty for anything else."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def integers(value: Any) -> list[int]:
    """The whole numbers of a list; empty for anything else."""
    return [item for item in value if integer(item) is not None] if isinstance(value, list) else []


def integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def facts_from_json(raw: Mapping[str, Any], host: str = "") -> Facts:
    """See :meth:`Facts.from_json`."""
    if not isinstance(raw, Mapping) or raw.get("schema") != 1:
        raise UnreadableFact(
            "these are not facts of a probe that this version understands",
            hint="run `dflash-deploy audit HOST --save FILE` again",
        )
    raw = clean(raw)
    system, gpu, python = section(raw, "host"), section(raw, "gpu"), section(raw, "python")
    init, privileges = section(system, "init"), section(system, "privileges")
    uid = integer(system.get("uid"))
    sudo = privileges.get("sudo") is True
    manager = None
    if init.get("systemd") is True:
        manager = "system" if uid == 0 or sudo else ("user" if init.get("user_manager") is True else None)
    libc = section(system, "libc")
    pythons = [
        PythonInterpreter(
            path=str(item["path"]),
            version=(version[0], version[1], version[2]),
            has_venv=bool(item.get("venv_module") and item.get("ensurepip_module")),
            has_headers=bool(item.get("headers")),
        )
        for item in rows(python.get("interpreters"))
        if len(version := integers(item.get("version"))) == 3 and isinstance(item.get("path"), str)
    ]
    gpus = [
        Gpu(
            index=integer(item.get("index")) or 0,
            name=str(item.get("name", "")),
            compute_capability=pair(item.get("compute_capability")),
            memory_mib=integer(item.get("memory_mib")),
            memory_free_mib=integer(item.get("memory_free_mib")),
        )
        for item in rows(section(gpu, "smi").get("gpus"))
    ]
    free = {}
    for path in section(system, "disk"):
        amount = integer(section(system, "disk", path).get("free_mib"))
        if amount is not None:
            free[path] = amount
    tool = section(python, "tools").get("uv")
    kind = section(system, "container").get("kind")
    return Facts(
        host=host or str(raw.get("name") or system.get("hostname") or "host"),
        arch=str(system.get("arch") or ""),
        system=str(system.get("system") or ""),
        home=str(system.get("home") or ""),
        user=str(system.get("user") or ""),
        uid=-1 if uid is None else uid,
        glibc=pair(libc.get("version")) if libc.get("name") == "glibc" else None,
        gpus=tuple(gpus),
        driver=version_tuple(section(gpu, "driver").get("version")),
        driver_text=str(section(gpu, "driver").get("version") or "none"),
        pythons=tuple(pythons),
        uv=tool if isinstance(tool, str) else None,
        systemd=manager,
        linger=init.get("linger") is True,
        sudo=sudo,
        container=kind if isinstance(kind, str) else None,
        memory_mib=integer(system.get("memory_mib")),
        disk_free_mib=free,
        cpu_count=integer(system.get("cpu_count")),
        raw=raw,
    )


def raw_from_shell(text: str, reason: str = "no Python >= 3.8 on the host") -> dict[str, Any]:
    """The fallback's ``key=value`` lines in the shape of the probe's JSON; what it could not see is missing, hence
    unknown."""
    values: dict[str, str] = {}
    gpus: list[dict[str, Any]] = []
    disks: dict[str, Any] = {}
    for line in text.splitlines():
        key, sep, value = line.partition("=")
        value = value.strip()
        if not sep or not value:
            continue
        if key == "gpu":
            cells = [cell.strip() for cell in value.split(",")]
            if len(cells) >= 5 and cells[0].isdigit():
                memory, free = (int(cell) if cell.isdigit() else None for cell in cells[2:4])
                gpus.append(
                    {
                        "index": int(cells[0]),
                        "name": cells[1],
                        "memory_mib": memory,
                        "memory_free_mib": free,
                        "compute_capability": cells[4],
                    }
                )
        elif key == "disk":
            # "<path> <device> <blocks> <used> <available> <capacity> <mount point>"; a path may hold spaces, so count
            # from "NN%".
            match = re.match(r"(.*?) \S+ +\d+ +\d+ +(\d+) +\d+% ", value + " ")
            if match:
                disks[match.group(1)] = {"free_mib": int(match.group(2)) // 1024}
        else:
            values[key] = value
    libc = values.get("libc", "").split()
    uid = values.get("uid", "")
    memory_kib = values.get("memory_kib", "")
    return {
        "schema": 1,
        "probe": {
            "via": "sh",
            "errors": dict.fromkeys(("python", "venvs", "models", "ports", "env", "iommu"), reason),
        },
        "host": {
            "hostname": values.get("hostname"),
            "arch": values.get("arch"),
            "system": values.get("system"),
            "kernel": values.get("kernel"),
            "home": values.get("home"),
            "user": values.get("user"),
            "uid": int(uid) if uid.isdigit() else None,
            "shell": values.get("shell"),
            "distribution": {"name": values.get("os", "").strip("\"'")},
            "libc": {"name": libc[0] if libc else None, "version": libc[1] if len(libc) > 1 else None},
            "memory_mib": int(memory_kib) // 1024 if memory_kib.isdigit() else None,
            "cpu_count": int(values["cpus"]) if values.get("cpus", "").isdigit() else None,
            "container": {"kind": values.get("container")},
            "init": {
                "pid1": values.get("pid1"),
                "systemd": values.get("systemd") == "1",
                "user_manager": values.get("user_manager") == "1",
                "linger": values.get("linger") not in (None, "0"),
            },
            "privileges": {"sudo": values.get("sudo") == "1"},
            "disk": disks,
        },
        "gpu": {
            "driver": {"version": values.get("driver")},
            "smi": {"status": "ok" if gpus else "absent", "gpus": gpus},
        },
        "python": {"interpreters": [], "tools": {"uv": values.get("uv")}},
    }
