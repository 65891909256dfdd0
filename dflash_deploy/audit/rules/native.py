"""The ABI audit: symbols, sonames, libc versions, machine and integrity of the environment's native files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dflash_deploy.audit.abi import demangle, old_string_abi, releases_with, torch_for_kernel
from dflash_deploy.audit.rules.base import (
    Case,
    Unseen,
    Verdict,
    dists,
    fail,
    label,
    modules,
    native,
    ok,
    rule,
    torch_cuda,
    unknown,
    warn,
)
from dflash_deploy.facts.parse import integer, pair, rows, section, texts, version_tuple
from dflash_deploy.model import Where

CUDA_SONAME = re.compile(
    r"^lib(cudart|nvrtc|cublas|cublasLt|cusparse|cusolver|cufft|nvJitLink|nccl|cudnn|cupti)\.so\.(\d+)"
)
ABI_REFS = (
    "sgl-project/sglang#30562",
    "kvcache-ai/sglang#33",
    "leonardodalinky/pytorch_fpsample#8",
    "opendatalab/MinerU#811",
)
NVIDIA_SYMBOL = re.compile(r"(__)?(cudnn|cublas|cusparse|cusolver|cufft|nvJitLink|nvrtc)")
KERNEL = re.compile(r"^sgl_kernel/")
ESSENTIAL = ("torch/", "sgl_kernel/")


def kernel_of(environment: Mapping[str, Any]) -> tuple[str, str] | None:
    """(distribution, version) of the kernel package."""
    have = dists(environment)
    for name in ("sglang-kernel", "sgl-kernel"):
        if name in have:
            return name, have[name]
    return None


def torch_text(environment: Mapping[str, Any]) -> str:
    return str(section(environment, "torch").get("version") or dists(environment).get("torch") or "none")


def variant(module: Mapping[str, Any], environment: Mapping[str, Any]) -> bool:
    """A build for another torch release than the installed one, as its file name says: never loaded here."""
    match = re.search(r"torch(\d)_?(\d{1,2})(?!\d)", str(module.get("path")).rpartition("/")[2])
    installed = pair(torch_text(environment))
    return bool(match) and installed is not None and (int(match.group(1)), int(match.group(2))) != installed  # type: ignore[union-attr]


def advice(environment: Mapping[str, Any], missing: list[str], kernel: bool) -> str:
    """Which torch would satisfy the symbols, and the way that keeps the release's own pair."""
    releases = releases_with(missing)
    built = torch_for_kernel(kernel_of(environment)[1]) if kernel and kernel_of(environment) else None  # type: ignore[index]
    target = built[0] if built else (releases[-1] if releases else "")
    if target:
        other = f"the build for torch {torch_text(environment)}"
        return f"keep the release's own pair: torch {target} for this build, or {other}"
    return f"rebuild or reinstall the package for torch {torch_text(environment)}"


@rule("extension-symbols-resolve", Where.VENV, references=ABI_REFS, weight=8)
def extension_symbols_resolve(case: Case) -> Iterator[Verdict]:
    """Every undefined c10, at, torch and caffe2 symbol of every native extension must be exported by the torch
    libraries beside it. A mismatch is an ABI mismatch: the extension was built for another torch, and importing it ends
    with "undefined symbol"."""
    for environment in case.environments:
        elf = native(environment)
        read = [m for m in modules(environment) if "missing_count" in m and not variant(m, environment)]
        broken = False
        for module in read:
            missing = [
                name
                for name in texts(module.get("missing"))
                if not name.startswith("nccl") and not NVIDIA_SYMBOL.match(name) and not old_string_abi(name)
            ]
            if not missing:
                continue
            severe = bool(module.get("important"))
            package = str(module.get("path")).split("/")[0]
            if not severe and any(
                not m.get("missing_count") for m in read if str(m.get("path")).split("/")[0] == package
            ):
                continue
            broken = True
            releases = releases_with(missing)
            evidence = [f"{name}  {demangle(name)}" for name in missing[:5]]
            if (integer(module.get("missing_count")) or 0) > 5:
                evidence.append(f"... {module.get('missing_count')} in all")
            evidence.append(
                f"installed torch: {torch_text(environment)}"
                + (f"; exported by torch {', '.join(releases)}" if releases else "")
            )
            kernel = bool(KERNEL.match(str(module.get("path"))))
            what = f"{len(missing)} symbol(s) that torch {torch_text(environment)} does not export"
            found = f"{module.get('path')} needs {what}"
            yield (
                fail(found, evidence, advice(environment, missing, kernel))
                if severe
                else warn(found, evidence, advice(environment, missing, kernel))
            )
        if elf.get("truncated"):
            yield unknown(f"{label(environment)}: the walk was cut short after {elf.get('files')} files")
        elif not broken and read:
            yield ok(
                f"{label(environment)}: {sum(integer(m.get('checked')) or 0 for m in read)} symbols of "
                f"{len(read)} extensions resolve"
            )


