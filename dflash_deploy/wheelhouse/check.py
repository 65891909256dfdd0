"""Proof that a wheelhouse is what its manifest says, and that it installs without an index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dflash_deploy.audit.stacks import dotted, get_stack
from dflash_deploy.errors import DflashError, UsageError
from dflash_deploy.wheelhouse.closure import lacking, requires, unfit
from dflash_deploy.wheelhouse.house import House, Wheel, file_sha256


@dataclass(frozen=True)
class Checked:
    """What a check found."""

    problems: tuple[str, ...]
    """One line each, the file's name first. Empty: fine."""
    bytes_read: int


def check(house: House, on_progress: Callable[[int, int], None] | None = None) -> Checked:
    """Every file against its digest, the set against its target and its stack; everything wrong comes out together.

    Args:
        on_progress: called as ``on_progress(bytes_done, bytes_total)``.
    """
    problems, read = damaged(house, house.wheels, on_progress)
    broken = {line.partition(":")[0] for line in problems}
    needs = {}
    for wheel in house.wheels:
        if wheel.file not in broken:
            try:
                needs[wheel.file] = requires(house.path(wheel))
            except ValueError as error:
                problems.append(f"{wheel.file}: no wheel: {error}")
    where = f"Python {house.target.dotted}, {house.target.arch}, glibc {dotted(house.target.glibc)}"
    problems += [f"{file}: does not run on {where}" for file in unfit(house.wheels, house.target)]
    try:
        stack = get_stack(house.stack)
    except DflashError:
        problems.append(f"stack {house.stack}: this version knows no such stack")
    else:
        if not broken:
            short = lacking(house.wheels, needs, house.target, wanted=stack.requirements, bare=stack.no_deps)
            problems += [f"lacks {line}" for line in short]

        if house.pins != stack.pins:
            problems.append(f"stack {house.stack}: its pins have changed since this was built")
    return Checked(tuple(problems), read)


def damaged(
    house: House, wheels: Sequence[Wheel], on_progress: Callable[[int, int], None] | None = None
) -> tuple[list[str], int]:
    """Files that are missing, truncated or changed, one line each with the file's name; and the bytes read."""
    total, done = sum(wheel.size for wheel in wheels), 0

    def look(wheel: Wheel) -> tuple[int, str]:
        path = house.path(wheel)
        try:
            size = path.stat().st_size
            if size != wheel.size:
                what = "truncated" if size < wheel.size else "too long"
                return 0, f"{wheel.file}: {what}: {size} bytes, the manifest says {wheel.size}"
            found = file_sha256(path)
        except OSError as error:
            return 0, f"{wheel.file}: {error.strerror or error}"
        if found != wheel.sha256:
            return size, f"{wheel.file}: wrong hash: {found}, the manifest says {wheel.sha256}"
        return size, ""

    problems = []
    # Digests are computed outside the interpreter's lock.
    with ThreadPoolExecutor(4) as pool:
        for size, problem in pool.map(look, wheels):
            done += size
            if on_progress is not None:
                on_progress(done, total)
            if problem:
                problems.append(problem)
    return problems, done


def refuse_damaged(
    house: House, wheels: Sequence[Wheel], on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Before anything travels.

    Raises:
        UsageError: naming every file that is not the one that the build wrote.
    """
    problems, _ = damaged(house, wheels, on_progress)
    if problems:
        raise UsageError(
            f"the wheelhouse {house.folder} is damaged",
            evidence=problems,
            hint=f"dflash-deploy wheelhouse build --stack {house.stack} --out {house.folder}, which mends it",
        )
