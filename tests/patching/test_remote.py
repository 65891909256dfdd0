"""The same transaction over SSH gives the same tree."""

from __future__ import annotations

import shutil
from pathlib import Path

from dflash_deploy.host import connect
from dflash_deploy.host.local import LocalHost
from dflash_deploy.model import Status
from dflash_deploy.patching import tree
from tests.hosts.loopback import Sshd
from tests.patching.demo import HOOKS, hashes, install, payload


def test_apply_and_revert_over_ssh(sshd: Sshd, tmp_path: Path) -> None:
    site = install(tmp_path / "env" / "lib" / "python3.11" / "site-packages")
    brought = payload(tmp_path / "source")
    before = hashes(site)
    host = connect(sshd.target)
    try:
        applied = tree.apply(host, str(tmp_path / "env"), [HOOKS], package="demo", payload=brought)
        again = tree.apply(host, str(tmp_path / "env"), [HOOKS], package="demo", payload=brought)
        assert [o.status for o in (*applied, *again)] == [Status.CHANGED, Status.OK]
        here = install(tmp_path / "here" / "site-packages")
        tree.apply(LocalHost(), str(here), [HOOKS], package="demo", payload=brought)
        assert hashes(here) == hashes(site)
        shutil.rmtree(brought)
        assert [o.status for o in tree.revert(host, str(site), package="demo")] == [Status.CHANGED]
        assert hashes(site) == before
    finally:
        host.close()