@rule(
    "cxx11-abi-matches",
    Where.VENV,
    references=("sgl-project/sglang#5100",),
    weight=7,
    explains=("extension-symbols-resolve",),
)
def cxx11_abi_matches(case: Case) -> Iterator[Verdict]:
    """Extensions must use the same std::string as torch (_GLIBCXX_USE_CXX11_ABI). The old one shows as ``Ss`` in
    mangled names where torch exports ``__cxx11::basic_string``."""
    for environment in case.environments:
        read = [m for m in modules(environment) if "missing_count" in m and not variant(m, environment)]
        broken = False
        for module in read:
            old = [name for name in texts(module.get("missing")) if old_string_abi(name)]
            if old:
                broken = True
                yield (fail if module.get("important") else warn)(
                    f"{module.get('path')} was built with the old C++ string ABI, torch with the new one",
                    [f"{name}  {demangle(name)}" for name in old[:5]],
                    "rebuild it with -D_GLIBCXX_USE_CXX11_ABI=1, or take the wheel for this torch",
                )
        if read and not broken:
            yield ok("one C++ string ABI throughout")


@rule(
    "libnuma-present",
    Where.HOST,
    references=("odysseus-dev/odysseus#6257",),
    weight=6,
    explains=("shared-libraries-resolve",),
)
def libnuma_present(case: Case) -> Iterator[Verdict]:
    """Kernel packages 0.3.21 to 0.4.3 link libnuma.so.1, which no pip package provides; the visible error is "Could not
    load any common_ops library"."""
    for environment in case.environments:
        users = [m for m in modules(environment) if "libnuma.so.1" in texts(m.get("needed"))]
        if not users:
            continue
        if any("libnuma.so.1" in texts(m.get("unresolved")) for m in users):
            container = Where.CONTAINER if case.facts.container else Where.HOST
            yield fail(
                "libnuma.so.1 is missing",
                [f"needed by {m.get('path')}" for m in users[:3]],
                "apt-get install libnuma1 (dnf install numactl-libs)",
                container,
            )
        else:
            yield ok("libnuma.so.1 is there")


@rule(
    "cuda-libraries-resolve",
    Where.VENV,
    references=(
        "vllm-project/vllm#31018",
        "sgl-project/sglang-omni#620",
        "kaito-project/kaito#2086",
        "sgl-project/sglang#29646",
        "sgl-project/sglang#2584",
        "vllm-project/vllm#52300",
    ),
    weight=6,
)
def cuda_libraries_resolve(case: Case) -> Iterator[Verdict]:
    """Every CUDA soname (libcudart.so.12, libnvrtc.so.13, ...) that a native file needs must be found through its
    RPATH, the NVIDIA packages beside torch or the system. One that is missing was built for another CUDA major than
    torch."""
    for environment in case.environments:
        cuda = torch_cuda(environment)
        groups: dict[str, list[str]] = {}
        for module in modules(environment):
            if not module.get("important") and str(module.get("path")).split("/")[0] not in ("nixl_ep", "flash_attn"):
                continue
            for name in filter(CUDA_SONAME.match, texts(module.get("unresolved"))):
                groups.setdefault(name, []).append(str(module.get("path")))
        for name, users in groups.items():
            match = CUDA_SONAME.match(name)
            assert match is not None
            major = match.group(2) if match.group(1) in ("cudart", "nvrtc", "cublas", "cublasLt") else ""
            evidence = [f"needed by {path}" for path in users[:4]]
            evidence.append(f"torch {torch_text(environment)} is for CUDA {cuda or 'none'}")
            if major and cuda and major != cuda.split(".")[0]:
                kernel = kernel_of(environment)
                built = torch_for_kernel(kernel[1]) if kernel and any(KERNEL.match(path) for path in users) else None
                remedy = (
                    f"this build belongs to a CUDA {major} stack"
                    + (f" (torch {built[0]})" if built else "")
                    + f"; take the build for CUDA {cuda.split('.')[0]}, or move torch"
                )
            else:
                remedy = f"install the NVIDIA runtime package with {name} in this environment"
            yield fail(f"{name} is not found", evidence, remedy)
        if not groups:
            yield ok("every CUDA library resolves")


