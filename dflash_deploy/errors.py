"""Every error of the tool, grouped by who must act.

::

    DflashError                     exit 1   (never raised itself)
    ├── UsageError                  exit 2   a bad option, config or path, found before any connection
    ├── HostError                   exit 3   the host cannot be reached: the network or its keys must be mended
    │   ├── ConnectError                     no connection within the deadline
    │   ├── AuthError                        the host refused every key
    │   ├── HostKeyError                     unknown or changed host key
    │   ├── ConnectionLost                   the connection broke in the middle of a step
    │   └── CommandTimeout                   a command passed its deadline
    ├── CommandFailed               exit 4   a command ran on the host and failed
    ├── UnreadableFact              exit 5   a probe ran and its answer could not be read
    ├── Incompatible                exit 6   this stack cannot run on this host
    ├── PatchError                  exit 7   the tree is not what the patch set was written for
    │   ├── UnsupportedVersion               no set for this release
    │   ├── AnchorMissing, AnchorAmbiguous   the code moved
    │   ├── ContractBroken                   code that injected lines call has changed
    │   ├── ForeignEdit                      somebody else changed the file
    │   └── InvalidResult                    the patched file would not compile
    ├── HostChanged                 exit 8   the host changed under us (a planned-on file, the lock)
    │   └── Locked                           another run holds the lock
    └── Unhealthy                   exit 9   the service does not serve

Exit 10 is no error: ``plan`` and ``patch --check`` use it for "something would change".
A message says what failed; ``evidence`` shows it; ``hint`` is the next command or action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CHANGES_PENDING = 10
"""Exit code of a dry run that would change something."""


class DflashError(Exception):
    """Base of all errors that end a command with one message and no traceback."""

    exit_code = 1

    def __init__(self, message: str, *, evidence: Sequence[str] | str = (), hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.evidence: tuple[str, ...] = (evidence,) if isinstance(evidence, str) else tuple(evidence)
        self.hint = hint

    def as_dict(self) -> dict[str, Any]:
        """The error as JSON data: kind, exit_code, message, evidence, hint."""
        return {
            "kind": type(self).__name__,
            "exit_code": self.exit_code,
            "message": self.message,
            "evidence": list(self.evidence),
            "hint": self.hint,
        }


class UsageError(DflashError):
    """A bad option, config file or path, found before any connection."""

    exit_code = 2


class HostError(DflashError):
    """The host cannot be reached or stopped answering."""

    exit_code = 3


class ConnectError(HostError):
    """No connection within the deadline."""


class AuthError(HostError):
    """The host refused every key that was offered."""


class HostKeyError(HostError):
    """The host's key is unknown or differs from the known one."""


class ConnectionLost(HostError):
    """The connection broke in the middle of a step; the same command goes on from there."""


class CommandTimeout(HostError):
    """A command on the host passed its deadline."""


class CommandFailed(DflashError):
    """A command ran on the host and failed."""

    exit_code = 4


class UnreadableFact(DflashError):
    """A probe ran and its answer could not be read: most likely a fault of ours."""

    exit_code = 5


class Incompatible(DflashError):
    """The audit's verdict: this stack cannot run on this host."""

    exit_code = 6


class PatchError(DflashError):
    """The tree is not what the patch set was written for."""

    exit_code = 7


class UnsupportedVersion(PatchError):
    """No patch set is written for this release."""


class AnchorMissing(PatchError):
    """A patch's anchor was not found."""


class AnchorAmbiguous(PatchError):
    """A patch's anchor was found more than once."""


class ContractBroken(PatchError):
    """Code that injected lines rely on is missing, takes other parameters, or never reaches them."""


class ForeignEdit(PatchError):
    """A file differs from both its pristine and its patched bytes."""


class InvalidResult(PatchError):
    """A patched file would not compile."""


class HostChanged(DflashError):
    """The host changed between plan and write."""

    exit_code = 8


class Locked(HostChanged):
    """Another run holds the deployment lock."""


class Unhealthy(DflashError):
    """The service does not serve as planned."""

    exit_code = 9
