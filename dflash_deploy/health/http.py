"""HTTP to a served model, with a deadline over the whole exchange. Proxy variables are never looked at."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MAX_BODY = 8 * 1024 * 1024


class NoReply(Exception):
    """No HTTP answer. ``kind``: refused, timeout, reset, not-http."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True)
class Reply:
    """One HTTP answer."""

    status: int
    body: bytes
    seconds: float

    def json(self) -> Any:
        """The body as JSON data; None when it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


def _headers(key: str) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "*/*"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _limit(connection: http.client.HTTPConnection, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline passed")
    if connection.sock is not None:
        connection.sock.settimeout(left)


def request(
    base_url: str, path: str, *, data: Any = None, method: str = "", key: str = "", timeout_s: float = 30.0
) -> Reply:
    """One request; ``data`` is sent as JSON by POST.

    Raises:
        NoReply: refused, timed out, broken off, or no HTTP.
    """
    began = time.monotonic()
    deadline = began + timeout_s
    with _connected(base_url, timeout_s) as connection:
        try:
            body = None if data is None else json.dumps(data)
            connection.request(method or ("GET" if data is None else "POST"), path, body=body, headers=_headers(key))
            _limit(connection, deadline)
            response = connection.getresponse()
            parts, size = [], 0
            while size < MAX_BODY:
                _limit(connection, deadline)
                part = response.read1(65536)
                if not part:
                    break
                parts.append(part)
                size += len(part)
            return Reply(response.status, b"".join(parts), time.monotonic() - began)
        except TimeoutError:
            raise NoReply("timeout", f"no answer within {timeout_s:g} s to {path}") from None
        except (http.client.BadStatusLine, http.client.LineTooLong, http.client.UnknownProtocol) as error:
            if isinstance(error, http.client.RemoteDisconnected):
                raise NoReply("reset", f"{path}: the connection was closed without an answer") from None
            raise NoReply("not-http", f"{path}: the port does not speak HTTP ({str(error)[:80]!r})") from None
        except (OSError, http.client.HTTPException) as error:
            raise NoReply("reset", f"{path}: {error!r}") from None


class _connected:
    def __init__(self, base_url: str, timeout_s: float) -> None:
        parts = urlsplit(base_url)
        self.connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=timeout_s)

    def __enter__(self) -> http.client.HTTPConnection:
        try:
            self.connection.connect()
        except ConnectionRefusedError:
            raise NoReply("refused", f"nothing listens on port {self.connection.port}") from None
        except (TimeoutError, socket.timeout):  # noqa: UP041
            raise NoReply("timeout", f"port {self.connection.port} does not accept connections") from None
        except OSError as error:
            raise NoReply("refused", f"port {self.connection.port}: {error}") from None
        return self.connection

    def __exit__(self, *exc: object) -> None:
        self.connection.close()


def stream_completion(
    base_url: str,
    prompt: str | list[dict[str, str]],
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    model: str = "default",
    key: str = "",
    timeout_s: float = 120.0,
) -> Iterator[str]:
    """A completion, piece by piece as it comes (server-sent events).

    Args:
        prompt: text for ``/v1/completions``, or messages for ``/v1/chat/completions``.
        timeout_s: for the whole stream.

    Raises:
        NoReply: no answer, an answer that is no stream, or a status other than 200.
    """
    chat = not isinstance(prompt, str)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    data = {
        "model": model,
        ("messages" if chat else "prompt"): prompt,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
    }
    for event in stream_events(base_url, path, data, key=key, timeout_s=timeout_s):
        try:
            choice = event["choices"][0]
            piece = choice["delta"].get("content") if chat else choice["text"]
        except (KeyError, IndexError, TypeError, AttributeError):
            raise NoReply("not-http", f"an event that is no completion: {json.dumps(event)[:120]}") from None
        if piece:
            yield piece


def stream_events(base_url: str, path: str, data: Any, *, key: str = "", timeout_s: float = 120.0) -> Iterator[Any]:
    """The JSON data of each server-sent event, as it comes.

    Args:
        timeout_s: for the whole stream.

    Raises:
        NoReply: no answer, an event that is no JSON, or a status other than 200.
    """
    deadline = time.monotonic() + timeout_s
    with _connected(base_url, timeout_s) as connection:
        try:
            connection.request("POST", path, body=json.dumps(data), headers=_headers(key))
            response = connection.getresponse()
            if response.status != 200:
                said = response.read(300).decode("utf-8", "replace").strip()
                raise NoReply("refused", f"{path} answered HTTP {response.status}: {said}")
            while True:
                _limit(connection, deadline)
                line = response.readline(MAX_BODY)
                if not line:
                    return
                if not line.startswith(b"data:"):
                    continue
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    return
                try:
                    event = json.loads(payload)
                except ValueError:
                    raise NoReply("not-http", f"an event that is no completion: {payload[:120]!r}") from None
                yield event
        except TimeoutError:
            raise NoReply("timeout", f"the stream did not end within {timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise NoReply("reset", f"{path}: {error!r}") from None