@rule("shared-libraries-resolve", Where.VENV, weight=9)
def shared_libraries_resolve(case: Case) -> Iterator[Verdict]:
    """Every other soname of the files that the server loads must resolve."""
    for environment in case.environments:
        torch_missing = any(str(m.get("path")).startswith("torch/lib/libtorch") for m in modules(environment)) is False
        found = False
        for module in modules(environment):
            path = str(module.get("path"))
            # Plug-ins that their package loads itself, after its main library.
            if not module.get("important") or path.startswith(("triton/plugins/", "xgrammar/")):
                continue
            names = [
                name
                for name in texts(module.get("unresolved"))
                if not CUDA_SONAME.match(name) and name != "libnuma.so.1"
            ]
            torch_names = [name for name in names if name.startswith(("libtorch", "libc10"))]
            if names:
                found = True
                remedy = (
                    "install torch in this environment"
                    if torch_names and torch_missing
                    else "install the package that provides it"
                )
                essential = path.startswith(("sgl_kernel/", "torch/lib/libtorch", "torch/lib/libc10", "torch/_C"))
                yield (fail if essential else warn)(f"{path}: {', '.join(names[:4])} not found", (), remedy)
        if not found:
            yield ok("every other library resolves")


@rule(
    "glibc-new-enough",
    Where.HOST,
    references=("huggingface/lerobot#2219", "HuguesTHOMAS/KPConv-PyTorch#250"),
    weight=3,
    explains=("extension-symbols-resolve",),
)
def glibc_new_enough(case: Case) -> Iterator[Verdict]:
    """The symbol versions that native files ask of glibc and libstdc++ must be defined there; files copied from a newer
    machine ask for more."""
    runtime = case.see("venvs", "runtime")
    for environment in case.environments:
        needs = rows(native(environment).get("needs"))
        broken = False
        for need in needs:
            version, library = str(need.get("version")), str(need.get("library"))
            defines = section(runtime, library, "defines")
            family, _, digits = version.rpartition("_")
            have = str(defines.get(version if version.startswith("GLIBC_ABI") else family) or "")
            if library == "libc.so.6" and not have and case.facts.glibc and family == "GLIBC":
                have = f"GLIBC_{case.facts.glibc[0]}.{case.facts.glibc[1]}"
            if version.startswith("GLIBC_ABI"):
                bad = bool(defines) and version not in defines
            elif not have:
                continue
            else:
                bad = (version_tuple(digits) or ()) > (version_tuple(have.rpartition("_")[2]) or ())
            if bad:
                broken = True
                yield fail(
                    f"{need.get('path')} needs {version} of {library}",
                    [f"the host's {library} goes up to {have or 'an older ABI'}"],
                    "a newer distribution or container, or a build on this host",
                )
        if needs and not broken:
            yield ok("glibc and libstdc++ are new enough for every native file")


@rule(
    "torch-complete",
    Where.VENV,
    weight=4,
    explains=(
        "extension-symbols-resolve",
        "shared-libraries-resolve",
        "native-files-whole",
        "cxx11-abi-matches",
        "cuda-libraries-resolve",
        "nccl-matches-torch",
    ),
)
def torch_complete(case: Case) -> Iterator[Verdict]:
    """torch's own files must be there and whole: version.py and the libraries that importing it loads. An interrupted
    install or a full disk leaves the metadata without them."""
    for environment in case.environments:
        if "torch" not in environment:
            raise Unseen(f"{label(environment)}: torch was not looked at")
        torch = environment["torch"]
        if torch is None:
            continue
        if not isinstance(torch, Mapping) or not isinstance(torch.get("libraries"), Mapping):
            yield unknown(f"{label(environment)}: torch's libraries were not looked at")
            continue
        wrong = [f"torch/lib/{name}: {problem}" for name, problem in torch["libraries"].items() if problem]
        if torch.get("broken"):
            wrong.insert(0, str(torch["broken"]))
        if wrong:
            version = torch.get("version") or dists(environment).get("torch") or ""
            pin = f"torch=={version}" if version else "torch"
            yield fail(
                f"torch {version} is not whole: {wrong[0]}",
                wrong,
                f"pip install --force-reinstall --no-deps {pin}, from the same index",
            )
        else:
            yield ok(f"torch {torch.get('version')} is whole")


