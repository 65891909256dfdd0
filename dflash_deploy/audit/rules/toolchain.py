"""What compiles at run time: Triton, flashinfer and SGLang's JIT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_deploy.audit.rules.base import Case, Verdict, dists, fail, label, ok, rule, torch_cuda, unknown, warn
from dflash_deploy.facts.parse import integers, section
from dflash_deploy.model import Where


def jit(case: Case) -> bool:
    """Something here compiles for a GPU."""
    return case.wants_gpu and (case.stack is not None or bool(case.environments))


def toolkits(case: Case) -> list[Mapping[str, Any]]:
    """CUDA toolkits with a compiler, the one that CUDA_HOME names first."""
    return [item for item in case.items("python", "cuda", "toolkits") if item.get("nvcc")]


def tool(case: Case, *names: str) -> Any:
    tools = case.see("python", "tools")
    return next((tools[name] for name in names if tools.get(name)), None)


@rule("c-compiler-available", Where.HOST, references=("sgl-project/sglang#1067",), weight=14)
def c_compiler_available(case: Case) -> Iterator[Verdict]:
    """Triton needs a C compiler on the target when it first launches a kernel."""
    if not jit(case):
        return
    if tool(case, "gcc", "cc", "clang") or case.variable("CC"):
        yield ok(str(tool(case, "gcc", "cc", "clang") or case.variable("CC")))
    else:
        yield fail(
            "no C compiler",
            ["gcc, cc and clang are not on PATH, CC is not set"],
            "apt-get install build-essential (or set CC)",
        )


@rule("python-headers-present", Where.HOST, references=("sgl-project/sglang#1117",), weight=14)
def python_headers_present(case: Case) -> Iterator[Verdict]:
    """Python.h of the environment's base interpreter: Triton's launcher includes it."""
    if not jit(case):
        return
    pythons = case.items("python", "interpreters")
    checked = False
    for environment in case.environments:
        home = str(environment.get("home") or "")
        base = [
            item
            for item in pythons
            if home
            and str(item.get("path")).rpartition("/")[0] == home
            and str(item.get("version", ""))
            and _same(item, environment)
        ]
        for item in base[:1]:
            checked = True
            if item.get("headers"):
                yield ok(f"Python.h of {item.get('path')}")
            else:
                yield fail(
                    f"no Python.h for {item.get('path')}",
                    [f"looked in {item.get('include')}"],
                    f"apt-get install python{_minor(item)}-dev",
                )
    if not checked:
        if any(item.get("headers") for item in pythons):
            yield ok("an interpreter with headers is there")
        elif pythons:
            yield warn("no interpreter has its headers", (), "apt-get install python3-dev")
        else:
            yield unknown("no interpreter was seen")


def _minor(item: Any) -> str:
    return ".".join(str(part) for part in integers(item.get("version"))[:2])


def _same(item: Any, environment: Any) -> bool:
    return _minor(item) == ".".join(str(environment.get("version") or "").split(".")[:2])


@rule("ninja-available", Where.VENV, references=("anthony-chaudhary/fak#923", "sgl-project/sglang#2514"), weight=13)
def ninja_available(case: Case) -> Iterator[Verdict]:
    """flashinfer's and torch's JIT run ``ninja``: in the environment or on PATH. Without it a service is "not healthy"
    for 15 minutes."""
    if not jit(case) or case.stack is not None:
        return
    for environment in case.environments:
        if "tools" not in environment:
            yield unknown(f"{label(environment)}: its programs were not looked at")
        elif section(environment, "tools").get("ninja") or tool(case, "ninja"):
            yield ok("ninja is there")
        else:
            yield fail(
                "ninja is neither in the environment nor on PATH",
                (),
                "pip install ninja in the environment (and pin it)",
            )


@rule(
    "nvcc-available",
    Where.HOST,
    references=("NVIDIA-NeMo/Gym#1405", "sgl-project/sglang#5002"),
    weight=13,
    explains=("cuda-headers-present",),
)
def nvcc_available(case: Case) -> Iterator[Verdict]:
    """torch's wheels bring CUDA's run-time libraries, not nvcc. Without prebuilt kernels (flashinfer-cubin or
    -jit-cache of the same version) a toolkit of torch's CUDA major is needed."""
    if not jit(case):
        return
    compilers = toolkits(case)
    if compilers or tool(case, "nvcc"):
        majors = {torch_cuda(e).split(".")[0] for e in case.environments} - {""}
        if case.stack is not None and case.stack.cuda:
            majors = {case.stack.cuda.split(".")[0]}
        have = {str(item.get("version") or "").split(".")[0] for item in compilers} - {""}
        if majors and have and not majors & have:
            yield warn(
                f"nvcc is for CUDA {', '.join(sorted(have))}, torch for CUDA {', '.join(sorted(majors))}",
                [str(item.get("path")) for item in compilers],
                "CUDA_HOME to a toolkit of torch's CUDA major",
            )
        else:
            yield ok("nvcc is there")
        return
    prebuilt = [e for e in case.environments if {"flashinfer-cubin", "flashinfer-jit-cache"} & set(dists(e))]
    if prebuilt:
        yield warn(
            "no CUDA toolkit; only the prebuilt kernels can run",
            (),
            "install a CUDA toolkit of torch's major: SGLang's own JIT still needs nvcc",
        )
    else:
        yield fail(
            "no nvcc and no prebuilt kernels",
            ["no /usr/local/cuda*, no nvcc on PATH"],
            "install a CUDA toolkit of torch's CUDA major, or flashinfer-cubin / flashinfer-jit-cache",
        )


@rule(
    "cuda-home-is-one-directory",
    Where.HOST,
    references=("vllm-project/vllm#36077",),
    weight=11,
    explains=("nvcc-available", "cuda-headers-present"),
)
def cuda_home_is_one_directory(case: Case) -> Iterator[Verdict]:
    """CUDA_HOME is one folder, not a PATH-like list."""
    value = case.variable("CUDA_HOME") or case.variable("CUDA_PATH")
    if not value:
        return
    if ":" in value:
        yield fail("CUDA_HOME holds a list", [f"CUDA_HOME={value}"], "set it to one folder, e.g. /usr/local/cuda")
    elif case.fact("python", "cuda", "cuda_home_exists") is False:
        yield fail("CUDA_HOME leads nowhere", [f"CUDA_HOME={value}"], "set it to the toolkit's folder, or unset it")
    else:
        yield ok(f"CUDA_HOME={value}")


@rule("cuda-headers-present", Where.HOST, references=("sgl-project/sglang#5389",), weight=14)
def cuda_headers_present(case: Case) -> Iterator[Verdict]:
    """A toolkit that compiles needs its headers, cuda_fp8.h (CUDA 11.8) among them."""
    if not jit(case) or not toolkits(case):
        return
    first = toolkits(case)[0]
    if not first.get("headers") or not first.get("fp8_header"):
        missing = "cuda_fp8.h" if first.get("headers") else "cuda_runtime.h"
        yield fail(
            f"{first.get('path')} has no {missing}",
            [f"version {first.get('version')}"],
            "install the toolkit's development packages (>= torch's CUDA) and set CUDA_HOME",
        )
    else:
        yield ok(f"headers of {first.get('path')}")
