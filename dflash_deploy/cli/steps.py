"""The steps of ``up`` up to the environment that a release runs from."""

from __future__ import annotations

import posixpath
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash_deploy.cli.common import talk
from dflash_deploy.cli.deployment import Deployment
from dflash_deploy.cli.recap import Recap, tell
from dflash_deploy.errors import CommandFailed
from dflash_deploy.model import Plan, Severity, Status, StepOutcome

if TYPE_CHECKING:
    from dflash_deploy.audit.report import Report
    from dflash_deploy.audit.stacks import Stack
    from dflash_deploy.releases.model import Look


def audit_step(here: Deployment) -> str:
    """What stands against the stack on this host is an error, all of it at once.

    Raises:
        Incompatible
    """
    from dflash_deploy.audit.stacks import judge_stack
    from dflash_deploy.errors import Incompatible

    # Disk space counts only while the venv is not there: the planner of provisioning knows how much is still to come.
    stack = replace(here.settings.stack, installed_mib=0)
    choice = judge_stack(stack, here.facts)
    report = audit_of(here, stack)
    for finding in report.findings:
        if finding.severity == Severity.WARN:
            talk(f"  warning: {finding.message}" + (f": {finding.remedy}" if finding.remedy else ""))
    talk(f"  {report.coverage_line}")
    if choice.fits and report.compatible:
        return f"{stack.name} fits; {here.settings.mode}; {report.coverage_line}"
    against = [] if choice.fits else list(choice.reasons)
    for finding in report.failures:
        because = f" (follows from {finding.because_of})" if finding.because_of else ""
        against.append(f"{finding.rule}: {finding.message}{because}")
        against += [f"  {line}" for line in finding.evidence]
    remedies = [*choice.changes, *(f.remedy for f in report.failures if f.remedy and not f.because_of)]
    raise Incompatible(
        f"{stack.name} cannot run on {here.host.name} as set",
        evidence=against,
        hint="; ".join(dict.fromkeys(remedies)) or f"dflash-deploy audit {here.host.name} --stack {stack.name}",
    )


def audit_of(here: Deployment, stack: Stack) -> Report:
    """Every rule on what is meant to run here. Models that have yet to travel are not looked at, and neither is the
    venv, which provisioning brings to the stack's pins."""
    from dflash_deploy.audit.report import audit
    from dflash_deploy.audit.request import build_case
    from dflash_deploy.facts import gather
    from dflash_deploy.facts.parse import section

    settings = here.settings
    model, draft = (p if here.look.models.get(p) else "" for p in (settings.model, settings.draft_model))
    draft = draft if settings.speculative else ""
    # A port that the service itself holds is as it should be.
    ports = () if settings.port in here.own_ports() else (settings.port,)
    facts = here.facts
    if not ports:
        facts = replace(facts, raw={**facts.raw, "ports": {**section(facts.raw, "ports"), "asked": {}}})
    seen = {str(each.get("path")) for each in facts.raw.get("models") or ()}
    if seen != {path for path in (model, draft) if path}:
        # The first look could not know which models there are.
        models = [path for path in (model, draft) if path]
        facts = gather(here.host, paths=[settings.root, settings.venv], models=models, ports=ports, discover=False)
    case = build_case(
        facts,
        stack=stack.name,
        model=model,
        draft=draft,
        args=settings.server_argv()[3:],
        env=settings.environment(),
        ports=ports,
    )
    return audit(replace(case, stack=stack))


def provision_steps(here: Deployment, recap: Recap) -> None:
    """The venv and the models."""
    from dflash_deploy.cli.proof import audit_installed, audit_models

    installed = recap.run(here, here.provision_plan)
    brought = recap.run(here, here.models_plan)
    if installed or brought:
        with recap.step("verify") as note:
            here.refresh()
            told = [audit_installed(here)] if installed else []
            note.detail = "; ".join([*told, *([audit_models(here)] if brought else [])])


