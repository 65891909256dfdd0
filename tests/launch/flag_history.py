"""Makes ``plan/flag_history.json`` from SGLang wheels: ``python -m tests.launch.flag_history WHEEL...``

Only arguments that not every wheel has are kept, each with the first and the last release that has it and what its own
release calls its replacement.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "dflash_deploy" / "launch" / "remote_flags.py"
HISTORY = ROOT / "dflash_deploy" / "plan" / "flag_history.json"


def flags_of(wheel: Path) -> dict[str, Any]:
    """The probe's answer about a wheel's source."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        wanted = ("sglang/srt/server_args.py", "sglang/srt/arg_groups/")
        for name in archive.namelist():
            if name.startswith(wanted) or name.endswith(".dist-info/METADATA"):
                archive.extract(name, folder)
        done = subprocess.run([sys.executable, "-I", str(SCRIPT), folder], capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def history_of(releases: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Releases oldest first."""
    found: dict[str, dict[str, str]] = {}
    for release in releases:
        for name, item in release["flags"].items():
            entry = found.setdefault(name, {"first": release["version"]})
            entry["last"] = release["version"]
            if item.get("new"):
                entry["new"] = item["new"]
    first, last = releases[0]["version"], releases[-1]["version"]
    return {
        name: entry
        for name, entry in sorted(found.items())
        if (entry["first"], entry["last"]) != (first, last) or "new" in entry
    }


if __name__ == "__main__":
    from packaging.version import Version

    answers = sorted((flags_of(Path(word)) for word in sys.argv[1:]), key=lambda a: Version(a["version"]))
    rows = [f'"{name}": {json.dumps(entry)}' for name, entry in history_of(answers).items()]
    HISTORY.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print(f"{len(rows)} arguments, {answers[0]['version']} to {answers[-1]['version']}")
