"""Whether a set of wheels is whole: every requirement of every wheel is met by another one. Reads their metadata only.

pip evaluates environment markers for the Python that it runs in, not for the one that it downloads for; here they are
evaluated for the target, so that what a foreign pip overlooked comes out before the wheels travel.
"""

from __future__ import annotations

import email
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from dflash_deploy.wheelhouse.house import Wheel, WheelTarget


def requires(path: Path) -> list[str]:
    """``Requires-Dist`` of a wheel.

    Raises:
        ValueError: it is no wheel.
    """
    try:
        with zipfile.ZipFile(path) as wheel:
            names = [n for n in wheel.namelist() if n.count("/") == 1 and n.endswith(".dist-info/METADATA")]
            if len(names) != 1:
                raise ValueError(f"{len(names)} METADATA files")
            headers = email.message_from_bytes(wheel.read(names[0]))
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(str(error)) from None
    return list(headers.get_all("Requires-Dist") or ())


def lacking(
    wheels: Sequence[Wheel],
    needs: Mapping[str, Sequence[str]],
    target: WheelTarget,
    *,
    wanted: Iterable[str],
    bare: Iterable[str],
) -> list[str]:
    """What the wheels lack, as ``name>=1, which x asks for``. Empty: they install without an index.

    Args:
        needs: file name of a wheel → its ``Requires-Dist``.
        wanted: requirements that are installed with their dependencies.
        bare: requirements that are installed without.
    """
    have = {wheel.name: wheel for wheel in wheels}
    environment = target.environment()
    missing: list[str] = []
    seen: set[tuple[str, str]] = set()
    queue: list[tuple[Requirement, str]] = [(Requirement(text), "the stack") for text in wanted]
    alone = {canonicalize_name(Requirement(text).name) for text in bare}
    queue += [(Requirement(text), "the stack") for text in bare]
    while queue:
        requirement, asker = queue.pop()
        name = str(canonicalize_name(requirement.name))
        wheel = have.get(name)
        if wheel is None or not requirement.specifier.contains(wheel.version, prereleases=True):
            found = f" (here: {wheel.version})" if wheel is not None else ""
            missing.append(f"{requirement.name}{requirement.specifier}{found}, which {asker} asks for")
            continue
        if name in alone:
            continue
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in needs.get(wheel.file, ()):
                try:
                    child = Requirement(text)
                    marker = child.marker
                    applies = marker is None or marker.evaluate({**environment, "extra": extra})
                    without = extra != "" and (marker is None or marker.evaluate({**environment, "extra": ""}))
                except (InvalidRequirement, UndefinedEnvironmentName):
                    continue
                if applies and not without:
                    queue.append((child, wheel.name))
    return sorted(set(missing))


def unfit(wheels: Sequence[Wheel], target: WheelTarget) -> list[str]:
    """File names of wheels that do not run on the target."""
    tags = frozenset(target.tags())
    from packaging.utils import parse_wheel_filename

    return [wheel.file for wheel in wheels if parse_wheel_filename(wheel.file)[3].isdisjoint(tags)]
