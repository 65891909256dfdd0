"""Hosts by name.

A name is looked up in this order: ``local``; ``hosts.toml`` (``--inventory``, else ``./hosts.toml``, else
``~/.config/dflash-deploy/hosts.toml``); a ``Host`` of ``~/.ssh/config``; an address ``[user@]host[:port]``.

``hosts.toml`` holds a table per host. Every key is optional; ``address`` defaults to the name, and an alias of
``~/.ssh/config`` will do::

    [defaults]                                   # for every host below
    identity_file = "~/.ssh/id_ed25519"

    [ct200]
    address = "deploy@10.0.0.200:22"             # [user@]host[:ssh port]
    identity_file = ["~/.ssh/ct200"]             # one, or a list
    known_hosts = "~/.ssh/known_hosts"           # one, or a list; new keys are recorded in the first
    proxy_jump = "admin@gateway, ct199"          # hops in order: names of this file, of ~/.ssh/config, or addresses
    accept_new = false

    profile = "h200"                             # a kind of machine (config profiles): the keys below are added to it
    root = "/srv/dflash"                         # where the deployment lives on the host
    venv = "/srv/dflash/venv"
    stack = "cpu"
    model = "Qwen/Qwen3-8B"
    draft_model = "z-lab/Qwen3-8B-DFlash-b16"
    port = 30000                                 # of the served model, not of sshd
    server_args = ["--mem-fraction-static", "0.8"]
    env_file = "ct200.env"                       # beside hosts.toml, mode 0600; kept off command lines
    lock = true                                  # packages by hash, where the stack has a lock; else by version alone
    env_from = ["HF_TOKEN"]                      # variables that are taken from the environment of the command

    [profiles.mine]                              # a profile of one's own: the same keys, on top of another one
    profile = "h200"
    budget = 48

    [groups]                                     # names that stand for several hosts, or for other groups
    farm = ["ct200", "ct201"]

    [clusters.big]                               # hosts that serve one model together; the first answers
    hosts = ["ct200", "ct201"]
    dist_init_addr = "10.0.0.200:20000"          # default: the first host's address, port 20000
    server_args = ["--tp-size", "16"]            # and any other key of a host, for all of them
"""

from __future__ import annotations

import difflib
import fnmatch
import getpass
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from dflash_deploy.errors import UsageError
from dflash_deploy.profiles import ORIGIN, expanded

_SSH_KEYS: dict[str, tuple[type, ...]] = {
    "address": (str,),
    "user": (str,),
    "ssh_port": (int,),
    "identity_file": (str, list),
    "known_hosts": (str, list),
    "proxy_jump": (str, list),
    "proxy_command": (str,),
    "accept_new": (bool,),
}
_OPTION_KEYS: dict[str, tuple[type, ...]] = {
    "root": (str,),
    "venv": (str,),
    "profile": (str,),
    "stack": (str,),
    "model": (str,),
    "draft_model": (str,),
    "port": (int,),
    "bind": (str,),
    "service": (str,),
    "mode": (str,),
    "algorithm": (str,),
    "budget": (int, str),
    "server_args": (list,),
    "env": (dict,),
    "env_file": (str,),
    "env_from": (list,),
    "lock": (bool,),
    "python": (str,),
    "index_url": (str,),
    "wheelhouse": (str,),
    "nnodes": (int,),
    "node_rank": (int,),
    "dist_init_addr": (str,),
}
_RESERVED = ("defaults", "groups", "clusters", "profiles", "local")
MEETING_PORT = 20000
"""Where hosts that serve a model together meet, unless it is said."""
_ADDRESS = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^@:\s/]+)(?::(?P<port>\d{1,5}))?\Z")
MAX_HOPS = 8


@dataclass(frozen=True)
class Target:
    """A host as :func:`~dflash_deploy.host.connect` needs it."""

    name: str
    kind: str = "ssh"
    """``ssh`` or ``local``."""
    address: str = ""
    port: int = 22
    """sshd's port. The served model's is ``options["port"]``."""
    user: str = ""
    identity_files: tuple[str, ...] = ()
    identities_only: bool = False
    proxy_jump: tuple[Target, ...] = ()
    proxy_command: str = ""
    known_hosts: tuple[str, ...] = ()
    accept_new: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """What ``hosts.toml`` says beyond the connection: root, venv, stack, model, draft_model, port, server_args, env,
    env_file, …"""


