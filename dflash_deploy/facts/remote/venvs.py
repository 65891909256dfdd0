"""Virtual environments: identity, distributions, torch build and every native file's needs."""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Iterator
from typing import Any

from dflash_deploy.facts.remote.dists import distributions, kernel_owners, owners, torch_build
from dflash_deploy.facts.remote.elf import NotElf, open_elf
from dflash_deploy.facts.remote.fatbin import architectures
from dflash_deploy.facts.remote.linker import Linker
from dflash_deploy.facts.remote.tools import list_dir, read_bytes, read_text

MAX_FILES = 300000
SCAN_SECONDS = 12.0
IMPORTANT = (
    "sgl_kernel",
    "torch",
    "torchvision",
    "torchaudio",
    "flashinfer",
    "triton",
    "deep_gemm",
    "flash_attn",
    "nixl_ep",
    "vllm",
    "xgrammar",
)
"""Top-level folders whose native files must load for the server to start."""
GPU_CODE = ("sgl_kernel", "flash_attn", "deep_gemm", "vllm")
"""Top-level folders whose GPU architectures rules compare with the card. torch's own lie scattered over a gigabyte."""
GPU_SECONDS = 2.0
"""For the GPU code of one environment, all files together."""
TORCH_LIBRARIES = ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so")
TORCH_CUDA_LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so")
DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")


def places(home: str) -> list[str]:
    """Virtual environments in the usual places, newest first; a bounded look, not a search of the disk."""
    patterns = (
        ".venv",
        "venv",
        "*/.venv",
        "*/venv",
        ".virtualenvs/*",
        "venvs/*",
        "envs/*",
        "*/*/.venv",
        ".local/share/*/venv",
        ".local/share/*/*/venv",
    )
    roots = [glob.escape(home) + "/" + pattern for pattern in patterns]
    roots += ["/opt/" + p for p in ("venv", "*/.venv", "*/venv", "venvs/*")] + [
        "/srv/*/venv",
        "/workspace/.venv",
        "/workspace/*/.venv",
    ]
    found = {os.path.dirname(path) for root in roots for path in glob.glob(root + "/pyvenv.cfg")}
    return sorted(found, key=lambda path: -mtime(path))


