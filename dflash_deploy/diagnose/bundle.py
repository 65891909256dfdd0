"""A redacted bundle of what is needed to look at an unknown failure elsewhere."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

MAX_LOG = 8 * 1024 * 1024
"""Bytes of log that are bundled: half from the beginning, half from the end."""

_SECRETS = (
    re.compile(
        r"(?i)((?:[\w-]*(?:api[_-]?key|token|secret|passw(?:or)?d|credential)s?)['\"]?\s*[=:]\s*)(['\"]?)(?!None\b|True\b|False\b|\d+\b)[^\s'\",;)]{4,}"
    ),
    re.compile(r"(?i)(authorization:\s*(?:bearer|basic)\s+)()\S+"),
    re.compile(r"(--[\w-]*(?:key|token|password|secret)[ =])()[^\s-]\S*"),
    re.compile(r"([\"']--[\w-]*(?:key|token|password|secret)[\"'],\s*)([\"'])[^\"']+"),
    re.compile(r"(\w+://[^/\s:@]+:)()[^@\s/]+(?=@)"),
    re.compile(r"()()\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})"),
)


_PLAIN = re.compile(
    r"(?:CUDA|NCCL|TORCH|PYTORCH|TRITON|SGLANG|SGL|OMP|MKL|TRANSFORMERS|DFLASH|FLASHINFER|GLOO|PYTHON\w*|LD_LIBRARY|HF_HUB)_\w+"
    r"|PATH|HOME|PYTHONUNBUFFERED"
)
_SECRET_NAME = re.compile(r"key|token|secret|passw|credential", re.I)


def environment(text: str) -> tuple[str, tuple[str, ...]]:
    """An environment file with the values of engine settings alone, and the other values: nobody outside needs them."""
    shown, hidden = [], []
    for line in text.splitlines():
        name, mark, value = line.partition("=")
        if not mark or line.startswith("#") or (_PLAIN.fullmatch(name) and not _SECRET_NAME.search(name)):
            shown.append(line)
            continue
        shown.append(f"{name}=[redacted]")
        if value[:1] == '"' == value[-1:]:
            value = re.sub(r"\\(.)", r"\1", value[1:-1])
        hidden.append(value)
    return "\n".join(shown) + "\n", tuple(hidden)


def redact(text: str, secrets: Sequence[str] = ()) -> str:
    """The text without keys, tokens, passwords and credentials in URLs.

    Args:
        secrets: texts that are known to be secret, wherever they stand.
    """
    for secret in sorted((s for s in secrets if len(s) >= 4), key=len, reverse=True):
        for form in (secret, json.dumps(secret)[1:-1]):
            text = text.replace(form, "[redacted]")
    for pattern in _SECRETS:
        text = pattern.sub(r"\1\2[redacted]", text)
    return text


def make_bundle(log: bytes, parts: Mapping[str, Any], secrets: Sequence[str] = ()) -> bytes:
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
            data = redact(text, secrets).encode()
            entry = tarfile.TarInfo(f"dflash-bundle/{name}")
            entry.size, entry.mode = len(data), 0o600
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()
