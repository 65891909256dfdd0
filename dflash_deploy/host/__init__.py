"""Hosts: where commands run. :func:`connect` is the one way to get one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, cast

from dflash_deploy.host.base import Host

if TYPE_CHECKING:
    from dflash_deploy.inventory import Target

__all__ = ["Host", "connect", "ssh_module"]


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
    host = ssh_module().SshHost(target, accept_new=accept_new, connect_timeout_s=connect_timeout_s, on_notice=on_notice)
    host.connect()
    return cast(Host, host)


def ssh_module() -> ModuleType:
    """:mod:`dflash_deploy.host.ssh`, which brings paramiko, imported in half the time: paramiko loads invoke, and with
    it asyncio, for ``Match exec`` of an SSH configuration alone."""
    skip = "invoke" not in sys.modules
    if skip:
        sys.modules["invoke"] = None  # type: ignore[assignment]  # so importing it fails, which paramiko allows
    try:
        from dflash_deploy.host import ssh
    finally:
        if skip:
            sys.modules.pop("invoke", None)
    return ssh
