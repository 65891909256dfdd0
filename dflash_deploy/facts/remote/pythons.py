"""Python interpreters, package tools, compilers and CUDA toolkits on the host."""

from __future__ import annotations

import ast
import glob
import os
import re
import sys
import threading
from typing import Any

from dflash_deploy.facts.remote.tools import list_dir, read_text, run_tool, which

QUESTION = (
    "import sys\n"
    "print(ascii((tuple(sys.version_info[:3]), sys.prefix, sys.base_prefix, sys.path, getattr(sys, 'abiflags', ''),"
    " sys.implementation.name)))\n"
)
"""Imports nothing: with a dozen interpreters the imports would take longer than all the rest of the probe."""
NAME = re.compile(r"^python3(\.\d+)?$")


def candidates(home: str) -> list[str]:
    """Paths worth asking, each real interpreter once, system ones first."""
    folders = [folder for folder in os.environ.get("PATH", "").split(":") if folder]
    folders += ["/usr/bin", "/usr/local/bin", os.path.join(home, ".local/bin")]
    for pattern in (
        ".local/share/uv/python/*/bin",
        ".pyenv/versions/*/bin",
        "miniconda3/bin",
        "anaconda3/bin",
        "miniforge3/bin",
        "micromamba/bin",
    ):
        folders += sorted(glob.glob(os.path.join(home, pattern)))
    folders += sorted(glob.glob("/opt/*/bin")) + sorted(glob.glob("/usr/local/*/bin"))
    found: dict[str, str] = {}
    for folder in folders:
        # A venv's python is no interpreter of its own.
        # pyenv's shims are slow scripts that lead to interpreters found anyway.
        if os.path.isfile(os.path.join(os.path.dirname(folder.rstrip("/")), "pyvenv.cfg")) or folder.endswith(
            "/.pyenv/shims"
        ):
            continue
        for name in list_dir(folder):
            path = os.path.join(folder, name)
            if NAME.match(name) and os.access(path, os.X_OK):
                found.setdefault(os.path.realpath(path), path)
    return list(found.values())[:24]


def ask(path: str) -> dict[str, Any]:
    """What one interpreter says of itself, and what lies beside it."""
    answer = run_tool([path, "-I", "-S", "-c", QUESTION], 5)
    try:
        version, prefix, base, search, flags, implementation = ast.literal_eval(answer["out"].strip())
        minor = "python%d.%d" % (version[0], version[1])
        lib = next((str(folder) for folder in search if os.path.isfile(os.path.join(folder, "os.py"))), "")
    except (ValueError, SyntaxError, TypeError, IndexError, MemoryError, RecursionError):
        return {"path": path, "error": answer["status"] + ": " + (answer["err"] or answer["out"]).strip()[-300:]}
    include = os.path.join(str(base), "include", minor + str(flags))
    return {
        "path": path,
        "real": os.path.realpath(path),
        "version": list(version),
        "prefix": prefix,
        "base_prefix": base,
        "stdlib": lib,
        "include": include,
        "venv_module": os.path.isfile(os.path.join(lib, "venv/__init__.py")),
        "ensurepip_module": os.path.isfile(os.path.join(lib, "ensurepip/__init__.py")),
        "headers": os.path.isfile(os.path.join(include, "Python.h")),
        "externally_managed": os.path.isfile(os.path.join(lib, "EXTERNALLY-MANAGED")),
        "implementation": implementation,
    }


def interpreters(home: str) -> list[dict[str, Any]]:
    """All interpreters, newest first."""
    found: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda p=path: found.append(ask(p)), daemon=True) for path in candidates(home)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(8)
    return sorted(found, key=lambda item: (item.get("version") or [], item["path"]), reverse=True)


def tools() -> dict[str, str | None]:
    """Paths of programs that provisioning and JIT compilers use."""
    home = os.path.expanduser("~")
    extra = os.pathsep.join(
        [
            os.environ.get("PATH", ""),
            os.path.join(home, ".local/bin"),
            os.path.join(home, ".cargo/bin"),
            "/usr/local/bin",
        ]
    )
    names = (
        "uv",
        "pip3",
        "git",
        "gcc",
        "g++",
        "cc",
        "c++",
        "clang",
        "nvcc",
        "ptxas",
        "ninja",
        "make",
        "cmake",
        "systemctl",
        "loginctl",
        "sudo",
        "setsid",
        "tar",
        "sha256sum",
        "lspci",
        "ldconfig",
        "timeout",
        "flock",
        "curl",
    )
    return {name: which(name, extra) for name in names}


