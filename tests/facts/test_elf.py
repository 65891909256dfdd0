"""The ELF reader: right on written and on real files, an answer for 1,000 damaged ones."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pytest

from dflash_deploy.facts.remote.elf import Elf, NotElf, open_elf
from dflash_deploy.facts.remote.fatbin import architectures
from tests.facts.elf_writer import fatbin, write_elf

EXPORTS = [f"_ZN3c10{len(str(i)) + 4}name{i}Ev" for i in range(500)]


def sample() -> bytes:
    return write_elf(
        needed=["libc10.so", "libc.so.6"],
        undefined=["_ZN3c106DeviceEv", "malloc"],
        exports=EXPORTS,
        soname="libsample.so",
        runpath="$ORIGIN/../torch/lib",
        versions=[("libc.so.6", "GLIBC_2.34"), ("libstdc++.so.6", "GLIBCXX_3.4.30")],
        gpu=fatbin([(2, 90), (2, 120), (1, 90)]),
    )


def test_reads_what_was_written() -> None:
    elf = Elf(sample())
    assert elf.machine == "x86_64"
    assert elf.needed == ["libc10.so", "libc.so.6"]
    assert elf.soname == "libsample.so"
    assert elf.runpath == ["$ORIGIN/../torch/lib"] and elf.rpath == []
    assert [name for name, _ in elf.undefined()] == [b"_ZN3c106DeviceEv", b"malloc"]
    assert sorted(elf.exported()) == sorted(name.encode() for name in EXPORTS)
    assert all(elf.exports(name.encode()) for name in EXPORTS)
    assert not any(elf.exports(name) for name in (b"", b"malloc", b"_ZN3c10", EXPORTS[0].encode() + b"x"))
    assert elf.version_needs() == {"libc.so.6": ["GLIBC_2.34"], "libstdc++.so.6": ["GLIBCXX_3.4.30"]}
    assert architectures(elf) == {"sm": [90, 120], "ptx": [90], "complete": True}


def test_no_gpu_code_is_none() -> None:
    assert architectures(Elf(write_elf(needed=["libc.so.6"]))) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs ELF files of this machine")
def test_reads_real_libraries() -> None:
    import _ctypes

    elf = open_elf(_ctypes.__file__)
    assert "libc.so.6" in elf.needed
    assert elf.exports(b"PyInit__ctypes")
    assert b"PyInit__ctypes" in set(elf.exported())
    assert any(name.startswith("GLIBC_") for versions in elf.version_needs().values() for name in versions)


def exercise(data: bytes) -> None:
    """Everything that the probe asks of a file."""
    elf = Elf(data)
    list(elf.undefined())
    elf.version_needs()
    elf.version_definitions()
    assert isinstance(elf.needed, list) and isinstance(elf.runpath, list) and isinstance(elf.rpath, list)
    elf.exports(b"malloc")
    elf.exports(EXPORTS[3].encode())
    architectures(elf, 0.05)


@pytest.mark.parametrize("seed", range(10))
def test_damaged_files_give_an_answer(seed: int) -> None:
    rng = random.Random(seed)
    whole = sample()
    slowest = 0.0
    for _ in range(100):
        data = bytearray(whole)
        kind = rng.randrange(4)
        if kind == 0:
            del data[rng.randrange(len(data)) :]
        elif kind == 1:
            for _ in range(rng.randrange(1, 40)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind == 2:
            start = rng.randrange(64, len(data) - 64)
            data[start : start + 64] = rng.randbytes(64)
        else:
            data[16:64] = rng.randbytes(48)
        begun = time.monotonic()
        try:
            exercise(bytes(data))
        except NotElf as error:
            assert str(error)
        slowest = max(slowest, time.monotonic() - begun)
    assert slowest < 5


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "truncated"), (b"#!/bin/sh\n" * 20, "no ELF header"), (b"version https://git-lfs\n" * 10, "no ELF header")],
)
def test_other_files_are_named(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(data)
    with pytest.raises(NotElf, match=says):
        open_elf(str(path))


def test_foreign_classes_are_named(tmp_path: Path) -> None:
    small = bytearray(sample())
    small[4] = 1
    with pytest.raises(NotElf, match="32-bit"):
        Elf(bytes(small))
    big = bytearray(sample())
    big[5] = 2
    with pytest.raises(NotElf, match="big-endian"):
        Elf(bytes(big))
    with pytest.raises(NotElf, match="truncated"):
        Elf(sample()[:-200])
    with pytest.raises(NotElf, match="regular"):
        open_elf(str(tmp_path))
