"""Streams prompts at a fixed concurrency and takes the time of each piece."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_deploy.health.acceptance import Acceptance, gather_acceptance
from dflash_deploy.health.http import NoReply, request, stream_events
from dflash_deploy.health.probes import Probe


@dataclass(frozen=True)
class Sample:
    """One streamed request. Times in seconds; ``began`` and ``times`` count from the sweep's start."""

    began: float
    times: tuple[float, ...]
    """When each piece came."""
    tokens: int
    meta: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def first(self) -> float:
        """Time to the first piece."""
        return self.times[0] - self.began if self.times else 0.0

    @property
    def whole(self) -> float:
        """Time to the last piece."""
        return self.times[-1] - self.began if self.times else 0.0

    @property
    def per_token(self) -> float:
        """Mean time per output token after the first piece; 0.0 when one piece was all."""
        return (self.times[-1] - self.times[0]) / max(1, self.tokens - 1) if len(self.times) > 1 else 0.0

    @property
    def gaps(self) -> tuple[float, ...]:
        """Time between one piece and the next: what a reader waits. A step of a speculative server is one piece."""
        return tuple(b - a for a, b in itertools.pairwise(self.times))


@dataclass(frozen=True)
class Sweep:
    """All requests of one method at one concurrency."""

    method: str
    """``chain``, ``tree 16``, ``none`` or ``as served``."""
    concurrency: int
    samples: tuple[Sample, ...]
    seconds: float

    @property
    def good(self) -> tuple[Sample, ...]:
        return tuple(sample for sample in self.samples if not sample.error)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second over all requests together."""
        return sum(sample.tokens for sample in self.good) / self.seconds if self.seconds > 0 else 0.0

    @property
    def acceptance(self) -> Acceptance:
        return gather_acceptance(sample.meta for sample in self.good)

    def timeline(self, buckets: int = 40) -> tuple[float, list[float]]:
        """(seconds per bucket, tokens a second in each)."""
        width = max(self.seconds / buckets, 1e-6)
        counts = [0.0] * buckets
        for sample in self.good:
            # SGLang streams a step's tokens as one piece: they are spread evenly over a request's pieces.
            share = sample.tokens / max(1, len(sample.times))
            for moment in sample.times:
                counts[min(buckets - 1, int(moment / width))] += share
        return width, [count / width for count in counts]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that ``percent`` of the values do not exceed (linear between neighbours); 0.0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def measure(
    base_url: str,
    probes: Sequence[Probe],
    *,
    method: str,
    concurrency: int,
    requests: int,
    max_tokens: int,
    key: str = "",
    timeout_s: float = 600.0,
    on_done: Callable[[Sample], None] | None = None,
) -> Sweep:
    """Send ``requests`` greedy requests, ``concurrency`` at a time, streamed.

    Failed requests are samples with ``error``; after ten failures in a row the rest is left out.
    """
    bodies = [_body(base_url, probe, max_tokens, key) for probe in probes[:requests]]
    began = time.monotonic()
    samples: list[Sample] = []
    lock, order, failures = threading.Lock(), itertools.count(), 0

    def work() -> None:
        nonlocal failures
        while True:
            with lock:
                number = next(order)
                if number >= requests or failures >= 10:
                    return
            path, body = bodies[number % len(bodies)]
            sample = _one(base_url, path, body, key, timeout_s, began)
            with lock:
                samples.append(sample)
                failures = failures + 1 if sample.error else 0
            if on_done:
                on_done(sample)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(concurrency, requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # an interrupt must get through
            thread.join(0.2)
    return Sweep(method, concurrency, tuple(samples), time.monotonic() - began)


def _body(base_url: str, probe: Probe, max_tokens: int, key: str) -> tuple[str, dict[str, Any]]:
    """Where and what to send. A chat goes as its tokens: streamed chats tell nothing of drafts."""
    if isinstance(probe.prompt, str):
        prompt: dict[str, Any] = {"text": probe.prompt}
    elif tokens := _tokens(base_url, probe, key):
        prompt = {"input_ids": tokens}
    else:
        return "/v1/chat/completions", {
            "model": "default", "messages": list(probe.prompt), "max_tokens": max_tokens, "temperature": 0.0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
    return "/generate", {
        **prompt, "stream": True, "sampling_params": {"temperature": 0.0, "max_new_tokens": max_tokens}
    }  # fmt: skip


def _tokens(base_url: str, probe: Probe, key: str) -> list[int]:
    """The chat as the server's own template has it; empty where the release cannot say."""
    asked = {"model": "default", "messages": list(probe.prompt)}
    try:
        reply = request(base_url, "/v1/tokenize", data=asked, key=key, timeout_s=30.0)
    except NoReply:
        return []
    found = reply.json() if reply.status == 200 else None
    tokens = found.get("tokens") if isinstance(found, dict) else None
    return tokens if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens) else []


def _one(base_url: str, path: str, data: dict[str, Any], key: str, timeout_s: float, began: float) -> Sample:
    start = time.monotonic() - began
    times: list[float] = []
    tokens = 0
    meta: dict[str, Any] = {}
    try:
        for event in stream_events(base_url, path, data, key=key, timeout_s=timeout_s):
            piece, count, more = _read(event)
            if piece:
                times.append(time.monotonic() - began)
            tokens = count or tokens
            meta = more or meta
    except NoReply as error:
        return Sample(start, tuple(times), tokens, meta, str(error))
    if not times:
        return Sample(start, (), 0, meta, "the stream held no text")
    return Sample(start, tuple(times), tokens or len(times), meta)


def _read(event: Any) -> tuple[bool, int, dict[str, Any]]:
    """(text came, output tokens so far, SGLang's account of the request) of one event."""
    if not isinstance(event, dict):
        raise NoReply("not-http", f"an event that is no completion: {json.dumps(event)[:120]}")
    if "choices" not in event:
        meta = dict(event.get("meta_info") or {})
        return "text" in event, int(meta.get("completion_tokens") or 0), meta
    choice = (event["choices"] or [{}])[0]
    usage = event.get("usage") or {}
    meta = dict(choice.get("meta_info") or event.get("meta_info") or {})
    piece = bool((choice.get("delta") or {}).get("content"))
    return piece, int(usage.get("completion_tokens") or 0), meta
