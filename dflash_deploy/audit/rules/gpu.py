"""The GPUs: listed, usable, sound, covered by the code that is installed, and free."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dflash_deploy.audit.rules.base import Case, Verdict, dists, fail, modules, na, ok, rule, torch_cuda, unknown, warn
from dflash_deploy.audit.stacks import dotted
from dflash_deploy.facts.parse import integers, pair, rows, section, texts
from dflash_deploy.model import Where


@rule("gpu-driver-answers", Where.HOST, references=("astral-sh/uv#14647",), weight=4, explains=("gpu-visible",))
def gpu_driver_answers(case: Case) -> Iterator[Verdict]:
    """nvidia-smi must answer in time and list every GPU with the same driver version."""
    smi = case.see("gpu", "smi")
    if smi.get("status") == "absent" and case.driver is None:
        return
    status = smi.get("status")
    if status == "timeout":
        yield unknown("nvidia-smi did not answer in time", str(smi.get("error", "")))
    elif status == "absent":
        yield unknown("nvidia-smi is not there")
    elif status == "failed":
        error = str(smi.get("error", ""))
        remedy = "mend the driver first: nothing on the GPU can run"
        if "No devices were found" in error and case.cards and case.see("gpu", "driver").get("open") is False:
            remedy = "install the open kernel module: cards since Blackwell need it, the proprietary one skips them"
        yield fail("nvidia-smi fails", [error], remedy)
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
    if case.driver is None and case.cards:
        meant = case.stack is not None or any(torch_cuda(environment) for environment in case.environments)
        drivers = sorted({str(card.get("driver") or "no driver") for card in case.cards})
        yield (fail if meant else warn)(
            f"{len(case.cards)} NVIDIA card(s) without the NVIDIA driver",
            [f"bound to: {', '.join(drivers)}"],
            "install the NVIDIA driver (the stacks below say which), or use a CPU stack",
        )
        return
    nodes = [str(item.get("path")) for item in case.items("gpu", "devices")]
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
    elif case.facts.container not in (None, "wsl") and nodes and "/dev/nvidia-uvm" not in nodes:
        yield fail(
            "/dev/nvidia-uvm is not in the container: nvidia-smi works, CUDA does not",
            nodes,
            "pass /dev/nvidia-uvm and /dev/nvidia-uvm-tools into the container; on the host: nvidia-modprobe -u -c 0",
        )
    elif hidden := hides_gpus(case):
        yield fail("CUDA_VISIBLE_DEVICES hides the GPUs", [hidden], "unset it for the service, or name GPUs that exist")
    elif case.see("gpu", "smi").get("status") != "failed" and case.gpus:
        yield ok(
            ", ".join(f"{gpu.name} (sm_{''.join(map(str, gpu.compute_capability or ('?',)))})" for gpu in case.gpus)
        )
    else:
        cards = [str(card.get("bus")) for card in case.cards]
        yield fail(
            "no usable NVIDIA GPU",
            [f"PCI: {', '.join(cards)}"] if cards else ["no NVIDIA card on the PCI bus"],
            "use a CPU stack, or give the container its GPU",
        )


def hides_gpus(case: Case) -> str:
    """The setting of CUDA_VISIBLE_DEVICES that leaves no GPU, or names one that is not there; "" when it does not."""
    value = case.env.get("CUDA_VISIBLE_DEVICES", case.see("env").get("CUDA_VISIBLE_DEVICES"))
    if not isinstance(value, str):
        return ""
    words = [word.strip() for word in value.split(",")]
    known = {str(gpu.index) for gpu in case.gpus}
    # CUDA stops at the first index that does not exist.
    bad = words[0] in ("", "-1", "NoDevFiles") or any(word.isdigit() and word not in known for word in words)
    return f"CUDA_VISIBLE_DEVICES={value!r}, GPUs: {', '.join(sorted(known)) or 'none'}" if bad else ""


@rule("gpu-mode-serves", Where.HOST, weight=6)
def gpu_mode_serves(case: Case) -> Iterator[Verdict]:
    """Compute mode must be Default: a server is several processes on one GPU ("all CUDA-capable devices are busy or
    unavailable"). A GPU in MIG mode is its instances; without one CUDA sees nothing."""
    if not case.wants_gpu or not case.gpus:
        return
    wrong = []
    for item in case.items("gpu", "smi", "gpus"):
        mode, mig = str(item.get("compute_mode") or ""), str(item.get("mig") or "")
        if mode in ("Prohibited", "Exclusive_Process", "Exclusive Process", "Exclusive_Thread"):
            wrong.append(f"GPU {item.get('index')}: compute mode {mode}")
        if mig == "Enabled":
            wrong.append(f"GPU {item.get('index')}: MIG is on")
    if any("Prohibited" in line for line in wrong):
        yield fail("a GPU takes no compute process", wrong, "nvidia-smi -i GPU -c DEFAULT")
    elif wrong:
        yield warn(
            "a GPU is in a mode in which servers fail",
            wrong,
            "nvidia-smi -i GPU -c DEFAULT; with MIG: name the instance in CUDA_VISIBLE_DEVICES, or switch it off",
        )
    else:
        yield ok("every GPU takes several processes")


XID = re.compile(r"Xid \(([^)]*)\): (\d+)")
FATAL_XID = {"48", "74", "79", "95", "119", "120", "140"}
"""Double-bit ECC, NVLink, fallen off the bus, uncontained ECC, GSP time-outs, unrecovered ECC: a reset is due."""
MEMORY_XID = {"63", "64", "92", "94"}


@rule("gpu-hardware-sound", Where.HOST, references=("NVIDIA/open-gpu-kernel-modules#1151",), weight=6)
def gpu_hardware_sound(case: Case) -> Iterator[Verdict]:
    """No fatal Xid in the kernel's log since it booted: such a GPU fails again until it is reset, reseated or
    replaced."""
    if case.driver is None:
        return
    lines = case.fact("gpu", "xid")
    if lines is None:
        yield unknown("the kernel's log could not be read (dmesg needs root)")
        return
    fatal, memory = [], []
    for line in texts(lines):
        match = XID.search(line)
        if match and match.group(2) in FATAL_XID:
            fatal.append(line)
        elif match and match.group(2) in MEMORY_XID:
            memory.append(line)
    if fatal:
        yield warn(
            "a GPU has failed since the boot", fatal[-3:], "reset the GPU or reboot; if it comes back, replace it"
        )
    elif memory:
        yield warn("a GPU had memory errors since the boot", memory[-3:], "nvidia-smi -q -d ECC,ROW_REMAPPER")
    else:
        yield ok("no fatal Xid in the kernel's log")


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
