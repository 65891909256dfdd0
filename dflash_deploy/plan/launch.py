"""Settings → the service's files and the steps that bring them to the host. Pure."""

from __future__ import annotations

import contextlib
import hashlib
import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from dflash_deploy.facts import Facts
from dflash_deploy.model import Plan, Run, Step, WriteFile
from dflash_deploy.settings import Mode, Settings

GRACE_S = 30
"""Seconds that the server gets to end by itself."""
GATE_WAIT_S = 60
"""Seconds that a start waits for the port and the GPUs to become free: a driver takes some to give memory back."""
LOGS_KEPT = 5
LOG_MIB = 64


@dataclass(frozen=True)
class ServiceFiles:
    """The rendered files and what stands for all of them."""

    unit: bytes
    """Empty without systemd."""
    env: bytes
    runner: bytes
    secrets: bytes
    """Arguments of the server that no command line may show; empty when there are none."""
    fingerprint: str
    """Changes whenever a running service would have to be restarted."""
    argv: tuple[str, ...]
    """How the runner is started."""


@dataclass(frozen=True)
class Present:
    """What planners need to know of the host."""

    digests: Mapping[str, str]
    """Path → sha256, ``""`` when absent, of :func:`paths`."""
    enabled: bool = False
    running: bool = False
    running_fingerprint: str = ""


def unit_path(settings: Settings, facts: Facts) -> str:
    """Where systemd looks for the unit; ``""`` for the supervisor."""
    if settings.mode == Mode.SYSTEM:
        return f"/etc/systemd/system/{settings.service}.service"
    if settings.mode == Mode.USER:
        return posixpath.join(facts.home, ".config", "systemd", "user", f"{settings.service}.service")
    return ""


def paths(settings: Settings, facts: Facts) -> list[str]:
    """Files whose digests :class:`Present` must hold."""
    unit = unit_path(settings, facts)
    return [settings.env_file, settings.runner, settings.secrets_file, *([settings.staged_unit, unit] if unit else [])]


def systemctl(mode: Mode, facts: Facts, *words: str) -> tuple[str, ...]:
    """A systemctl command for the service's manager, through sudo where that is needed."""
    if mode == Mode.USER:
        # A command without a login session does not know where its own manager listens.
        return ("env", f"XDG_RUNTIME_DIR=/run/user/{facts.uid}", "systemctl", "--user", *words)
    return (*sudo(facts), "systemctl", *words)


def sudo(facts: Facts) -> tuple[str, ...]:
    """``sudo -n`` unless this is root."""
    return () if facts.uid == 0 else ("sudo", "-n")


def render(settings: Settings, facts: Facts, templates: Path, content: Sequence[str]) -> ServiceFiles:
    """The service's files.

    Args:
        content: digests of what the server is made of and no path shows: the venv's pins, the patched tree, the models.
    """
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    places = (settings.root, settings.venv, settings.model, settings.draft_model)

    def under(*roots: str) -> bool:
        return any(place.startswith(root + "/") for place in places for root in roots)

    jinja.globals["under"] = under
    jinja.filters.update(exec=exec_line, quoted=env_quoted, path=unit_escaped)
    runner = (templates / "serve.py").read_bytes()
    env = jinja.get_template("service.env.j2").render(env=settings.environment()).encode()
    server = settings.server_argv()
    gates = gate_words(settings)
    secrets = b"".join(f"{name}: {json.dumps(value)}\n".encode() for name, value in settings.secret_args().items())
    made_of = (env, runner, secrets, server, settings.mode, settings.root, tuple(content))
    fingerprint = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    if secrets:
        server = (*server, "--config", settings.secrets_file)
    argv = (
        settings.python, settings.runner,
        *(("run",) if settings.mode != Mode.SUPERVISOR else ("start", "--replace")),
        *(("--release", settings.release, "--current", settings.current) if settings.release else ()),
        "--state", settings.state_file, "--log", settings.log_file, "--keep", str(LOGS_KEPT), "--max-mib", str(LOG_MIB),
        "--grace", str(GRACE_S), "--cwd", settings.service_dir, "--fingerprint", fingerprint,
        "--env-file", settings.env_file,
        *(gates if settings.mode == Mode.SUPERVISOR else ()),
        "--", *server,
    )  # fmt: skip
    gate = (settings.python, settings.runner, "gate", "--log", settings.log_file, *gates)
    unit = b""
    if settings.mode != Mode.SUPERVISOR:
        user = facts.user if settings.mode == Mode.SYSTEM and facts.uid != 0 else ""
        unit = jinja.get_template("service.unit.j2").render(
            settings=settings, argv=argv, gate=gate, user=user, mode=str(settings.mode), grace_s=GRACE_S,
        ).encode()  # fmt: skip
    return ServiceFiles(unit, env, runner, secrets, fingerprint, argv)


def gate_words(settings: Settings) -> tuple[str, ...]:
    """What must be free before the server starts: its port, and of each GPU the share that it will take."""
    words = ["--port", str(settings.port), "--wait", str(GATE_WAIT_S)]
    if settings.stack.device == "cuda":
        words += ["--gpu-share", f"{memory_fraction(settings):g}"]
    return tuple(words)


