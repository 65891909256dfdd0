"""GPU, driver and what lies between them and CUDA."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dflash_deploy.audit.rules.base import Case, Verdict, dists, fail, modules, na, ok, rule, torch_cuda, unknown, warn
from dflash_deploy.audit.stacks import dotted
from dflash_deploy.facts.parse import integers, pair, rows, section, version_tuple
from dflash_deploy.model import Where

MIN_DRIVER = {"11": (450,), "12": (525,), "13": (580,)}
"""CUDA major -> first driver branch that runs it (minor-version compatibility)."""


@rule(
    "driver-supports-cuda",
    Where.HOST,
    references=("sgl-project/sglang#11395",),
    weight=1,
    explains=("gpu-visible", "toolkit-not-newer-than-driver"),
)
def driver_supports_cuda(case: Case) -> Iterator[Verdict]:
    """The driver must be new enough for the CUDA release of torch: R580 for CUDA 13, R570 for a CUDA 12.8 stack (R525
    runs CUDA 12 by minor-version compatibility, without JIT of newer PTX). With an older one torch falls back to the
    CPU or refuses."""
    wanted: list[tuple[str, tuple[int, ...]]] = []
    if case.stack is not None and case.stack.min_driver:
        wanted.append((f"{case.stack.name} (CUDA {case.stack.cuda})", case.stack.min_driver))
    elif case.stack is None:
        for environment in case.environments:
            cuda = torch_cuda(environment)
            if cuda.split(".")[0] in MIN_DRIVER:
                wanted.append(
                    (
                        f"torch {section(environment, 'torch').get('version')} (CUDA {cuda})",
                        MIN_DRIVER[cuda.split(".")[0]],
                    )
                )
    if not wanted or not case.wants_gpu:
        return
    for what, need in wanted:
        if case.driver is None:
            yield fail(
                f"{what} needs an NVIDIA driver; no kernel module is loaded",
                remedy=f"install driver >= {dotted(need)} on the host",
            )
        elif case.driver < need:
            place = "the host of this container" if case.facts.container else "the host"
            remedy = f"driver >= {dotted(need)} on {place}, or a stack for the CUDA release that this driver runs"
            yield fail(
                f"the driver is too old for {what}",
                [f"driver {dotted(case.driver)}, needs >= {dotted(need)}"],
                remedy,
            )
        else:
            yield ok(f"driver {dotted(case.driver)} runs {what}")


@rule(
    "driver-libraries-match-module",
    Where.HOST,
    references=("tinygrad/open-gpu-kernel-modules#47", "NVIDIA/nvidia-container-toolkit#171"),
    weight=2,
    explains=("gpu-visible", "gpu-driver-answers"),
)
def driver_libraries_match_module(case: Case) -> Iterator[Verdict]:
    """The loaded kernel module and the user-space libraries (libcuda, libnvidia-ml) must be the same version, to the
    last component. They differ after an upgrade without a reboot, and in containers whose user space was installed
    apart from the host's."""
    module = case.fact("gpu", "driver", "version")
    if not module:
        return
    libraries = case.see("gpu", "user_libraries")
    found = False
    for name in ("libnvidia-ml", "libcuda"):
        for item in rows(libraries.get(name)):
            version = item.get("version")
            if not version or item.get("from") == "compat":
                continue
            found = True
            if version_tuple(str(version)) != version_tuple(str(module)):
                container = case.facts.container is not None
                remedy = (
                    f"install the user-space driver {module} in the container (or update the host)"
                    if container
                    else "reboot, or reload the nvidia modules"
                )
                yield fail(
                    f"kernel module {module}, but {name} {version}",
                    [f"{item.get('path')} -> {item.get('real')}", f"module: {module}"],
                    remedy,
                    Where.CONTAINER if container else Where.HOST,
                )
                break
    if not found:
        smi = section(case.raw, "gpu", "smi")
        if "version mismatch" in str(smi.get("error", "")):
            yield fail(
                "nvidia-smi reports a driver/library version mismatch",
                [str(smi.get("error"))],
                "reboot, or reload the nvidia modules",
            )
        else:
            yield unknown("no versioned libcuda or libnvidia-ml was found")
    else:
        yield ok(f"user space and kernel module are {module}")


