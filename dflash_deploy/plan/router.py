"""Replicas on several hosts behind SGLang's own router: its settings, from the inventory. Pure.

The router is one more service: the same runner, unit and environment files, another command line.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from dflash_deploy.audit.stacks import ROUTER
from dflash_deploy.errors import UsageError
from dflash_deploy.settings import DEFAULT_PORT, SECRET_ARGS, Settings

if TYPE_CHECKING:
    from dflash_deploy.inventory import Target

ROUTER_PORT = 30080
SERVICE = "dflash-router"
POLICIES = ("cache_aware", "power_of_two", "round_robin", "random")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class RouterSettings(Settings):
    """Settings of the router as a service."""

    replicas: tuple[str, ...] = ()
    """Base URLs of the served models, as the router's host reaches them."""
    policy: str = POLICIES[0]

    def server_argv(self) -> tuple[str, ...]:
        """The router's command line, interpreter included."""
        return (
            self.python, "-m", "sglang_router.launch_router", "--host", self.bind, "--port", str(self.port),
            "--policy", self.policy,
            # Its metrics have a port of their own, which two routers on a host must not share.
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(self.port + 1),
            # SGLang answers its health check after up to 20 s when it is busy; three misses in a row count.
            "--health-check-interval-secs", "10", "--health-check-timeout-secs", "20",
            "--health-failure-threshold", "3",
            "--worker-urls", *self.replicas, *self.server_args,
        )  # fmt: skip

    @classmethod
    def of(
        cls, base: Settings, *, port: int, bind: str, policy: str, replicas: Sequence[str], args: Sequence[str]
    ) -> RouterSettings:
        """The router's settings on a host.

        Args:
            base: of a deployment on that host: its root, mode and user.

        Raises:
            UsageError: a value that cannot be; all of them at once.
        """
        problems = [] if policy in POLICIES else [f"policy {policy!r}: one of {', '.join(POLICIES)}"]
        if not 0 < port < 65535:
            problems.append(f"port {port!r}: 1 to 65534")
        if problems:
            raise UsageError(f"the router's settings on {base.host} do not hold", evidence=problems)
        given = {each.name: getattr(base, each.name) for each in fields(Settings)}
        given |= {
            "stack": ROUTER, "service": SERVICE, "bind": bind, "port": port, "algorithm": "NONE", "env": {},
            "venv": posixpath.join(base.root, "venvs", ROUTER.pins[:12]), "server_args": tuple(args), "release": "",
            "tiny_pair": False, "threads": 0, "nnodes": 1,
        }  # fmt: skip
        return cls(**given, replicas=tuple(replicas), policy=policy)


def _address(target: Target) -> str:
    """Its address; one word for this machine."""
    return "127.0.0.1" if target.kind == "local" or target.address in LOOPBACK else target.address


def replica_urls(replicas: Sequence[Target], router: Target) -> list[str]:
    """Where the router's host reaches each replica.

    Raises:
        UsageError: a replica that cannot be reached so, or that asks for a key; all of them at once.
    """
    urls, problems = [], []
    for target in replicas:
        if int(target.options.get("node_rank", 0)):
            continue  # of a cluster the first host answers
        bind, port = str(target.options.get("bind", "127.0.0.1")), target.options.get("port", DEFAULT_PORT)
        same = target.name == router.name or _address(target) == _address(router)
        if not same and bind in LOOPBACK:
            problems.append(f"{target.name} serves on its loopback only: set bind to an address that is reached")
        if any(key in dict(target.options.get("env", {})) for key in SECRET_ARGS):
            problems.append(f"{target.name} asks for an API key, which the router takes on its command line only")
        address = "127.0.0.1" if same and bind in (*LOOPBACK, "0.0.0.0") else target.address
        if bind not in (*LOOPBACK, "0.0.0.0", "::"):
            address = bind
        urls.append(f"http://{f'[{address}]' if ':' in address else address}:{port}")
    if not urls and not problems:
        problems.append("no replica is named")
    if problems:
        raise UsageError("these hosts cannot stand behind one router", evidence=problems)
    return list(dict.fromkeys(urls))