@dataclass(frozen=True)
class Inventory:
    """A parsed ``hosts.toml``."""

    path: str
    hosts: Mapping[str, Mapping[str, Any]]
    """Per host, with the defaults merged in."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Per group its hosts."""


def load_inventory(path: str | Path | None = None) -> Inventory:
    """Read ``hosts.toml``; an empty inventory when none was named and none is there.

    Raises:
        UsageError: it was named and is missing, is no TOML, or has an unknown key or a value of another type.
    """
    candidates = (
        [Path(path).expanduser()]
        if path is not None
        else [Path("hosts.toml"), Path("~/.config/dflash-deploy/hosts.toml").expanduser()]
    )
    found = next((c for c in candidates if c.is_file()), None)
    if found is None:
        if path is not None:
            raise UsageError(f"no inventory at {path}", hint="name a hosts.toml that exists")
        return Inventory("", {})
    try:
        data = tomllib.loads(found.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{found} cannot be read", evidence=str(error)) from error
    groups = _groups(str(found), data)
    for name, table in data.items():
        if name in ("groups", "clusters", "profiles"):
            continue
        if name == "local":
            raise UsageError(f"{found}: 'local' is this machine and takes no table", hint="choose another name")
        if not isinstance(table, dict):
            raise UsageError(
                f"{found}: '{name}' stands outside any host",
                hint=f"put it under [defaults] or a host: [my-host]\n{name} = …",
            )
        _check_keys(str(found), name, table)
    profiles = data.get("profiles", {})
    if not isinstance(profiles, dict) or not all(isinstance(table, dict) for table in profiles.values()):
        raise UsageError(f"{found}: [profiles] holds a table per profile", hint='[profiles.mine]\nprofile = "h200"')
    for name, table in profiles.items():
        _check_keys(str(found), f"profiles.{name}", table)
    defaults = expanded(data.get("defaults", {}), profiles)
    own = {n: expanded(t, profiles) for n, t in data.items() if n not in _RESERVED}
    hosts = {name: _over(defaults, table) for name, table in own.items()}
    clusters = _clusters(str(found), data, hosts)
    for shared in clusters.values():
        for name, options in shared.items():
            hosts[name] = _over(_over(defaults, expanded(options, profiles)), own[name])
    return Inventory(str(found), hosts, {**groups, **{name: tuple(shared) for name, shared in clusters.items()}})


def _over(below: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """A table over another one."""
    left = {key: name for key, name in below.get(ORIGIN, {}).items() if key not in table}
    return {**below, **table, ORIGIN: {**left, **table.get(ORIGIN, {})}}


def _clusters(
    file: str, data: Mapping[str, Any], hosts: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Cluster → its hosts in order → what being in it means for each."""
    raw = data.get("clusters", {})
    if not isinstance(raw, dict):
        raise UsageError(f"{file}: [clusters] holds a table per cluster", hint='[clusters.big]\nhosts = ["a", "b"]')
    found: dict[str, dict[str, dict[str, Any]]] = {}
    taken: dict[str, str] = {}
    for cluster, table in raw.items():
        if cluster in hosts or cluster in data.get("groups", {}) or cluster in _RESERVED:
            raise UsageError(f"{file}: '{cluster}' is a cluster and something else", hint="rename one of them")
        members = table.get("hosts") if isinstance(table, dict) else None
        if not isinstance(members, list) or len(members) < 2 or len(set(members)) != len(members):
            raise UsageError(f"{file}: [clusters.{cluster}] hosts must be a list of two or more different hosts")
        options = {key: value for key, value in table.items() if key != "hosts"}
        _check_keys(file, f"clusters.{cluster}", options)
        for name in members:
            if name not in hosts:
                raise UsageError(f"{file}: [clusters.{cluster}] names '{name}', which is no host of this file")
            if taken.setdefault(name, cluster) != cluster:
                raise UsageError(f"{file}: '{name}' is in two clusters", evidence=f"{taken[name]}, {cluster}")
        first = _ADDRESS.match(str(hosts[members[0]].get("address", members[0])))
        meeting = f"{first['host'] if first else members[0]}:{MEETING_PORT}"
        found[cluster] = {
            name: {"dist_init_addr": meeting, **options, "nnodes": len(members), "node_rank": rank}
            for rank, name in enumerate(members)
        }
    return found


def _groups(file: str, data: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Group → its hosts, groups within groups resolved."""
    raw = data.get("groups", {})
    if not isinstance(raw, dict) or not all(
        isinstance(members, list) and members and all(isinstance(member, str) for member in members)
        for members in raw.values()
    ):
        raise UsageError(
            f"{file}: [groups] holds a list of names per group", hint='[groups]\nfarm = ["host-a", "host-b"]'
        )
    for name in raw:
        if name in data or name == "local":
            raise UsageError(f"{file}: '{name}' is both a group and a host", hint="rename one of them")

    def members(name: str, seen: tuple[str, ...]) -> list[str]:
        if name not in raw:
            return [name]
        if name in seen:
            raise UsageError(f"{file}: the groups go in a circle", evidence=" -> ".join((*seen, name)))
        return [host for member in raw[name] for host in members(member, (*seen, name))]

    return {name: tuple(dict.fromkeys(members(name, ()))) for name in raw}


def _check_keys(file: str, host: str, table: Mapping[str, Any]) -> None:
    known = {**_SSH_KEYS, **_OPTION_KEYS}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise UsageError(
                f"{file}: [{host}] has an unknown key '{key}'",
                evidence=f"known keys: {', '.join(known)}",
                hint=f"did you mean '{near[0]}'?" if near else "see the known keys",
            )
        kinds = known[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(
                {"str": "text", "int": "a number", "list": "a list", "bool": "true or false", "dict": "a table"}[
                    k.__name__
                ]
                for k in kinds
            )
            raise UsageError(f"{file}: [{host}] {key} must be {wanted}, not {value!r}")
        if isinstance(value, list) and not all(isinstance(v, str) for v in value):
            raise UsageError(f"{file}: [{host}] {key} must be a list of texts, not {value!r}")


def resolve_all(
    names: Sequence[str], *, inventory: str | Path | None = None, ssh_config: str | Path | None = None
) -> tuple[Target, ...]:
    """The targets that ``names`` (of hosts or groups) stand for, each once, in the order given; every file is read
    once.

    Raises:
        UsageError: as :func:`resolve`, for any of the names: before a host is asked.
    """
    known, config = Inventory("", {}), ""
    if set(names) - {"local"}:
        known, config = load_inventory(inventory), _config_text(ssh_config)
    return tuple(
        Target("local", kind="local") if name == "local" else _resolve(name, known, config, ())
        for name in dict.fromkeys(host for name in names for host in known.groups.get(name, (name,)))
    )


def resolve(name: str, *, inventory: str | Path | None = None, ssh_config: str | Path | None = None) -> Target:
    """The target that ``name`` stands for.

    Args:
        inventory: a ``hosts.toml`` instead of the usual places.
        ssh_config: an OpenSSH client configuration instead of ``~/.ssh/config``.

    Raises:
        UsageError: nobody knows the name (with the nearest ones), or a file has a fault.
    """
    found = resolve_all([name], inventory=inventory, ssh_config=ssh_config)
    if len(found) > 1:
        members = ", ".join(target.name for target in found)
        raise UsageError(f"'{name}' is a group, and this takes one host", evidence=members, hint="name one of them")
    return found[0]


def _resolve(name: str, inventory: Inventory, config: str, seen: tuple[str, ...]) -> Target:
    if name in seen or len(seen) >= MAX_HOPS:
        raise UsageError(f"the jump hosts of {seen[0]} go in a circle", evidence=" -> ".join((*seen, name)))
    entry = inventory.hosts.get(name)
    asked = str(entry.get("address", name)) if entry is not None else name
    parts = _ADDRESS.match(asked)
    if parts is None:
        raise UsageError(f"not a host: '{asked}'", hint="name a host of hosts.toml or ~/.ssh/config, or user@host:port")
    alias = parts["host"].strip("[]")
    said, patterns = _lookup(config, alias)
    listed = any(p not in ("*", "") and not p.startswith("!") and fnmatch.fnmatchcase(alias, p) for p in patterns)
    if (
        entry is None
        and not listed
        and not (parts["user"] or parts["port"] or "." in alias or ":" in alias or alias == "localhost")
    ):
        known = ["local", *inventory.hosts, *inventory.groups, *(p for p in patterns if not set(p) & set("*?!"))]
        near = difflib.get_close_matches(name, known, 3)
        raise UsageError(
            f"no host is called '{name}'",
            evidence=f"known: {', '.join(known)}",
            hint=f"did you mean {' or '.join(near)}?" if near else "add it to hosts.toml, or name user@host:port",
        )
    entry = entry or {}
    port = entry.get("ssh_port") or int(parts["port"] or 0) or int(said.get("port", 22))
    if not 0 < port < 65536:
        raise UsageError(f"{name}: {port} is no port")
    base = Path(inventory.path).parent if inventory.path else Path()
    identities = _paths(entry.get("identity_file"), base) or tuple(
        str(Path(p).expanduser()) for p in said.get("identityfile", ())
    )
    known_hosts = _paths(entry.get("known_hosts"), base) or tuple(
        str(Path(p).expanduser())
        for p in str(said.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2")).split()
    ) + tuple(str(said.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts")).split())
    jump = entry.get("proxy_jump", said.get("proxyjump", ""))
    hops = [
        h.strip() for h in (jump if isinstance(jump, list) else jump.split(",")) if h.strip() and h.strip() != "none"
    ]
    via = tuple(_resolve(hop.removeprefix("ssh://"), inventory, config, (*seen, name)) for hop in hops)
    return Target(
        name=name,
        address=str(said.get("hostname", alias)),
        port=port,
        user=entry.get("user") or parts["user"] or said.get("user") or getpass.getuser(),
        identity_files=identities,
        identities_only=str(said.get("identitiesonly", "no")) == "yes",
        # A hop that is itself behind a jump brings its own chain along.
        proxy_jump=tuple(t for hop in via[:1] for t in (*hop.proxy_jump, _flat(hop)))
        + tuple(_flat(h) for h in via[1:]),
        proxy_command="" if via else str(entry.get("proxy_command", said.get("proxycommand", "") or "")),
        known_hosts=known_hosts,
        accept_new=bool(entry.get("accept_new", False)),
        options={k: v for k, v in entry.items() if k in _OPTION_KEYS or (k == ORIGIN and v)},
    )


def _flat(target: Target) -> Target:
    from dataclasses import replace

    return replace(target, proxy_jump=())


def _paths(value: str | list[str] | None, base: Path) -> tuple[str, ...]:
    """Paths of an entry; relative ones lie beside hosts.toml."""
    words = [value] if isinstance(value, str) else value or []
    return tuple(str(base / Path(w).expanduser()) for w in words)


def _config_text(path: str | Path | None) -> str:
    """The client configuration, with its includes put in; empty when there is none."""
    if path is not None and not Path(path).expanduser().is_file():
        raise UsageError(f"no SSH configuration at {path}")
    return _with_includes(Path(path or "~/.ssh/config").expanduser(), 0)


def _with_includes(path: Path, depth: int) -> str:
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    out: list[str] = []
    for line in lines:
        words = line.replace("=", " ", 1).split()
        if words and words[0].lower() == "include" and depth < 16:
            for word in words[1:]:
                pattern = Path(word.strip('"')).expanduser()
                pattern = pattern if pattern.is_absolute() else Path("~/.ssh").expanduser() / pattern
                out += [
                    _with_includes(p, depth + 1)
                    for p in sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
                ]
        else:
            out.append(line)
    return "\n".join(out)


def _lookup(config: str, alias: str) -> tuple[Mapping[str, Any], frozenset[str]]:
    if not config.strip():
        return {}, frozenset()
    from dflash_deploy.host import ssh_module  # paramiko takes 100 ms to import

    try:
        return cast("tuple[Mapping[str, Any], frozenset[str]]", ssh_module().read_ssh_config(config, alias))
    except ValueError as error:
        raise UsageError(
            "the SSH client configuration cannot be read",
            evidence=str(error),
            hint="ssh -G HOST shows what ssh makes of it",
        ) from error
