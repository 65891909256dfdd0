"""The effective settings of one deployment, and where each value came from.

Later sources win: built-in default < stack < ``hosts.toml`` < command line. Nothing here touches a host.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dflash_deploy.audit.stacks import Stack, choose_stacks, get_stack, stack_for
from dflash_deploy.errors import Incompatible, UnreadableFact, UsageError
from dflash_deploy.facts import Facts


class Mode(StrEnum):
    """How the service is kept running."""

    SYSTEM = "systemd-system"
    USER = "systemd-user"
    SUPERVISOR = "supervisor"


class Algorithm(StrEnum):
    """Values of ``--speculative-algorithm``; ``NONE`` leaves the flag out."""

    DDTREE = "DDTREE"
    DFLASH = "DFLASH"
    NONE = "NONE"


DEFAULT_PORT = 30000
DEFAULT_BUDGET = 16
"""Nodes of the draft tree, the root not counted."""
AUTO = "auto"
AUTO_RELEASES = ("0.5.16",)
"""Releases whose server was seen to choose the width itself."""
RANKS_RELEASES = ("0.5.16",)
"""Releases that draft and verify a tree on several ranks."""

SECRET_ARGS = {"SGLANG_API_KEY": "api-key", "SGLANG_ADMIN_API_KEY": "admin-api-key"}
"""Variables of ``env`` and ``env_file`` that become arguments of the server, and on no command line."""

TINY_CONTEXT = 2048
"""Tokens of context that the tiny pair is served with."""


@dataclass(frozen=True)
class Settings:
    """Everything that a deployment is made from. Paths are absolute POSIX paths of the host."""

    host: str
    stack: Stack
    root: str
    venv: str
    service: str
    bind: str
    port: int
    model: str
    draft_model: str
    algorithm: str
    budget: int | str
    """Nodes of the draft tree; ``auto``: the server chooses for each batch."""
    server_args: tuple[str, ...]
    """What the user adds; last, so that it wins over the stack's own arguments."""
    env: Mapping[str, str] = field(repr=False)
    """May hold secrets: written to a 0600 file, never shown or put on a command line."""
    mode: Mode
    tiny_pair: bool
    """The shipped pair is served: no model was named and the host has no GPU."""
    threads: int = 0
    """CPU threads of the server on a CPU stack; 0: left to it."""
    release: str = ""
    """Id of the release whose files are meant; ``""``: the layout before there were releases."""
    lock: bool = True
    """Packages are installed as the stack's lock says, where it has one."""
    managed: bool = True
    """The environment is one that is made below ``venvs/``, not one that the user named."""
    nnodes: int = 1
    """Hosts that serve the model together."""
    node_rank: int = 0
    """This one's place among them, from 0; the first one answers requests."""
    dist_init_addr: str = ""
    """Where the first of them is met: ``address:port``."""
    origin: Mapping[str, str] = field(default_factory=dict)
    """Where each value came from: ``command line``, ``hosts.toml``, ``stack NAME``, ``facts`` or ``default``."""

    @property
    def python(self) -> str:
        """The deployment's own interpreter."""
        return posixpath.join(self.venv, "bin", "python")

    @property
    def stamp(self) -> str:
        """Written after the last package: absent while an installation is unfinished."""
        return posixpath.join(self.venv, ".dflash-deploy-stack.json")

    @property
    def base_venv(self) -> str:
        """The environment as installed, which patched ones are made from."""
        return posixpath.join(self.root, "venvs", self.stack.pins[:12]) if self.managed else self.venv

    @property
    def release_dir(self) -> str:
        return posixpath.join(self.root, "releases", self.release)

    @property
    def service_dir(self) -> str:
        return posixpath.join(self.release_dir, "config") if self.release else posixpath.join(self.root, "service")

    @property
    def env_file(self) -> str:
        return posixpath.join(self.service_dir, f"{self.service}.env")

    @property
    def secrets_file(self) -> str:
        """Secret arguments of the server, as its ``--config`` reads them."""
        return posixpath.join(self.service_dir, f"{self.service}.secrets.yaml")

    @property
    def current(self) -> str:
        """Link to the last release that was proved healthy."""
        return posixpath.join(self.root, "current")

    @property
    def runner(self) -> str:
        """The script that starts the server and keeps its log."""
        return posixpath.join(self.service_dir, "serve.py")

    @property
    def state_file(self) -> str:
        """What runs now, written by the runner; one for all releases."""
        return posixpath.join(self.root, "service", f"{self.service}.state.json")

    @property
    def log_file(self) -> str:
        if self.release:
            return posixpath.join(self.release_dir, "log", f"{self.service}.log")
        return posixpath.join(self.root, "logs", f"{self.service}.log")

    @property
    def staged_unit(self) -> str:
        """The unit as rendered; for systemd-user and the supervisor the only copy of it."""
        return posixpath.join(self.service_dir, f"{self.service}.service")

    @property
    def url(self) -> str:
        """Base URL as seen from the host itself."""
        address = f"[{self.bind}]" if ":" in self.bind else self.bind
        return f"http://{'127.0.0.1' if self.bind == '0.0.0.0' else address}:{self.port}"

    @property
    def speculative(self) -> bool:
        return self.algorithm != Algorithm.NONE

    def server_argv(self) -> tuple[str, ...]:
        """The server's command line, interpreter included."""
        argv = [self.python, "-m", "sglang.launch_server", "--model-path", self.model]
        argv += ["--host", self.bind, "--port", str(self.port), *self.stack.server_args]
        if self.speculative:
            argv += ["--speculative-algorithm", self.algorithm, "--speculative-draft-model-path", self.draft_model]
            if self.stack.device == "cpu":
                argv += ["--speculative-draft-attention-backend", "triton"]
        if self.tiny_pair:
            argv += ["--context-length", str(TINY_CONTEXT)]
        if self.algorithm == Algorithm.DDTREE:
            argv += ["--speculative-ddtree-budget", str(self.budget)]
        if self.nnodes > 1:
            argv += ["--nnodes", str(self.nnodes), "--node-rank", str(self.node_rank)]
            argv += ["--dist-init-addr", self.dist_init_addr]
        return (*argv, *self.server_args)

    def secret_args(self) -> dict[str, str]:
        """Arguments that the server takes from a file, because a command line can be read by everyone."""
        return {name: self.env[key] for key, name in SECRET_ARGS.items() if self.env.get(key)}

    def environment(self) -> dict[str, str]:
        """The server's own variables: stack first, the user's last."""
        return {
            # Everything is on the host already; a server that asks the network hangs where there is none.
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            # Threads that spin while they wait for one whose core is taken cost 20 times their work.
            **({"OMP_NUM_THREADS": str(self.threads), "OMP_WAIT_POLICY": "PASSIVE"} if self.threads else {}),
            **dict(self.stack.env),
            **{key: value for key, value in self.env.items() if key not in SECRET_ARGS},
        }

    def as_dict(self) -> dict[str, Any]:
        """For ``--json`` and ``config show``: no value of ``env``, only its names."""
        return {
            "host": self.host,
            "stack": self.stack.name,
            "root": self.root,
            "venv": self.venv,
            "service": self.service,
            "bind": self.bind,
            "port": self.port,
            "model": self.model,
            "draft_model": self.draft_model,
            "algorithm": self.algorithm,
            "budget": self.budget,
            "server_args": list(self.server_args),
            "env": sorted(self.env),
            "mode": str(self.mode),
            "tiny_pair": self.tiny_pair,
            "threads": self.threads,
            "release": self.release,
            "managed": self.managed,
            "nnodes": self.nnodes,
            "node_rank": self.node_rank,
            "dist_init_addr": self.dist_init_addr,
            "origin": dict(self.origin),
        }

    @classmethod
    def of_record(cls, host: str, raw: Mapping[str, Any]) -> Settings:
        """Settings as a release recorded them; values of ``env`` are in its environment file alone.

        Raises:
            UsageError: its stack is not one of this version's.
            UnreadableFact: not a record of settings.
        """
        try:
            return cls(
                host=host,
                stack=get_stack(str(raw["stack"])),
                root=str(raw["root"]),
                venv=str(raw["venv"]),
                service=str(raw["service"]),
                bind=str(raw["bind"]),
                port=int(raw["port"]),
                model=str(raw["model"]),
                draft_model=str(raw["draft_model"]),
                algorithm=str(raw["algorithm"]),
                budget=_budget(raw["budget"]),
                server_args=tuple(map(str, raw["server_args"])),
                env={},
                mode=Mode(raw["mode"]),
                tiny_pair=bool(raw["tiny_pair"]),
                threads=int(raw.get("threads", 0)),
                release=str(raw.get("release", "")),
                managed=bool(raw.get("managed", True)),
                nnodes=int(raw.get("nnodes", 1)),
                node_rank=int(raw.get("node_rank", 0)),
                dist_init_addr=str(raw.get("dist_init_addr", "")),
                origin={str(k): f"release {raw.get('release', '')}" for k in raw},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UnreadableFact(f"the settings of a release of {host} cannot be read", evidence=repr(error)) from None


def effective(
    host: str,
    facts: Facts,
    *,
    options: Mapping[str, Any] | None = None,
    entry: Mapping[str, Any] | None = None,
    serving: bool = True,
) -> Settings:
    """Settings of a deployment on a host.

    Args:
        options: from the command line; None values count as not given.
        entry: the host's table of ``hosts.toml``, SSH keys taken out.
        serving: False when only the running service is asked about: no model has to be named.

    Raises:
        UsageError: a value that cannot be; all of them at once.
        Incompatible: no stack was named and none fits the host.
    """
    origin: dict[str, str] = {}

    def pick(key: str, default: Any, why: str = "default") -> Any:
        for source, name in ((options or {}, "command line"), (entry or {}, "hosts.toml")):
            if source.get(key) is not None:
                origin[key] = name
                if source is entry and (profile := entry.get("profile_of", {}).get(key)):
                    origin[key] = f"profile {profile}"
                return source[key]
        origin[key] = why
        return default

    named = pick("stack", None, "facts")
    stack = find_stack(named, facts)
    root = _absolute(str(pick("root", "~/.local/share/dflash-deploy")), facts.home)
    venv = _absolute(str(pick("venv", posixpath.join(root, "venvs", stack.pins[:12]))), facts.home)
    pair = posixpath.join(root, "models", "tiny-pair")
    model = pick("model", None, "facts")
    tiny = model is None and not facts.gpus
    draft = pick("draft_model", posixpath.join(pair, "drafter") if tiny else None, "facts" if tiny else "default")
    algorithm = str(pick("algorithm", Algorithm.DDTREE)).upper()
    port, budget = pick("port", DEFAULT_PORT), _budget(pick("budget", DEFAULT_BUDGET))
    service, bind = str(pick("service", "dflash-sglang")), str(pick("bind", "127.0.0.1"))
    mode = str(pick("mode", "auto", "facts"))
    server_args = _words(pick("server_args", ()))
    env = {str(key): str(value) for key, value in dict(pick("env", {})).items()}
    nnodes, rank, meeting = pick("nnodes", 1), pick("node_rank", 0), str(pick("dist_init_addr", ""))
    problems = []
    if not isinstance(nnodes, int) or not isinstance(rank, int) or not 0 <= rank < nnodes:
        problems.append(f"node_rank {rank!r} of nnodes {nnodes!r}: from 0 to one less")
    elif nnodes > 1 and not re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[^\s:/]+):\d{1,5}", meeting):
        problems.append(f"dist_init_addr {meeting!r}: address:port of the first host, as the others reach it")
    elif nnodes > 1 and algorithm == Algorithm.DDTREE and stack.sglang not in RANKS_RELEASES:
        releases = ", ".join(RANKS_RELEASES)
        problems.append(f"DDTREE runs on one host (SGLang {releases}: on several): --algorithm DFLASH or NONE")
    if serving and model is None and not tiny:
        problems.append("no model: this host has a GPU, so name one with --model (and --draft-model)")
    if algorithm not in set(Algorithm):
        problems.append(f"algorithm {algorithm!r}: one of {', '.join(Algorithm)}")
    elif algorithm != Algorithm.NONE and draft is None and model is not None:
        problems.append(f"{algorithm} needs a drafter: --draft-model, or --algorithm NONE")
    if not isinstance(port, int) or not 0 < port < 65536:
        problems.append(f"port {port!r}: 1 to 65535")
    if budget == AUTO:
        if stack.device == "cpu" or stack.sglang not in AUTO_RELEASES:
            problems.append(
                f"budget auto: served on a GPU by SGLang {', '.join(AUTO_RELEASES)}; give a number of nodes"
            )
    elif not isinstance(budget, int) or not 0 < budget <= 1024:
        problems.append(f"budget {budget!r}: 1 to 1024 nodes, or auto")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", service):
        problems.append(f"service {service!r}: letters, digits, dot, dash and underscore")
    problems += [f"env {key!r}: not a variable name" for key in env if not re.fullmatch(r"[A-Za-z_]\w*", key)]
    problems += [
        f"env {key}: a line break in its value" for key, value in env.items() if "\n" in value or "\0" in value
    ]
    shown = {word.partition("=")[0] for word in server_args} & {f"--{name}" for name in SECRET_ARGS.values()}
    problems += [f"server argument {word}: everyone on the host could read it; put it into env_file" for word in shown]
    if "--config" in server_args and any(env.get(key) for key in SECRET_ARGS):
        problems.append("server argument --config: the server takes one, and the API key is in it")
    if mode not in ("auto", *Mode):
        problems.append(f"mode {mode!r}: auto, {', '.join(Mode)}")
    for key, path in (("root", root), ("venv", venv)):
        if posixpath.normpath(path) in ("/", facts.home, "/usr", "/home", "/srv", "/opt", "/var", "/etc"):
            problems.append(f"{key} {path}: a folder of the deployment's own is needed")
    if problems:
        raise UsageError(f"the settings of {host} do not hold", evidence=problems)
    return Settings(
        host=host,
        stack=stack,
        root=root,
        venv=venv,
        service=service,
        bind=bind,
        port=port,
        model=posixpath.join(pair, "target") if tiny else str(model or ""),
        draft_model=str(draft or ""),
        algorithm=algorithm,
        budget=budget,
        server_args=server_args,
        env=env,
        mode=choose_mode(facts) if mode == "auto" else Mode(mode),
        tiny_pair=tiny,
        # More threads than cores that are free make the interpreter slower, not faster.
        threads=min(8, facts.cpu_count or 2) if stack.device == "cpu" else 0,
        managed=origin["venv"] == "default",
        lock=bool(pick("lock", True)),
        nnodes=nnodes,
        node_rank=rank,
        dist_init_addr=meeting,
        origin=origin,
    )


