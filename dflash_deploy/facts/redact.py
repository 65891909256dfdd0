"""Saved facts without names: what a person may show to others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dflash_deploy.facts.parse import section

ADDRESS = re.compile(r"(?<![=<>~!]=)(?<![<>\w.])(?:\d{1,3}\.){3}\d{1,3}\b")
"""Not the version of a requirement: ``nvidia-cudnn-cu13==9.19.0.56``."""
UUID = re.compile(r"\b(GPU|MIG)-[0-9a-f-]{20,}\b", re.I)
URL_HOST = re.compile(r"(://)([^/@\s]*@)?([^/:\s,]+)")
LOOPBACK = ("127.0.0.1", "0.0.0.0")
ADDRESS_6 = re.compile(r"(?<![\w:])(?:[0-9a-f]{1,4}:){3,7}[0-9a-f]{1,4}(?![\w:])", re.I)
OTHER_HOME = re.compile(r"(?<=/home/)[^/\s:,'\"]+")
HOST_LISTS = ("no_proxy", "NO_PROXY", "PIP_TRUSTED_HOST")
"""Variables that list host names."""
KEPT_HOSTS = ("localhost", "*", "::1", *LOOPBACK)


def redact(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The facts with the host's name, the account, addresses, GPU serials and hosts in URLs replaced. Versions and
    paths below the home folder stay: rules read them."""
    env = dict(section(raw, "env"))
    for name in (*HOST_LISTS, *(key for key in env if "HOST" in key.upper())):
        if env.get(name):
            words = re.split(r"[\s,]+", str(env[name]))
            env[name] = ",".join(word if word in KEPT_HOSTS else "host" for word in words)
    raw = {**raw, "env": env} if env else raw
    system = section(raw, "host")
    names = {str(raw.get("name") or ""), str(system.get("hostname") or "")} - {"", "local", "localhost"}
    home, user = str(system.get("home") or ""), str(system.get("user") or "")

    def text(value: str) -> str:
        if home and home not in ("/", "/root"):
            value = value.replace(home, "/home/user")
        for name in sorted(names, key=len, reverse=True):
            value = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "host", value)
        if user and user not in ("root", "user"):
            value = re.sub(rf"(?<![\w-]){re.escape(user)}(?![\w-])", "user", value)
        value = OTHER_HOME.sub("user", value)
        value = UUID.sub(r"\1-redacted", value)
        value = URL_HOST.sub(lambda m: m.group() if m.group(3) in LOOPBACK else m.group(1) + "host", value)
        value = ADDRESS_6.sub("::", value)
        return ADDRESS.sub(lambda m: m.group() if m.group() in LOOPBACK or is_version(value) else "0.0.0.0", value)

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return text(value)
        if isinstance(value, Mapping):
            return {text(str(key)): walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        return value

    found = walk(raw)
    assert isinstance(found, dict)
    return found


def is_version(value: str) -> bool:
    """The whole text is a four-part version such as cuDNN's, not an address."""
    return bool(re.fullmatch(r"\d+\.\d+\.\d+\.\d+", value)) and not value.startswith(("10.", "192.", "172.", "127."))
