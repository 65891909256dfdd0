"""One request to the agent on the target, and its answer. Needs neither libcst nor a patch set."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dflash_deploy import errors
from dflash_deploy.errors import CommandFailed, DflashError
from dflash_deploy.model import Result

BOOT = (
    "import sys; n = int(sys.stdin.buffer.readline()); "
    "exec(compile(sys.stdin.buffer.read(n), '<dflash-deploy agent>', 'exec'))"
)


class TreeHost(Protocol):
    """The part of a host that is needed here."""

    name: str

    def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Result:
        """See :class:`dflash_deploy.host.base.Host`."""
        ...


@functools.cache
def _agent() -> bytes:
    return Path(__file__).with_name("agent.py").read_bytes()


def ask(host: TreeHost, path: str, request: Mapping[str, Any], *, timeout_s: float = 300.0) -> dict[str, Any]:
    """Run one request of the agent, with the environment's own Python where ``path`` leads to one.

    Raises:
        DflashError: of the kind that the agent names.
    """
    folders = (path, f"{path}/../../..", f"{path}/../../../..")
    tries = " ".join(shlex.quote(f"{folder}/bin/python") for folder in folders)
    script = f'for p in {tries}; do [ -x "$p" ] && exec "$p" -I -S -c "$1"; done; exec python3 -I -S -c "$1"'
    agent = _agent()
    data = str(len(agent)).encode() + b"\n" + agent + json.dumps(request).encode()
    result = host.run(["/bin/sh", "-c", script, "sh", BOOT], input=data, timeout_s=timeout_s)
    try:
        answer: dict[str, Any] = json.loads(result.stdout)
    except ValueError:
        raise CommandFailed(
            f"{host.name}: the patch agent ended without an answer (exit {result.exit_code})",
            evidence=result.err.splitlines()[-6:],
            hint="run the same command again: an interrupted change is carried to its end",
        ) from None
    if not answer.get("ok"):
        kind = getattr(errors, str(answer.get("kind")), CommandFailed)
        assert issubclass(kind, DflashError)
        raise kind(f"{host.name}: {answer.get('message')}", evidence=answer.get("evidence", ()))
    return answer
