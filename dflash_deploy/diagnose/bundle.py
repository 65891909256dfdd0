"""A redacted bundle of what is needed to look at an unknown failure elsewhere."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Mapping
from typing import Any

MAX_LOG = 8 * 1024 * 1024
"""Bytes of log that are bundled: half from the beginning, half from the end."""

_SECRETS = (
    re.compile(
        r"(?i)((?:[\w-]*(?:api[_-]?key|token|secret|passw(?:or)?d|credential)s?)['\"]?\s*[=:]\s*)(['\"]?)(?!None\b|True\b|False\b|\d+\b)[^\s'\",;)]{4,}"
    ),
    re.compile(r"(?i)(authorization:\s*(?:bearer|basic)\s+)()\S+"),
    re.compile(r"(--(?:api-key|admin-api-key|hf-token)[ =])()\S+"),
    re.compile(r"(\w+://[^/\s:@]+:)()[^@\s/]+(?=@)"),
    re.compile(r"()()\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})"),
)


def redact(text: str) -> str:
    """The text without keys, tokens, passwords and credentials in URLs."""
    for pattern in _SECRETS:
        text = pattern.sub(r"\1\2[redacted]", text)
    return text


def make_bundle(log: bytes, parts: Mapping[str, Any]) -> bytes:
    """A ``tar.gz`` with ``service.log`` and one file per part (text as it is, other data as JSON), all redacted."""
    if len(log) > MAX_LOG:
        cut = len(log) - MAX_LOG
        log = log[: MAX_LOG // 2] + f"\n[... {cut} bytes left out ...]\n".encode() + log[-MAX_LOG // 2 :]
    files = {"service.log": log.decode("utf-8", "replace")}
    for name, part in parts.items():
        files[name] = part if isinstance(part, str) else json.dumps(part, indent=2, default=str)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, text in files.items():
            data = redact(text).encode()
            entry = tarfile.TarInfo(f"dflash-bundle/{name}")
            entry.size, entry.mode = len(data), 0o600
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()