def mtime(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def config(path: str) -> dict[str, str]:
    """Keys of pyvenv.cfg."""
    found = {}
    for line in (read_text(os.path.join(path, "pyvenv.cfg")) or "").splitlines():
        key, sep, value = line.partition("=")
        if sep:
            found[key.strip().lower()] = value.strip()
    return found


def identity(path: str) -> dict[str, Any]:
    """What ties the environment to one machine: the base interpreter, the recorded path, the scripts' first lines."""
    settings = config(path)
    home = settings.get("home", "")
    version = settings.get("version") or settings.get("version_info") or ""
    minor = ".".join(version.split(".")[:2])
    python = os.path.join(path, "bin/python")
    chain = []
    link = python
    for _ in range(8):
        if not os.path.islink(link):
            break
        target = os.readlink(link)
        link = target if os.path.isabs(target) else os.path.join(os.path.dirname(link), target)
        chain.append(target)
    base = os.path.dirname(os.path.realpath(home)) if home else ""
    stdlib = [os.path.join(base, folder, "python" + minor) for folder in ("lib", "lib64")] if home and minor else []
    # Debian's interpreter lives in /usr; a symlinked home keeps its library beside the link's target or beside the
    # link.
    if home and minor:
        stdlib.append(os.path.join(os.path.dirname(home), "lib", "python" + minor))
    foreign = []
    checked = 0
    recorded = None
    for name in list_dir(os.path.join(path, "bin"), 2000):
        head = read_bytes(os.path.join(path, "bin", name), 400) or b""
        if name == "activate":
            match = re.search(
                r"^\s*(?:export )?VIRTUAL_ENV=['\"]?([^'\"\n]+)", read_text(os.path.join(path, "bin", name)) or "", re.M
            )
            recorded = match.group(1) if match else None
        if not head.startswith(b"#!"):
            continue
        line = head.split(b"\n")[0][2:].strip().decode("utf-8", "replace")
        if line.startswith("/bin/sh") and b"'''exec'" in head:
            match = re.search(r"'''exec' ['\"]?([^'\"\n]+?)['\"]? ", head.decode("utf-8", "replace"))
            line = match.group(1) if match else line
        interpreter = line.split(" ")[0]
        if "python" in os.path.basename(interpreter):
            checked += 1
            real_dir = os.path.realpath(os.path.dirname(interpreter))
            if interpreter.startswith("/") and real_dir != os.path.realpath(os.path.join(path, "bin")):
                foreign.append(interpreter)
    return {
        "config": settings,
        "home": home or None,
        "home_exists": os.path.isdir(home) if home else None,
        "stdlib_exists": any(os.path.isfile(os.path.join(folder, "os.py")) for folder in stdlib) if stdlib else None,
        "version": version or None,
        "python": python,
        "python_links": chain,
        "python_exists": os.path.exists(python),
        "recorded_path": recorded,
        "scripts_checked": checked,
        "scripts_foreign": sorted(set(foreign))[:5],
        "scripts_foreign_count": len(foreign),
        "tools": {name: os.access(os.path.join(path, "bin", name), os.X_OK) for name in ("ninja", "pip", "uv", "nvcc")},
    }


def native_files(site: str, deadline: float, state: dict[str, Any]) -> Iterator[str]:
    """Every ``*.so*`` file below ``site``; ``state`` counts files and says when the walk was cut short."""
    stack = [site]
    while stack:
        folder = stack.pop()
        if time.monotonic() > deadline or state["files"] > MAX_FILES:
            state["truncated"] = True
            return
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    state["files"] += 1
                    name = entry.name
                    if name.endswith((".py", ".pyc", ".h", ".pyi", ".cuh", ".hpp")):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if name != "__pycache__" and not name.endswith(".dist-info"):
                            stack.append(entry.path)
                    elif (
                        ".so" in name
                        and (name.endswith(".so") or ".so." in name)
                        and entry.is_file(follow_symlinks=False)
                    ):
                        yield entry.path
        except OSError:
            continue


def version_key(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def scan(sites: list[str], markers: list[str]) -> dict[str, Any]:
    """Read every native file of the environment."""
    begun = time.monotonic()
    deadline = begun + SCAN_SECONDS
    linker = Linker(sites)
    state: dict[str, Any] = {"files": 0, "truncated": False}
    bad: list[dict[str, Any]] = []
    modules: list[dict[str, Any]] = []
    machines: dict[str, int] = {}
    needs: dict[str, tuple[tuple[int, ...], str, str, str]] = {}
    libraries = 0
    gpu_seconds = GPU_SECONDS
    shadowed = linker.shadowed()
    for site in sites:
        for path in native_files(site, deadline, state):
            relative = os.path.relpath(path, site)
            important = relative.split(os.sep)[0] in IMPORTANT
            libraries += 1
            try:
                elf = open_elf(path)
                machines[elf.machine] = machines.get(elf.machine, 0) + 1
                note_versions(elf.version_needs(), relative, needs)
                needed = elf.needed
                uses_torch = any(name.startswith(("libtorch", "libc10")) for name in needed)
                # Another copy of what these need may come first: see Linker.shadowed.
                nvidia = bool(shadowed) and relative.startswith("nvidia/")
                if not important and not uses_torch and not nvidia:
                    continue
                module = {
                    "path": relative,
                    "machine": elf.machine,
                    "needed": needed,
                    "unresolved": [
                        name for name in needed if name not in DRIVER and linker.resolve(name, path, elf) is None
                    ],
                    "driver_missing": [
                        name for name in needed if name in DRIVER and linker.resolve(name, path, elf) is None
                    ],
                    "important": important,
                }
                if uses_torch or nvidia or "libnccl.so.2" in needed:
                    module.update(linker.missing_symbols(path))
                if relative.split(os.sep)[0] in GPU_CODE:
                    started = time.monotonic()
                    gpu = architectures(elf, min(0.5, max(0.0, gpu_seconds)))
                    gpu_seconds -= time.monotonic() - started
                    if gpu is not None:
                        module["gpu"] = gpu
                modules.append(module)
            except NotElf as error:
                bad.append({"path": relative, "reason": str(error), "important": important})
    found = {marker: linker.torch_exports(marker.encode()) for marker in markers}
    return {
        "files": state["files"],
        "libraries": libraries,
        "truncated": state["truncated"],
        "seconds": round(time.monotonic() - begun, 3),
        "machines": machines,
        "needs": [
            {"library": item[1], "version": item[2], "path": item[3]} for item in sorted(needs.values(), reverse=True)
        ],
        "modules": modules,
        "shadowed": shadowed,
        "bad": bad[:50],
        "bad_count": len(bad),
        "markers": found if linker.torch_libraries() else {},
    }


def note_versions(
    wanted: dict[str, list[str]], relative: str, needs: dict[str, tuple[tuple[int, ...], str, str, str]]
) -> None:
    """Keep the highest version of each family (GLIBC, GLIBCXX, ...) and every version without a number."""
    for library, versions in wanted.items():
        for version in versions:
            family, _, digits = version.rpartition("_")
            if family not in ("GLIBC", "GLIBCXX", "CXXABI", "GCC") and not version.startswith("GLIBC_ABI"):
                continue
            key = family if digits[:1].isdigit() else version
            entry = (version_key(digits), library, version, relative)
            if key not in needs or entry[0] > needs[key][0]:
                needs[key] = entry


def runtime_versions() -> dict[str, Any]:
    """Highest symbol versions that the system's libstdc++ and libc define."""
    linker = Linker([])
    found: dict[str, Any] = {}
    for soname in ("libstdc++.so.6", "libc.so.6", "libnuma.so.1", "libgomp.so.1"):
        path = linker.cache.get(soname)
        if path is None or not os.path.exists(path):
            path = next(
                (os.path.join(d, soname) for d in linker.system_dirs if os.path.exists(os.path.join(d, soname))), None
            )
        if path is None:
            found[soname] = None
            continue
        try:
            definitions = open_elf(os.path.realpath(path)).version_definitions()
        except NotElf as error:
            found[soname] = {"path": path, "error": str(error)}
            continue
        best: dict[str, str] = {}
        for version in definitions:
            family, _, digits = version.rpartition("_")
            if not digits[:1].isdigit():
                best[version] = version
            elif family not in best or version_key(digits) > version_key(best[family]):
                best[family] = version
        found[soname] = {"path": path, "defines": best}
    return found


def torch_facts(sites: list[str]) -> dict[str, Any] | None:
    """torch's build, and what is wrong with each library that ``import torch`` loads ("" for nothing); None when
    neither the package nor its metadata is there."""
    for site in sites:
        build = torch_build(site)
        if build is None and not glob.glob(os.path.join(glob.escape(site), "torch-[0-9]*.dist-info")):
            continue
        found = build or {"version": None, "cuda": None, "broken": "its folder is missing"}
        libraries = {}
        for name in TORCH_LIBRARIES + (TORCH_CUDA_LIBRARIES if found.get("cuda") else ()):
            path = os.path.join(site, "torch/lib", name)
            try:
                open_elf(path)
                libraries[name] = ""
            except NotElf as error:
                libraries[name] = str(error) if os.path.lexists(path) else "missing"
        return dict(found, libraries=libraries)
    return None


def one(path: str, asked: bool, markers: list[str], deep: bool) -> dict[str, Any]:
    """Facts of one environment."""
    if not os.path.isdir(path):
        return {"path": path, "asked": asked, "exists": False}
    sites = sorted(glob.glob(os.path.join(glob.escape(path), "lib*", "python3*", "site-packages")))
    sites = list({os.path.realpath(site): site for site in sites}.values())
    conda = os.path.isdir(os.path.join(path, "conda-meta"))
    found: dict[str, Any] = {
        "path": path,
        "asked": asked,
        "exists": True,
        "kind": "conda" if conda else ("venv" if config(path) else "folder"),
    }
    found.update(identity(path))
    found["site_packages"] = sites
    found["dists"] = [dist for site in sites for dist in distributions(site)]
    found["torch"] = torch_facts(sites)
    found["owners"] = {key: value for site in sites for key, value in owners(site).items()}
    found["kernel_owners"] = [name for site in sites for name in kernel_owners(site)]
    found["elf"] = scan(sites, markers) if deep and sites else None
    return found


def venv_facts(home: str, asked: list[str], discover: bool, markers: list[str]) -> dict[str, Any]:
    """Environments asked for, in full; those found beside them get their files read only when nothing was asked for and
    they hold SGLang."""
    found = [one(path, True, markers, True) for path in asked]
    if discover:
        known = {os.path.realpath(path) for path in asked}
        others = [path for path in places(home) if os.path.realpath(path) not in known][:12]
        for path in others:
            holds = bool(glob.glob(os.path.join(glob.escape(path), "lib*/python3*/site-packages/sglang-*.dist-info")))
            found.append(one(path, False, markers, holds and not asked))
    return {"environments": found, "runtime": runtime_versions()}
