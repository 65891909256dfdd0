"""Where the dynamic loader would find a soname, and whether a torch extension's symbols are defined by what it
loads."""

from __future__ import annotations

import glob
import os
import re
import struct
from typing import Any

from dflash_deploy.facts.remote.elf import Elf, NotElf, gnu_hash, open_elf
from dflash_deploy.facts.remote.tools import list_dir, read_bytes, read_text

DEFAULT_DIRS = (
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
)
TORCH_SYMBOL = re.compile(rb"_ZT?[ISVT]?N[rVKRO]*(3c10|4c10d|2at|5torch|6caffe2)|aoti_torch_|torch_|THP")
"""Names in torch's namespaces: functions with any qualifier, type information and vtables, and its C functions."""
LIBRARY_PREFIXES = ("nccl", "cudnn", "cublas", "cusparse", "cusolver", "cufft", "nvJitLink", "__nvJitLink", "nvrtc")
"""Symbols of these C libraries are looked up in the copy that the process would load."""
OTHER = tuple(prefix.encode() for prefix in LIBRARY_PREFIXES)


def loader_cache(path: str = "/etc/ld.so.cache") -> dict[str, str]:
    """soname -> path from ld.so.cache (the ``glibc-ld.so.cache1.1`` part); empty when it cannot be read."""
    data = read_bytes(path, 16 << 20) or b""
    start = data.find(b"glibc-ld.so.cache1.1")
    found: dict[str, str] = {}
    if start < 0:
        return found
    try:
        count = struct.unpack_from("<I", data, start + 20)[0]
        for index in range(min(count, 200000)):
            _, key, value = struct.unpack_from("<iII", data, start + 48 + index * 24)
            # Offsets count from the start of this part.
            name = data[start + key : data.index(b"\0", start + key)].decode("utf-8", "replace")
            place = data[start + value : data.index(b"\0", start + value)].decode("utf-8", "replace")
            found.setdefault(name, place)
    except (struct.error, ValueError):
        pass
    return found