@rule("native-files-whole", Where.VENV, weight=5, explains=("extension-symbols-resolve", "shared-libraries-resolve"))
def native_files_whole(case: Case) -> Iterator[Verdict]:
    """Native files must be whole and for this machine: not truncated by an interrupted install, not of another
    architecture."""
    for environment in case.environments:
        elf = native(environment)
        broken = False
        for item in rows(elf.get("bad")):
            path, reason = str(item.get("path")), str(item.get("reason"))
            if item.get("important"):
                broken = True
                # Elsewhere a text file may be named .so: a linker script.
                sure = "no ELF header" not in reason or path.startswith(ESSENTIAL)
                yield (fail if sure else warn)(f"{path}: {reason}", (), "reinstall the package")
        other = [
            m
            for m in modules(environment)
            if m.get("important") and case.facts.arch and m.get("machine") not in (case.facts.arch, None)
        ]
        essential = [m for m in other if str(m.get("path")).startswith(ESSENTIAL)]
        if essential:
            broken = True
            yield fail(
                f"native files for {essential[0].get('machine')} on {case.facts.arch}",
                [str(m.get("path")) for m in essential[:3]],
                "rebuild the environment on this host",
            )
        if not broken:
            yield ok("no damaged or foreign native files")


@rule("kernel-files-present", Where.VENV, references=("PyPI sglang 0.5.9 to 0.5.10",), weight=6)
def kernel_files_present(case: Case) -> Iterator[Verdict]:
    """An installed kernel package must have its compiled operators. Uninstalling sgl-kernel after sglang-kernel was
    installed over it (or the other way round) removes files that both own and leaves the metadata."""
    for environment in case.environments:
        kernel = kernel_of(environment)
        if kernel is None:
            continue
        paths = [str(item.get("path")) for item in (*modules(environment), *rows(native(environment).get("bad")))]
        if any(KERNEL.match(path) and "common_ops" in path for path in paths):
            yield ok(f"{kernel[0]} {kernel[1]} has its operators")
        elif native(environment).get("truncated"):
            yield unknown(f"{label(environment)}: the walk was cut short")
        else:
            yield fail(
                f"{kernel[0]} {kernel[1]} is installed without its operators",
                ["no sgl_kernel/**/common_ops*.so"],
                f"pip install --force-reinstall --no-deps {kernel[0]}=={kernel[1]}",
            )


@rule("nvidia-libraries-consistent", Where.VENV, weight=6, explains=("cuda-libraries-resolve",))
def nvidia_libraries_consistent(case: Case) -> Iterator[Verdict]:
    """The NVIDIA libraries of the environment must find each other's symbols. LD_LIBRARY_PATH comes before the
    environment's own copies: a system toolkit of another minor release on it gives "undefined symbol:
    __nvJitLinkComplete_12_4", or cuDNN and cuBLAS of another release."""
    for environment in case.environments:
        elf = native(environment)
        shadowed = [
            f"{item.get('soname')}: {item.get('by')} comes before {item.get('ours')}"
            for item in rows(elf.get("shadowed"))
        ]
        missing = {
            f"{module.get('path')} needs {name}"
            for module in modules(environment)
            for name in texts(module.get("missing"))
            if NVIDIA_SYMBOL.match(name)
        }
        remedy = "reinstall the NVIDIA packages that torch requires"
        if shadowed:
            remedy = "unset LD_LIBRARY_PATH for the service: the environment brings its own libraries"
        if missing:
            evidence = [*sorted(missing)[:4], *shadowed[:4]]
            yield fail("NVIDIA libraries of different releases would be loaded together", evidence, remedy)
        elif shadowed:
            message = "LD_LIBRARY_PATH puts other NVIDIA libraries before the environment's own"
            yield warn(message, shadowed[:6], remedy)
        elif "shadowed" not in elf:
            yield unknown(f"{label(environment)}: LD_LIBRARY_PATH was not compared")
        else:
            yield ok("the environment's own NVIDIA libraries are loaded")


@rule(
    "nccl-matches-torch",
    Where.VENV,
    references=("vllm-project/vllm#4195", "rwth-i6/returnn#1802", "pytorch/pytorch#186591"),
    weight=9,
)
def nccl_matches_torch(case: Case) -> Iterator[Verdict]:
    """The libnccl that would be loaded must define every nccl symbol that torch asks for."""
    for environment in case.environments:
        broken = False
        users = [m for m in modules(environment) if "libnccl.so.2" in texts(m.get("needed")) and "missing_count" in m]
        for module in users:
            names = [name for name in texts(module.get("missing")) if name.startswith("nccl")]
            if names:
                broken = True
                owners = texts(section(environment, "owners").get("nvidia/nccl/lib/libnccl.so.2"))
                yield fail(
                    f"libnccl.so.2 lacks {', '.join(names[:3])}, which {module.get('path')} needs",
                    [
                        f"owned by: {', '.join(owners) or 'no package of this environment'}",
                        f"torch {torch_text(environment)}",
                    ],
                    "reinstall the nvidia-nccl package that torch requires, and remove any other",
                )
        if users and not broken:
            yield ok("libnccl defines what torch needs")
