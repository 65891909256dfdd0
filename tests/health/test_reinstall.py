"""A release that was installed anew over the patches: the server may still run on the patched code in its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dflash_patches import registry

from dflash_deploy.health.report import Level
from dflash_deploy.patching import tree
from tests.health.conftest import Standin
from tests.health.test_ladder import climb
from tests.patches.wheels import unpack


@pytest.mark.wheels
@pytest.mark.waits
def test_health_notices_a_reinstallation(standin: Standin) -> None:
    standin.settings = replace(standin.settings, stack=replace(standin.settings.stack, patch_sets=("cpu",)))
    unpack("sglang", "0.5.16", standin.site)
    tree.apply(standin.host, str(standin.site), [registry.find("0.5.16", "cpu")], device="cpu")
    assert climb(standin, Level.READY).ok
    unpack("sglang", "0.5.16", standin.site)
    report = climb(standin, Level.READY)
    assert report.failed is not None and report.failed.name == "patches"
    assert "patch manifest: sglang/srt/speculative/dflash_worker_v2.py differs" in report.failed.evidence
    assert "dflash-deploy patch" in report.failed.hint
    tree.apply(standin.host, str(standin.site), [registry.find("0.5.16", "cpu")], device="cpu")
    assert climb(standin, Level.READY).ok
