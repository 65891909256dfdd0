"""All rules, by id. A rule is a function in one of the modules here; adding one is adding a function and a case under
tests/data/audit."""

from __future__ import annotations

from dflash_deploy.audit.rules import driver, gpu, host, model, native, packages, toolchain, venv
from dflash_deploy.audit.rules.base import RULES, Case, Rule

__all__ = ["RULES", "Case", "Rule", "driver", "gpu", "host", "model", "native", "packages", "toolchain", "venv"]
