"""GPU architectures embedded in a library's ``.nv_fatbin`` section.

A fat binary is a 16-byte header (magic 0xBA55ED50, version, header size, payload size) and entries; an entry's header
says its kind (1 PTX, 2 machine code), its own size, the payload's size and the architecture (90 for sm_90) at byte 28.
"""

from __future__ import annotations

import time
from typing import Any

from dflash_deploy.facts.remote.elf import Elf, NotElf

MAGIC = 0xBA55ED50
MAX_FATBINS = 200000
WINDOW = 1 << 20
"""Bytes searched between two looks at the clock."""
PADDING = 1 << 16
"""A longer stretch without a fat binary was not understood."""


def architectures(elf: Elf, budget_s: float = 0.5) -> dict[str, Any] | None:
    """``{"sm": [80, 90], "ptx": [90], "complete": true}``; None when the file carries no GPU code. Not complete: out of
    time or a part was not understood; an architecture that is missing then is unknown, not absent."""
    place = elf.section(b".nv_fatbin")
    if place is None or not place[1]:
        return None
    position, size = place
    end = position + size
    found: dict[int, set[int]] = {1: set(), 2: set()}
    deadline = time.monotonic() + budget_s
    complete = True
    try:
        for _ in range(MAX_FATBINS):
            if position + 16 > end:
                break
            if time.monotonic() > deadline:
                complete = False
                break
            magic, _, header, payload = elf._unpack("<IHHQ", position)
            if magic != MAGIC:
                skipped, position = position, following(elf, position, end, deadline)
                complete = complete and position - skipped <= PADDING
                continue
            entry = position + header
            last = min(entry + payload, end)
            while entry + 32 <= last:
                kind, _, length, amount = elf._unpack("<HHIQ", entry)
                arch = elf._unpack("<I", entry + 28)[0]
                if kind not in found or length < 32 or not 10 <= arch < 1000:
                    complete = False
                    break
                found[kind].add(arch)
                entry += length + amount
            position = (last + 7) // 8 * 8
        else:
            complete = False
    except NotElf:
        complete = False
    return {"sm": sorted(found[2]), "ptx": sorted(found[1]), "complete": complete}


def following(elf: Elf, position: int, end: int, deadline: float) -> int:
    """Offset of the next fat binary, ``end`` when there is none; where the clock ran out, how far it was looked."""
    while position < end and time.monotonic() <= deadline:
        found = int(elf.data.find(b"\x50\xed\x55\xba", position, min(position + WINDOW + 3, end)))
        if found >= 0:
            return found
        position += WINDOW
    return min(position, end)
