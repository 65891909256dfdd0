"""The steps of ``up`` one by one, and the recap that they end in."""

from __future__ import annotations

import posixpath
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dflash_deploy.cli.common import emit_json
from dflash_deploy.cli.deployment import Deployment, talk
from dflash_deploy.errors import DflashError
from dflash_deploy.model import Plan, Severity, Status, StepOutcome

if TYPE_CHECKING:
    from dflash_deploy.audit.report import Report
    from dflash_deploy.audit.stacks import Stack
    from dflash_deploy.execute import Progress
    from dflash_deploy.health import HealthReport
    from dflash_deploy.releases.model import Look, Release


class Note:
    """What a step says of itself while it runs."""

    def __init__(self) -> None:
        self.status = Status.OK
        self.detail = ""


class Recap:
    """Collects one line per step; prints them in the end, also after a failure."""

    def __init__(self) -> None:
        self.outcomes: list[StepOutcome] = []
        self.data: dict[str, Any] = {}
        self.lines: list[str] = []

    @contextmanager
    def step(self, name: str) -> Iterator[Note]:
        """Time a step and take its outcome; a failure is a line too."""
        note, began = Note(), time.monotonic()
        talk(f"{name} ...")
        try:
            yield note
        except BaseException as error:
            detail = error.message if isinstance(error, DflashError) else type(error).__name__
            self.outcomes.append(StepOutcome(name, Status.FAILED, detail, time.monotonic() - began))
            raise
        self.outcomes.append(StepOutcome(name, note.status, note.detail, time.monotonic() - began))

    def run(self, here: Deployment, make: Callable[[], Plan]) -> bool:
        """Make one plan and execute it. True when it changed something."""
        from dflash_deploy.execute import execute

        # The plan's name is known only afterwards; every plan of ours is named like the step.
        planned = make()
        with self.step(planned.name) as note:
            outcomes = execute(planned, here.host, journal=here.journal, on_progress=tell)
            changed = any(outcome.status == Status.CHANGED for outcome in outcomes)
            note.status = Status.CHANGED if changed else Status.OK
            note.detail = planned.reason
        return changed

    @contextmanager
    def printed(self, host: str, as_json: bool) -> Iterator[None]:
        """Print the recap when the steps are over, whatever became of them."""
        failed: DflashError | None = None
        try:
            yield
        except DflashError as error:
            failed = error
            raise
        finally:
            if as_json and failed is None and self.outcomes:
                emit_json(
                    {
                        "ok": all(o.status != Status.FAILED for o in self.outcomes),
                        "host": host,
                        "changed": any(o.status == Status.CHANGED for o in self.outcomes),
                        "steps": [
                            {
                                "name": o.name,
                                "status": str(o.status),
                                "detail": o.detail,
                                "seconds": round(o.seconds, 3),
                            }
                            for o in self.outcomes
                        ],
                        **self.data,
                    }
                )
            else:
                self._table(host, failed is not None)
                if not as_json:
                    for line in self.lines:
                        print(line)

    def _table(self, host: str, failed: bool) -> None:
        if not self.outcomes:
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        styles = {Status.OK: "green", Status.CHANGED: "yellow", Status.SKIPPED: "cyan", Status.FAILED: "bold red"}
        table = Table("step", "status", "seconds", "detail", title=f"recap of {host}", title_justify="left")
        for each in self.outcomes:
            status = Text(str(each.status), style=styles[each.status])
            table.add_row(each.name, status, f"{each.seconds:.1f}", Text(each.detail))
        console = Console(stderr=True)
        console.print(table)
        changed = sum(o.status == Status.CHANGED for o in self.outcomes)
        if not failed:
            console.print(
                f"{changed} of {len(self.outcomes)} steps changed something" if changed else "nothing changed",
                highlight=False,
            )

    def show_health(self, report: HealthReport) -> None:
        """The proof, for people: URL, the completion, acceptance."""
        self.lines += health_lines(self.data["url"], report.data)


QUIET = ("{", "Requirement already satisfied", "WARNING: Location", "Looking in", "Obtaining dependency information")
"""Lines of installers that tell a person nothing."""


def tell(news: Progress) -> None:
    """A step's progress as lines on stderr."""
    mark = f"  [{news.step}/{news.steps}]"
    if news.outcome is not None:
        talk(f"{mark} {news.title}: {news.outcome.status} ({news.outcome.seconds:.1f} s)")
    elif news.line and not news.line.lstrip().startswith(QUIET):
        talk(f"{mark}   {news.line[:160]}")
    elif not news.line:
        talk(f"{mark} {news.title}")


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
    ports = () if settings.port in own_ports(here) else (settings.port,)
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


def launch_steps(here: Deployment, recap: Recap) -> None:
    """The release's files, and its service.

    Raises:
        Incompatible: the service does not run and another process holds its port; or the release would not take its
            arguments.
    """
    from dflash_deploy.cli.lint import check_arguments

    def plan() -> Plan:
        if here.settings.port not in own_ports(here):
            check_port(here, here.seen_service().orphans)
        planned = here.launch_plan()
        if not planned.empty:
            check_arguments(here)
        return planned

    recap.run(here, plan)


