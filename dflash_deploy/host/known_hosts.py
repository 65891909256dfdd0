"""OpenSSH known_hosts files: look-up (plain, hashed, patterns, ``[host]:port``, ``@revoked``) and appending. Format:
sshd(8)."""

from __future__ import annotations

import base64
import binascii
import fcntl
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class KnownKey:
    """One line that speaks of a host."""

    kind: str
    blob: bytes
    revoked: bool
    where: str
    """``file:line``."""


def fingerprint(blob: bytes) -> str:
    """``SHA256:…`` as ``ssh-keygen -l`` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def lookup_name(address: str, port: int) -> str:
    """The name under which OpenSSH records a host."""
    return address.lower() if port == 22 else f"[{address.lower()}]:{port}"


def _matches(names: str, wanted: str) -> bool:
    hit = False
    for pattern in names.split(","):
        if pattern.startswith("|1|"):
            try:
                _, _, salt, digest = pattern.split("|")
                mac = hmac.new(base64.b64decode(salt), wanted.encode(), hashlib.sha1).digest()
                hit = hit or hmac.compare_digest(mac, base64.b64decode(digest))
            except (ValueError, binascii.Error):
                continue
            continue
        negated = pattern.startswith("!")
        # Only * and ? are special in known_hosts; fnmatch would take the brackets of [host]:port for a set.
        glob = pattern.lstrip("!").lower().replace("[", "[[]")
        if fnmatch.fnmatchcase(wanted, glob):
            if negated:
                return False
            hit = True
    return hit


def known_keys(files: Iterable[str], address: str, port: int) -> Iterator[KnownKey]:
    """Every key recorded for ``address:port``; files that are missing or unreadable and lines that are broken are
    passed over."""
    wanted = lookup_name(address, port)
    for name in files:
        try:
            lines = Path(name).read_text("utf-8", "replace").splitlines()
        except OSError:
            continue
        for number, line in enumerate(lines, 1):
            words = line.split()
            marker = words.pop(0) if words and words[0].startswith("@") else ""
            if len(words) < 3 or words[0].startswith("#") or marker not in ("", "@revoked"):
                continue
            try:
                blob = base64.b64decode(words[2], validate=True)
            except binascii.Error:
                continue
            if _matches(words[0], wanted):
                yield KnownKey(words[1], blob, marker == "@revoked", f"{name}:{number}")


def record(file: str, address: str, port: int, kind: str, blob: bytes) -> None:
    """Append one line; the file and its folder are made private when missing. Safe beside another process that does
    the same.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    line = f"{lookup_name(address, port)} {kind} {base64.b64encode(blob).decode()}\n".encode()
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            line = b"\n" + line
        os.write(handle, line)
        os.fsync(handle)
    finally:
        os.close(handle)
