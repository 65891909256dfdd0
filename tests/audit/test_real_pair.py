"""A kernel package and a torch as published, downloaded, unpacked and audited: the verdict that the stored symbol lists
give, with the same symbols.

With ``DFLASH_TESTS=all`` every kernel package of the lists (2 GB of downloads) instead of the one.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dflash_deploy.audit.report import Report, audit
from dflash_deploy.audit.request import build_case
from dflash_deploy.facts import Facts
from dflash_deploy.facts.remote.elf import open_elf
from dflash_deploy.facts.remote.venvs import venv_facts
from dflash_deploy.model import Severity
from tests.audit.test_wheels import FITTING, KERNELS, tables
from tests.scope import EVERYTHING

TORCH = "2.14.1"
TORCH_FILES = tuple(
    f"torch/{name}"
    for name in (
        "version.py",
        *(f"lib/lib{stem}.so" for stem in ("c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda", "torch_python")),
    )
)
OPERATORS = ("sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/sm100/common_ops.abi3.so")
CHOSEN = KERNELS if EVERYTHING else ("0.4.2",)


def unpack(requirement: str, site: Path, names: tuple[str, ...]) -> None:
    """Download a wheel and unpack some of its files and its metadata."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version=3.12",
    ]
    command += [f"--platform=manylinux{tag}_x86_64" for tag in ("2014", "_2_28", "_2_34")]
    folder = site / "wheels"
    done = subprocess.run([*command, "-d", folder, requirement], capture_output=True, text=True, timeout=540)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr[-200:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name in names or name.endswith(".dist-info/METADATA"):
                archive.extract(name, site)
    wheel.unlink()


@pytest.fixture(scope="module")
def torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the real torch."""
    site = tmp_path_factory.mktemp("pair") / "lib/python3.12/site-packages"
    site.mkdir(parents=True)
    unpack(f"torch=={TORCH}", site, TORCH_FILES)
    return site


def judged(venv: Path) -> Report:
    section = venv_facts(str(venv), [str(venv)], False, [])
    return audit(build_case(Facts.from_json({"schema": 1, "host": {"arch": "x86_64"}, "venvs": section})))


@pytest.mark.wheels
@pytest.mark.waits
@pytest.mark.parametrize("kernel", CHOSEN)
def test_the_verdict_on_a_real_pair(torch: Path, kernel: str) -> None:
    name = "sgl-kernel" if kernel.startswith("0.3") else "sglang-kernel"
    for old in (*torch.glob("sgl*_kernel-*.dist-info/METADATA"), *torch.glob("sgl_kernel/*/*.so")):
        old.unlink()
    for folder in torch.glob("sgl*_kernel-*.dist-info"):
        folder.rmdir()
    unpack(f"{name}=={kernel}", torch, OPERATORS)
    report = judged(torch.parents[2])
    findings = {f.rule: f for f in report.findings if f.severity is Severity.FAIL and "common_ops" in f.message}
    assert next(f for f in report.findings if f.rule == "torch-complete").severity is Severity.OK
    for path in OPERATORS:
        stored = tables()["kernels"][kernel]["modules"][path]
        elf = open_elf(str(torch / path))
        assert elf.needed == stored["needed"]
        undefined = {symbol.decode() for symbol, weak in elf.undefined() if not weak}
        assert set(stored["undefined"]) <= undefined
    if (kernel, TORCH) in FITTING:
        assert "extension-symbols-resolve" not in findings
        return
    absent = {
        symbol for path in OPERATORS for symbol in tables()["kernels"][kernel]["modules"][path]["undefined"]
    } - set(tables()["torch"][TORCH]["exports"])
    found = findings["extension-symbols-resolve"]
    named = {line.split("  ")[0] for line in found.evidence if line.startswith("_Z")}
    assert named and named <= absent
    assert found.message.startswith(OPERATORS) and f"{len(absent)} symbol(s)" in found.message
    assert f"installed torch: {TORCH}" in " ".join(found.evidence)
