"""Data that does not fit in memory, through a command on a host."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest

from dflash_deploy.errors import CommandFailed, CommandTimeout
from dflash_deploy.host import Host, connect
from dflash_deploy.host.local import LocalHost


@pytest.fixture(params=["local", "ssh"])
def real(request: pytest.FixtureRequest) -> Iterator[Host]:
    host = LocalHost() if request.param == "local" else connect(request.getfixturevalue("sshd").target)
    yield host
    host.close()


def chunks(count: int) -> Iterator[bytes]:
    for number in range(count):
        yield hashlib.sha256(str(number).encode()).digest() * 1024


def test_what_goes_in_comes_out_also_from_one_host_into_another(real: Host) -> None:
    wanted = hashlib.sha256(b"".join(chunks(200))).hexdigest()
    once = hashlib.sha256(b"".join(real.pipe(["cat"], chunks(200)))).hexdigest()
    twice = hashlib.sha256(b"".join(LocalHost().pipe(["cat"], real.pipe(["cat"], chunks(200))))).hexdigest()
    assert once == twice == wanted
    assert b"".join(real.pipe(["printf", "x"])) == b"x"


def test_a_failure_at_either_end_is_said(real: Host) -> None:
    with pytest.raises(CommandFailed) as caught:
        list(real.pipe(["sh", "-c", "head -c 9; echo no room >&2; exit 3"], chunks(500)))
    assert "ended with 3" in caught.value.message and caught.value.evidence == ("no room",)
    with pytest.raises(CommandFailed, match="ended with 4"):
        list(real.pipe(["cat"], LocalHost().pipe(["sh", "-c", "echo begun; exit 4"])))
    with pytest.raises(CommandTimeout):
        list(real.pipe(["sleep", "20"], timeout_s=1.5))
