"""Runs every section in a thread of its own under one deadline and prints one JSON document between two marks."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any, Callable

from dflash_deploy.facts.remote.gpu import gpu_facts
from dflash_deploy.facts.remote.models import model_facts
from dflash_deploy.facts.remote.ports import port_facts
from dflash_deploy.facts.remote.pythons import python_facts
from dflash_deploy.facts.remote.system import clean_environment, home_folder, iommu_facts, system_facts
from dflash_deploy.facts.remote.venvs import venv_facts

SCHEMA = 1


def sections(params: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Name -> function that reads the section."""
    home = home_folder()[0]

    def given(name: str) -> list[str]:
        """Paths of the parameters; ``~/`` is this account's home."""
        return [os.path.join(home, path[2:]) if path.startswith("~/") else path for path in params.get(name, [])]

    smi_timeout = float(params.get("smi_timeout_s", 5))
    return {
        "host": lambda: system_facts(given("paths")),
        "env": clean_environment,
        "gpu": lambda: gpu_facts(smi_timeout),
        "iommu": iommu_facts,
        "python": lambda: python_facts(home),
        "ports": lambda: port_facts([int(port) for port in params.get("ports", [])]),
        "models": lambda: [model_facts(path) for path in given("models")],
        "venvs": lambda: venv_facts(
            home, given("venvs"), bool(params.get("discover", True)), list(params.get("markers", []))
        ),
    }


def collect(params: dict[str, Any]) -> dict[str, Any]:
    """All sections. One that fails or is late is named in ``errors`` and left out: could not look."""
    start = time.monotonic()
    deadline = start + float(params.get("deadline_s", 25))
    found: dict[str, Any] = {}
    errors: dict[str, str] = {}
    seconds: dict[str, float] = {}

    def read(name: str, function: Callable[[], Any]) -> None:
        begun = time.monotonic()
        try:
            found[name] = function()
        except Exception as error:  # a fault of ours or a strange host: the other sections still count
            import traceback

            errors[name] = (
                "".join(traceback.format_exception_only(type(error), error)).strip()
                + " "
                + traceback.format_exc()[-400:]
            )
        seconds[name] = round(time.monotonic() - begun, 3)

    work = sections(params)
    threads = {
        name: threading.Thread(target=read, args=(name, function), daemon=True) for name, function in work.items()
    }
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            errors[name] = "no answer within %.0f s" % float(params.get("deadline_s", 25))
    answer: dict[str, Any] = {name: found[name] for name in work if name in found and name not in errors}
    answer["schema"] = SCHEMA
    answer["probe"] = {
        "via": "python",
        "python": "%d.%d.%d" % sys.version_info[:3],
        "executable": sys.executable,
        "seconds": round(time.monotonic() - start, 3),
        "section_seconds": dict(seconds),
        "errors": errors,
    }
    return answer


def main(params: dict[str, Any], mark: str) -> None:
    """Print the answer between two lines that carry ``mark``: a login shell may have printed before, or a background
    job after."""
    text = json.dumps(collect(params), ensure_ascii=True)
    sys.stdout.write("\n%s BEGIN\n%s\n%s END\n" % (mark, text, mark))
    sys.stdout.flush()
    os._exit(0)  # a section that hangs in the kernel must not hold the exit
