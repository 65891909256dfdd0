"""The steps from a release's files to the proof that it serves; and back, when it does not."""

from __future__ import annotations

import posixpath
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from dflash_deploy.cli.common import talk
from dflash_deploy.cli.deployment import Deployment
from dflash_deploy.cli.recap import Recap, tell
from dflash_deploy.errors import DflashError
from dflash_deploy.model import Plan, Status

if TYPE_CHECKING:
    from dflash_deploy.health import HealthReport
    from dflash_deploy.releases.model import Release


def launch_steps(here: Deployment, recap: Recap) -> None:
    """The release's files, and its service.

    Raises:
        Incompatible: the service does not run and another process holds its port; or the release would not take its
            arguments.
    """
    from dflash_deploy.cli.lint import check_arguments

    def plan() -> Plan:
        if here.settings.port not in here.own_ports():
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
    serves = str(record.get("serves") or "")
    return restore_plan(here.settings, here.facts, release, unit_differs=differs, running=serves, broken=broken)


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
