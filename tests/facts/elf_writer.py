"""Writes small, valid ELF64 shared objects: just enough for a dynamic-section reader, from lists of symbols."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from dflash_deploy.facts.remote.elf import gnu_hash


def fatbin(entries: Sequence[tuple[int, int]]) -> bytes:
    """A GPU code section with one fat binary of (kind, architecture) entries: kind 1 PTX, 2 machine code."""
    body = b"".join(
        struct.pack("<HHIQ", kind, 0x101, 64, 16) + b"\0" * 12 + struct.pack("<I", arch) + b"\0" * 48
        for kind, arch in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def write_elf(
    *,
    needed: Sequence[str] = (),
    undefined: Sequence[str] = (),
    exports: Sequence[str] = (),
    soname: str = "",
    runpath: str = "",
    versions: Sequence[tuple[str, str]] = (),
    gpu: bytes = b"",
) -> bytes:
    """A shared object. ``versions`` are (library, symbol version) needs; ``gpu`` becomes ``.nv_fatbin``."""
    strings = bytearray(b"\0")

    def text(value: str) -> int:
        place = len(strings)
        strings.extend(value.encode() + b"\0")
        return place

    buckets = max(1, len(exports) // 4)
    ordered = sorted(exports, key=lambda name: gnu_hash(name.encode()) % buckets)
    symbols = bytearray(24)
    for name in undefined:
        symbols += struct.pack("<IBBHQQ", text(name), 0x12, 0, 0, 0, 0)
    first = len(symbols) // 24
    for name in ordered:
        symbols += struct.pack("<IBBHQQ", text(name), 0x12, 0, 1, 0x1000, 8)
    hashes = [gnu_hash(name.encode()) for name in ordered]
    table = [0] * buckets
    chains = b""
    for index, value in enumerate(hashes):
        table[value % buckets] = table[value % buckets] or first + index
        last = index + 1 == len(hashes) or hashes[index + 1] % buckets != value % buckets
        chains += struct.pack("<I", value & ~1 | last)
    # One bloom word with every bit set lets all lookups pass to the buckets.
    hashed = struct.pack("<IIIIQ", buckets, first, 1, 6, 2**64 - 1) + struct.pack(f"<{buckets}I", *table) + chains
    tags = [(1, text(name)) for name in needed]
    if soname:
        tags.append((14, text(soname)))
    if runpath:
        tags.append((29, text(runpath)))
    need = b""
    for index, (library, version) in enumerate(versions):
        following = 0 if index + 1 == len(versions) else 32
        need += struct.pack("<HHIII", 1, 1, text(library), 16, following) + struct.pack(
            "<IHHII", 0, 0, 2, text(version), 0
        )
    names = b"\0.nv_fatbin\0.shstrtab\0"
    parts: list[bytes] = []
    at = 64 + 2 * 56
    places = []
    for part in (bytes(strings), bytes(symbols), hashed, need, gpu, names):
        pad = -at % 8
        parts.append(b"\0" * pad + part)
        places.append(at + pad)
        at += pad + len(part)
    tags += [(5, places[0]), (10, len(strings)), (6, places[1]), (11, 24), (0x6FFFFEF5, places[2])]
    if need:
        tags += [(0x6FFFFFFE, places[3]), (0x6FFFFFFF, len(versions))]
    pad = -at % 8
    dynamic = b"".join(struct.pack("<QQ", *tag) for tag in [*tags, (0, 0)])
    start = at + pad
    body = b"".join(parts) + b"\0" * pad + dynamic
    sections = start + len(dynamic)
    total = sections + 3 * 64
    header = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, sections, 0, 64, 56, 2, 64, 3, 2)
    loads = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, total, total, 4096)
    loads += struct.pack("<IIQQQQQQ", 2, 6, start, start, start, len(dynamic), len(dynamic), 8)
    tables = bytes(64)
    tables += struct.pack("<IIQQQQIIQQ", 1, 1, 2, 0, places[4], len(gpu), 0, 0, 8, 0)
    tables += struct.pack("<IIQQQQIIQQ", 12, 3, 0, 0, places[5], len(names), 0, 0, 1, 0)
    return header + loads + body + tables
