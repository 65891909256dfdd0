"""The environment itself: there, with its interpreter, under its own path, and imported from nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_deploy.audit.rules.base import Case, Verdict, fail, label, na, ok, rule, unknown, warn
from dflash_deploy.facts.parse import texts
from dflash_deploy.model import Where


@rule(
    "venv-python-resolves",
    Where.VENV,
    references=("astral-sh/uv#6782",),
    weight=2,
    explains=("venv-not-moved", "venv-home-holds-stdlib"),
)
def venv_python_resolves(case: Case) -> Iterator[Verdict]:
    """The environment's bin/python must lead to an interpreter. In a copied environment the link dangles (uv's
    interpreters live in the first machine's home)."""
    for environment in case.environments:
        if environment.get("python_exists") is False:
            chain = " -> ".join([str(environment.get("python")), *texts(environment.get("python_links"))])
            yield fail(
                f"{label(environment)}: bin/python leads nowhere",
                [chain],
                "rebuild the environment on this host from its pins (provision)",
            )
        elif environment.get("python_exists"):
            yield ok("bin/python is there")
        else:
            yield unknown(f"{label(environment)}: bin/python was not looked at")


@rule("venv-present", Where.VENV, weight=1)
def venv_present(case: Case) -> Iterator[Verdict]:
    """An environment that was asked for must be there to be judged. Nothing else can be said of one that is not."""
    judged = [label(environment) for environment in case.environments]
    for item in case.items("venvs", "environments"):
        if item.get("asked") and item.get("exists") and label(item) not in judged and case.stack is not None:
            yield na(f"{label(item)} holds another release than {case.stack.name} and was not judged")
        elif item.get("asked") and item.get("exists") is False and case.stack is None:
            yield warn(
                f"{label(item)} is not there: nothing is installed that could be judged",
                (),
                "install a stack there (dflash-deploy up), or judge one before: --stack auto",
            )
        elif item.get("asked") and item.get("exists"):
            yield ok(f"{label(item)} is there")


@rule("venv-home-holds-stdlib", Where.VENV, references=("pypa/virtualenv#3157",), weight=3)
def venv_home_holds_stdlib(case: Case) -> Iterator[Verdict]:
    """pyvenv.cfg's ``home`` must exist and lead to the interpreter's standard library."""
    for environment in case.environments:
        if "home" not in environment:
            yield unknown(f"{label(environment)}: pyvenv.cfg was not read")
        elif not environment["home"]:
            continue
        elif environment.get("home_exists") is False:
            yield fail(
                f"{label(environment)}: its base interpreter is gone",
                [f"home = {environment.get('home')}"],
                "install that Python, or rebuild the environment",
            )
        elif environment.get("stdlib_exists") is False:
            yield fail(
                f"{label(environment)}: no standard library beside its base interpreter",
                [f"home = {environment.get('home')}"],
                "recreate it with the interpreter's real path",
            )
        else:
            yield ok(f"home = {environment.get('home')}")


@rule("venv-not-moved", Where.VENV, references=("astral-sh/uv#11168",), weight=4)
def venv_not_moved(case: Case) -> Iterator[Verdict]:
    """Scripts and activate must name the environment's own path. After a move or a copy they start another interpreter,
    or none."""
    for environment in case.environments:
        recorded = environment.get("recorded_path")
        foreign = texts(environment.get("scripts_foreign"))
        moved = (
            bool(recorded) and "$" not in str(recorded) and str(recorded).rstrip("/") != label(environment).rstrip("/")
        )
        if foreign:
            count = environment.get("scripts_foreign_count")
            yield fail(
                f"{count} scripts start another interpreter: the environment was moved or copied",
                [*foreign[:3], f"recorded path: {recorded}"],
                "rebuild the environment here; do not copy it",
            )
        elif moved:
            yield warn(
                "the environment was made under another path",
                [f"recorded path: {recorded}"],
                "call its interpreter by path, or rebuild it",
            )
        elif environment.get("scripts_checked") is not None:
            yield ok("scripts start this environment's interpreter")
        else:
            yield unknown(f"{label(environment)}: its scripts were not read")


@rule("no-import-shadow", Where.HOST, references=("PyPI sglang-radeon-rdna3",), weight=10)
def no_import_shadow(case: Case) -> Iterator[Verdict]:
    """No folder named like a package (sglang, torch, ...) in the folder that the service starts from: it would be
    imported instead."""
    shadows = texts(case.fact("host", "cwd_shadows"))
    if shadows:
        yield warn(
            f"folders in {case.facts.home} would shadow packages",
            shadows,
            "start the service from a fixed, empty working directory",
        )
    else:
        yield ok("nothing shadows the packages")
    path = case.variable("PYTHONPATH")
    if path:
        yield warn("PYTHONPATH is set", [path], "unset it for the service")
