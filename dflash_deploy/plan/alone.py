"""One installer at a time in a deployment. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from dflash_deploy.settings import Settings

INSTALL_TIMEOUT_S = 3 * 3600.0


def alone(settings: Settings, argv: Sequence[str]) -> tuple[str, ...]:
    """The command under a file lock: an installer that outlives its killed caller is waited for, never doubled."""
    lock = posixpath.join(settings.root, "provision.flock")
    script = (
        'mkdir -p "${0%/*}"; if command -v flock >/dev/null 2>&1; then '
        'flock -n "$0" true || echo "waiting for an earlier installation to end"; exec flock "$0" "$@"; fi; exec "$@"'
    )
    return ("/bin/sh", "-c", script, lock, *argv)