@rule(
    "driver-libraries-present",
    Where.CONTAINER,
    references=("AbdBarho/stable-diffusion-webui-docker#48",),
    weight=2,
    explains=("gpu-visible", "gpu-driver-answers"),
)
def driver_libraries_present(case: Case) -> Iterator[Verdict]:
    """Where the kernel module is visible, its user space (libcuda.so.1, libnvidia-ml.so.1) must be there too: in a
    container it is installed or mounted separately."""
    if not case.fact("gpu", "driver", "version"):
        return
    libraries = case.see("gpu", "user_libraries")
    missing = [f"{name}.so.1" for name in ("libcuda", "libnvidia-ml") if not rows(libraries.get(name))]
    if missing:
        yield fail(
            f"{', '.join(missing)} not found",
            ["the kernel module is loaded"],
            "install the driver's user space of the same version (in a container: without the kernel module)",
        )
    else:
        yield ok("libcuda and libnvidia-ml are there")


@rule("no-compat-libcuda", Where.CONTAINER, references=("llm-d/llm-d#706",), weight=3, explains=("gpu-visible",))
def no_compat_libcuda(case: Case) -> Iterator[Verdict]:
    """A compatibility libcuda (``/usr/local/cuda*/compat``) must not win over the driver's own: with another driver
    branch CUDA fails with error 803."""
    if not case.fact("gpu", "driver", "version"):
        return
    path = case.variable("LD_LIBRARY_PATH")
    if "/compat" in path:
        yield fail(
            "LD_LIBRARY_PATH leads to a compatibility libcuda",
            [f"LD_LIBRARY_PATH={path}"],
            "remove the compat folder from LD_LIBRARY_PATH",
        )
        return
    for item in case.items("gpu", "user_libraries", "libcuda")[:1]:
        if "compat" in str(item.get("real")) or "compat" in str(item.get("path")):
            yield fail(
                "a compatibility libcuda comes first on the library path",
                [str(item.get("path"))],
                "remove it from /etc/ld.so.conf.d and run ldconfig",
            )
            return
    yield ok("the driver's own libcuda comes first")


@rule("gpu-driver-answers", Where.HOST, references=("astral-sh/uv#14647",), weight=4)
def gpu_driver_answers(case: Case) -> Iterator[Verdict]:
    """nvidia-smi must answer in time and list every GPU with the same driver version."""
    smi = case.see("gpu", "smi")
    gpus = [item for item in case.items("gpu", "pci") if item.get("kind") == "gpu"]
    if smi.get("status") == "absent" and case.driver is None and not gpus:
        return
    status = smi.get("status")
    if status == "timeout":
        yield unknown("nvidia-smi did not answer in time", str(smi.get("error", "")))
    elif status == "absent":
        yield unknown("nvidia-smi is not there")
    elif status == "failed":
        yield fail("nvidia-smi fails", [str(smi.get("error", ""))], "mend the driver first: nothing on the GPU can run")
    else:
        versions = {str(item.get("driver_version")) for item in rows(smi.get("gpus"))} - {"None"}
        if len(versions) > 1:
            yield fail("GPUs report different driver versions", sorted(versions), "reboot")
        else:
            yield ok(f"nvidia-smi lists {len(rows(smi.get('gpus')))} GPU(s)")


@rule("gpu-visible", Where.HOST, weight=5)
def gpu_visible(case: Case) -> Iterator[Verdict]:
    """A CUDA stack needs a GPU that this account may use: the card, a bound driver and usable device nodes."""
    if not case.wants_gpu:
        return
    blocked = [str(item.get("path")) for item in case.items("gpu", "devices") if item.get("usable") is False]
    blocked = [path for path in blocked if re.fullmatch(r"/dev/nvidia(\d+|ctl|-uvm)", path)]
    if blocked:
        container = case.facts.container is not None
        remedy = (
            "allow the devices in the container's configuration on the host"
            if container
            else "add the account to the device's group"
        )
        yield fail("this account may not use the GPU's device nodes", blocked, remedy)
    elif case.see("gpu", "smi").get("status") != "failed" and case.gpus:
        yield ok(
            ", ".join(f"{gpu.name} (sm_{''.join(map(str, gpu.compute_capability or ('?',)))})" for gpu in case.gpus)
        )
    else:
        cards = [str(item.get("bus")) for item in case.items("gpu", "pci") if item.get("kind") == "gpu"]
        yield fail(
            "no usable NVIDIA GPU",
            [f"PCI: {', '.join(cards)}"] if cards else ["no NVIDIA card on the PCI bus"],
            "use a CPU stack, or give the container its GPU",
        )


