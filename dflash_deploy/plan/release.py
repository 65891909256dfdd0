"""What lies on the host → the steps that make, prove, bring back and remove releases. Pure."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Sequence
from typing import Any

from dflash_deploy.errors import UsageError
from dflash_deploy.facts import Facts
from dflash_deploy.model import Plan, Remove, Run, Step, WriteFile
from dflash_deploy.patching.manifest import Manifest
from dflash_deploy.plan.alone import alone
from dflash_deploy.plan.launch import GRACE_S, ServiceFiles, install_unit, restart_steps, systemctl, unit_path
from dflash_deploy.releases.model import ADOPTED, Look, Release, folder_of
from dflash_deploy.settings import Mode, Settings

KEEP = 3
"""Proved releases that stay, the current one counted."""
CLONE_TIMEOUT_S = 1800.0

CLONE = r"""
set -e
from=$1 to=$2 final=$3 script=$4; shift 4
rm -rf "$to"
mkdir -p "${to%/*}"
cp -al "$from" "$to" 2>/dev/null || { rm -rf "$to"; cp -a --reflink=auto "$from" "$to"; }
rm -f "$to/.dflash-deploy-stack.json"
for site in "$to"/lib/python3*/site-packages; do
  for name in "$@"; do
    [ -e "$site/$name" ] || continue
    rm -rf "$site/$name"
    cp -a --reflink=auto "$from/${site#"$to"/}/$name" "$site/$name"
  done