def toolchain(found: dict[str, str | None]) -> dict[str, Any]:
    """Compiler versions."""
    versions: dict[str, Any] = {}
    for name, arguments in (
        ("gcc", ["-dumpfullversion"]),
        ("g++", ["-dumpfullversion"]),
        ("clang", ["--version"]),
        ("ninja", ["--version"]),
        ("uv", ["--version"]),
    ):
        path = found.get(name)
        if path:
            match = re.search(r"\d+(\.\d+)+", run_tool([path, *arguments], 5)["out"])
            versions[name] = match.group() if match else "unreadable"
    return versions


def nvcc_version(program: str) -> str | None:
    match = re.search(r"release (\d+\.\d+)", run_tool([program, "--version"], 5)["out"])
    return match.group(1) if match else None


def toolkit(path: str) -> dict[str, Any]:
    """One CUDA toolkit folder: version, compiler, headers, assembler."""
    match = re.search(
        r'"cuda"\s*:\s*\{[^}]*"version"\s*:\s*"([\d.]+)"', read_text(os.path.join(path, "version.json")) or ""
    )
    version = match.group(1) if match else None
    if version is None:
        match = re.search(
            r"#define\s+CUDA_VERSION\s+(\d+)", read_text(os.path.join(path, "include/cuda.h"), 1 << 20) or ""
        )
        if match:
            version = "%d.%d" % (int(match.group(1)) // 1000, int(match.group(1)) % 1000 // 10)
    nvcc = os.path.join(path, "bin/nvcc")
    has_nvcc = os.access(nvcc, os.X_OK)
    return {
        "path": path,
        "real": os.path.realpath(path),
        "version": version or (nvcc_version(nvcc) if has_nvcc else None),
        "nvcc": nvcc if has_nvcc else None,
        "ptxas": os.access(os.path.join(path, "bin/ptxas"), os.X_OK),
        "headers": os.path.isfile(os.path.join(path, "include/cuda_runtime.h")),
        "fp8_header": os.path.isfile(os.path.join(path, "include/cuda_fp8.h")),
        "compat": os.path.exists(os.path.join(path, "compat/libcuda.so.1")),
    }


def cuda_facts(found: dict[str, str | None]) -> dict[str, Any]:
    """CUDA_HOME as it is set, and every toolkit."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = sorted(glob.glob("/usr/local/cuda*")) + sorted(glob.glob("/opt/cuda*"))
    if found.get("nvcc"):
        folders.append(os.path.dirname(os.path.dirname(os.path.realpath(str(found["nvcc"])))))
    if home and os.path.isdir(home):
        folders.insert(0, home)
    seen: dict[str, str] = {}
    for folder in folders:
        if os.path.isdir(folder):
            seen.setdefault(os.path.realpath(folder), folder)
    return {
        "cuda_home": home,
        "cuda_home_exists": bool(home) and os.path.isdir(str(home)),
        "toolkits": [toolkit(folder) for folder in seen.values()],
    }


def jit_caches(home: str) -> dict[str, Any]:
    """JIT caches that outlive an upgrade."""
    found = {}
    for name, path in (
        ("triton", os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton/cache")),
        ("flashinfer", os.path.join(home, ".cache/flashinfer")),
        ("torch_extensions", os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(home, ".cache/torch_extensions")),
        ("tvm_ffi", os.path.join(home, ".cache/tvm-ffi")),
        ("deep_gemm", os.path.join(home, ".cache/deep_gemm")),
        ("inductor", os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "/tmp/torchinductor_" + os.path.basename(home)),
    ):
        if os.path.isdir(path):
            found[name] = {"path": path, "entries": list_dir(path, 200)[:50]}
    return found


def python_facts(home: str) -> dict[str, Any]:
    """Interpreters, tools, compilers, toolkits and caches."""
    found = tools()
    return {
        "interpreters": interpreters(home),
        "tools": found,
        "versions": toolchain(found),
        "cuda": cuda_facts(found),
        "caches": jit_caches(home),
        "probe_python": "%d.%d.%d" % sys.version_info[:3],
    }