def choose_mode(facts: Facts) -> Mode:
    """systemd where a unit of it outlives this session, else our own supervisor."""
    if facts.systemd == "system":
        return Mode.SYSTEM
    if facts.systemd == "user" and facts.linger:
        return Mode.USER
    return Mode.SUPERVISOR


def find_stack(named: str | None, facts: Facts) -> Stack:
    """The stack of that name; without a name the best that fits.

    Raises:
        UsageError: no such stack.
        Incompatible: none was named and none fits.
    """
    if named is not None:
        # "cpu" says enough where one stack has that device.
        if named == "cpu":
            named = "sglang-0.5.16-cpu"
        return get_stack(named)
    stack = stack_for(facts)
    if stack is None:
        choice = choose_stacks(facts)[0]
        raise Incompatible(
            "no stack fits this host", evidence=[f"{choice.stack.name}: {reason}" for reason in choice.reasons],
            hint="; ".join(choice.changes) or "dflash-deploy audit HOST",
        )  # fmt: skip
    return stack


def _budget(given: object) -> int | str:
    """A number, from the command line too; anything else as it is, to be judged with the rest."""
    return int(given) if isinstance(given, (int, str)) and str(given).isdecimal() else str(given)


def _absolute(path: str, home: str) -> str:
    if path == "~" or path.startswith("~/"):
        path = home + path[1:]
    return posixpath.normpath(path if path.startswith("/") else posixpath.join(home, path))


def _words(value: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        import shlex

        return tuple(shlex.split(value))
    return tuple(str(word) for word in value)