def patch_steps(here: Deployment, recap: Recap) -> None:
    """The stack's patch sets: in an environment of their own, or as one transaction in the one that the user named."""
    with recap.step("patch") as note:
        names = ", ".join(here.patch_sets())
        if not names:
            note.detail = "this stack needs none"
            return
        if here.patched is not None:
            note.detail = f"{names}: applied already"
            return
        if here.settings.managed and here.settings.venv == here.settings.base_venv:
            note.detail = f"{names}: {_derive(here)}"
            note.status = Status.CHANGED
        else:
            outcomes = _apply(here, here.settings.venv)
            changed = [o for o in outcomes if o.status == Status.CHANGED]
            note.status = Status.CHANGED if changed else Status.OK
            note.detail = f"{names}: {len(changed)} changes" if changed else f"{names}: applied already"
            if changed:
                here.journal.add("changed", plan="patch", what=[o.name for o in changed])
            _note_inputs(here, here.settings.venv)
        here.refresh()
        here.choose_venv()
        if here.settings.managed and here.patched is None:
            raise CommandFailed(
                f"{here.settings.venv} on {here.host.name} is not as it was just patched",
                hint="look who else changes it, then run the same command again",
            )


def _apply(here: Deployment, path: str) -> list[StepOutcome]:
    from dflash_deploy.cli.patch import choose_sets, payload_of, rules
    from dflash_deploy.patching import tree

    site, sets = choose_sets(here.host, path, here.patch_sets())
    device = here.settings.stack.device
    return tree.apply(here.host, site, sets, payload=payload_of(sets), device=device, rules=rules())


def _derive(here: Deployment) -> str:
    """Make the patched environment beside the one as installed, and put it in place when it is whole."""
    from dflash_deploy.cli.deployment import OWN_FOLDERS
    from dflash_deploy.execute import execute
    from dflash_deploy.plan.release import clone_step, outcome_digest, patched_name, venv_steps
    from dflash_deploy.releases.look import store

    settings, source = here.settings, here.source()
    state = here.tree_state(source)
    state.check()
    assert state.manifest is not None
    patches = outcome_digest(state.manifest)
    name = patched_name(settings, patches)
    final = store(settings.root, name)
    there = here.look.venvs.get(final)
    if there is not None and there.stamp.get("patches") == patches:
        # Other sources of ours, the same outcome.
        here.look = _with_whole(here, final)
        if here.complete(final) and here.look.venvs[final].intact:
            _note_inputs(here, final)
            return f"{name} is the same"
    part = f"{final}.part"
    execute(
        Plan("patch", (clone_step(settings, source, part, final, OWN_FOLDERS),)),
        here.host,
        journal=here.journal,
        on_progress=tell,
    )
    outcomes = _apply(here, part)
    here.journal.add("changed", plan="patch", what=[o.name for o in outcomes], venv=name)
    steps = tuple(venv_steps(settings, part, final, patches, here.inputs))
    execute(Plan("patch", steps), here.host, journal=here.journal, on_progress=tell)
    return f"{len(state.changes)} files in {name}"


def _note_inputs(here: Deployment, path: str) -> None:
    """Note in an environment's stamp that these sources come to what is in it: the next run need not compute it."""
    from dflash_deploy.plan.release import outcome_digest, stamp_bytes

    here.look = _with_whole(here, path)
    found = here.look.venvs[path]
    if found.manifest is None or found.stamp.get("pins") != here.settings.stack.pins:
        return
    inputs = [*(str(each) for each in found.stamp.get("inputs") or ()), here.inputs][-8:]
    data = stamp_bytes(here.settings, outcome_digest(found.manifest), inputs)
    here.host.write(posixpath.join(path, posixpath.basename(here.settings.stamp)), data)


def _with_whole(here: Deployment, path: str) -> Look:
    """A look that goes into one environment."""
    from dflash_deploy.cli.deployment import look_at

    settings = replace(here.settings, venv=path, managed=False)
    return look_at(here.host, here.facts, settings, "")
