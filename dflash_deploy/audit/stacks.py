"""Which packages go together, as data: one stack per SGLang release and platform.

The pins are those of the releases' own metadata; minimum drivers are NVIDIA's for the CUDA release (12.8: 525 with
minor-version compatibility, 570 in full; 13.0: 580).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_deploy.errors import UsageError
from dflash_deploy.facts import Facts
from dflash_deploy.facts.parse import section


@dataclass(frozen=True)
class Stack:
    """A set of pinned packages that is known to run together."""

    name: str
    """``sglang-0.5.16-cpu``"""
    sglang: str
    device: str
    """``cuda`` or ``cpu``"""
    torch: str
    torch_variant: str
    """PyTorch's wheel variant: ``cu128``, ``cu130``, ``cpu``."""
    requirements: tuple[str, ...]
    """Pins for pip or uv, complete when ``no_deps``."""
    no_deps: tuple[str, ...] = ()
    """Requirements installed without their dependencies (the release's own metadata asks for CUDA packages that a CPU
    never imports)."""
    python: tuple[tuple[int, int], tuple[int, int]] = ((3, 11), (3, 13))
    """Lowest and highest Python minor, both included."""
    min_glibc: tuple[int, int] = (2, 28)
    min_driver: tuple[int, ...] | None = None
    installed_mib: int = 0
    """Disk space that the venv takes, measured; 0: not measured."""
    patch_sets: tuple[str, ...] = ()
    """Names of the patch sets that this stack needs."""
    server_args: tuple[str, ...] = ()
    """Arguments that the server needs on this stack."""
    env: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    cuda: str = ""
    """CUDA release of the torch build, e.g. ``13.0``."""
    kernel: str = ""
    """Kernel package, e.g. ``sglang-kernel==0.4.5``."""
    flashinfer: str = ""
    transformers: str = ""
    native_dflash: bool = True
    """The release has the DFLASH algorithm."""
    capabilities: tuple[tuple[int, int], ...] = ()
    """Compute capabilities that the kernel package carries code for."""
    arch: tuple[str, ...] = ("x86_64",)
    """``uname -m`` values with published wheels."""
    resolvable: bool = True
    """Installs from published wheels alone."""
    rank: int = 0
    """Preference among stacks that fit; higher is better."""
    imports: tuple[str, ...] = ("torch", "transformers", "sglang", "sglang.srt.server_args")
    """Modules whose import proves an installation."""

    @property
    def pins(self) -> str:
        """One digest (sha256, hex) of everything that decides the content of an environment."""
        text = json.dumps([self.name, self.torch, self.torch_variant, sorted(self.requirements), sorted(self.no_deps)])
        return hashlib.sha256(text.encode()).hexdigest()


def cpu_packages(transformers: str, openai: str) -> tuple[str, ...]:
    """What the server imports on a CPU, found by importing it, in the versions that were run; 0.5.16 and 0.5.23 differ
    in two."""
    return (
        "torch==2.14.1",
        "torchvision==0.29.1",
        f"transformers=={transformers}",
        "numpy==2.4.6",
        "orjson==3.13.0",
        "psutil==7.2.2",
        "pybase64==1.5.1",
        "requests==2.34.2",
        "starlette==1.10.0",
        "ipython==9.18.1",
        "aiohttp==3.14.5",
        "msgspec==0.23.0",
        "pyzmq==27.3.0",
        "dill==0.4.1",
        f"openai=={openai}",
        "partial-json-parser==0.2.1.1.post7",
        "sentencepiece==0.2.3",
        "uvicorn==0.54.0",
        "uvloop==0.23.0",
        "fastapi==0.165.0",
        "einops==0.8.2",
        "loguru==0.7.3",
        "gguf==0.19.0",
        "setproctitle==1.3.8",
        "jsonschema==4.26.0",
        "soundfile==0.13.1",
        "python-multipart==0.0.34",
        "pydantic==2.14.4",
        "prometheus_client==0.26.0",
        "pillow==13.0.0",
        # torch imports it where a compiler is looked for; only pip's own venvs have one, and no later Python's.
        "setuptools==81.0.0",
    )


BLACKWELL = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
"""sm_86 runs sm_80 code. sm_121 (GB10) is in no published kernel wheel's list."""

