"""Cases as files: a healthy host plus what differs. ``set`` takes dotted paths (a key that holds dots ends in
``#``)."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "data" / "audit"
CASES = sorted(DATA.glob("cases/*.json"))
HEALTHY = sorted(DATA.glob("healthy/*.json"))


def put(document: Any, path: str, value: Any) -> None:
    """Set ``value`` at the dotted ``path``."""
    if path.endswith("#"):
        prefix = "venvs.runtime."
        document["venvs"]["runtime"][path.removeprefix(prefix).removesuffix("#")] = value
        return
    *steps, last = path.split(".")
    for step in steps:
        document = document[int(step)] if isinstance(document, list) else document[step]
    document[int(last) if isinstance(document, list) else last] = value


def facts_of(case: dict[str, Any]) -> dict[str, Any]:
    """The case's whole facts document."""
    raw: dict[str, Any] = copy.deepcopy(json.loads((DATA / "healthy" / f"{case['base']}.json").read_text()))
    for path, value in case.get("set", {}).items():
        put(raw, path, value)
    environment = raw["venvs"]["environments"][0]
    for name, version in case.get("dists", {}).items():
        environment["dists"] = [item for item in environment["dists"] if item["name"] != name or version is not None]
        present = next((item for item in environment["dists"] if item["name"] == name), None)
        if present is not None:
            present["version"] = version
        elif version is not None:
            environment["dists"].append({"name": name, "version": version})
    for name, fields in case.get("dist_fields", {}).items():
        next(item for item in environment["dists"] if item["name"] == name).update(fields)
    for change in case.get("modules", []):
        modules = environment["elf"]["modules"]
        present = next((item for item in modules if item["path"] == change["path"]), None)
        if present is None:
            important = change["path"].split("/")[0] in ("vllm", "nixl_ep", "flash_attn", "sgl_kernel", "torch")
            present = {
                "path": change["path"],
                "machine": "x86_64",
                "needed": [],
                "unresolved": [],
                "important": important,
                "checked": 10,
                "missing": [],
            }
            modules.append(present)
        present.update(change)
        present["missing_count"] = len(present.get("missing", []))
    return raw
