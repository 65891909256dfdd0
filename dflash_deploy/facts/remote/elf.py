"""A reader for 64-bit little-endian ELF files: what the dynamic loader would want to know, nothing else. It follows
program headers, so stripped section tables do not matter; sections are read only for the GPU code.

Formats: System V ABI (ELF-64), GNU extensions for symbol versions and ``DT_GNU_HASH``.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from typing import Any

DT_NEEDED, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SONAME, DT_RPATH, DT_RUNPATH = 1, 4, 5, 6, 10, 14, 15, 29
DT_GNU_HASH, DT_VERDEF, DT_VERDEFNUM, DT_VERNEED, DT_VERNEEDNUM = (
    0x6FFFFEF5,
    0x6FFFFFFC,
    0x6FFFFFFD,
    0x6FFFFFFE,
    0x6FFFFFFF,
)
MACHINES = {3: "i386", 8: "mips", 21: "ppc64le", 22: "s390x", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
MAX_SYMBOLS = 1000000
MAX_UNDEFINED = 300000
"""libtorch_python.so has 6,000 undefined symbols; reading this many takes half a second."""
MAX_ENTRIES = 65536
SYMBOL = struct.Struct("<IBBHQQ")
WORD = struct.Struct("<Q")
HALF = struct.Struct("<I")
WEAK = 2


class NotElf(Exception):
    """The file cannot be read as a 64-bit little-endian ELF file; the text says why."""


def gnu_hash(name: bytes) -> int:
    """The hash of ``DT_GNU_HASH`` tables."""
    value = 5381
    for char in name:
        value = (value * 33 + char) & 0xFFFFFFFF
    return value


class Elf:
    """One file. ``data`` is anything that slices to bytes: bytes or a memory map."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.size = len(data)
        if self.size < 64 or data[:4] != b"\x7fELF":
            raise NotElf("no ELF header" if self.size >= 4 else "truncated: %d bytes" % self.size)
        self.machine = MACHINES.get(self._unpack("<H" if data[5] == 1 else ">H", 18)[0], "machine %d" % data[18])
        if data[4] != 2 or data[5] != 1:
            raise NotElf(
                "%s-bit %s-endian %s"
                % ("64" if data[4] == 2 else "32", "little" if data[5] == 1 else "big", self.machine)
            )
        header = self._unpack("<HHIQQQIHHHHHH", 16)
        self.phoff, self.shoff = header[4], header[5]
        self.phentsize, self.phnum, self.shentsize, self.shnum, self.shstrndx = (
            header[8],
            header[9],
            header[10],
            header[11],
            header[12],
        )
        self.loads: list[tuple[int, int, int]] = []
        self.dynamic: dict[int, list[int]] = {}
        span = (0, 0)
        for index in range(min(self.phnum, 1024)):
            kind, _, offset, vaddr, _, filesz, _, _ = self._unpack("<IIQQQQQQ", self.phoff + index * self.phentsize)
            if kind == 1:
                self.loads.append((vaddr, offset, filesz))
                if offset + filesz > self.size:
                    raise NotElf("truncated: a segment ends at %d, the file at %d" % (offset + filesz, self.size))
            elif kind == 2:
                span = (offset, filesz)
        for position in range(span[0], span[0] + min(span[1], MAX_ENTRIES * 16), 16):
            tag, value = self._unpack("<QQ", position)
            if tag == 0:
                break
            self.dynamic.setdefault(tag, []).append(value)
        self._strings = self._table(DT_STRTAB)
        self._strings_size = self.dynamic.get(DT_STRSZ, [0])[0]
        self._symbols = self._table(DT_SYMTAB)
        self._gnu = self._gnu_header()
        self._names: dict[bytes, bool] | None = None

    def _unpack(self, form: str, offset: int) -> tuple[Any, ...]:
        try:
            return struct.unpack_from(form, self.data, offset)
        except (struct.error, OverflowError, ValueError) as error:
            raise NotElf("truncated or corrupt at offset %d" % offset) from error

    def _offset(self, vaddr: int) -> int:
        for start, offset, size in self.loads:
            if start <= vaddr < start + size:
                return offset + vaddr - start
        raise NotElf("corrupt: address %#x is in no segment" % vaddr)

    def _table(self, tag: int) -> int | None:
        values = self.dynamic.get(tag)
        return self._offset(values[0]) if values else None

    def _bytes_at(self, offset: int) -> bytes:
        end = self.data.find(b"\0", offset, min(offset + 16384, self.size))
        if offset < 0 or end < 0:
            raise NotElf("corrupt: no string at offset %d" % offset)
        return bytes(self.data[offset:end])

    def _string(self, index: int) -> bytes:
        if self._strings is None or index >= max(self._strings_size, 1):
            raise NotElf("corrupt: string index %d" % index)
        return self._bytes_at(self._strings + index)

    def _text(self, index: int) -> str:
        return self._string(index).decode("utf-8", "backslashreplace")

    @property
    def needed(self) -> list[str]:
        """DT_NEEDED sonames in order."""
        return [self._text(value) for value in self.dynamic.get(DT_NEEDED, [])[:1000]]

    @property
    def soname(self) -> str | None:
        values = self.dynamic.get(DT_SONAME)
        return self._text(values[0]) if values else None

    @property
    def rpath(self) -> list[str]:
        return [part for value in self.dynamic.get(DT_RPATH, [])[:10] for part in self._text(value).split(":") if part]

    @property
    def runpath(self) -> list[str]:
        return [
            part for value in self.dynamic.get(DT_RUNPATH, [])[:10] for part in self._text(value).split(":") if part
        ]

    def _gnu_header(self) -> tuple[int, int, int, int, int] | None:
        """(buckets, first hashed symbol, bloom words, bloom shift, offset of the bloom filter)"""
        at = self._table(DT_GNU_HASH)
        if at is None:
            return None
        buckets, first, words, shift = self._unpack("<IIII", at)
        if not buckets or not words or buckets > MAX_SYMBOLS or words > MAX_SYMBOLS or shift > 63:
            raise NotElf("corrupt: GNU hash header")
        return (buckets, first, words, shift, at + 16)

    def _hash_count(self) -> int | None:
        at = self._table(DT_HASH)
        return None if at is None else int(self._unpack("<II", at)[1])

    def _symbol(self, index: int) -> tuple[int, int, int]:
        """(name index, binding, section index)"""
        assert self._symbols is not None
        name, info, _, section, _, _ = self._unpack("<IBBHQQ", self._symbols + index * 24)
        return name, info >> 4, section

    def undefined(self) -> Iterator[tuple[bytes, bool]]:
        """(name, weak) of every undefined dynamic symbol. A GNU hash table keeps them before its first hashed
        symbol."""
        if self._symbols is None:
            return
        count = self._hash_count()
        if self._gnu is not None:
            count = self._gnu[1]
        elif count is None and self._strings is not None and self._strings > self._symbols:
            count = (self._strings - self._symbols) // 24
        if (count or 0) > MAX_UNDEFINED and self._gnu is not None:
            raise NotElf("corrupt: %d undefined symbols" % (count or 0))
        for index in range(1, min(count or 0, MAX_SYMBOLS)):
            name, binding, section = self._symbol(index)
            if section == 0 and name:
                yield self._string(name), binding == WEAK

    def exports(self, name: bytes, hashed: int | None = None) -> bool:
        """Whether the file defines the dynamic symbol ``name``."""
        if self._symbols is None:
            return False
        if self._gnu is None:
            if self._names is None:
                count = min(self._hash_count() or 0, MAX_SYMBOLS)
                symbols = (self._symbol(index) for index in range(1, count))
                self._names = {self._string(item[0]): True for item in symbols if item[2] != 0 and item[0]}
            return name in self._names
        buckets, first, words, shift, bloom = self._gnu
        value = gnu_hash(name) if hashed is None else hashed
        data = self.data
        try:
            word = WORD.unpack_from(data, bloom + 8 * ((value // 64) % words))[0]
            if not (word >> (value % 64)) & 1 or not (word >> ((value >> shift) % 64)) & 1:
                return False
            table = bloom + 8 * words
            index = HALF.unpack_from(data, table + 4 * (value % buckets))[0]
            if index < first:
                return False
            chains = table + 4 * (buckets - first)
            for _ in range(MAX_ENTRIES):
                link = HALF.unpack_from(data, chains + 4 * index)[0]
                if link | 1 == value | 1:
                    position, _, _, section, _, _ = SYMBOL.unpack_from(data, self._symbols + index * 24)
                    start = (self._strings or 0) + position
                    if section != 0 and data[start : start + len(name) + 1] == name + b"\0":
                        return True
                if link & 1:
                    return False
                index += 1
        except struct.error as error:
            raise NotElf("corrupt: symbol hash table") from error
        return False

    def exported(self) -> Iterator[bytes]:
        """Every defined dynamic symbol (slow for large libraries; the audit itself looks names up instead)."""
        if self._symbols is None:
            return
        count = self._hash_count()
        first = 1
        if self._gnu is not None:
            buckets, first, words, _, bloom = self._gnu
            table = bloom + 8 * words
            last = max([self._unpack("<I", table + 4 * bucket)[0] for bucket in range(buckets)] or [0])
            count = first
            if last >= first:
                while not self._unpack("<I", table + 4 * buckets + 4 * (last - first))[0] & 1 and last < MAX_SYMBOLS:
                    last += 1
                count = last + 1
        for index in range(first, min(count or 0, MAX_SYMBOLS)):
            name, _, section = self._symbol(index)
            if section != 0 and name:
                yield self._string(name)

    def version_needs(self) -> dict[str, list[str]]:
        """Library -> symbol versions wanted of it, e.g. ``{"libc.so.6": ["GLIBC_2.17", "GLIBC_2.34"]}``."""
        found: dict[str, list[str]] = {}
        at = self._table(DT_VERNEED)
        for _ in range(min(self.dynamic.get(DT_VERNEEDNUM, [0])[0], 1000)):
            if at is None:
                break
            _, count, name, aux, following = self._unpack("<HHIII", at)
            position = at + aux
            versions = found.setdefault(self._text(name), [])
            for _ in range(min(count, 1000)):
                _, _, _, label, step = self._unpack("<IHHII", position)
                versions.append(self._text(label))
                if not step:
                    break
                position += step
            if not following:
                break
            at += following
        return found

    def version_definitions(self) -> list[str]:
        """Symbol versions that the file defines, e.g. ``GLIBCXX_3.4.30``."""
        found = []
        at = self._table(DT_VERDEF)
        for _ in range(min(self.dynamic.get(DT_VERDEFNUM, [0])[0], 10000)):
            if at is None:
                break
            _, _, _, count, _, aux, following = self._unpack("<HHHHIII", at)
            if count:
                found.append(self._text(self._unpack("<II", at + aux)[0]))
            if not following:
                break
            at += following
        return found

    def section(self, wanted: bytes) -> tuple[int, int] | None:
        """(offset, size) of a section by name; None when there is none."""
        if not self.shoff or not self.shnum or self.shstrndx >= self.shnum:
            return None
        strings = self._unpack("<IIQQQQIIQQ", self.shoff + self.shstrndx * self.shentsize)[4]
        for index in range(min(self.shnum, MAX_ENTRIES)):
            header = self._unpack("<IIQQQQIIQQ", self.shoff + index * self.shentsize)
            if self._bytes_at(strings + header[0]) == wanted:
                return header[4], min(header[5], max(0, self.size - header[4]))
        return None


def open_elf(path: str) -> Elf:
    """Map a regular file and read its headers.

    Raises:
        NotElf: not a regular file, unreadable, or not such an ELF file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise NotElf("unreadable: %s" % error) from error
    try:
        import stat

        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotElf("not a regular file")
        if status.st_size < 64:
            raise NotElf("truncated: %d bytes" % status.st_size)
        data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise NotElf("unreadable: %s" % error) from error
    finally:
        os.close(descriptor)
    return Elf(data)
