"""What an installer may not choose: another torch, kernels of another ABI, libraries of a second CUDA major. Pure."""

from __future__ import annotations

import re

from dflash_deploy.audit.stacks import Stack

FLASHINFER = ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache")
"""The library and its two packages of compiled kernels refuse each other unless their versions agree."""

NVIDIA = (
    "cublas", "cuda-cupti", "cuda-nvrtc", "cuda-runtime", "cudnn", "cufft", "cufile", "curand", "cusolver", "cusparse",
    "cusparselt", "nccl", "nvjitlink", "nvshmem", "nvtx",
)  # fmt: skip
"""Packages ``nvidia-NAME-cu12`` and ``nvidia-NAME-cu13`` (some of CUDA 13 have no suffix)."""


def torch_pins(stack: Stack) -> list[str]:
    """Pins of torch's own packages."""
    return [pin for pin in stack.requirements if re.match(r"(torch|torchvision|torchaudio)==", pin)]


def constraints(stack: Stack) -> list[str]:
    """Lines of a constraints file for pip or uv: they bind what comes in as a dependency, and install nothing."""
    lines = []
    if stack.torch and not any(pin.startswith("torch==") for pin in stack.requirements):
        lines.append(f"torch=={stack.torch}")
    if stack.kernel:
        lines.append(stack.kernel)
    if stack.flashinfer:
        lines += [f"{name}=={stack.flashinfer}" for name in FLASHINFER]
    if stack.transformers and not any(pin.startswith("transformers==") for pin in stack.requirements):
        lines.append(f"transformers=={stack.transformers}")
    if stack.cuda:
        other = "cu12" if stack.cuda.startswith("13.") else "cu13"
        # No release is below 0: whatever asks for such a package fails the resolution, by name.
        lines += [f"nvidia-{name}-{other}<0" for name in NVIDIA]
    return lines
