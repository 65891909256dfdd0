"""What is meant to run, with the facts, as one saved document: the input of ``audit --offline``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_deploy.audit.rules import Case
from dflash_deploy.audit.stacks import choose_stacks, get_stack, stack_for
from dflash_deploy.errors import Incompatible
from dflash_deploy.facts import Facts
from dflash_deploy.facts.parse import section, texts


def build_case(
    facts: Facts,
    *,
    stack: str = "",
    model: str = "",
    draft: str = "",
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    ports: Sequence[int] = (),
) -> Case:
    """A case for the rules. What is not given is taken from the request that was saved with the facts.

    Raises:
        UsageError: no stack of that name.
        Incompatible: ``auto``, and none fits.
    """
    saved = section(facts.raw, "request")
    name = stack or str(saved.get("stack") or "")
    chosen = None
    if name == "auto":
        chosen = stack_for(facts)
        if chosen is None:
            nearest = choose_stacks(facts)[:3]
            raise Incompatible(
                f"no stack fits {facts.host}",
                evidence=[f"{choice.stack.name}: {'; '.join(choice.reasons)}" for choice in nearest],
                hint="; ".join(nearest[0].changes) or "dflash-deploy audit HOST, which says why for each of them",
            )
    elif name:
        chosen = get_stack(name)
    words = args or texts(saved.get("args"))
    variables = env if env is not None else {str(key): str(value) for key, value in section(saved, "env").items()}
    return Case(
        facts,
        chosen,
        model or str(saved.get("model") or ""),
        draft or str(saved.get("draft") or ""),
        tuple(words),
        variables,
        tuple(ports),
    )


def request_of(case: Case) -> dict[str, Any]:
    """The part of a saved document that :func:`build_case` reads again."""
    return {
        "stack": case.stack.name if case.stack else "",
        "model": case.model,
        "draft": case.draft,
        "args": list(case.args),
        "env": dict(case.env),
    }
