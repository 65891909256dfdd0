"""The steps of ``up`` one by one, and the recap that they end in."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    from dflash_deploy.cli.deployment import has_model
    from dflash_deploy.facts import gather

    settings = here.settings
    model, draft = (p if p and has_model(here.host, p) else "" for p in (settings.model, settings.draft_model))
    draft = draft if settings.speculative else ""
    # A port that the service itself holds is as it should be.
    ports = () if here.service().running else (settings.port,)
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
    recap.run(here, here.provision_plan)
    recap.run(here, here.models_plan)


def patch_steps(here: Deployment, recap: Recap) -> None:
    """The stack's patch sets, as one transaction."""
    from dflash_deploy.cli.patch import choose_sets, nothing_to_do, payload_of, rules

    with recap.step("patch") as note:
        device, names = here.settings.stack.device, here.patch_sets()
        if names and nothing_to_do(here.host, here.settings.venv, names, gpu=device == "cuda"):
            note.status, note.detail = Status.OK, "applied already"
            return
        from dflash_deploy.patching import tree

        site, sets = choose_sets(here.host, here.settings.venv, names)
        began = here.journal
        outcomes = tree.apply(here.host, site, sets, payload=payload_of(sets), device=device, rules=rules())
        changed = [o for o in outcomes if o.status == Status.CHANGED]
        note.status = Status.CHANGED if changed else Status.OK
        note.detail = f"{', '.join(s.name for s in sets)}: {len(changed)} changes" if changed else "applied already"
        if changed:
            began.add("changed", plan="patch", what=[o.name for o in changed])


def launch_steps(here: Deployment, recap: Recap) -> None:
    """The service's files, and the service itself.

    Raises:
        Incompatible: the service does not run and another process holds its port; or the release would not take its
            arguments.
    """
    from dflash_deploy.cli.lint import check_arguments

    def plan() -> Plan:
        state = here.service()
        if not state.running:
            check_port(here, state.orphans)
        planned = here.launch_plan(state, here.applied())
        if not planned.empty:
            check_arguments(here)
        return planned

    recap.run(here, plan)


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
    from dflash_deploy.cli.start import api_key_of, wait_until_ready
    from dflash_deploy.errors import Unhealthy
    from dflash_deploy.health import Level, Options, check, is_ready

    settings = here.settings
    key = api_key_of(settings)
    with here.host.forward(settings.port) as port:

        def ready() -> bool:
            return here.service().running and is_ready(f"http://127.0.0.1:{port}", key=key)

        if not ready():
            wait_until_ready(here, ready)
    level = Level.SPEC if settings.speculative else Level.GENERATE
    report = check(
        here.host,
        settings,
        level,
        lambda rung: talk(f"  {rung.name}: {rung.status} ({rung.seconds:.1f} s)"),
        # Two at once prove that requests do not mix; `health` asks for more.
        options=Options(key=key, concurrency=2, timeout_s=answer_s(here)),
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
    from dflash_deploy.cli.start import api_key_of
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
                key=api_key_of(here.settings),
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