def prove_steps(here: Deployment, recap: Recap, *, keep: int) -> HealthReport:
    """Start the release, prove it healthy, make it the current one, remove old ones. If it is not healthy, the release
    that was current is started again.

    Raises:
        Unhealthy, CommandFailed: with what the failed one said, and what serves now.
    """
    from dflash_deploy.errors import CommandFailed, Unhealthy

    served = here.look.running_release is not None or here.seen_service().running or here.seen_service().enabled
    try:
        launch_steps(here, recap)
        with recap.step("health") as note:
            report = health_step(here)
            rank = here.settings.node_rank
            note.detail = f"serving at {here.settings.url}" if not rank else f"ready as rank {rank}"
            recap.data["health"] = report.as_dict()
            if not rank:
                recap.data["streamed"] = stream_step(here)
    except (Unhealthy, CommandFailed) as error:
        raise give_back(here, recap, error, served=served) from None
    promote_step(here, recap, keep=keep)
    return report


def promote_step(here: Deployment, recap: Recap, *, keep: int) -> None:
    """``current`` → the release that was just proved; old ones are removed."""
    from dflash_deploy.execute import execute
    from dflash_deploy.plan.release import plan_prune, promote_steps

    release = here.settings.release
    with recap.step("release") as note:
        note.detail = f"{release} is current"
        steps = promote_steps(here.settings, here.look, release)
        if not steps:
            return
        note.status = Status.CHANGED
        execute(Plan("release", tuple(steps), note.detail), here.host, journal=here.journal, on_progress=tell)
        old = plan_prune(here.settings, here.refresh(), keep)
        execute(old, here.host, journal=here.journal, on_progress=tell)
        if old.steps:
            note.detail += f"; {old.reason}"
    recap.data["release"] = release


