"""Installed distributions, read from their metadata folders; nothing is imported."""

from __future__ import annotations

import os
import re
from typing import Any

from dflash_deploy.facts.remote.tools import list_dir, read_text

CORE = re.compile(
    r"^(sglang|sgl[-_]kernel|sglang[-_]kernel|torch|torchvision|torchaudio|flashinfer.*|transformers|triton|nvidia.*|cuda.*|xgrammar|numpy|ninja|"
    r"flash[-_]attn.*|vllm|deep[-_]gemm|nixl.*|dflash.*|compressed[-_]tensors|tokenizers|huggingface[-_]hub)$",
    re.I,
)
"""Distributions whose requirements and wheel tags rules read; of the others the name and version suffice."""
SHARED = (
    "libnccl.so.2",
    "libcudnn.so.9",
    "libcudnn.so.8",
    "libcublas.so.12",
    "libcublas.so.13",
    "libcudart.so.12",
    "libcudart.so.13",
)


def headers(text: str) -> dict[str, list[str]]:
    """Header fields of METADATA or WHEEL."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if not line:
            break
        key, sep, value = line.partition(":")
        if sep and not line[0].isspace():
            found.setdefault(key.strip().lower(), []).append(value.strip())
    return found


def distribution(folder: str, name: str) -> dict[str, Any]:
    """One ``*.dist-info`` folder."""
    stem = name[: -len(".dist-info")]
    dist_name, _, dir_version = stem.partition("-")
    fields = headers(read_text(os.path.join(folder, name, "METADATA"), 1 << 18) or "")
    found: dict[str, Any] = {
        "name": (fields.get("name") or [dist_name])[0],
        "version": (fields.get("version") or [dir_version])[0],
    }
    if not fields:
        found["metadata"] = False
    if dir_version and fields.get("version") and dir_version != fields["version"][0].replace("-", "_"):
        found["folder_version"] = dir_version
    if CORE.match(dist_name):
        found["requires"] = fields.get("requires-dist", [])[:400]
        found["requires_python"] = fields["requires-python"][0] if fields.get("requires-python") else None
        found["tags"] = headers(read_text(os.path.join(folder, name, "WHEEL")) or "").get("tag", [])[:50]
        direct = read_text(os.path.join(folder, name, "direct_url.json"))
        if direct:
            found["direct_url"] = True
            found["editable"] = '"editable": true' in direct or '"editable":true' in direct
    return found


def distributions(folder: str) -> list[dict[str, Any]]:
    """All distributions of one site-packages folder."""
    return [distribution(folder, name) for name in list_dir(folder) if name.endswith(".dist-info")]


def owners(folder: str) -> dict[str, list[str]]:
    """Shared NVIDIA libraries that more than one distribution claims (``RECORD``), or that one owns: path ->
    distributions."""
    found: dict[str, list[str]] = {}
    for name in list_dir(folder):
        if not name.endswith(".dist-info") or not name.lower().startswith("nvidia"):
            continue
        for line in (read_text(os.path.join(folder, name, "RECORD"), 1 << 20) or "").splitlines():
            path = line.split(",")[0].strip('"')
            if os.path.basename(path) in SHARED:
                found.setdefault(path, []).append(name[: -len(".dist-info")])
    return found


def kernel_owners(folder: str) -> list[str]:
    """Distributions that claim the import package ``sgl_kernel``."""
    return [
        name[: -len(".dist-info")]
        for name in list_dir(folder)
        if re.match(r"^(sgl_kernel|sglang_kernel)-.*\.dist-info$", name)
    ]


def torch_build(folder: str) -> dict[str, Any] | None:
    """torch's version and CUDA release from its version.py, without importing it."""
    text = read_text(os.path.join(folder, "torch/version.py"))
    if text is None:
        return (
            None
            if not os.path.isdir(os.path.join(folder, "torch"))
            else {"version": None, "cuda": None, "broken": "torch/version.py is missing"}
        )

    def value(name: str) -> str | None:
        match = re.search(r"^%s(?:\s*:[^=\n]*)?\s*=\s*(?:'([^']*)'|\"([^\"]*)\"|None)" % name, text, re.M)
        return (match.group(1) or match.group(2)) if match else None

    return {"version": value("__version__"), "cuda": value("cuda"), "hip": value("hip"), "git": value("git_version")}