class Linker:
    """Resolves sonames for the libraries of one environment."""

    def __init__(self, site_packages: list[str]) -> None:
        self.site_packages = site_packages
        self.cache = loader_cache()
        self.search = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
        self.torch_dirs = [os.path.join(site, "torch/lib") for site in site_packages]
        self.nvidia_dirs = [
            folder
            for site in site_packages
            for folder in sorted(glob.glob(os.path.join(glob.escape(site), "nvidia/*/lib")))
        ]
        self.system_dirs = list(DEFAULT_DIRS)
        for conf in sorted(glob.glob("/etc/ld.so.conf.d/*.conf")):
            self.system_dirs += [line.strip() for line in (read_text(conf) or "").splitlines() if line.startswith("/")]
        self.files: dict[str, Elf | None] = {}
        self.real: dict[str, str] = {}
        self.places: dict[tuple[str, str, str], tuple[str, str] | None] = {}
        self.torch_names: dict[bytes, bool] = {}
        self.torch_loaded: list[Elf] | None = None

    def realpath(self, path: str) -> str:
        if path not in self.real:
            self.real[path] = os.path.realpath(path)
        return self.real[path]

    def shadowed(self) -> list[dict[str, str]]:
        """NVIDIA libraries of the environment that ``LD_LIBRARY_PATH`` puts another copy before."""
        found = []
        for ours in self.nvidia_dirs:
            for name in list_dir(ours, 200):
                if ".so." not in name:
                    continue
                for folder in self.search:
                    path = os.path.join(folder, name)
                    if os.path.exists(path) and os.path.realpath(path) != os.path.realpath(os.path.join(ours, name)):
                        found.append({"soname": name, "by": path, "ours": os.path.join(ours, name)})
                        break
        return found[:50]

    def open(self, path: str) -> Elf | None:
        """The library, once per real path; None when it is not readable as ELF."""
        real = self.realpath(path)
        if real not in self.files:
            try:
                self.files[real] = open_elf(real)
            except NotElf:
                self.files[real] = None
        return self.files[real]

    def resolve(self, soname: str, path: str, elf: Elf) -> tuple[str, str] | None:
        """(file, how) that satisfies ``soname`` for the library at ``path``. ``preloaded``: torch loads it first (it
        opens its own libraries and the NVIDIA ones)."""
        origin = self.realpath(os.path.dirname(path))
        key = (soname, origin, ":".join(elf.runpath or elf.rpath))
        if key not in self.places:
            self.places[key] = self._resolve(soname, origin, elf)
        return self.places[key]

    def _resolve(self, soname: str, origin: str, elf: Elf) -> tuple[str, str] | None:
        if "/" in soname:
            return (soname, "path") if os.path.exists(soname) else None
        steps = [
            ("rpath", [] if elf.runpath else elf.rpath),
            ("LD_LIBRARY_PATH", self.search),
            ("runpath", elf.runpath),
        ]
        for how, folders in steps:
            for folder in folders:
                place = os.path.join(folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin), soname)
                if os.path.exists(place):
                    return os.path.normpath(place), how
        for folder in self.torch_dirs + self.nvidia_dirs:
            place = os.path.join(folder, soname)
            if os.path.exists(place):
                return place, "preloaded"
        place = self.cache.get(soname, "")
        if place and os.path.exists(place):
            return place, "system"
        for folder in self.system_dirs:
            place = os.path.join(folder, soname)
            if os.path.exists(place):
                return place, "system"
        return None

    def closure(self, path: str, limit: int = 400) -> tuple[list[Elf], list[str]]:
        """Libraries that loading ``path`` brings in, itself first, and sonames that nothing provides."""
        first = self.open(path)
        if first is None:
            return [], []
        order, missing = [first], []
        queue = [(path, first)]
        seen = set()
        while queue and len(order) < limit:
            place, elf = queue.pop(0)
            for soname in elf.needed:
                if soname in seen:
                    continue
                seen.add(soname)
                found = self.resolve(soname, place, elf)
                if found is None:
                    missing.append(soname)
                    continue
                library = self.open(found[0])
                if library is not None:
                    order.append(library)
                    queue.append((found[0], library))
        return order, missing

    def torch_libraries(self) -> list[Elf]:
        """The libraries that ``import torch`` makes visible, those with most symbols first."""
        if self.torch_loaded is None:
            order = ("libtorch_cpu.so", "libc10.so", "libtorch_python.so", "libtorch_cuda.so", "libc10_cuda.so")
            found = []
            for folder in self.torch_dirs:
                paths = glob.glob(os.path.join(glob.escape(folder), "lib*.so"))
                for path in sorted(
                    paths, key=lambda p: (order.index(os.path.basename(p)) if os.path.basename(p) in order else 9, p)
                ):
                    elf = self.open(path)
                    if elf is not None:
                        found.append(elf)
            self.torch_loaded = found
        return self.torch_loaded

    def torch_exports(self, name: bytes) -> bool:
        """Some torch library defines ``name``."""
        if name not in self.torch_names:
            hashed = gnu_hash(name)
            self.torch_names[name] = any(self._exports(library, name, hashed) for library in self.torch_libraries())
        return self.torch_names[name]

    def missing_symbols(self, path: str, limit: int = 50) -> dict[str, Any]:
        """Strong undefined symbols of torch and of the C libraries above that nothing which ``path`` loads defines:
        ``{checked, missing: [...], missing_count}``."""
        first = self.open(path)
        if first is None:
            return {"checked": 0, "missing": [], "missing_count": 0}
        # torch's own libraries come from one wheel: only what they ask of others is looked up.
        own = os.path.basename(os.path.dirname(path)) == "lib" and os.path.dirname(path) in self.torch_dirs
        libraries: list[Elf] | None = None
        checked = 0
        missing = []
        for name, weak in first.undefined():
            other = name.startswith(OTHER)
            if weak or not (other or (not own and TORCH_SYMBOL.match(name))):
                continue
            checked += 1
            if not other and self.torch_exports(name):
                continue
            if libraries is None:
                libraries = self.closure(path)[0]
            hashed = gnu_hash(name)
            if not any(self._exports(library, name, hashed) for library in libraries):
                missing.append(name.decode("utf-8", "backslashreplace"))
        return {"checked": checked, "missing": sorted(missing)[:limit], "missing_count": len(missing)}

    @staticmethod
    def _exports(library: Elf, name: bytes, hashed: int) -> bool:
        try:
            return library.exports(name, hashed)
        except NotElf:
            return False
