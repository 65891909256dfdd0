"""What a wheelhouse is: wheels with their digests, for one stack, one Python, one platform. Pure but for reading."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from dflash_deploy.errors import UsageError

SCHEMA = 1
MANIFEST = "wheelhouse.json"
"""Written last: a folder without it is an unfinished build."""
OLDEST_GLIBC = 5
"""manylinux1."""
LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
"""Names of platform tags before they carried glibc's version, by its minor."""


@dataclass(frozen=True)
class WheelTarget:
    """What a wheel must run on."""

    python: tuple[int, int]
    arch: str = "x86_64"
    glibc: tuple[int, int] = (2, 34)

    @property
    def dotted(self) -> str:
        return f"{self.python[0]}.{self.python[1]}"

    def platforms(self) -> list[str]:
        """Platform tags, newest glibc first."""
        found = []
        for minor in range(self.glibc[1], OLDEST_GLIBC - 1, -1):
            found.append(f"manylinux_2_{minor}_{self.arch}")
            if minor in LEGACY:
                found.append(f"{LEGACY[minor]}_{self.arch}")
        return [*found, f"linux_{self.arch}"]

    def tags(self) -> Iterator[Tag]:
        """Every tag that pip would take there."""
        platforms = self.platforms()
        yield from cpython_tags(self.python, platforms=platforms, abis=[f"cp{self.python[0]}{self.python[1]}"])
        yield from compatible_tags(self.python, f"cp{self.python[0]}{self.python[1]}", platforms)

    def environment(self) -> dict[str, str]:
        """Values of environment markers there."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.dotted}.0",
            "os_name": "posix",
            "platform_machine": self.arch,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.dotted}.0",
            "python_version": self.dotted,
            "sys_platform": "linux",
        }


@dataclass(frozen=True)
class Wheel:
    """One file of the folder."""

    file: str
    sha256: str
    size: int = 0
    """Bytes."""

    @property
    def name(self) -> str:
        """Normalized name of its package."""
        return str(canonicalize_name(parse_wheel_filename(self.file)[0]))

    @property
    def version(self) -> str:
        return str(parse_wheel_filename(self.file)[1])

    def fits(self, target: WheelTarget) -> bool:
        return not parse_wheel_filename(self.file)[3].isdisjoint(target.tags())


@dataclass(frozen=True)
class House:
    """A finished wheelhouse."""

    folder: str
    stack: str
    pins: str
    """:attr:`~dflash_deploy.audit.stacks.Stack.pins` of the stack that it was built for."""
    target: WheelTarget
    wheels: tuple[Wheel, ...]

    @property
    def bytes(self) -> int:
        return sum(wheel.size for wheel in self.wheels)

    @property
    def digest(self) -> str:
        """Stands for the whole content."""
        text = "".join(f"{wheel.sha256} {wheel.file}\n" for wheel in self.wheels)
        return hashlib.sha256(text.encode()).hexdigest()

    def path(self, wheel: Wheel) -> Path:
        return Path(self.folder) / wheel.file

    def requirements(self) -> str:
        """A requirements file of exact versions with their hashes."""
        return "".join(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in self.wheels)

    def to_json(self) -> dict[str, Any]:
        """What the manifest holds."""
        about = asdict(self.target) | {"python": list(self.target.python), "glibc": list(self.target.glibc)}
        wheels = [asdict(wheel) for wheel in self.wheels]
        return {"schema": SCHEMA, "stack": self.stack, "pins": self.pins, "target": about, "wheels": wheels}

    @classmethod
    def from_json(cls, folder: str, raw: Any) -> House:
        """Type a manifest.

        Raises:
            ValueError: it is none.
        """
        try:
            if raw["schema"] != SCHEMA:
                raise ValueError(f"schema {raw['schema']}, this version reads {SCHEMA}")
            where: Mapping[str, Any] = raw["target"]
            target = WheelTarget(_pair(where["python"]), str(where["arch"]), _pair(where["glibc"]))
            wheels = tuple(Wheel(str(w["file"]), str(w["sha256"]), int(w["size"])) for w in raw["wheels"])
            for wheel in wheels:
                if "/" in wheel.file or wheel.file.startswith("."):
                    raise ValueError(f"{wheel.file!r} is no file name")
                parse_wheel_filename(wheel.file)
            return cls(folder, str(raw["stack"]), str(raw["pins"]), target, wheels)
        except (KeyError, TypeError, IndexError, AttributeError, InvalidWheelFilename) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None


def read_house(folder: str | Path) -> House:
    """The wheelhouse in a folder; its wheels are not looked at (see :mod:`.check`).

    Raises:
        UsageError: no folder, an unfinished build, or an unreadable manifest.
    """
    path = Path(folder).expanduser().resolve() / MANIFEST
    again = "dflash-deploy wheelhouse build --stack STACK --out " + str(folder)
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {folder}", hint=again)
    try:
        return House.from_json(str(path.parent), json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        raise UsageError(
            f"{folder} is no finished wheelhouse", evidence=f"it holds no {MANIFEST}", hint=again
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read", evidence=str(error), hint=again) from None


def file_sha256(path: Path) -> str:
    """Digest of a file of any size, in constant memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pair(value: Any) -> tuple[int, int]:
    return int(value[0]), int(value[1])