CPU_ARGS = (
    "--device",
    "cpu",
    "--attention-backend",
    "triton",
    "--sampling-backend",
    "pytorch",
    "--disable-cuda-graph",
    "--dtype",
    "float32",
    "--grammar-backend",
    "none",
    "--mem-fraction-static",
    "0.3",
    "--max-total-tokens",
    "16384",
    "--max-running-requests",
    "8",
    # The warm-up's request takes longer here than the server waits for it; the health check sends its own.
    "--skip-server-warmup",
    # Else the scheduler keeps a core busy while nothing is asked.
    "--sleep-on-idle",
)


def cuda_stack(
    sglang: str,
    torch: str,
    variant: str,
    kernel: str,
    flashinfer: str,
    transformers: str,
    *,
    rank: int,
    python: tuple[tuple[int, int], tuple[int, int]] = ((3, 10), (3, 13)),
    native_dflash: bool = True,
    resolvable: bool = True,
    patch_sets: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> Stack:
    """A CUDA stack from one row of the release table."""
    cuda13 = variant == "cu130"
    return Stack(
        name=f"sglang-{sglang}-{variant}",
        sglang=sglang,
        device="cuda",
        torch=torch,
        torch_variant=variant,
        requirements=(f"sglang=={sglang}",),
        python=python,
        # 0.5.11 brought Rust extensions: manylinux_2_34 wheels, one per Python minor.
        min_glibc=(2, 34) if native_dflash else (2, 28),
        min_driver=(580,) if cuda13 else (570,),
        cuda="13.0" if cuda13 else "12.8",
        kernel=kernel,
        flashinfer=flashinfer,
        transformers=transformers,
        native_dflash=native_dflash,
        resolvable=resolvable,
        rank=rank,
        patch_sets=patch_sets,
        capabilities=BLACKWELL,
        notes=notes,
    )


INTERPRETED = "attention in PyTorch, other kernels through Triton's interpreter, in float32: for proof and development"


def cpu_stack(
    sglang: str,
    transformers: str,
    openai: str,
    compressed_tensors: str,
    xgrammar: str,
    *,
    rank: int = 0,
    min_glibc: tuple[int, int] = (2, 34),
    native_dflash: bool = True,
    more_args: tuple[str, ...] = (),
) -> Stack:
    """A stack that runs a release without a GPU."""
    return Stack(
        name=f"sglang-{sglang}-cpu",
        sglang=sglang,
        device="cpu",
        torch="2.14.1",
        torch_variant="cpu",
        requirements=cpu_packages(transformers, openai),
        # Their metadata asks for CUDA packages or for another torch.
        no_deps=(
            "apache-tvm-ffi==0.1.11",
            f"compressed-tensors=={compressed_tensors}",
            f"sglang=={sglang}",
            f"xgrammar=={xgrammar}",
        ),
        python=((3, 11), (3, 13)),
        min_glibc=min_glibc,
        installed_mib=6144,
        patch_sets=("cpu", "ddtree"),
        server_args=(*CPU_ARGS, *more_args),
        env=(("TRITON_INTERPRET", "1"), ("CUDA_VISIBLE_DEVICES", ""), ("DFLASH_KERNELS_BACKEND", "naive")),
        transformers=transformers,
        native_dflash=native_dflash,
        rank=rank,
        notes=(INTERPRETED,),
    )


LIBNUMA = "its kernel package needs libnuma.so.1, which no pip package provides (apt-get install libnuma1)"
CUDA_TILE = "cuda-tile==1.6.0rc5 is published only as a stub that downloads from elsewhere"
OLD_PY = ((3, 10), (3, 13))
NEW_PY = ((3, 11), (3, 13))

STACKS: tuple[Stack, ...] = (
    cpu_stack("0.5.16", "5.12.1", "2.6.1", "0.20.1", "0.2.1", rank=1),
    cpu_stack(
        "0.5.10.post1",
        "5.3.0",
        "2.6.1",
        "0.20.1",
        "0.2.1",
        min_glibc=(2, 28),
        native_dflash=False,
        # Graphs of prefill pieces are on by default in this release and exist for CUDA only.
        more_args=("--disable-piecewise-cuda-graph",),
    ),
    cpu_stack("0.5.23", "5.19.0", "2.8.0", "0.18.0", "0.2.7"),
    cuda_stack(
        "0.5.8",
        "2.9.1",
        "cu128",
        "sgl-kernel==0.3.21",
        "0.6.1",
        "4.57.1",
        rank=8,
        native_dflash=False,
        notes=(LIBNUMA,),
    ),
    cuda_stack(
        "0.5.9",
        "2.9.1",
        "cu128",
        "sgl-kernel==0.3.21",
        "0.6.3",
        "4.57.1",
        rank=9,
        native_dflash=False,
        notes=(LIBNUMA,),
    ),
    cuda_stack(
        "0.5.10.post1",
        "2.9.1",
        "cu128",
        "sglang-kernel==0.4.1",
        "0.6.7.post3",
        "5.3.0",
        rank=10,
        native_dflash=False,
        patch_sets=("ddtree",),
        notes=("the last release for CUDA 12; DFLASH itself comes with the patch set", LIBNUMA),
    ),
    cuda_stack("0.5.11", "2.11.0", "cu130", "sglang-kernel==0.4.2", "0.6.8.post1", "5.6.0", rank=20, notes=(LIBNUMA,)),
    cuda_stack(
        "0.5.12.post1",
        "2.11.0",
        "cu130",
        "sglang-kernel==0.4.2.post2",
        "0.6.11.post1",
        "5.6.0",
        rank=21,
        notes=(LIBNUMA,),
    ),
    cuda_stack("0.5.13.post1", "2.11.0", "cu130", "sglang-kernel==0.4.3", "0.6.12", "5.8.1", rank=22, notes=(LIBNUMA,)),
    cuda_stack("0.5.14", "2.11.0", "cu130", "sglang-kernel==0.4.4", "0.6.12", "5.8.1", rank=23),
    cuda_stack("0.5.15.post1", "2.11.0", "cu130", "sglang-kernel==0.4.4", "0.6.12", "5.12.1", rank=24),
    cuda_stack(
        "0.5.16", "2.11.0", "cu130", "sglang-kernel==0.4.5", "0.6.14", "5.12.1", rank=100, patch_sets=("ddtree",)
    ),
    cuda_stack(
        "0.5.18",
        "2.13.0",
        "cu130",
        "sglang-kernel==0.4.6.post1",
        "0.6.17",
        "5.12.1",
        rank=25,
        resolvable=False,
        notes=(CUDA_TILE,),
    ),
    cuda_stack(
        "0.5.20",
        "2.13.0",
        "cu130",
        "sglang-kernel==0.4.7",
        "0.6.18",
        "5.12.1",
        rank=26,
        resolvable=False,
        notes=(CUDA_TILE,),
    ),
    cuda_stack(
        "0.5.21",
        "2.13.0",
        "cu130",
        "sglang-kernel==0.4.7",
        "0.6.18",
        "5.12.1",
        rank=27,
        resolvable=False,
        notes=(CUDA_TILE,),
    ),
    cuda_stack(
        "0.5.22",
        "2.14.1",
        "cu130",
        "sglang-kernel==0.4.9",
        "0.7.1",
        "5.19.0",
        rank=28,
        python=NEW_PY,
        resolvable=False,
        notes=(CUDA_TILE,),
    ),
    cuda_stack(
        "0.5.23",
        "2.14.1",
        "cu130",
        "sglang-kernel==0.4.10",
        "0.7.2",
        "5.19.0",
        rank=90,
        python=NEW_PY,
        patch_sets=("ddtree",),
    ),
)


ROUTER = Stack(
    name="sglang-router-0.3.2",
    sglang="",
    device="cpu",
    torch="",
    torch_variant="",
    requirements=("sglang-router==0.3.2",),
    python=((3, 10), (3, 13)),
    min_glibc=(2, 17),
    installed_mib=256,
    notes=("SGLang's own router in front of several hosts; it serves no model",),
    imports=("sglang_router", "sglang_router.launch_router"),
)
"""What a router's host needs. Not among the stacks that serve a model."""


@dataclass(frozen=True)
class Choice:
    """One stack judged for one host."""

    stack: Stack
    fits: bool
    reasons: tuple[str, ...]
    """Why not, or why this place in the ranking; and what to know."""
    changes: tuple[str, ...] = ()
    """What to change on the host so that it would fit."""


def get_stack(name: str) -> Stack:
    """The stack of that name.

    Raises:
        UsageError: no such stack.
    """
    for stack in (*STACKS, ROUTER):
        if stack.name == name:
            return stack
    raise UsageError(
        f"there is no stack named {name!r}", evidence=[stack.name for stack in STACKS], hint="dflash-deploy stacks"
    )


def judge_stack(stack: Stack, facts: Facts) -> Choice:
    """Whether ``stack`` can run on the host, every reason at once. What could not be seen does not exclude a stack and
    is said."""
    no: list[str] = []
    know: list[str] = []
    changes: list[str] = []
    if facts.system and facts.system != "Linux":
        no.append(f"needs Linux, this is {facts.system}")
    if facts.arch and facts.arch not in stack.arch:
        no.append(f"wheels are published for {', '.join(stack.arch)}, this is {facts.arch}")
    if section(facts.raw, "host", "libc").get("name") == "musl":
        no.append("its wheels need glibc, the host has musl")
        changes.append("a distribution with glibc (Debian, Ubuntu, RHEL), or a container of one")
    elif facts.glibc is None:
        know.append("glibc unknown")
    elif facts.glibc < stack.min_glibc:
        no.append(f"its wheels need glibc >= {dotted(stack.min_glibc)}, the host has {dotted(facts.glibc)}")
        changes.append("a newer distribution or container (glibc cannot be replaced by itself)")
    versions = {python.version[:2] for python in facts.pythons}
    low, high = stack.python
    if facts.pythons and not any(low <= version <= high for version in versions) and not facts.uv:
        no.append(
            f"needs Python {dotted(low)} to {dotted(high)}, the host has "
            f"{', '.join(dotted(v) for v in sorted(versions))}"
        )
        changes.append(f"install Python {dotted(high)} with its venv module, or uv, which brings its own")
    elif not facts.pythons and not facts.uv:
        know.append("no Python seen")
    if stack.device == "cuda":
        judge_cuda(stack, facts, no, know, changes)
    else:
        know.append("needs no GPU")
    if not stack.resolvable:
        no.append("does not install from published wheels alone")
    free = facts.disk_free_mib.get(facts.home)
    if stack.installed_mib and free is not None and free < stack.installed_mib:
        no.append(f"needs {stack.installed_mib} MiB of disk, {facts.home} has {free}")
        changes.append("free disk space or put the venv on another file system")
    return Choice(stack, not no, (*no, *know, *stack.notes), tuple(changes))


def judge_cuda(stack: Stack, facts: Facts, no: list[str], know: list[str], changes: list[str]) -> None:
    """GPU, driver and architecture of a CUDA stack."""
    if facts.driver is None and not facts.gpus:
        no.append("needs an NVIDIA GPU and its driver; neither was seen")
        return
    if facts.driver is None:
        know.append("driver version unknown")
    elif stack.min_driver is not None and facts.driver < stack.min_driver:
        no.append(
            f"torch {stack.torch}+{stack.torch_variant} (CUDA {stack.cuda}) needs driver >= "
            f"{stack.min_driver[0]}, the host has {facts.driver_text}"
        )
        where = " on the host of this container" if facts.container else ""
        changes.append(f"driver >= {stack.min_driver[0]}{where}")
    for gpu in facts.gpus:
        if gpu.compute_capability is None:
            know.append(f"GPU {gpu.index}: compute capability unknown")
        elif gpu.compute_capability not in stack.capabilities:
            no.append(
                f"GPU {gpu.index} ({gpu.name}) is sm_{gpu.compute_capability[0]}{gpu.compute_capability[1]}: "
                f"no code for it in {stack.kernel}"
            )
    if not stack.native_dflash and not stack.patch_sets:
        know.append("no native DFLASH in this release")


def choose_stacks(facts: Facts) -> list[Choice]:
    """Every stack judged: those that fit first, best first; then the others, those that need the least change first."""
    judged = [judge_stack(stack, facts) for stack in STACKS]
    return sorted(
        judged, key=lambda choice: (not choice.fits, 0 if choice.fits else len(choice.changes), -choice.stack.rank)
    )


def stack_for(facts: Facts) -> Stack | None:
    """The best stack that fits; None when none does."""
    best = choose_stacks(facts)[0]
    return best.stack if best.fits else None


def dotted(version: Sequence[int]) -> str:
    """``(2, 34)`` as ``2.34``."""
    return ".".join(str(part) for part in version)
