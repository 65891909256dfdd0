"""Published kernel packages against published torch releases: symbol lists as data, carried through real ELF files, the
probe's reader and the rules."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dflash_deploy.audit.abi import demangle, epochs, releases_with, torch_for_kernel
from dflash_deploy.audit.report import audit
from dflash_deploy.audit.request import build_case
from dflash_deploy.facts import Facts
from dflash_deploy.facts.remote.venvs import venv_facts
from dflash_deploy.model import Severity
from tests.audit.cases import DATA
from tests.facts.elf_writer import write_elf

FITTING = {("0.3.21", "2.9.1"), ("0.4.1", "2.9.1"), ("0.4.2", "2.11.0"), ("0.4.5", "2.11.0"), ("0.4.10", "2.14.1")}
KERNELS = ("0.3.21", "0.4.1", "0.4.2", "0.4.5", "0.4.10")
TORCHES = ("2.9.1", "2.11.0", "2.13.0", "2.14.1")


@cache
def tables() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(gzip.decompress((DATA / "wheel_symbols.json.gz").read_bytes()))
    return loaded


def build_venv(root: Path, kernel: str, torch: str) -> None:
    """An environment whose native files have the wheels' real imports, exports and sonames."""
    major = "12" if torch == "2.9.1" else "13"
    site = root / "lib/python3.12/site-packages"
    (site / "torch/lib").mkdir(parents=True)
    (site / "torch/version.py").write_text(f"__version__ = '{torch}+cu{major}0'\ncuda: Optional[str] = '{major}.0'\n")
    for name in ("libc10.so", "libc10_cuda.so", "libtorch.so", "libtorch_cuda.so", "libtorch_python.so"):
        (site / "torch/lib" / name).write_bytes(write_elf(soname=name))
    exports = tables()["torch"][torch]["exports"]
    (site / "torch/lib/libtorch_cpu.so").write_bytes(write_elf(soname="libtorch_cpu.so", exports=exports))
    for name, module in tables()["kernels"][kernel]["modules"].items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        needed = [lib for lib in module["needed"] if lib.startswith(("libtorch", "libc10", "libcudart"))]
        path.write_bytes(write_elf(needed=needed, undefined=module["undefined"]))
    nvidia = site / ("nvidia/cu13/lib" if major == "13" else "nvidia/cuda_runtime/lib")
    nvidia.mkdir(parents=True)
    (nvidia / f"libcudart.so.{major}").write_bytes(write_elf(soname=f"libcudart.so.{major}"))
    for name, version in (("torch", torch), ("sglang_kernel", kernel)):
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")


@pytest.mark.parametrize("torch", TORCHES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_pair(tmp_path: Path, kernel: str, torch: str) -> None:
    build_venv(tmp_path, kernel, torch)
    section = venv_facts(str(tmp_path), [str(tmp_path)], False, [])
    report = audit(build_case(Facts.from_json({"schema": 1, "host": {"arch": "x86_64"}, "venvs": section})))
    findings = [f for f in report.findings if f.rule == "extension-symbols-resolve" and f.severity is Severity.FAIL]
    wanted = set(tables()["kernels"][kernel]["modules"]["sgl_kernel/sm100/common_ops.abi3.so"]["undefined"])
    absent = wanted - set(tables()["torch"][torch]["exports"])
    if (kernel, torch) in FITTING:
        assert not absent
        assert not findings
        return
    common = next(f for f in findings if "sm100/common_ops" in f.message)
    named = {line.split("  ")[0] for line in common.evidence if line.startswith("_Z")}
    assert named and named <= absent
    assert len(named) == min(5, len(absent))
    assert any("::" in line for line in common.evidence)
    target = torch_for_kernel(kernel)
    assert target is not None and target[0] in common.remedy


def test_epoch_table_agrees_with_the_wheels() -> None:
    for kernel in KERNELS:
        target = torch_for_kernel(kernel)
        assert target is not None and (kernel, target[0]) in FITTING
    for symbol, releases in epochs().items():
        exported = tuple(torch for torch in TORCHES if symbol in tables()["torch"][torch]["exports"])
        assert releases == exported
    assert releases_with(["_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib"]) == ("2.9.1",)
    assert releases_with(["_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb"]) == ("2.11.0", "2.13.0")
    assert releases_with(["_ZN7unknownEv"]) == ()


def symbols() -> list[str]:
    return sorted(
        {
            name
            for kernel in tables()["kernels"].values()
            for module in kernel["modules"].values()
            for name in module["undefined"]
        }
    )


def test_every_symbol_is_readable() -> None:
    unreadable = [name for name in symbols() if name.startswith("_Z") and demangle(name) == name]
    assert not unreadable


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="c++filt is not on this machine")
def test_demangler_agrees_with_binutils() -> None:
    names = [name for name in symbols() if name.startswith("_Z")]
    truth = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()

    def bare(text: str) -> str:
        # binutils prints the return type of templates, which ours leaves out, and spaces "> >".
        return text.replace(" ", "").replace("[abi:cxx11]", "")

    differing = [
        (ours, theirs)
        for ours, theirs in zip(map(demangle, names), truth, strict=True)
        if bare(ours) not in bare(theirs)
    ]
    assert len(differing) <= len(names) // 20, differing[:5]


@pytest.mark.parametrize(
    "text",
    [
        "_Z",
        "_ZN",
        "_ZNK3c10",
        "_ZN3c10IS",
        "_ZN99999999999999999999c10E",
        "_ZSS_",
        "_ZN3c101S_E",
        "_Z" + "N" * 5000,
        "main",
    ],
)
def test_demangler_never_fails(text: str) -> None:
    assert demangle(text)
