"""A small package with the classes that the map reads its words from."""

from __future__ import annotations

from pathlib import Path

SPEC_INFO = '''
from enum import Enum, IntEnum, auto


class SpeculativeAlgorithm(Enum):
    """EAGLE and DFLASH, in prose."""

    EAGLE = auto()
    DFLASH = auto()
    NONE = auto()

    @classmethod
    def from_string(cls, name):
        return cls[name.upper()]

    def is_none(self) -> bool:
        return self == SpeculativeAlgorithm.NONE

    def is_eagle(self) -> bool:
        return self == SpeculativeAlgorithm.EAGLE

    def is_dflash(self) -> bool:
        return self == SpeculativeAlgorithm.DFLASH

    def is_dflash_family(self) -> bool:
        return self.is_dflash()

    def create_worker(self, server_args):
        return None


class SpecInputType(IntEnum):
    EAGLE_DRAFT = auto()
    DFLASH_VERIFY = auto()


class SpecInput:
    def is_verify_input(self) -> bool:
        return self.spec_input_type in {SpecInputType.DFLASH_VERIFY}


class DFlashVerifyInput(SpecInput):
    pass
'''
MODES = """
from enum import IntEnum, auto


class ForwardMode(IntEnum):
    EXTEND = auto()
    TARGET_VERIFY = auto()

    def is_target_verify(self):
        return self == ForwardMode.TARGET_VERIFY

    def is_extend(self):
        return self == ForwardMode.EXTEND


class CaptureHiddenMode(IntEnum):
    NULL = auto()
    FULL = auto()
"""
OTHERS = """
from enum import Enum


class Backend(Enum):
    def is_none(self):
        return True
"""


def package(folder: Path, version: str = "1.0", **files: str) -> Path:
    """Write the package, with more files by module name (``a__b`` is ``a/b.py``)."""
    root = folder / "sglang"
    texts = {"spec_info": SPEC_INFO, "modes": MODES, "others": OTHERS, "__init__": "", **files}
    for name, text in texts.items():
        path = root / (name if name == "__init__" else name.replace("__", "/"))
        path = path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    info = folder / f"sglang-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return root
