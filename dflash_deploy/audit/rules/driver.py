"""GPU, driver and what lies between them and CUDA."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_deploy.audit.rules.base import Case, Verdict, fail, ok, rule, torch_cuda, unknown
from dflash_deploy.audit.stacks import dotted
from dflash_deploy.facts.parse import pair, rows, section, version_tuple
from dflash_deploy.model import Where

MIN_DRIVER = {"11": (450,), "12": (525,), "13": (580,)}
"""CUDA major -> first driver branch that runs it (minor-version compatibility)."""


@rule(
    "driver-supports-cuda",
    Where.HOST,
    references=("sgl-project/sglang#11395",),
    weight=1,
    explains=("gpu-visible", "gpu-driver-answers", "toolkit-not-newer-than-driver"),
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
            evidence, remedy = no_driver(case, need)
            yield fail(f"{what} needs an NVIDIA driver; no kernel module is loaded", evidence, remedy)
        elif case.driver < need:
            place = "the host of this container" if case.facts.container else "the host"
            remedy = f"driver >= {dotted(need)} on {place}, or a stack for the CUDA release that this driver runs"
            yield fail(
                f"the driver is too old for {what}",
                [f"driver {case.facts.driver_text}, needs >= {dotted(need)}"],
                remedy,
            )
        else:
            yield ok(f"driver {case.facts.driver_text} runs {what}")


def no_driver(case: Case, need: tuple[int, ...]) -> tuple[list[str], str]:
    """(evidence, remedy) where no NVIDIA kernel module is loaded."""
    bound = {str(card.get("bus")): str(card.get("driver") or "no driver") for card in case.cards}
    evidence = [f"PCI {bus}: {driver}" for bus, driver in bound.items()] or ["no NVIDIA card on the PCI bus"]
    installed = case.see("gpu", "driver").get("installed")
    if "vfio-pci" in bound.values():
        return evidence, "the card is reserved for a virtual machine (vfio-pci): audit that machine, or release it"
    if "nouveau" in bound.values():
        return evidence, f"blacklist nouveau, install driver >= {dotted(need)} and reboot"
    if installed:
        evidence.append(f"module {installed} is installed for this kernel")
        return evidence, "modprobe nvidia; where that is refused, see dmesg (Secure Boot, another kernel)"
    if not bound and case.facts.container:
        return evidence, "give the container its GPU on the host"
    return evidence, f"install driver >= {dotted(need)} on the host, for the kernel that runs"


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
    if not module or case.facts.container == "wsl":
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
            "start the container with its GPUs: --gpus all, or runtime class nvidia (nvidia-container-toolkit)"
            if case.facts.container in ("docker", "podman", "kubernetes", "oci")
            else "install the driver's user space of the same version (in a container: without the kernel module)",
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