done
for file in "$to"/pyvenv.cfg "$to"/bin/*; do
  [ -f "$file" ] && [ ! -L "$file" ] && grep -Iq . "$file" || continue
  sed "$script" "$file" > "$file.new" && chmod --reference="$file" "$file.new" && mv -f "$file.new" "$file"
done
"""
"""A second environment of the same content. What is patched is copied; the rest shares its blocks by hard link, so that
6 GB take seconds and 0.1 GB. Installers, Python's bytecode and the patch engine replace files, they never write into
them."""

SWITCH = (
    'ln -sfn "releases/$2" "$1/.current.new" && mv -T "$1/.current.new" "$1/current" && '
    'echo "$2" >> "$1/releases/history"'
)


def outcome_digest(manifest: Manifest) -> str:
    """What patching comes to: the patched bytes and the payload, not the tool's version."""
    lines = [f"{path} {entry.patched}" for path, entry in sorted(manifest.files.items())]
    return hashlib.sha256("\n".join([*lines, manifest.payload]).encode()).hexdigest()


def patched_name(settings: Settings, patches: str) -> str:
    """Name of the patched environment below ``venvs/``."""
    return f"{settings.stack.pins[:12]}-{patches[:8]}"


def known_venv(settings: Settings, look: Look, inputs: str) -> str:
    """Path of the environment that these patch sets were brought into before; ``""`` when there is none."""
    for path, venv in look.venvs.items():
        if venv.stamp.get("pins") == settings.stack.pins and inputs in (venv.stamp.get("inputs") or ()):
            return path
    return ""


def clone_step(settings: Settings, base: str, part: str, final: str, own: Sequence[str]) -> Run:
    """Make ``part``, which will be renamed to ``final``, from ``base``; ``own`` are entries of site-packages that it
    gets to itself."""
    escaped = re.sub(r"([\\.*^$\[\]|])", r"\\\1", base)
    target = re.sub(r"([\\&|])", r"\\\1", final)
    # Not where the path goes on: another environment's name may begin with this one's.
    script = f"s|{escaped}\\([^-A-Za-z0-9_.]\\)|{target}\\1|g; s|{escaped}$|{target}|g"
    return Run(
        alone(settings, ("/bin/sh", "-c", CLONE, "sh", base, part, final, script, *own)),
        title=f"make {posixpath.basename(final)} from {posixpath.basename(base)}",
        timeout_s=CLONE_TIMEOUT_S,
    )


def stamp_bytes(settings: Settings, patches: str, inputs: Sequence[str]) -> bytes:
    """The note that an environment is complete, and what was patched into it."""
    stamp = {
        "stack": settings.stack.name,
        "pins": settings.stack.pins,
        "patches": patches,
        "inputs": sorted(set(inputs)),
    }
    return json.dumps(stamp, indent=1).encode() + b"\n"


def venv_steps(settings: Settings, part: str, final: str, patches: str, inputs: str) -> list[Step]:
    """Put the finished environment in its place."""
    script = 'if [ -e "$2" ]; then rm -rf "$2.old"; mv -T "$2" "$2.old"; fi; mv -T "$1" "$2"; rm -rf "$2.old"'
    stamp = posixpath.join(part, posixpath.basename(settings.stamp))
    return [
        WriteFile(stamp, stamp_bytes(settings, patches, [inputs]), title="note that the venv is complete"),
        Run(
            alone(settings, ("/bin/sh", "-c", script, "sh", part, final)),
            title=f"put {posixpath.basename(final)} in place",
        ),
    ]


def release_steps(
    settings: Settings, facts: Facts, files: ServiceFiles, look: Look, manifest: Manifest | None, created: str
) -> list[Step]:
    """Files of the release ``settings.release`` that are absent or differ; its manifest comes last."""
    old = look.release(settings.release)
    folder = settings.release_dir
    launch = {
        "argv": list(files.argv), "mode": str(settings.mode), "service": settings.service,
        "unit": unit_path(settings, facts), "fingerprint": files.fingerprint,
    }  # fmt: skip
    wanted = [
        (settings.env_file, files.env, 0o600),
        (settings.runner, files.runner, 0o644),
        (posixpath.join(settings.service_dir, "settings.json"), as_json(recorded(settings)), 0o644),
        (posixpath.join(settings.service_dir, "launch.json"), as_json(launch), 0o644),
    ]
    if files.secrets:
        wanted.append((settings.secrets_file, files.secrets, 0o600))
    if files.unit:
        wanted.append((settings.staged_unit, files.unit, 0o644))
    if manifest is not None:
        wanted.append((posixpath.join(folder, "patched.json"), as_json(manifest.as_dict()), 0o644))
    present = old.files if old is not None else {}
    steps: list[Step] = []
    for path, data, mode in wanted:
        if present.get(posixpath.relpath(path, folder)) != hashlib.sha256(data).hexdigest():
            steps.append(WriteFile(path, data, mode, title=f"write {posixpath.basename(path)}"))
    if old is None or not old.complete:
        link = posixpath.join(folder, "venv")
        target = posixpath.relpath(settings.venv, folder) if settings.managed else settings.venv
        steps.append(Run(("ln", "-sfn", target, link), title="link its environment", timeout_s=60))
        about = {
            "id": settings.release,
            "fingerprint": files.fingerprint,
            "created": created,
            "stack": settings.stack.name,
            "pins": settings.stack.pins,
            "patches": outcome_digest(manifest) if manifest is not None else "",
            "venv": settings.venv,
        }
        path = posixpath.join(folder, "manifest.json")
        steps.append(WriteFile(path, as_json(about), title=f"note what release {settings.release} is made of"))
    return steps


def recorded(settings: Settings) -> dict[str, Any]:
    """Settings as a release keeps them: not what the host was called, nor where each value came from."""
    return {key: value for key, value in settings.as_dict().items() if key not in ("origin", "host")}


def adopt_steps(settings: Settings, look: Look, record: dict[str, Any], runner: bytes, unit: str) -> list[Step]:
    """Make a release of a service that was started before there were any, so that a failed start can go back to it.

    Args:
        record: the runner's account of that service.
        unit: path of its unit, ``""`` without systemd.
    """
    folder = folder_of(settings.root, ADOPTED)
    config = posixpath.join(folder, "config")
    old = posixpath.join(settings.root, "service")
    env = posixpath.join(config, f"{settings.service}.env")
    command = [str(word) for word in record.get("command") or ()]
    argv = [
        command[0], posixpath.join(config, "serve.py"), "start", "--replace",
        "--state", settings.state_file, "--log", str(record.get("log")), "--cwd", old, "--grace", str(GRACE_S),
        "--fingerprint", str(record.get("fingerprint")), "--env-file", env, "--", *command,
    ]  # fmt: skip
    launch = {
        "argv": argv, "mode": str(settings.mode), "service": settings.service, "unit": unit,
        "fingerprint": str(record.get("fingerprint")),
    }  # fmt: skip
    copy = 'mkdir -p "$2" && cp -p "$1"/*.env "$2"/ && if [ -n "$3" ]; then cp "$3" "$2"/; fi'
    about = {
        "id": ADOPTED,
        "fingerprint": str(record.get("fingerprint")),
        "venv": posixpath.join(settings.root, "venv"),
    }
    return [
        Run(
            ("/bin/sh", "-c", copy, "sh", old, config, unit),
            title="keep the files of the service that runs",
            timeout_s=60,
        ),
        WriteFile(posixpath.join(config, "serve.py"), runner, title="write serve.py"),
        WriteFile(posixpath.join(config, "launch.json"), as_json(launch), title="write launch.json"),
        Run(("ln", "-sfn", "../../venv", posixpath.join(folder, "venv")), title="link its environment", timeout_s=60),
        WriteFile(posixpath.join(folder, "manifest.json"), as_json(about), title=f"note release {ADOPTED}"),
        Run(("/bin/sh", "-c", SWITCH, "sh", settings.root, ADOPTED), title=f"current -> {ADOPTED}", timeout_s=60),
    ]


def promote_steps(settings: Settings, look: Look, release: str) -> list[Step]:
    """Switch ``current`` to a release that was proved healthy, by rename."""
    outcome = posixpath.join(folder_of(settings.root, release), "outcome.json")
    steps: list[Step] = []
    found = look.release(release)
    if found is not None and found.failed:
        steps.append(Remove(outcome, title="forget that an earlier start failed"))
    if look.current != release or not look.history or look.history[-1] != release:
        steps.append(
            Run(("/bin/sh", "-c", SWITCH, "sh", settings.root, release), title=f"current -> {release}", timeout_s=60)
        )
    return steps


def restore_plan(
    settings: Settings,
    facts: Facts,
    release: Release,
    *,
    unit_differs: bool,
    running: str,
    broken: Release | None = None,
) -> Plan:
    """Start the service of a release from its own files: nothing is computed anew.

    Args:
        settings: those of the release, or where it has none (adopted) of its unit and mode.
        unit_differs: the installed unit is not the release's.
        running: fingerprint of what runs now.
        broken: another release that may run under another manager or name, to be ended first.

    Raises:
        UsageError: its files are not all there.
    """
    launch = release.launch
    if not launch.get("argv"):
        raise UsageError(f"the files of release {release.id} are not all there", hint="dflash-deploy releases HOST")
    steps: list[Step] = []
    service, mode = str(launch["service"]), Mode(launch["mode"])
    name = f"{service}.service"
    if broken is not None and broken.launch:
        steps += end_steps(settings, facts, broken, unless=(mode, service))
    config = posixpath.join(folder_of(settings.root, release.id), "config")
    if mode == Mode.SUPERVISOR:
        if running != release.fingerprint:
            steps.append(
                Run(tuple(map(str, launch["argv"])), title=f"start release {release.id}", timeout_s=GRACE_S * 2 + 60)
            )
        return Plan("restore", tuple(steps), f"release {release.id} is brought back")
    unit = str(launch["unit"])
    if unit_differs:
        staged = posixpath.join(config, name)
        steps += install_unit(mode, facts, staged, unit)
    if unit_differs or running != release.fingerprint:
        steps.append(Run(systemctl(mode, facts, "enable", name), title="enable the service at boot", timeout_s=120))
    if running != release.fingerprint:
        steps += restart_steps(mode, facts, name, f"start release {release.id}")
    return Plan("restore", tuple(steps), f"release {release.id} is brought back")


def end_steps(settings: Settings, facts: Facts, release: Release, *, unless: tuple[Mode, str]) -> list[Step]:
    """End the service of a release that another way of keeping, or another name, is to replace."""
    mode, service = Mode(release.launch["mode"]), str(release.launch["service"])
    if (mode, service) == unless:
        return []
    if mode != Mode.SUPERVISOR:
        words = systemctl(mode, facts, "disable", "--now", f"{service}.service")
        return [Run(words, title=f"end {service} under {mode}", ok_exits=(0, 1), timeout_s=GRACE_S + 90)]
    argv = [str(word) for word in release.launch["argv"]]
    state = argv[argv.index("--state") + 1]
    stop = (argv[0], argv[1], "stop", "--state", state, "--grace", str(GRACE_S))
    return [Run(stop, title=f"end {service} under its supervisor", ok_exits=(0, 1), timeout_s=GRACE_S * 2 + 60)]


def plan_prune(settings: Settings, look: Look, keep: int = KEEP) -> Plan:
    """Remove releases beyond the last ``keep`` that were proved, failed ones older than the current, and environments
    that none of the rest uses."""
    running = look.running_release
    proved = [name for name in dict.fromkeys(reversed(look.history)) if look.release(name) is not None]
    stay = {*proved[: max(1, keep)], look.current, *((running.id,) if running else ())}
    newest = max((each.number for each in look.releases if each.id in look.history), default=0)
    # One that is on its way, or has just failed, is looked at once more.
    stay |= {each.id for each in look.releases if each.number > newest}
    steps: list[Step] = [
        Remove(folder_of(look.root, each.id), title=f"remove release {each.id}")
        for each in look.releases
        if each.id not in stay
    ]
    used = {each.venv for each in look.releases if each.id in stay} | {settings.venv, settings.base_venv}
    pins = {posixpath.basename(path).partition("-")[0] for path in used}
    for path in sorted(look.venvs):
        name = posixpath.basename(path)
        if posixpath.dirname(path) != posixpath.join(look.root, "venvs") or path in used:
            continue
        if "-" not in name and name in pins:
            continue
        steps.append(Remove(path, title=f"remove environment {name}"))
    legacy = posixpath.join(look.root, "venv")
    # As long as nothing was installed anew, patched environments are made from it.
    if look.release(ADOPTED) is not None and ADOPTED not in stay and settings.base_venv in look.venvs:
        steps.append(Remove(legacy, title="remove the environment of the layout before releases"))
    reason = f"{len(stay)} releases stay" if steps else "nothing to remove"
    return Plan("prune", tuple(steps), reason)


def as_json(data: Any) -> bytes:
    """A small file for people and machines."""
    return json.dumps(data, indent=1, sort_keys=True).encode() + b"\n"