@rule("fabric-manager-matches", Where.HOST, references=("pytorch/pytorch#35710",), weight=4)
def fabric_manager_matches(case: Case) -> Iterator[Verdict]:
    """On NVSwitch machines the fabric manager must run, in exactly the driver's version: CUDA answers error 802 until
    then."""
    fabric = case.see("gpu", "fabric")
    if not fabric.get("nvswitch"):
        return
    module = str(case.fact("gpu", "driver", "version"))
    if not fabric.get("running"):
        yield fail(
            "an NVSwitch is there and no fabric manager runs",
            [f"installed: {fabric.get('installed')}"],
            f"install and start nvidia-fabricmanager {module}",
        )
    elif fabric.get("installed") and fabric.get("installed") != module:
        yield fail(
            f"fabric manager {fabric.get('installed')}, driver {module}",
            (),
            f"install nvidia-fabricmanager {module} and restart it",
        )
    else:
        yield ok("the fabric manager runs")


@rule(
    "toolkit-not-newer-than-driver",
    Where.CONTAINER,
    references=("Blackwellboy/model-serving-minefield trap 08",),
    weight=6,
)
def toolkit_not_newer_than_driver(case: Case) -> Iterator[Verdict]:
    """The toolkit whose ptxas and nvcc compile at run time must not be newer than the CUDA release that the driver can
    JIT (cudaErrorUnsupportedPtxVersion)."""
    if case.driver is None:
        return
    for item in case.items("python", "cuda", "toolkits")[:1]:
        limit = case.fact("gpu", "smi", "cuda")
        most = pair(str(limit)) if limit else None
        version = pair(str(item.get("version")))
        if version is None or most is None:
            what = item.get("path") if version is None else "the driver's newest CUDA"
            yield unknown(f"the version of {what} was not seen")
            continue
        if version > most:
            yield fail(
                f"CUDA toolkit {dotted(version)} is newer than what the driver runs ({limit})",
                [str(item.get("path"))],
                f"use a toolkit <= {limit} (CUDA_HOME), or a newer driver; TRITON_PTXAS_PATH helps Triton alone",
            )
        else:
            yield ok(f"toolkit {dotted(version)}, driver up to {limit}")


@rule("gpu-architecture-covered", Where.VENV, references=("sgl-project/sglang#7249",), weight=10)
def gpu_architecture_covered(case: Case) -> Iterator[Verdict]:
    """The kernel package must carry machine code or PTX for the GPU: same major and no higher minor, or PTX of any
    lower architecture. The loader takes sm90/ for capability 9.0 and sm100/ for everything else. A list that was cut
    short makes absence unknown."""
    for environment in case.environments:
        for gpu in case.gpus:
            if gpu.compute_capability is None:
                yield unknown(f"GPU {gpu.index}: compute capability unknown")
                continue
            major, minor = gpu.compute_capability
            folder = "sm90" if (major, minor) == (9, 0) else "sm100"
            common = [
                m
                for m in modules(environment)
                if "sgl_kernel/" in str(m.get("path")) and "common_ops" in str(m.get("path"))
            ]
            chosen = [m for m in common if f"/{folder}/" in str(m.get("path"))] or common
            for module in chosen[:1]:
                code = section(module, "gpu")
                if not code:
                    yield unknown(f"{module.get('path')}: no list of architectures")
                    continue
                sm = integers(code.get("sm"))
                ptx = integers(code.get("ptx"))
                covered = any(number // 10 == major and number % 10 <= minor for number in sm) or any(
                    number <= major * 10 + minor for number in ptx
                )
                # sm_120 code does not run on sm_121 when it is built for the "a" variant, as all published kernels are.
                if covered and major >= 9 and (major * 10 + minor) not in sm and not ptx:
                    covered = False
                listed = "sm_" + ", sm_".join(map(str, sm)) if sm else "none"
                if covered:
                    yield ok(f"{module.get('path')} carries code for sm_{major}{minor}", listed)
                elif not code.get("complete", True):
                    yield unknown(f"{module.get('path')}: sm_{major}{minor} not seen, the list is not complete", listed)
                else:
                    yield fail(
                        f"{module.get('path')} has no code for {gpu.name} (sm_{major}{minor})",
                        [f"machine code: {listed}", f"PTX: {ptx or 'none'}"],
                        "a kernel package with this architecture, or a build from source",
                    )


