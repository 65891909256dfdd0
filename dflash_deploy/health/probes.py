"""The prompts that a check sends, and what must come back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_deploy.assets import templates_dir
from dflash_deploy.errors import UsageError
from dflash_deploy.health.http import request


@dataclass(frozen=True)
class Probe:
    """One greedy prompt. ``expect`` empty: any text that is not degenerate."""

    prompt: str | tuple[dict[str, str], ...]
    max_tokens: int = 32
    expect: str = ""

    def as_dict(self) -> dict[str, Any]:
        shown = {"prompt": self.prompt} if isinstance(self.prompt, str) else {"messages": list(self.prompt)}
        return {**shown, "max_tokens": self.max_tokens, "expect": self.expect}


@dataclass(frozen=True)
class Answer:
    """What one probe got."""

    status: int
    text: str
    tokens: int
    meta: dict[str, Any]
    seconds: float
    error: str = ""


GENERAL = (
    Probe("The capital city of France is", 24),
    Probe("Here is a list of the numbers from one to ten: one, two, three,", 24),
    Probe("def add(a, b):\n    ", 24),
)
"""For a model that nobody described: no answer is expected, only text that is not degenerate."""


def parse_probes(text: str, where: str) -> tuple[Probe, ...]:
    """Probes from a JSON list or from JSON lines.

    Raises:
        UsageError: not of that shape.
    """
    try:
        rows = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(r) for r in text.splitlines() if r.strip()]
        )
        return tuple(
            Probe(
                row["prompt"] if "prompt" in row else tuple(row["messages"]),
                int(row.get("max_tokens", 32)),
                str(row.get("expect", row.get("text", ""))),
            )
            for row in rows
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{where} holds no probes", evidence=repr(error), hint='JSON lines of {"prompt", "text"}'
        ) from error


def tiny_pair_probes() -> tuple[Probe, ...]:
    """The checked answers that are shipped with the tiny pair."""
    path = templates_dir() / "tiny-pair" / "probe.json"
    return read_probes(path) if path.is_file() else ()


def read_probes(path: str | Path) -> tuple[Probe, ...]:
    """Probes of a file.

    Raises:
        UsageError: unreadable or of another shape.
    """
    try:
        return parse_probes(Path(path).read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read", evidence=str(error)) from error


def ask(base_url: str, probe: Probe, *, key: str = "", timeout_s: float = 120.0) -> Answer:
    """Send one probe greedily; ``meta`` is SGLang's own account of the request.

    Raises:
        NoReply: no HTTP answer.
    """
    if isinstance(probe.prompt, str):
        data: dict[str, Any] = {
            "text": probe.prompt,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": probe.max_tokens},
        }
        path = "/generate"
    else:
        data = {
            "model": "default",
            "messages": list(probe.prompt),
            "max_tokens": probe.max_tokens,
            "temperature": 0.0,
            "return_meta_info": True,
        }
        path = "/v1/chat/completions"
    reply = request(base_url, path, data=data, key=key, timeout_s=timeout_s)
    body = reply.json()
    try:
        if isinstance(probe.prompt, str):
            text, meta = str(body["text"]), dict(body.get("meta_info") or {})
        else:
            choice = body["choices"][0]
            text, meta = str(choice["message"]["content"] or ""), dict(choice.get("meta_info") or {})
            meta.setdefault("completion_tokens", (body.get("usage") or {}).get("completion_tokens", 0))
    except (KeyError, IndexError, TypeError, AttributeError):
        shown = reply.body[:300].decode("utf-8", "replace")
        return Answer(reply.status, "", 0, {}, reply.seconds, f"HTTP {reply.status} to {path}: {shown}")
    return Answer(reply.status, text, int(meta.get("completion_tokens") or 0), meta, reply.seconds)


def degenerate(text: str) -> str:
    """Why a text is no answer of a working model (empty, one token repeated, undecodable); empty when it may be one."""
    stripped = text.strip()
    if not stripped:
        return "the completion is empty"
    if len(stripped) >= 12 and len(set(stripped.replace(" ", ""))) <= 1:
        return f"completion repeats one token: {stripped[:40]!r}"
    words = stripped.split()
    if len(words) >= 8 and len(set(words)) == 1:
        return f"completion repeats one token: {stripped[:40]!r}"
    if stripped.count("\ufffd") > len(stripped) // 4:
        return f"the completion is gibberish: {stripped[:40]!r}"
    return ""
