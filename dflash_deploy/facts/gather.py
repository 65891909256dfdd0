"""One round trip: send the probe, read its answer."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dflash_deploy.errors import UnreadableFact
from dflash_deploy.facts import Facts
from dflash_deploy.facts.parse import facts_from_json, raw_from_shell
from dflash_deploy.facts.program import bootstrap, cut, program
from dflash_deploy.model import Result


class Runner(Protocol):
    """The part of a host that the probe needs."""

    name: str

    def run(self, argv: Sequence[str], *, input: bytes | None = None, timeout_s: float = 60.0) -> Result:
        """See :class:`dflash_deploy.host.base.Host`."""
        ...


def gather(
    host: Runner,
    *,
    venvs: Sequence[str] = (),
    models: Sequence[str] = (),
    paths: Sequence[str] = (),
    ports: Sequence[int] = (),
    discover: bool = True,
    deadline_s: float = 25.0,
) -> Facts:
    """Read the host's facts, changing nothing there.

    Args:
        host: anything with ``name`` and ``run`` (a :class:`~dflash_deploy.host.base.Host`).
        venvs: virtual environments to look into; those found in the usual places come with them when ``discover``.
            ``~/`` at the start of this and the other paths is the account's home on the host.
        models: model and draft folders to check.
        paths: folders whose free space is wanted.
        ports: TCP ports whose holder is wanted.
        deadline_s: seconds after which the probe answers with what it has.

    Raises:
        HostError: the host does not answer.
        UnreadableFact: it answers, and neither Python nor the shell gives anything readable.
    """
    mark = f"facts-{secrets.token_hex(8)}"
    params: Mapping[str, Any] = {
        "venvs": list(venvs),
        "models": list(models),
        "paths": list(paths),
        "ports": list(ports),
        "discover": discover,
        "deadline_s": deadline_s,
        "markers": list(markers()),
    }
    # + the time to find a Python and to start it, on a slow host.
    timeout_s = deadline_s + 20
    reason = "no Python >= 3.8 on the host"
    result = host.run(bootstrap(venvs, paths, mark), input=program(params, mark), timeout_s=timeout_s)
    try:
        via, body = cut(result.out, mark)
    except UnreadableFact as first:
        # A Python that starts and then breaks (half a standard library): the shell alone still knows the basics.
        again = host.run(bootstrap(venvs, paths, mark, use_python=False), timeout_s=timeout_s)
        try:
            via, body = cut(again.out, mark)
            reason = "its Python broke: " + (result.err.strip().splitlines() or ["no message"])[-1]
        except UnreadableFact:
            lines = [*first.evidence, *result.err.strip().splitlines()[-3:]]
            raise UnreadableFact("the probe gave no answer on this host", evidence=lines, hint=first.hint) from None
    if via == "sh":
        return facts_from_json(raw_from_shell(body, reason), host.name)
    try:
        raw = json.loads(body)
    except ValueError as error:
        raise UnreadableFact("the probe's answer is not JSON", evidence=[str(error), body[:200]]) from None
    return facts_from_json(raw, host.name)


def markers() -> tuple[str, ...]:
    """Symbols that tell one torch ABI from another; the probe looks each up in the torch libraries."""
    return ()
