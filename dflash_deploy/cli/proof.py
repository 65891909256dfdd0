"""What was installed or brought, judged as it now lies there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_deploy.errors import CommandFailed
from dflash_deploy.model import Where

if TYPE_CHECKING:
    from dflash_deploy.cli.deployment import Deployment


def audit_installed(here: Deployment) -> str:
    """Every rule on the environment; gives what was looked at.

    Raises:
        CommandFailed: one does not hold.
    """
    from dflash_deploy.audit.report import audit
    from dflash_deploy.audit.request import build_case
    from dflash_deploy.facts import gather

    facts = gather(here.host, venvs=[here.settings.venv], discover=False)
    report = audit(build_case(facts, env=here.settings.environment()))
    broken = [finding for finding in report.failures if finding.where == Where.VENV]
    if broken:
        raise CommandFailed(
            f"the environment on {here.host.name} does not stand the audit",
            evidence=[f"{each.rule}: {each.message}" for each in broken],
            hint="; ".join(dict.fromkeys(each.remedy for each in broken if each.remedy)),
        )
    return f"environment: {report.coverage_line}"


def audit_models(here: Deployment) -> str:
    """Every rule on the models: their files are there and as long as they say.

    Raises:
        CommandFailed: one does not hold.
    """
    from dflash_deploy.audit.report import audit
    from dflash_deploy.audit.request import build_case
    from dflash_deploy.facts import gather

    settings = here.settings
    model, draft = settings.model, settings.draft_model if settings.speculative else ""
    facts = gather(here.host, models=[path for path in (model, draft) if path], discover=False)
    report = audit(build_case(facts, stack=settings.stack.name, model=model, draft=draft))
    broken = [finding for finding in report.failures if finding.where == Where.MODEL]
    if broken:
        raise CommandFailed(
            f"the models on {here.host.name} do not stand the audit",
            evidence=[f"{each.rule}: {each.message}" for each in broken],
            hint="; ".join(dict.fromkeys(each.remedy for each in broken if each.remedy)),
        )
    return "models: whole"
