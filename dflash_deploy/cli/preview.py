"""What ``plan`` shows: the plans that ``up`` executes, each file's diff, what would be downloaded."""

from __future__ import annotations

import posixpath
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_deploy.model import CopyTree, Plan, Remove, Step, WriteFile
from dflash_deploy.releases.model import VenvLook

if TYPE_CHECKING:
    from dflash_deploy.cli.deployment import Deployment

SECRET_NAMES = (".env", ".secrets.yaml")
DIFF_LINES = 60


def all_plans(here: Deployment) -> list[Plan]:
    """The plans of ``up``, in its order, as far as they can be known before the earlier ones are carried out."""
    provision = here.provision_plan()
    return [provision, here.models_plan(), patch_plan(here, provision), here.launch_plan()]


def patch_plan(here: Deployment, provision: Plan) -> Plan:
    """What the patch step would do."""
    from dflash_deploy.cli.deployment import OWN_FOLDERS
    from dflash_deploy.plan.patch import plan_patch
    from dflash_deploy.plan.release import clone_step, outcome_digest, patched_name, venv_steps
    from dflash_deploy.releases.look import store

    names = ", ".join(here.patch_sets())
    settings = here.settings
    if not names:
        return Plan("patch", (), "this stack needs none")
    if here.patched is not None:
        return Plan("patch", (), f"{names}: applied already")
    if not provision.empty:
        return Plan("patch", (), f"{names}: after SGLang is installed")
    if not settings.managed or settings.venv != settings.base_venv:
        return plan_patch(here.tree_state(settings.venv))
    source = here.source()
    state = here.tree_state(source)
    changes = plan_patch(state)
    assert state.manifest is not None
    patches = outcome_digest(state.manifest)
    final = store(settings.root, patched_name(settings, patches))
    there = here.look.venvs.get(final)
    # The launch plan that follows counts on it.
    foreseen = VenvLook(final, manifest=state.manifest)
    here.look = replace(here.look, venvs={**here.look.venvs, final: foreseen})
    here.settings = settings = replace(settings, venv=final)
    if there is not None and there.stamp.get("patches") == patches:
        return Plan("patch", (), f"{posixpath.basename(final)} is the same")
    part = f"{final}.part"
    inside = [_moved(step, source, part) for step in changes.steps]
    steps = (
        clone_step(settings, source, part, final, OWN_FOLDERS),
        *inside,
        *venv_steps(settings, part, final, patches, here.inputs),
    )
    return Plan("patch", steps, changes.reason)


def _moved(step: Step, source: str, part: str) -> Step:
    """A step on the source's tree as it will be on the copy."""
    if isinstance(step, WriteFile | Remove):
        return replace(step, path=step.path.replace(source, part, 1))
    return step


def shown(here: Deployment, plan: Plan) -> dict[str, Any]:
    """JSON data of a plan."""
    steps = []
    for step in plan.steps:
        text = diff_of(here, step) if isinstance(step, WriteFile) else ""
        steps.append({"title": step.title or step.describe(), "does": step.describe()[:2000], "diff": text})
    return {"name": plan.name, "reason": plan.reason, "steps": steps, "download_mib": download_mib(here, plan)}


def diff_of(here: Deployment, step: WriteFile) -> str:
    """Unified diff of a file that would be written against what stands there, or what the current release has in its
    place; of a file that may hold secrets only the names."""
    from dflash_deploy.patching.judge import diff

    before_path = step.path
    current = here.look.current
    folder = f"/releases/{here.settings.release}/"
    if folder in step.path and current and current != here.settings.release:
        before_path = step.path.replace(folder, f"/releases/{current}/", 1)
    before = here.host.read(before_path.replace(".part/", "/", 1))
    after: bytes | None = step.data
    if before is None and ".part/" in before_path:
        # The copy is not made yet: its source says what it will hold.
        head, _, rest = before_path.partition(".part/")
        before = here.host.read(posixpath.join(here.source(), rest)) if head else None
    if step.path.endswith(SECRET_NAMES):
        before, after = masked(before), masked(step.data)
    return diff(posixpath.relpath(step.path, here.settings.root), before, after, limit=DIFF_LINES)


def masked(data: bytes | None) -> bytes | None:
    """Names without values; that a value differs is shown by a digest."""
    import hashlib

    if data is None:
        return None
    lines = []
    for line in data.decode("utf-8", "replace").splitlines():
        mark = "=" if "=" in line else ":"
        name, found, value = line.partition(mark)
        hidden = hashlib.sha256(b"plan" + value.encode()).hexdigest()[:6]
        lines.append(f"{name}{mark}<{hidden}>" if found and not line.startswith("#") else line)
    return "\n".join([*lines, ""]).encode()


def download_mib(here: Deployment, plan: Plan) -> int:
    """MiB that a plan brings to the host, roughly: packages by the stack's measured size, folders by their files."""
    from dflash_deploy.plan.provision import missing_mib

    total = 0
    for step in plan.steps:
        if isinstance(step, CopyTree):
            total += sum(p.stat().st_size for p in Path(step.source).rglob("*") if p.is_file()) >> 20
    if plan.name == "provision" and plan.steps:
        total += missing_mib(here.settings.stack, here.venv_state(here.settings.venv).packages)
    return total
