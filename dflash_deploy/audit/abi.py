"""What a missing symbol means: readable names, and which torch releases export it (the ABI epochs), as data read from
published wheels."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from functools import cache
from importlib import resources

KERNEL_TORCH: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("0.3.21", "0.4.1"), "2.9.1", "12"),
    (("0.4.2", "0.4.2.post2", "0.4.3", "0.4.4", "0.4.5"), "2.11.0", "13"),
    (("0.4.6.post1", "0.4.7"), "2.13.0", "13"),
    (("0.4.9", "0.4.10"), "2.14.1", "13"),
)
"""Kernel releases, the torch release that they are built against, and the CUDA major that they link."""


@cache
def epochs() -> dict[str, tuple[str, ...]]:
    """Symbol -> torch releases that export it, for the symbols on which the releases differ."""
    text = resources.files("dflash_deploy.audit").joinpath("torch_symbols.json").read_text(encoding="utf-8")
    return {name: tuple(releases) for name, releases in json.loads(text)["symbols"].items()}


def torch_for_kernel(version: str) -> tuple[str, str] | None:
    """(torch release, CUDA major) that a kernel release is built for."""
    for kernels, torch, cuda in KERNEL_TORCH:
        if version.split("+")[0] in kernels:
            return torch, cuda
    return None


def releases_with(symbols: Sequence[str]) -> tuple[str, ...]:
    """torch releases that export every one of ``symbols``; empty when the table does not know them."""
    known = [set(epochs()[name]) for name in symbols if name in epochs()]
    if len(known) != len(symbols) or not known:
        return ()
    common = set.intersection(*known)
    return tuple(sorted(common, key=lambda release: [int(part) for part in release.split(".")]))


SUBSTITUTIONS = {
    "St": "std",
    "Sa": "std::allocator",
    "Sb": "std::basic_string",
    "Ss": "std::string (old ABI)",
    "Si": "std::istream",
    "So": "std::ostream",
}
BUILTINS = {
    "v": "void",
    "b": "bool",
    "c": "char",
    "a": "signed char",
    "h": "unsigned char",
    "s": "short",
    "t": "unsigned short",
    "i": "int",
    "j": "unsigned int",
    "l": "long",
    "m": "unsigned long",
    "x": "long long",
    "y": "unsigned long long",
    "f": "float",
    "d": "double",
    "e": "long double",
    "w": "wchar_t",
    "z": "...",
}
OPERATORS = {
    "cv": "operator",
    "eq": "operator==",
    "ne": "operator!=",
    "ix": "operator[]",
    "cl": "operator()",
    "ls": "operator<<",
    "rs": "operator>>",
    "aS": "operator=",
    "pl": "operator+",
    "mi": "operator-",
    "lt": "operator<",
    "gt": "operator>",
    "nw": "operator new",
    "dl": "operator delete",
    "pt": "operator->",
    "de": "operator*",
}


class _Unsupported(Exception):
    """A construct that this small demangler does not read."""


class _Demangler:
    """The part of the Itanium C++ ABI name grammar that torch's exported names use."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.seen: list[str] = []
        self.depth = 0

    def peek(self, count: int = 1) -> str:
        return self.text[self.at : self.at + count]

    def take(self, wanted: str) -> bool:
        if self.text.startswith(wanted, self.at):
            self.at += len(wanted)
            return True
        return False

    def name_text(self) -> str:
        match = re.compile(r"\d+").match(self.text, self.at)
        if match is None:
            raise _Unsupported
        length = int(match.group())
        self.at = match.end() + length
        if self.at > len(self.text):
            raise _Unsupported
        name = self.text[match.end() : self.at]
        if self.take("B"):  # an ABI tag such as cxx11
            name += f"[abi:{self.name_text()}]"
        return name

    def substitution(self) -> str:
        two = self.peek(2)
        if two in SUBSTITUTIONS:
            self.at += 2
            return SUBSTITUTIONS[two]
        self.at += 1
        end = self.text.find("_", self.at)
        digits = self.text[self.at : end]
        index = 0 if digits == "" else int(digits, 36) + 1
        self.at = end + 1
        if end < 0 or index >= len(self.seen):
            raise _Unsupported
        return self.seen[index]

    def arguments(self) -> str:
        """Template arguments after ``I``."""
        parts = []
        while not self.take("E"):
            if self.take("L"):
                kind = self.type()
                end = self.text.index("E", self.at)
                value = self.text[self.at : end].replace("n", "-")
                self.at = end + 1
                parts.append({"0": "false", "1": "true"}.get(value, value) if kind == "bool" else value)
            elif self.take("J"):
                inner = self.arguments()
                if inner[1:-1]:
                    parts.append(inner[1:-1])
            else:
                parts.append(self.type())
        return "<" + ", ".join(parts) + ">"

    def component(self, scope: str) -> str:
        last = scope.split("<")[0].rsplit("::", 1)[-1]
        if self.peek(2) in ("C1", "C2", "C3"):
            self.at += 2
            return last
        if self.peek(2) in ("D0", "D1", "D2"):
            self.at += 2
            return "~" + last
        if self.peek(2) in OPERATORS:
            code = self.peek(2)
            self.at += 2
            return OPERATORS[code] + (" " + self.type() if code == "cv" else "")
        return self.name_text()

    def nested(self) -> tuple[str, str]:
        """(name, qualifiers) after ``N``."""
        qualifiers = ""
        while self.peek() in "rVKRO" and self.peek():
            qualifiers += " const" if self.peek() == "K" else ""
            self.at += 1
        scope = ""
        while not self.take("E"):
            if self.peek() == "S" and self.peek(2) != "St":
                scope = self.substitution()
                continue
            if self.take("St"):
                scope = "std"
                continue
            if self.take("I"):
                scope += self.arguments()
            else:
                part = self.component(scope)
                scope = f"{scope}::{part}" if scope else part
            if self.peek() != "E":
                self.seen.append(scope)
        return scope, qualifiers

    def name(self) -> tuple[str, str]:
        if self.take("N"):
            found, qualifiers = self.nested()
            return found, qualifiers
        prefix = "std::" if self.take("St") else ""
        found = prefix + self.component("")
        if self.peek() == "I":
            self.seen.append(found)
            self.at += 1
            found += self.arguments()
        return found, ""

    def type(self) -> str:
        self.depth += 1
        if self.depth > 200:
            raise _Unsupported
        try:
            return self._type()
        finally:
            self.depth -= 1

    def _type(self) -> str:
        head = self.peek()
        if head in BUILTINS:
            self.at += 1
            return BUILTINS[head]
        for code, mark in (("P", "*"), ("R", "&"), ("O", "&&")):
            if head == code:
                self.at += 1
                found = self.type() + mark
                self.seen.append(found)
                return found
        if head == "K":
            self.at += 1
            found = self.type() + " const"
            self.seen.append(found)
            return found
        if self.take("Dp"):
            return self.type() + "..."
        if self.take("T"):
            end = self.text.index("_", self.at)
            self.at = end + 1
            self.seen.append("T")
            return "T"
        if head == "S" and self.peek(2) != "St":
            found = self.substitution()
            if self.take("I"):
                found += self.arguments()
                self.seen.append(found)
            return found
        if head == "F":
            self.at += 1
            parts = []
            while not self.take("E"):
                parts.append(self.type())
            found = f"{parts[0]} ({', '.join(parts[1:])})"
            self.seen.append(found)
            return found
        if head == "N" or head.isdigit() or self.peek(2) == "St":
            nested = head == "N"
            before = len(self.seen)
            found, _ = self.name()
            if nested or len(self.seen) >= before:
                self.seen.append(found)
            return found
        raise _Unsupported

    def symbol(self) -> str:
        for code, label in (
            ("TI", "typeinfo for "),
            ("TS", "typeinfo name for "),
            ("TV", "vtable for "),
            ("TT", "VTT for "),
        ):
            if self.take(code):
                return label + self.type()
        found, qualifiers = self.name()
        if self.at >= len(self.text):
            return found + qualifiers
        template = found.endswith(">") and not found.startswith("operator")
        parts = []
        if template:
            self.type()  # the return type, which readers do not need
        while self.at < len(self.text):
            parts.append(self.type())
        return f"{found}({'' if parts == ['void'] else ', '.join(parts)}){qualifiers}"


def demangle(symbol: str) -> str:
    """A readable form of a mangled C++ name; the name itself when it is not one that this demangler reads."""
    if not symbol.startswith("_Z"):
        return symbol
    try:
        return _Demangler(symbol[2:]).symbol()
    except (_Unsupported, ValueError, IndexError, RecursionError):
        return symbol


def has_filter() -> bool:
    """Whether c++filt is on this machine (tests compare with it)."""
    return shutil.which("c++filt") is not None


def old_string_abi(symbol: str) -> bool:
    """The name uses the old ``std::string`` (``Ss``), that is ``_GLIBCXX_USE_CXX11_ABI=0``."""
    return (
        bool(re.search(r"(?<![A-Za-z0-9_])(?:K|RK|PK)?Ss|KSs|ERSs|ESs|jSs|S2_Ss|cSs", symbol))
        and "__cxx11" not in symbol
    )
