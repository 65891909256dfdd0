"""The fake host is strict."""

from __future__ import annotations

import pytest

from dflash_deploy.errors import CommandFailed, CommandTimeout, ConnectionLost
from dflash_deploy.host.fake import FakeHost, UnscriptedCommand
from dflash_deploy.model import Result


def test_an_unscripted_command_is_an_error() -> None:
    host = FakeHost()
    host.script(["nvidia-smi"], "ok")
    with pytest.raises(UnscriptedCommand):
        host.run(["nvidia-smi", "-L"])
    with pytest.raises(UnscriptedCommand), host.forward(1):
        pass


def test_answers() -> None:
    host = FakeHost()
    lines: list[tuple[str, str]] = []
    host.script(["pip", ...], 1)
    host.script(["pip", "list"], "a\nb")
    host.script(["id"], lambda call: (call.input or b"") + b"!")
    host.script(["lost"], ConnectionLost("gone"))
    host.script(["slow"], Result((), 0, seconds=90))
    assert host.run(["pip", "list"], on_line=lambda s, t: lines.append((s, t))).out == "a\nb"
    assert lines == [("stdout", "a"), ("stdout", "b")]
    assert host.run(["pip", "install", "x"]).exit_code == 1
    assert host.run(["id"], input=b"in", env={"A": "1"}).stdout == b"in!"
    assert host.calls[-1].env == {"A": "1"}
    with pytest.raises(ConnectionLost):
        host.run(["lost"])
    with pytest.raises(CommandTimeout):
        host.run(["slow"], timeout_s=60)


def test_read_only_folders() -> None:
    host = FakeHost(files={"/etc/x": b"old"})
    host.read_only.add("/etc")
    with pytest.raises(CommandFailed):
        host.write("/etc/x", b"new")
    assert host.files["/etc/x"] == b"old"
