"""What a rule is: a name that states what must hold, why, and a pure function from a :class:`Case` to verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_deploy.audit.stacks import Stack
from dflash_deploy.facts import Facts, Gpu
from dflash_deploy.facts.parse import rows, section
from dflash_deploy.model import Finding, Severity, Where


class Unseen(Exception):
    """Facts that a rule needs were not read; the text says which, and why when that is known."""


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

    def fact(self, *names: str) -> Any:
        """The fact at ``names``, which may be None where absence is a value.

        Raises:
            Unseen: the probe did not read it.
        """
        errors = section(self.raw, "probe", "errors")
        if names[0] in errors:
            raise Unseen(f"{names[0]} was not seen: {errors[names[0]]}")
        value: Any = self.raw
        for name in names:
            if not isinstance(value, Mapping) or name not in value:
                raise Unseen(f"{'.'.join(names)} was not seen")
            value = value[name]
        return value

    def see(self, *names: str) -> Mapping[str, Any]:
        """As :meth:`fact`, for one that is a mapping."""
        value = self.fact(*names)
        if not isinstance(value, Mapping):
            raise Unseen(f"{'.'.join(names)} was not seen")
        return value

    def items(self, *names: str) -> list[Mapping[str, Any]]:
        """As :meth:`fact`, for a list of mappings."""
        value = self.fact(*names)
        if not isinstance(value, list):
            raise Unseen(f"{'.'.join(names)} was not seen")
        return rows(value)

    def variable(self, name: str) -> str:
        """A variable of the service, "" when it is not set."""
        return str(self.env[name] if name in self.env else self.see("env").get(name, ""))

    @property
    def environments(self) -> Sequence[Mapping[str, Any]]:
        """The environments to judge: those asked for, else those that hold SGLang; with a stack, only such as hold its
        release, because it would be installed anew beside any other."""
        found = self.items("venvs", "environments")
        asked = [item for item in found if item.get("asked")]
        there = [item for item in asked or found if item.get("exists")]
        if self.stack is not None:
            return [item for item in there if version_of(item, "sglang") == self.stack.sglang]
        return there if asked else [item for item in there if version_of(item, "sglang")]

    @property
    def gpus(self) -> Sequence[Gpu]:
        """The GPUs as the driver lists them. :class:`Unseen` where cards or a driver are there and no list is."""
        smi = self.see("gpu", "smi")
        status = smi.get("status")
        if not isinstance(smi.get("gpus"), list) or (status != "ok" and (self.cards or self.driver is not None)):
            raise Unseen(f"the GPUs could not be listed: nvidia-smi {status}")
        return self.facts.gpus

    @property
    def cards(self) -> Sequence[Mapping[str, Any]]:
        """NVIDIA cards on the PCI bus, with a driver or without."""
        return [item for item in self.items("gpu", "pci") if item.get("kind") == "gpu"]

    @property
    def driver(self) -> tuple[int, ...] | None:
        """Version of the loaded kernel module; None: none is loaded."""
        self.fact("gpu", "driver", "version")
        return self.facts.driver

    @property
    def wants_gpu(self) -> bool:
        """The stack means to use a GPU or, without one, the host has one."""
        if self.stack is not None:
            return self.stack.device == "cuda"
        return self.driver is not None or bool(self.cards) or bool(self.gpus)

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
        """Findings of this rule. One that yields nothing did not apply; one whose facts were not read, or have a shape
        that no probe writes, is unknown."""
        verdicts: list[Verdict] = []
        try:
            verdicts.extend(self.check(case))
        except Unseen as reason:
            verdicts.append(unknown(str(reason)))
        except Exception as error:  # facts come from other machines: one odd value must not hide the other rules
            verdicts.append(unknown("the facts are of an unexpected shape", f"{type(error).__name__}: {error}"))
        verdicts = verdicts or [na("nothing here that it applies to")]
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
    found = environment.get("dists")
    if not isinstance(found, list):
        raise Unseen(f"{label(environment)}: its distributions were not read")
    return {normal(str(item.get("name"))): str(item.get("version")) for item in rows(found)}


def version_of(environment: Mapping[str, Any], name: str) -> str | None:
    """Version of an installed distribution."""
    return dists(environment).get(normal(name))


def native(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was read of the environment's native files."""
    found = environment.get("elf")
    if not isinstance(found, Mapping):
        raise Unseen(f"{label(environment)}: its native files were not read")
    return found


def modules(environment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Native files that were read in full."""
    return rows(native(environment).get("modules"))


def torch_cuda(environment: Mapping[str, Any]) -> str:
    """CUDA release of the installed torch, e.g. ``13.0``; "" for a CPU build or no torch."""
    if "torch" not in environment:
        raise Unseen(f"{label(environment)}: torch was not looked at")
    return str(section(environment, "torch").get("cuda") or "")


def label(environment: Mapping[str, Any]) -> str:
    return str(environment.get("path", "?"))