@rule("ptxas-knows-gpu", Where.VENV, references=("triton-lang/triton#8539", "RLinf/RLinf#92"), weight=12)
def ptxas_knows_gpu(case: Case) -> Iterator[Verdict]:
    """Triton's bundled ptxas must know the GPU: sm_100 and sm_120 since Triton 3.3, sm_103 and sm_121 since 3.6; else
    TRITON_PTXAS_PATH must lead to a toolkit that does."""
    need = {(10, 0): (3, 3), (12, 0): (3, 3), (10, 3): (3, 6), (12, 1): (3, 6)}
    for environment in case.environments:
        version = pair(dists(environment).get("triton"))
        for gpu in case.gpus:
            wanted = need.get(gpu.compute_capability or (0, 0))
            if version is None or wanted is None:
                continue
            if version < wanted and not case.variable("TRITON_PTXAS_PATH"):
                yield fail(
                    f"Triton {dotted(version)}'s ptxas does not know {gpu.name}",
                    [f"sm_{''.join(map(str, gpu.compute_capability or ()))} needs Triton >= {dotted(wanted)}"],
                    "a stack with a newer Triton, or TRITON_PTXAS_PATH=<CUDA toolkit>/bin/ptxas",
                )
            else:
                yield ok(f"Triton {dotted(version)} knows {gpu.name}")


@rule("gpu-memory-free", Where.HOST, references=("Blackwellboy/model-serving-minefield traps 81, 123",), weight=20)
def gpu_memory_free(case: Case) -> Iterator[Verdict]:
    """The GPUs must be empty before a start: memory of an exited container is released late, and engine children
    survive their parent."""
    if not case.gpus:
        return
    processes = case.items("gpu", "smi", "processes")
    held = [f"GPU process {item.get('pid')} {item.get('name')}: {item.get('memory_mib')} MiB" for item in processes]
    short = [
        gpu
        for gpu in case.gpus
        if gpu.memory_mib and gpu.memory_free_mib is not None and gpu.memory_free_mib < 0.9 * gpu.memory_mib
    ]
    busy = [f"GPU {gpu.index}: {gpu.memory_free_mib} of {gpu.memory_mib} MiB free" for gpu in short]
    if held or busy:
        yield warn(
            "GPU memory is in use",
            busy + held,
            "stop the processes (or wait until the memory is released) before the start",
        )
    else:
        yield ok("the GPUs are empty")


@rule(
    "attention-backend-fits-gpu",
    Where.VENV,
    references=("sgl-project/sglang#9140", "sgl-project/sglang#28297"),
    weight=15,
)
def attention_backend_fits_gpu(case: Case) -> Iterator[Verdict]:
    """The attention backend must exist for the GPU: trtllm_mha and trtllm_mla on sm_100/103 only, fa3 on sm_80 to
    sm_90, fa4 on sm_10x and sm_11x, and none of them is needed where triton or flashinfer do."""
    families = {"trtllm_mha": (10,), "trtllm_mla": (10,), "fa3": (8, 9), "fa4": (10, 11), "cutlass_mla": (10,)}
    given = False
    for flag in (
        "--attention-backend",
        "--decode-attention-backend",
        "--prefill-attention-backend",
        "--speculative-draft-attention-backend",
    ):
        backend = case.argument(flag)
        if not backend or backend not in families:
            given = given or bool(backend)
            continue
        given = True
        for gpu in case.gpus:
            if gpu.compute_capability and gpu.compute_capability[0] not in families[backend]:
                yield fail(
                    f"{flag} {backend} does not run on {gpu.name} "
                    f"(sm_{gpu.compute_capability[0]}{gpu.compute_capability[1]})",
                    (),
                    f"{flag} triton (or flashinfer)",
                )
                break
    if given and case.wants_gpu and not case.gpus:
        yield unknown("no GPU to compare the attention backend with")
    elif given:
        yield ok("the attention backends exist for this GPU")
    else:
        yield na("no attention backend is asked for")
