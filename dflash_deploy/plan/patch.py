"""The state of a tree → the plan of an apply. The transaction itself is :mod:`dflash_deploy.patching.tree`."""

from __future__ import annotations

import posixpath

from dflash_deploy.model import Plan, Remove, Step, WriteFile
from dflash_deploy.patching.judge import Change, TreeState


def plan_patch(state: TreeState) -> Plan:
    """Every file that an apply would write or remove. An empty plan: nothing to do.

    Raises:
        PatchError, HostChanged: the sets do not fit the tree.
    """
    state.check()
    names = ", ".join(s.name for s in state.sets)
    reason = f"{names} on {state.facts.package} {state.facts.version}: {state.status}"
    return Plan("patch", tuple(_step(state.facts.site, change) for change in state.changes), reason)


def _step(site: str, change: Change) -> Step:
    path = posixpath.join(site, change.path)
    if change.after is None:
        return Remove(path, title=f"remove {change.path}")
    return WriteFile(path, change.after, mode=-1, expect_sha256=change.before_sha256, title=f"patch {change.path}")
