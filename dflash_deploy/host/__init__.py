"""Hosts: where commands run. :func:`connect` is the one way to get one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dflash_deploy.host.base import Host

if TYPE_CHECKING:
    from dflash_deploy.inventory import Target

__all__ = ["Host", "connect"]


def connect(
    target: Target,
    *,
    accept_new: bool = False,
    connect_timeout_s: float = 30.0,
    on_notice: Callable[[str], None] | None = None,
) -> Host:
    """The host of ``target``, connected.

    Args:
        accept_new: record the key of a host that was never met; a changed key is refused all the same.
        connect_timeout_s: retries with backoff end after so many seconds.
        on_notice: told what a person should know: a fingerprint that was accepted, a retry.

    Raises:
        ConnectError, AuthError, HostKeyError: see :mod:`dflash_deploy.errors`.
    """
    if target.kind == "local":
        from dflash_deploy.host.local import LocalHost

        return LocalHost(name=target.name)
    from dflash_deploy.host.ssh import SshHost  # paramiko takes 100 ms to import

    host = SshHost(target, accept_new=accept_new, connect_timeout_s=connect_timeout_s, on_notice=on_notice)
    host.connect()
    return host
