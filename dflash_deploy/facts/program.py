"""The probe as one program text for stdin, the one-line shell command that finds a Python for it, and the answer's
marks."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from dflash_deploy.errors import UnreadableFact

MODULES = ("tools", "system", "gpu", "ports", "pythons", "elf", "fatbin", "linker", "dists", "venvs", "models", "main")
"""Modules of :mod:`dflash_deploy.facts.remote` in import order."""
PACKAGE = "dflash_deploy.facts.remote"

LOADER = """
import sys, types
for _name in ("dflash_deploy", "dflash_deploy.facts", "dflash_deploy.facts.remote"):
    _module = types.ModuleType(_name)
    _module.__path__ = []
    sys.modules[_name] = _module
for _name, _source in SOURCES:
    _module = types.ModuleType(_name)
    sys.modules[_name] = _module
    exec(compile(_source, _name, "exec"), _module.__dict__)
sys.modules["dflash_deploy.facts.remote.main"].main(json.loads(PARAMS), MARK)
"""

CANDIDATES = (
    '/usr/bin/python3 python3 /usr/local/bin/python3 python "$HOME"/.local/share/uv/python/*/bin/python3 '
    '"$HOME"/miniconda3/bin/python3 '
    '"$HOME"/.pyenv/versions/*/bin/python3 /opt/*/bin/python3 /usr/libexec/platform-python'
)


@cache
def sources() -> str:
    """The modules' text as a Python literal: [(name, text)] in import order."""
    files = ((name, resources.files(PACKAGE).joinpath(f"{name}.py")) for name in MODULES)
    return ascii([(f"{PACKAGE}.{name}", file.read_text(encoding="utf-8")) for name, file in files])


def program(params: Mapping[str, Any], mark: str) -> bytes:
    """The Python program for stdin: a loader, the modules' text and the parameters."""
    head = f"import json\nSOURCES = {sources()}\nPARAMS = {json.dumps(params)!a}\nMARK = {mark!a}\n"
    return (head + LOADER).encode("ascii")


def fallback_lines(paths: Sequence[str], mark: str) -> list[str]:
    """POSIX shell that prints the basics as ``key=value`` lines. One complete command per line: they travel as one
    line."""
    guard = "if command -v timeout >/dev/null 2>&1; then t='timeout 5'; else t=''; fi"
    smi = "nvidia-smi --query-gpu=index,name,memory.total,memory.free,compute_cap --format=csv,noheader,nounits"
    return [
        f"echo; echo '{mark} SH-BEGIN'",
        guard,
        'echo "arch=$(uname -m)"; echo "system=$(uname -s)"; echo "kernel=$(uname -r)"; echo "hostname=$(uname -n)"',
        'echo "home=$HOME"; echo "user=$(id -un 2>/dev/null)"; echo "uid=$(id -u 2>/dev/null)"; echo "shell=$SHELL"',
        'echo "libc=$(getconf GNU_LIBC_VERSION 2>/dev/null)"',
        'for f in /lib/ld-musl-*; do if [ -e "$f" ]; then '
        "echo \"libc=musl $($f 2>&1 | sed -n 's/^Version //p')\"; fi; done",
        "echo \"memory_kib=$(sed -n 's/^MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo 2>/dev/null)\"",
        'echo "cpus=$(grep -c ^processor /proc/cpuinfo 2>/dev/null)"',
        "echo \"os=$(sed -n 's/^PRETTY_NAME=//p' /etc/os-release 2>/dev/null)\"",
        'echo "pid1=$(cat /proc/1/comm 2>/dev/null)"; echo "container=$(cat /run/systemd/container 2>/dev/null)"',
        "if [ -e /.dockerenv ]; then echo container=docker; fi",
        'echo "linger=$(ls /var/lib/systemd/linger 2>/dev/null | grep -cx "$(id -un)")"',
        'if [ -e "/run/user/$(id -u)/systemd/private" ]; then echo user_manager=1; fi',
        "if [ -d /run/systemd/system ]; then echo systemd=1; fi",
        "if command -v sudo >/dev/null 2>&1; then if $t sudo -n true >/dev/null 2>&1 </dev/null; then echo "
        "sudo=1; fi; fi",
        "echo \"driver=$(sed -n 's/^NVRM version:.* \\([0-9][0-9]*\\.[0-9.]*\\) .*/\\1/p' "
        '/proc/driver/nvidia/version 2>/dev/null)"',
        f"if command -v nvidia-smi >/dev/null 2>&1; then $t {smi} </dev/null 2>/dev/null | sed 's/^/gpu=/'; fi",
        'echo "uv=$(command -v uv 2>/dev/null)"',
        'if [ -x "$HOME/.local/bin/uv" ]; then echo "uv=$HOME/.local/bin/uv"; fi',
        *(
            f'echo "disk={shlex.quote(path)} $(df -Pk {shlex.quote(path)} 2>/dev/null | sed -n 2p)"'
            if shlex.quote(path) == path
            else f'printf "disk=%s %s\\n" {shlex.quote(path)} "$(df -Pk {shlex.quote(path)} 2>/dev/null | sed -n 2p)"'
            for path in paths
        ),
        'echo "disk=$HOME $(df -Pk "$HOME" 2>/dev/null | sed -n 2p)"',
        f"echo '{mark} END'",
    ]


def bootstrap(venvs: Sequence[str], paths: Sequence[str], mark: str, *, use_python: bool = True) -> tuple[str, ...]:
    """``sh -c`` with one line (a csh login shell cannot take more): the first Python >= 3.8 runs stdin, else the
    fallback answers."""
    own = " ".join(
        '"$HOME"/' + shlex.quote(f"{venv[2:]}/bin/python")
        if venv.startswith("~/")
        else shlex.quote(f"{venv}/bin/python")
        for venv in venvs
    )
    check = '"$p" -I -S -c "import sys; sys.exit(sys.version_info < (3, 8))" </dev/null >/dev/null 2>&1'
    search = f'for p in {CANDIDATES} {own}; do if {check}; then exec "$p" -I -S -; fi; done'
    lines = ([search] if use_python else []) + fallback_lines(paths, mark)
    return ("sh", "-c", "; ".join(lines))


def cut(text: str, mark: str) -> tuple[str, str]:
    """The answer between the marks, whatever was printed around it.

    Returns:
        ("python" or "sh", body)

    Raises:
        UnreadableFact: no whole answer in ``text``.
    """
    match = re.search(rf"^{re.escape(mark)} (SH-)?BEGIN\r?\n(.*?)\r?\n{re.escape(mark)} END\r?$", text, re.S | re.M)
    if match is None:
        tail = text.strip().splitlines()[-5:]
        raise UnreadableFact(
            "the probe gave no answer",
            evidence=tail or ["(no output)"],
            hint="run the command again with the host's shell start-up files moved away",
        )
    return ("sh" if match.group(1) else "python", match.group(2))
