"""What a rule is: a name that states what must hold, why, and a pure function from a :class:`Case` to verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_deploy.audit.stacks import Stack
from dflash_deploy.facts import Facts
from dflash_deploy.facts.parse import rows, section
from dflash_deploy.model import Finding, Severity, Where


@dataclass(frozen=True)
class Case:
    """One host and what is meant to run there."""

    facts: Facts
    stack: Stack | None = None
    """The stack that would be installed; None: what is there is judged."""
    model: str = ""
    """Path of the target model, as in the facts' model sections."""
    draft: str = ""
    args: tuple[str, ...] = ()
    """Server arguments that are meant to be used."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that the service will have, over those of the login."""
    ports: tuple[int, ...] = ()

    @property
    def raw(self) -> Mapping[str, Any]:
        return self.facts.raw

    def looked(self, name: str) -> bool:
        """The probe read this section."""
        return name in self.raw and name not in section(self.raw, "probe", "errors")

    def variable(self, name: str) -> str:
        value = self.env.get(name, section(self.raw, "env").get(name, ""))
        return str(value)

    @property
    def environments(self) -> list[Mapping[str, Any]]:
        """The environments to judge: those asked for, else those that hold SGLang."""
        found = [item for item in rows(section(self.raw, "venvs").get("environments")) if item.get("exists")]
        asked = [item for item in found if item.get("asked")]
        return asked or [item for item in found if version_of(item, "sglang")]

    @property
    def wants_gpu(self) -> bool:
        """The stack or an installed CUDA torch means to use a GPU."""
        if self.stack is not None:
            return self.stack.device == "cuda"
        return bool(self.facts.gpus) or self.facts.driver is not None

    def argument(self, name: str) -> str | None:
        """Value of ``--name VALUE`` or ``--name=VALUE``; "" for a bare flag; None when it is not given."""
        for index, word in enumerate(self.args):
            if word == name:
                following = self.args[index + 1] if index + 1 < len(self.args) else ""
                return "" if following.startswith("--") else following
            if word.startswith(name + "="):
                return word.split("=", 1)[1]
        return None


@dataclass(frozen=True)
class Verdict:
    """What a rule's function yields."""

    severity: Severity
    message: str
    evidence: Sequence[str] = ()
    remedy: str = ""
    where: Where | None = None


Check = Callable[[Case], Iterator[Verdict]]


@dataclass(frozen=True)
class Rule:
    """One rule. The id is stable and states what must hold."""

    id: str
    title: str
    where: Where
    check: Check
    references: tuple[str, ...]
    weight: int
    """Lower is nearer to the root of things; of several failures the lowest is the primary cause."""
    explains: tuple[str, ...]
    """Rules whose failures follow from this one's."""

    def run(self, case: Case) -> list[Finding]:
        """Findings of this rule; a rule that yields nothing did not apply."""
        verdicts = list(self.check(case)) or [na("nothing here that it applies to")]
        return [
            Finding(
                self.id, v.severity, v.message, tuple(str(line) for line in v.evidence), v.remedy, v.where or self.where
            )
            for v in verdicts
        ]


RULES: dict[str, Rule] = {}


def rule(
    id: str,
    where: Where,
    *,
    references: tuple[str, ...] = (),
    weight: int = 50,
    explains: tuple[str, ...] = (),
) -> Callable[[Check], Check]:
    """Register a rule; its function's docstring is the explanation that ``explain`` prints."""

    def register(check: Check) -> Check:
        RULES[id] = Rule(id, (check.__doc__ or "").strip(), where, check, references, weight, explains)
        return check

    return register


def ok(message: str, *evidence: str) -> Verdict:
    return Verdict(Severity.OK, message, evidence)


def na(message: str) -> Verdict:
    return Verdict(Severity.NOT_APPLICABLE, message)


def unknown(message: str, *evidence: str) -> Verdict:
    return Verdict(Severity.UNKNOWN, message, evidence)


def fail(message: str, evidence: Sequence[str] = (), remedy: str = "", where: Where | None = None) -> Verdict:
    return Verdict(Severity.FAIL, message, evidence, remedy, where)


def warn(message: str, evidence: Sequence[str] = (), remedy: str = "", where: Where | None = None) -> Verdict:
    return Verdict(Severity.WARN, message, evidence, remedy, where)


def normal(name: str) -> str:
    """A distribution's normalized name."""
    return name.lower().replace("_", "-").replace(".", "-")


def dists(environment: Mapping[str, Any]) -> dict[str, str]:
    """Normalized name -> version."""
    return {normal(str(item.get("name"))): str(item.get("version")) for item in rows(environment.get("dists"))}


def version_of(environment: Mapping[str, Any], name: str) -> str | None:
    """Version of an installed distribution."""
    return dists(environment).get(normal(name))


def modules(environment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Native files that were read in full."""
    return rows(section(environment, "elf").get("modules"))


def label(environment: Mapping[str, Any]) -> str:
    return str(environment.get("path", "?"))