def memory_fraction(settings: Settings) -> float:
    """The planned ``--mem-fraction-static``; 0.8 where it is left to SGLang, which then computes about that."""
    argv = settings.server_argv()
    fraction = 0.8
    for at, word in enumerate(argv):
        name, mark, value = word.partition("=")
        if name == "--mem-fraction-static":
            with contextlib.suppress(ValueError, IndexError):
                fraction = float(value if mark else argv[at + 1])
    return min(max(fraction, 0.0), 1.0)


def plan_launch(settings: Settings, facts: Facts, files: ServiceFiles, present: Present) -> Plan:
    """Steps that end with the service running as rendered. Nothing when it runs so already."""
    steps: list[Step] = []
    wanted = [(settings.env_file, files.env, 0o600), (settings.runner, files.runner, 0o644)]
    if files.secrets:
        wanted.append((settings.secrets_file, files.secrets, 0o600))
    unit = unit_path(settings, facts)
    if unit:
        wanted.append((settings.staged_unit, files.unit, 0o644))
    for path, data, mode in wanted:
        before = present.digests.get(path, "")
        if before != hashlib.sha256(data).hexdigest():
            steps.append(WriteFile(path, data, mode, before, title=f"write {posixpath.basename(path)}"))
    if unit and present.digests.get(unit, "") != hashlib.sha256(files.unit).hexdigest():
        steps += install_unit(settings.mode, facts, settings.staged_unit, unit)
    service = f"{settings.service}.service"
    if unit and not present.enabled:
        steps.append(
            Run(systemctl(settings.mode, facts, "enable", service), title="enable the service at boot", timeout_s=120)
        )
    current = present.running and present.running_fingerprint == files.fingerprint
    if not current:
        steps += start_steps(settings, facts, files, running=present.running)
    if not steps:
        return Plan("launch", (), "the service runs as planned")
    reason = "the service runs and is brought up to date" if present.running else "the service does not run"
    if current:
        reason = "the service runs as planned; files around it are mended"
    return Plan("launch", tuple(steps), reason)


def start_steps(settings: Settings, facts: Facts, files: ServiceFiles, *, running: bool) -> list[Step]:
    """End what runs of this service and start it anew. One command does both, and goes on when its caller is gone."""
    title = f"{'restart' if running else 'start'} the service"
    if settings.mode == Mode.SUPERVISOR:
        return [Run(files.argv, title=title, timeout_s=GRACE_S * 2 + 60)]
    return restart_steps(settings.mode, facts, f"{settings.service}.service", title)


def restart_steps(mode: Mode, facts: Facts, name: str, title: str) -> list[Step]:
    """One job of systemd's."""
    forget = systemctl(mode, facts, "reset-failed", name)
    return [
        # A run that was cut off between putting the unit in place and this left the old one loaded.
        Run(systemctl(mode, facts, "daemon-reload"), title="reload systemd", timeout_s=120),
        # Earlier failures count against the start limit.
        Run(forget, title="forget earlier failures", ok_exits=(0, 1), timeout_s=60),
        Run(systemctl(mode, facts, "restart", name), title=title, timeout_s=GRACE_S + 90),
    ]


def install_unit(mode: Mode, facts: Facts, staged: str, unit: str) -> list[Step]:
    """Put a unit of ours where systemd looks for it."""
    # By rename: a unit that is half there would be none after a reboot.
    script = 'install -D -m 0644 "$1" "$2.new" && mv -f "$2.new" "$2"'
    words: tuple[str, ...] = ("/bin/sh", "-c", script, "sh", staged, unit)
    if mode == Mode.SYSTEM:
        # Writing to /etc may take sudo.
        words = (*sudo(facts), *words)
    return [
        Run(words, title=f"install {unit}", timeout_s=60),
        Run(systemctl(mode, facts, "daemon-reload"), title="reload systemd", timeout_s=120),
    ]


def stop_steps(settings: Settings, facts: Facts) -> list[Step]:
    """End exactly what was started, and keep it from starting at boot."""
    if settings.mode == Mode.SUPERVISOR:
        stop = (settings.python, settings.runner, "stop", "--state", settings.state_file, "--grace", str(GRACE_S))
        return [Run(stop, title="end the service", timeout_s=GRACE_S * 2 + 60)]
    service = f"{settings.service}.service"
    return [
        Run(
            systemctl(settings.mode, facts, "disable", "--now", service),
            title="end and disable the service",
            timeout_s=GRACE_S + 90,
        )
    ]


def unit_escaped(text: str) -> str:
    """``%`` is a specifier in units."""
    return text.replace("%", "%%")


def exec_line(argv: Sequence[str]) -> str:
    """An argument vector as systemd reads it: quoted words, ``%`` and ``$`` doubled, line breaks escaped."""
    return " ".join(_exec_word(word) for word in argv)


def _exec_word(word: str) -> str:
    word = word.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$").replace("\n", "\\n").replace('"', '\\"')
    plain = word and all(ch.isalnum() or ch in "-_./:=,@+%$" for ch in word)
    return word if plain else f'"{word}"'


def env_quoted(value: str) -> str:
    """A value as EnvironmentFile reads it: in double quotes, with ``"``, ``\\``, ``$`` and backtick escaped."""
    for char in '\\"$`':
        value = value.replace(char, "\\" + char)
    return f'"{value}"'
