"""Installed distributions against each other, and the identity of the environment itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from packaging.markers import InvalidMarker, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from dflash_deploy.audit.abi import torch_for_kernel
from dflash_deploy.audit.rules.base import (
    Case,
    Verdict,
    dists,
    fail,
    normal,
    ok,
    rule,
    torch_cuda,
    unknown,
    version_of,
    warn,
)
from dflash_deploy.audit.stacks import STACKS, dotted
from dflash_deploy.facts.parse import pair, rows, section, texts, version_tuple
from dflash_deploy.model import Where

CU_TAG = re.compile(r"-cu(\d\d)$")
COLLIDES = re.compile(
    r"^nvidia-(nccl|cudnn|cublas|cuda-runtime|cuda-nvrtc|cuda-cupti|cufft|curand|cusolver|cusparse|nvjitlink|nvtx|nvshmem|cusparselt)-cu"
)
"""Packages whose two flavours own the same files or are loaded into one process."""


@rule(
    "one-kernel-package",
    Where.VENV,
    references=("PyPI sglang 0.5.9 to 0.5.10",),
    weight=7,
    explains=("extension-symbols-resolve", "torch-matches-kernel"),
)
def one_kernel_package(case: Case) -> Iterator[Verdict]:
    """Only one of sgl-kernel and sglang-kernel may be installed: the distribution was renamed at 0.5.10 and both own
    the import package sgl_kernel."""
    for environment in case.environments:
        have = dists(environment)
        both = [f"{name} {have[name]}" for name in ("sgl-kernel", "sglang-kernel") if name in have]
        if len(both) > 1:
            yield fail(
                "two distributions own sgl_kernel",
                both,
                "pip uninstall sgl-kernel sglang-kernel, then install the one that the SGLang release pins",
            )
        elif both:
            yield ok(both[0])


@rule("torch-matches-kernel", Where.VENV, references=("PyPI sglang-kernel 0.4.1 to 0.4.10",), weight=9)
def torch_matches_kernel(case: Case) -> Iterator[Verdict]:
    """A kernel package is built against one torch release (table read from published wheels). The symbols decide; this
    names the pair when they could not be read."""
    for environment in case.environments:
        have = dists(environment)
        kernel = have.get("sglang-kernel") or have.get("sgl-kernel")
        torch = have.get("torch")
        if not kernel or not torch:
            continue
        built = torch_for_kernel(kernel)
        if built is None:
            yield unknown(f"kernel {kernel} is not in the table")
        elif pair(built[0]) != pair(torch):
            yield warn(
                f"kernel {kernel} is built against torch {built[0]}, installed is {torch}",
                (),
                f"torch {built[0]}, or the kernel for torch {torch}",
            )
        else:
            yield ok(f"kernel {kernel} with torch {torch}")


@rule(
    "one-cuda-major",
    Where.VENV,
    references=(
        "sgl-project/sglang#22833",
        "sgl-project/sglang#29425",
        "vllm-project/vllm#42338",
        "z-lab/dflash#123",
        "pytorch/pytorch#186591",
        "rwth-i6/returnn#1802",
    ),
    weight=5,
    explains=("cuda-libraries-resolve", "nccl-matches-torch", "requirements-satisfied", "torch-flavour-fits-release"),
)
def one_cuda_major(case: Case) -> Iterator[Verdict]:
    """One environment, one CUDA major: nvidia-*-cu12 beside nvidia-*-cu13 overwrite each other's files (both NCCL
    packages own nvidia/nccl/lib/libnccl.so.2), and two runtimes in one process crash. Minor releases may differ."""
    for environment in case.environments:
        have = dists(environment)
        cuda = torch_cuda(environment)
        major = cuda.split(".")[0]
        tagged: dict[str, list[str]] = {}
        for name, version in have.items():
            match = CU_TAG.search(name)
            local = re.search(r"\+cu(\d\d)\d*", version)
            if match and COLLIDES.match(name):
                tagged.setdefault(match.group(1), []).append(f"{name} {version}")
            elif local and name != "torch":
                tagged.setdefault(local.group(1), []).append(f"{name} {version}")
        shared = [
            f"{path}: {', '.join(map(str, names))}"
            for path, names in section(environment, "owners").items()
            if isinstance(names, list) and len(names) > 1
        ]
        foreign = [item for tag, items in tagged.items() if major and tag != major for item in items]
        if shared or foreign or len(tagged) > 1:
            evidence = [
                *shared,
                *[f"CUDA {tag}: {', '.join(sorted(items)[:6])}" for tag, items in sorted(tagged.items())],
                f"torch is for CUDA {cuda or 'none'}",
            ]
            yield fail(
                "packages of two CUDA majors in one environment",
                evidence,
                f"pip uninstall the packages that are not for CUDA {major or '<torch>'}, then reinstall "
                f"torch's own (a constraints file keeps the resolver there)",
            )
        elif tagged or cuda:
            yield ok(f"CUDA {cuda or next(iter(tagged))} throughout")
        toolkit = next(
            (str(item.get("version")) for item in case.items("python", "cuda", "toolkits") if item.get("version")),
            "",
        )
        path = case.variable("LD_LIBRARY_PATH")
        if major and toolkit and toolkit.split(".")[0] != major and ("cuda" in path or "deep-gemm" in have):
            yield fail(
                f"torch is for CUDA {cuda}, the toolkit that JIT compilers use is {toolkit}",
                [f"LD_LIBRARY_PATH={path}"] if path else [],
                f"CUDA_HOME to a CUDA {major} toolkit, or torch from the index for CUDA {toolkit.split('.')[0]}",
            )


@rule(
    "torch-flavour-fits-release",
    Where.VENV,
    references=("sgl-project/sglang#25069",),
    weight=6,
    explains=("requirements-satisfied", "cuda-libraries-resolve", "extension-symbols-resolve"),
)
def torch_flavour_fits_release(case: Case) -> Iterator[Verdict]:
    """An SGLang release works with one torch release and CUDA flavour: 0.5.10.post1 and older with torch 2.9.1 for CUDA
    12.8, 0.5.11 and newer with a CUDA 13 torch (cuda-python>=13; the kernel package links libcudart.so.13)."""
    for environment in case.environments:
        sglang = version_of(environment, "sglang")
        if not sglang:
            continue
        rows_ = [stack for stack in STACKS if stack.sglang == sglang and stack.device == "cuda"]
        cuda = torch_cuda(environment)
        if not rows_:
            yield unknown(f"SGLang {sglang} is not in the table")
        elif not cuda:
            continue
        elif cuda.split(".")[0] != rows_[0].cuda.split(".")[0]:
            yield fail(
                f"SGLang {sglang} belongs to CUDA {rows_[0].cuda}, torch is "
                f"{section(environment, 'torch').get('version')} for CUDA {cuda}",
                [f"its kernel package is {rows_[0].kernel}"],
                "the CUDA 13 stack (driver >= 580), or SGLang 0.5.10.post1 with torch 2.9.1 for CUDA 12.8",
            )
        else:
            yield ok(f"SGLang {sglang} with torch for CUDA {cuda}")


@cache
def parsed(text: str, python: str, machine: str) -> Requirement | None:
    """A requirement of the metadata; None when it does not apply to this Python and machine, or is none. Cached, as the
    hosts of a fleet ask the same."""
    values = {
        "python_version": ".".join(python.split(".")[:2]),
        "python_full_version": python,
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_version": "",
        "implementation_version": python,
        "extra": "",
    }
    try:
        found = Requirement(text)
        return found if found.marker is None or found.marker.evaluate(values) else None
    except (InvalidRequirement, InvalidMarker, InvalidVersion, UndefinedEnvironmentName):
        return None


def requirements(environment: Mapping[str, Any], case: Case, dist: str) -> list[Requirement]:
    """What an installed distribution asks for here."""
    python, machine = str(environment.get("version") or "3.12.0"), case.facts.arch or "x86_64"
    wanted = [
        text
        for item in rows(environment.get("dists"))
        if normal(str(item.get("name"))) == dist
        for text in texts(item.get("requires"))
    ]
    return [found for text in wanted if (found := parsed(text, python, machine)) is not None]


def satisfied(requirement: Requirement, version: str) -> bool:
    """A version that is no version satisfies nothing."""
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


@rule("requirements-satisfied", Where.VENV, references=("sgl-project/sglang#25069",), weight=12)
def requirements_satisfied(case: Case) -> Iterator[Verdict]:
    """What the installed SGLang, torch and kernel packages require must be installed in the versions that they ask for.
    On a CPU stack, CUDA packages are left out on purpose."""
    for environment in case.environments:
        have = dists(environment)
        problems = [
            f"{dist} {have[dist]} wants {wanted.name}{wanted.specifier}, installed is {have[normal(wanted.name)]}"
            for dist in ("sglang", "torch", "sglang-kernel", "sgl-kernel", "flashinfer-python")
            for wanted in requirements(environment, case, dist)
            if normal(wanted.name) in have and not satisfied(wanted, have[normal(wanted.name)])
        ]
        if problems:
            yield warn(
                "installed versions are not those that the packages ask for",
                problems[:12],
                "install the stack's own pins (dflash-deploy stacks)",
            )
        elif "sglang" in have:
            yield ok("what is installed is in the versions asked for")


def requirement_of(environment: Mapping[str, Any], case: Case, dist: str, wanted: str) -> Requirement | None:
    """What an installed distribution asks of another; None when it asks nothing that applies here."""
    return next((found for found in requirements(environment, case, dist) if normal(found.name) == wanted), None)


@rule("torch-companions-match", Where.VENV, weight=7, explains=("extension-symbols-resolve", "requirements-satisfied"))
def torch_companions_match(case: Case) -> Iterator[Verdict]:
    """torchvision and torchaudio are built for one torch release, and torch for one Triton. Another one imports and
    then fails: "operator torchvision::nms does not exist", missing symbols, missing functions of Triton."""
    for environment in case.environments:
        have = dists(environment)
        wrong = []
        for dist, wanted in (("torchvision", "torch"), ("torchaudio", "torch"), ("torch", "triton")):
            requirement = requirement_of(environment, case, dist, wanted) if dist in have and wanted in have else None
            if requirement is not None and not satisfied(requirement, have[wanted]):
                wrong.append(f"{dist} {have[dist]} is for {wanted}{requirement.specifier}, installed is {have[wanted]}")
        family = {name: have[name] for name in ("torch", "torchvision", "torchaudio") if name in have}
        if len({tag for version in family.values() if (tag := version.partition("+")[2])}) > 1:
            wrong.append(f"builds of different flavours: {', '.join(f'{n} {v}' for n, v in family.items())}")
        if wrong:
            yield fail(
                "torch and its companions are not of one release",
                wrong,
                "install torch, torchvision, torchaudio and triton together, from one index",
            )
        elif "torch" in have:
            yield ok(f"torch {have['torch']} and its companions")


@rule("transformers-requirements-met", Where.VENV, weight=10, explains=("requirements-satisfied",))
def transformers_requirements_met(case: Case) -> Iterator[Verdict]:
    """transformers checks some of its requirements when it is imported, and refuses: tokenizers, huggingface-hub,
    safetensors and numpy among them."""
    for environment in case.environments:
        have = dists(environment)
        if "transformers" not in have:
            continue
        wrong = []
        for name in ("tokenizers", "huggingface-hub", "safetensors", "numpy", "packaging", "regex", "tqdm", "pyyaml"):
            requirement = requirement_of(environment, case, "transformers", name) if name in have else None
            if requirement is not None and not satisfied(requirement, have[name]):
                wrong.append(f"wants {name}{requirement.specifier}, installed is {have[name]}")
        if wrong:
            remedy = "install the versions that it asks for"
            yield fail(f"transformers {have['transformers']} refuses to be imported", wrong, remedy)
        else:
            yield ok("transformers has what it checks at import")


@rule("cudnn-not-older-than-torch", Where.VENV, weight=10, explains=("requirements-satisfied",))
def cudnn_not_older_than_torch(case: Case) -> Iterator[Verdict]:
    """torch refuses a cuDNN older than the one that it was built with ("cuDNN version incompatibility")."""
    for environment in case.environments:
        have = dists(environment)
        for name in sorted(have):
            requirement = requirement_of(environment, case, "torch", name) if name.startswith("nvidia-cudnn") else None
            pins = [spec.version for spec in requirement.specifier if spec.operator == "=="] if requirement else []
            built, installed = version_tuple(pins[0] if pins else ""), version_tuple(have[name])
            if built is None or installed is None:
                continue
            if installed[:2] < built[:2]:
                yield fail(
                    f"{name} {have[name]} is older than {pins[0]}, which torch was built with",
                    (),
                    f"pip install {name}=={pins[0]}",
                )
            else:
                yield ok(f"{name} {have[name]}")


@rule("metadata-version-consistent", Where.VENV, references=("sgl-project/sglang#14327",), weight=15)
def metadata_version_consistent(case: Case) -> Iterator[Verdict]:
    """A distribution's folder name and its METADATA must carry the same version; wheels renamed by hand (+cu130) do
    not, and installers refuse them."""
    for environment in case.environments:
        installed = dists(environment)
        wrong = [
            f"{item.get('name')}: folder {item.get('folder_version')}, METADATA {item.get('version')}"
            for item in rows(environment.get("dists"))
            if item.get("folder_version")
        ]
        if wrong:
            yield warn(
                "distributions whose two versions differ",
                wrong[:5],
                "install the wheel from an index, not one renamed by hand",
            )
        elif installed:
            yield ok("names and metadata agree")


@rule(
    "flashinfer-versions-equal",
    Where.VENV,
    references=("NVIDIA-NeMo/Export-Deploy#679", "lightseekorg/tokenspeed#284", "flashinfer-ai/flashinfer#4337"),
    weight=8,
)
def flashinfer_versions_equal(case: Case) -> Iterator[Verdict]:
    """flashinfer-python, -cubin and -jit-cache must be the same public version (the local part, +cu130, is compared
    with torch instead). Silencing the check (FLASHINFER_DISABLE_VERSION_CHECK) runs stale kernels."""
    for environment in case.environments:
        have = {
            name: version
            for name, version in dists(environment).items()
            if name in ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache")
        }
        if not have:
            continue
        public = {version.split("+")[0] for version in have.values()}
        listed = [f"{name} {version}" for name, version in sorted(have.items())]
        silenced = case.variable("FLASHINFER_DISABLE_VERSION_CHECK") not in ("", "0")
        if len(public) > 1:
            evidence = listed + (["FLASHINFER_DISABLE_VERSION_CHECK is set"] if silenced else [])
            yield fail(
                "the flashinfer packages differ in version",
                evidence,
                f"install all of them as {have.get('flashinfer-python', max(public))}",
            )
            continue
        cuda = torch_cuda(environment).replace(".", "")
        tags = {match.group(1) for version in have.values() if (match := re.search(r"\+cu(\d+)", version))}
        if cuda and any(tag[:2] != cuda[:2] for tag in tags):
            yield fail(
                "flashinfer's prebuilt kernels are for another CUDA major than torch",
                listed,
                "install the build for torch's CUDA",
            )
        elif silenced:
            yield warn("flashinfer's version check is switched off", listed, "unset FLASHINFER_DISABLE_VERSION_CHECK")
        else:
            yield ok(", ".join(listed))


@rule(
    "transformers-matches-release",
    Where.VENV,
    references=("sgl-project/sglang#4410", "princeton-ddss/blackfish#322"),
    weight=11,
)
def transformers_matches_release(case: Case) -> Iterator[Verdict]:
    """transformers must be the release that SGLang pins: a newer one registers the same architectures twice, an older
    one does not know the model."""
    for environment in case.environments:
        sglang, transformers = version_of(environment, "sglang"), version_of(environment, "transformers")
        pinned = next((stack.transformers for stack in STACKS if stack.sglang == sglang and stack.transformers), None)
        if not pinned or not transformers:
            continue
        if transformers != pinned:
            yield fail(
                f"SGLang {sglang} pins transformers {pinned}, installed is {transformers}",
                (),
                f"pip install transformers=={pinned}",
            )
        else:
            yield ok(f"transformers {transformers}")
    models = [item for item in case.items("models") if section(item, "config").get("model_type")]
    for environment in case.environments:
        transformers = version_of(environment, "transformers")
        for item in models:
            wanted = section(item, "config").get("transformers_version")
            if transformers and isinstance(wanted, str) and (pair(wanted) or (0,))[0] > (pair(transformers) or (0,))[0]:
                yield fail(
                    f"model type {section(item, 'config').get('model_type')} was saved by transformers "
                    f"{wanted}, installed is {transformers}",
                    [str(item.get("path"))],
                    "a newer SGLang stack",
                )


@rule("wheel-fits-host", Where.HOST, references=("PyPI sglang >= 0.5.11",), weight=3)
def wheel_fits_host(case: Case) -> Iterator[Verdict]:
    """The stack's wheels need a glibc and a Python minor: since 0.5.11 SGLang is cp310 to cp313 and manylinux_2_34."""
    stack = case.stack
    if stack is not None:
        problems = []
        if case.facts.glibc and case.facts.glibc < stack.min_glibc:
            problems.append(f"glibc {dotted(case.facts.glibc)}, needs >= {dotted(stack.min_glibc)}")
        low, high = stack.python
        versions = sorted({python.version[:2] for python in case.facts.pythons})
        if versions and not case.facts.uv and not any(low <= version <= high for version in versions):
            problems.append(f"Python {', '.join(map(dotted, versions))}, needs {dotted(low)} to {dotted(high)}")
        if problems:
            yield fail(
                f"{stack.name} has no wheel for this host",
                problems,
                "a distribution with glibc >= 2.34 (Debian 12, Ubuntu 22.04, RHEL 9) and a matching Python",
            )
        elif case.see("host", "libc").get("name") == "musl":
            yield fail(
                f"{stack.name} has no wheel for musl",
                [f"C library: musl {case.see('host', 'libc').get('version')}"],
                "a distribution with glibc >= 2.34 (Debian 12, Ubuntu 22.04, RHEL 9)",
            )
        elif case.facts.glibc is None:
            yield unknown("glibc unknown")
        else:
            yield ok(f"glibc {dotted(case.facts.glibc)} and Python fit {stack.name}")
    for environment in case.environments:
        minor = "".join(str(environment.get("version") or "").split(".")[:2])
        for item in rows(environment.get("dists")):
            tags = texts(item.get("tags"))
            pythons = {tag.split("-")[0] for tag in tags if re.match(r"cp3\d+-cp3\d+-", tag)}
            if minor and pythons and f"cp{minor}" not in pythons:
                yield fail(
                    f"{item.get('name')} is a wheel for {', '.join(sorted(pythons))}, the environment is "
                    f"Python {environment.get('version')}",
                    (),
                    "reinstall it with this Python",
                    Where.VENV,
                )