def give_back(here: Deployment, recap: Recap, error: DflashError, *, served: bool) -> DflashError:
    """Note that a release failed, and start the one that is current, which it has not become.

    Args:
        served: something ran before.

    Returns:
        The error to raise: what failed, with what serves now.
    """
    from dflash_deploy.cli.start import is_serving, wait_until_ready
    from dflash_deploy.errors import Unhealthy
    from dflash_deploy.execute import execute
    from dflash_deploy.plan.release import as_json

    failed = here.settings.release
    log = here.settings.log_file
    told = [*error.evidence, f"the failed release is {failed}; its log: {log} on {here.host.name}"]
    retry = f"mend the cause, then run the same command again; dflash-deploy logs {here.host.name} --release {failed}"
    hint = f"{error.hint}; {retry}" if error.hint else retry
    look = here.refresh()
    before = look.current_release if served else None
    if before is None or before.id == failed:
        return type(error)(error.message, evidence=told, hint=hint)
    with recap.step("restore") as note:
        try:
            outcome = as_json({"failed": error.message, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
            with suppress(DflashError):
                here.host.write(posixpath.join(here.settings.release_dir, "outcome.json"), outcome)
            plan = restore_of(here, before, look.release(failed))
            here.journal.add("restore", release=before.id, failed=failed)
            execute(plan, here.host, journal=here.journal, on_progress=tell)
            if before.settings:
                old = here.of_release(before)
                with old.host.forward(old.settings.port) as port:
                    if not is_serving(old, port):
                        wait_until_ready(old, lambda: is_serving(old, port))
            note.status = Status.CHANGED
            note.detail = f"{before.id} serves again"
            told.append(f"release {before.id} serves again")
        except DflashError as second:
            told.append(f"release {before.id} could not be started again: {second.message}")
            note.status = Status.FAILED
            note.detail = second.message
            return Unhealthy(error.message, evidence=[*told, *second.evidence], hint=hint)
    return type(error)(error.message, evidence=told, hint=hint)


def restore_of(here: Deployment, release: Release, broken: Release | None) -> Plan:
    """The plan that starts a release from its own files."""
    from dflash_deploy.plan.release import restore_plan

    service = str(release.launch.get("service") or here.settings.service)
    unit = str(release.launch.get("unit") or "")
    ours = release.files.get(f"config/{service}.service", "")
    differs = bool(unit) and here.look.files.get(unit) != ours
    record = (here.look.services.get(service) or {}).get("record") or {}
    running = str(record.get("fingerprint") or "") if record.get("running") else ""
    return restore_plan(here.settings, here.facts, release, unit_differs=differs, running=running, broken=broken)


def own_ports(here: Deployment) -> set[int]:
    """Ports that a service of this deployment holds now, and that its restart sets free."""
    found = here.look.running_release
    if found is not None and found.settings:
        return {int(found.settings.get("port", 0))}
    return {here.settings.port} if found is not None or here.seen_service().running else set()


def check_port(here: Deployment, ours: Sequence[int]) -> None:
    """The service's port is free, or held by a process that its start ends.

    Args:
        ours: pids of the service that outlived it.

    Raises:
        Incompatible: another process holds it.
    """
    from dflash_deploy.errors import Incompatible
    from dflash_deploy.facts import gather
    from dflash_deploy.facts.parse import section

    port = here.settings.port
    holder = section(here.facts.raw, "ports", "asked", str(port))
    if holder.get("free") is not True:
        holder = section(gather(here.host, ports=[port], discover=False).raw, "ports", "asked", str(port))
    if holder.get("free") is False and holder.get("pid") not in ours:
        raise Incompatible(
            f"port {port} of {here.host.name} is in use",
            evidence=f"held by {holder.get('command') or 'a process that this account may not see'} "
            f"(pid {holder.get('pid') or 'unknown'})",
            hint="end that process, or choose another port with --port",
        )


def health_step(here: Deployment) -> HealthReport:
    """Follow the start until the service answers, then climb the health ladder.

    Raises:
        Unhealthy: with the cause, where the log shows one.
    """
    from dflash_deploy.cli.start import is_serving, wait_until_ready
    from dflash_deploy.errors import Unhealthy
    from dflash_deploy.health import Level, Options, check

    settings = here.settings
    with here.host.forward(settings.port) as port:
        if not is_serving(here, port):
            wait_until_ready(here, lambda: is_serving(here, port))
    level = Level.SPEC if settings.speculative else Level.GENERATE
    if settings.node_rank:
        # It says that its part of the model is ready; requests go to the first host.
        level = Level.LIVE
    report = check(
        here.host,
        settings,
        level,
        lambda rung: talk(f"  {rung.name}: {rung.status} ({rung.seconds:.1f} s)"),
        # Two at once prove that requests do not mix; `health` asks for more.
        options=Options(key=here.api_key(), concurrency=2, timeout_s=answer_s(here)),
    )
    failed = report.failed
    if failed is not None or not report.ok:
        name = failed.name if failed is not None else "ladder"
        raise Unhealthy(
            f"{settings.service} on {here.host.name} serves, but not as planned: {name}",
            evidence=failed.evidence if failed is not None else (),
            hint=(failed.hint if failed is not None else "") or f"dflash-deploy logs {here.host.name}",
        )
    return report


def answer_s(here: Deployment) -> float:
    """Deadline of one request in seconds. The interpreter on a busy machine takes minutes for a sentence."""
    return 600.0 if here.settings.stack.device == "cpu" else 180.0


def stream_step(here: Deployment) -> str:
    """One completion, shown on stderr as it comes. Returns its text.

    Raises:
        Unhealthy: the stream broke, or held nothing.
    """
    from dflash_deploy.errors import Unhealthy
    from dflash_deploy.health import NoReply, Probe, stream_completion, tiny_pair_probes

    probes = tiny_pair_probes() if here.settings.tiny_pair else ()
    probe = probes[0] if probes else Probe("The capital city of France is", 24)
    prompt = probe.prompt if isinstance(probe.prompt, str) else list(probe.prompt)
    asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    print(f"  {asked} > ", end="", file=sys.stderr, flush=True)
    pieces: list[str] = []
    try:
        with here.host.forward(here.settings.port) as port:
            for piece in stream_completion(
                f"http://127.0.0.1:{port}",
                prompt,
                max_tokens=probe.max_tokens,
                key=here.api_key(),
                timeout_s=answer_s(here),
            ):
                pieces.append(piece)
                print(piece, end="", file=sys.stderr, flush=True)
    except NoReply as error:
        raise Unhealthy(
            f"{here.settings.service} on {here.host.name} does not stream",
            evidence=[error.detail, f"so far: {''.join(pieces)!r}"],
            hint=f"dflash-deploy logs {here.host.name}",
        ) from None
    finally:
        print(file=sys.stderr, flush=True)
    if not "".join(pieces).strip():
        raise Unhealthy(f"{here.settings.service} on {here.host.name} streams an empty completion")
    return "".join(pieces)


def health_lines(url: str, data: Mapping[str, Any]) -> list[str]:
    """The lines that end ``up``."""
    lines = [f"url: {url}"]
    if data.get("completion"):
        lines.append(f"completion: {data['completion']!r}")
    if data.get("acceptance_length") is not None:
        lines.append(
            f"acceptance length: {data['acceptance_length']:.2f} tokens a step, {data.get('verify_steps')} steps"
        )
    histogram = data.get("acceptance_histogram") or []
    if histogram:
        peak = max(histogram) or 1
        lines.append("accepted drafts a step:")
        lines += [f"  {depth:>3} {count:>6} {'#' * round(40 * count / peak)}" for depth, count in enumerate(histogram)]
    positions = data.get("acceptance_by_position") or []
    if positions:
        lines.append(
            "accepted at each position: " + " ".join(f"{depth}:{share:.0%}" for depth, share in enumerate(positions, 1))
        )
    return lines
