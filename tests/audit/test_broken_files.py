"""Environments whose files are damaged, foreign, missing or many: the cause is named, in bounded time."""

from __future__ import annotations

import os
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_deploy.audit.report import Report, audit
from dflash_deploy.audit.request import build_case
from dflash_deploy.facts import Facts
from dflash_deploy.facts.remote.venvs import venv_facts
from tests.audit.test_wheels import build_venv
from tests.facts.elf_writer import fatbin, write_elf

KERNEL = "sgl_kernel/sm100/common_ops.abi3.so"


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A whole environment of a fitting pair."""
    build_venv(tmp_path, "0.4.5", "2.11.0")
    major, minor = sys.version_info[:2]
    (tmp_path / "pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\nversion = {major}.{minor}.0\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(f"{sys.base_prefix}/bin/python3")
    return tmp_path


def site(venv: Path) -> Path:
    return venv / "lib/python3.12/site-packages"


def judged(venv: Path) -> Report:
    raw = {
        "schema": 1,
        "host": {"arch": "x86_64", "system": "Linux"},
        "gpu": {"driver": {"version": None}, "smi": {"status": "absent", "gpus": []}, "pci": []},
        "venvs": venv_facts(str(venv), [str(venv)], False, []),
    }
    return audit(build_case(Facts.from_json(raw)))


def edited(name: str, change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        change(data)
        (folder / name).write_bytes(data)

    return apply


def set_bytes(at: int, value: bytes) -> Callable[[bytearray], object]:
    def change(data: bytearray) -> None:
        data[at : at + len(value)] = value

    return change


def cut(size: int) -> Callable[[bytearray], object]:
    def change(data: bytearray) -> None:
        del data[size:]

    return change


def gone(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return apply


def loops(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(Path(name).name)

    return apply


def fifo(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return apply


TORCH = "torch/lib/libtorch_cpu.so"
DAMAGE: tuple[tuple[str, Callable[[Path], None], str, str], ...] = (
    ("kernel cut off", edited(KERNEL, cut(4000)), "native-files-whole", "truncated: a segment ends at"),
    ("kernel empty", edited(KERNEL, cut(0)), "native-files-whole", "truncated: 0 bytes"),
    ("kernel is noise", edited(KERNEL, set_bytes(0, b"\x93" * 64)), "native-files-whole", "no ELF header"),
    ("kernel for 32 bits", edited(KERNEL, set_bytes(4, b"\1")), "native-files-whole", "32-bit"),
    ("kernel big-endian", edited(KERNEL, set_bytes(5, b"\2")), "native-files-whole", "big-endian"),
    ("kernel for aarch64", edited(KERNEL, set_bytes(18, struct.pack("<H", 183))), "native-files-whole", "aarch64"),
    ("kernel's files gone", gone("sgl_kernel"), "kernel-files-present", "without its operators"),
    ("torch cut off", edited(TORCH, cut(3000)), "torch-complete", "libtorch_cpu.so: truncated"),
    ("torch is zeros", edited(TORCH, set_bytes(0, bytes(64))), "torch-complete", "libtorch_cpu.so: no ELF header"),
    ("torch library gone", gone(TORCH), "torch-complete", "libtorch_cpu.so: missing"),
    ("torch libraries gone", gone("torch/lib"), "torch-complete", "libc10.so: missing"),
    ("torch folder gone", gone("torch"), "torch-complete", "its folder is missing"),
    ("torch version gone", gone("torch/version.py"), "torch-complete", "version.py is missing"),
    ("torch library loops", loops("torch/lib/libc10.so"), "torch-complete", "libc10.so: unreadable"),
    ("torch library is a pipe", fifo("torch/lib/libc10.so"), "torch-complete", "not a regular file"),
)


def test_the_whole_environment_is_clean(venv: Path) -> None:
    report = judged(venv)
    assert not report.failures, report.failures


@pytest.mark.parametrize(("damage", "rule", "says"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_damage_is_the_primary_cause(venv: Path, damage: Callable[[Path], None], rule: str, says: str) -> None:
    damage(site(venv))
    report = judged(venv)
    assert report.primary is not None and report.primary.rule == rule
    assert says in " ".join((report.primary.message, *report.primary.evidence))
    assert all(finding.because_of for finding in report.failures if finding.rule != rule), report.failures


def test_gigabytes_are_not_read(venv: Path) -> None:
    """1.8 GB whose GPU code section is zeros for a whole gigabyte: not understood, so unknown, and soon."""
    path = site(venv) / KERNEL
    data = bytearray(write_elf(needed=["libc10.so"], gpu=fatbin([(2, 90)])))
    headers = struct.unpack_from("<Q", data, 40)[0]
    struct.pack_into("<QQ", data, headers + 64 + 24, len(data), 1_700_000_000)
    path.write_bytes(data)
    os.truncate(path, 1_800_000_000)
    began = time.monotonic()
    (environment,) = venv_facts(str(venv), [str(venv)], False, [])["environments"]
    assert time.monotonic() - began < 8
    (module,) = [item for item in environment["elf"]["modules"] if item["path"] == KERNEL]
    assert module["gpu"] == {"sm": [], "ptx": [], "complete": False}


def test_a_hundred_thousand_files() -> None:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # making them on a disk takes far longer
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        build_venv(Path(folder), "0.4.5", "2.11.0")
        for part in range(100):
            place = f"{site(Path(folder))}/data/{part}"
            os.makedirs(place)  # noqa: PTH103  (pathlib doubles the time)
            for index in range(1000):
                os.mknod(f"{place}/{index}.txt")
        began = time.monotonic()
        (environment,) = venv_facts(folder, [folder], False, [])["environments"]
        assert time.monotonic() - began < 10
    assert environment["elf"]["files"] > 100_000
    assert not environment["elf"]["truncated"]
