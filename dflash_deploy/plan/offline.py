"""A wheelhouse → the steps that install it on a host without a network. Pure.

The host keeps every wheel once, under its digest, in ``<root>/cache/wheels``: releases share them, and a second
installation uploads nothing. A folder of hard links with the wheels' own names is what the installer reads.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from dflash_deploy.audit.stacks import Stack, dotted
from dflash_deploy.facts import Facts
from dflash_deploy.model import Blob, Run, Step, Upload, WriteFile
from dflash_deploy.plan.alone import INSTALL_TIMEOUT_S, alone
from dflash_deploy.settings import Settings
from dflash_deploy.wheelhouse.house import House

LINK = r"""
set -u
cd "$2" || exit 1
while read -r sum name; do
  ln -f "$1/$sum" "$name" 2>/dev/null || cp "$1/$sum" "$name" || { echo "error: $name is not in the cache"; exit 1; }
done < SHA256SUMS
said=$(sha256sum -c SHA256SUMS 2>/dev/null) && exit 0
echo "$said" | sed -n 's/: FAILED.*//p' | while read -r name; do
  sum=$(sed -n "s/  $name\$//p" SHA256SUMS)
  rm -f "$1/$sum" "$name"
  echo "error: $name: wrong hash on this host, removed; it is uploaded again"
done
exit 1
"""
"""``sh -c LINK sh CACHE SET``: links by name, then every digest, so that a damaged file is named before pip runs."""


def cache_folder(settings: Settings) -> str:
    """Where the host keeps wheels by digest."""
    return posixpath.join(settings.root, "cache", "wheels")


def unfitting(house: House, stack: Stack, facts: Facts) -> list[str]:
    """Why this wheelhouse is not for this stack and host."""
    problems = []
    where = f"the wheelhouse {house.folder}"
    if house.stack != stack.name:
        problems.append(f"{where} holds {house.stack}, wanted is {stack.name}")
    elif house.pins != stack.pins:
        problems.append(f"{where} was built for other pins of {stack.name}: build it again")
    if facts.arch and facts.arch != house.target.arch:
        problems.append(f"{where} is for {house.target.arch}, the host is {facts.arch}")
    if facts.glibc is not None and facts.glibc < house.target.glibc:
        problems.append(f"{where} is for glibc >= {dotted(house.target.glibc)}, the host has {dotted(facts.glibc)}")
    return problems


def to_upload(house: House, present: Mapping[str, int]) -> list[Blob]:
    """Wheels that the host's cache does not hold whole.

    Args:
        present: digest → size of the files in the cache.
    """
    return [
        Blob(str(house.path(wheel)), wheel.file, wheel.sha256, wheel.size)
        for wheel in house.wheels
        if present.get(wheel.sha256) != wheel.size
    ]


def offline_steps(settings: Settings, facts: Facts, house: House, present: Mapping[str, int]) -> list[Step]:
    """Upload, link, install; nothing in it asks an index."""
    cache = cache_folder(settings)
    folder = posixpath.join(cache, "sets", house.digest[:16])
    steps: list[Step] = []
    blobs = to_upload(house, present)
    if blobs:
        mib = sum(blob.size for blob in blobs) / (1 << 20)
        title = f"upload {len(blobs)} of {len(house.wheels)} wheels ({mib:.1f} MiB)"
        steps.append(Upload(tuple(blobs), cache, title=title))
    sums = "".join(f"{wheel.sha256}  {wheel.file}\n" for wheel in house.wheels)
    wanted = posixpath.join(folder, "requirements.txt")
    steps.append(WriteFile(posixpath.join(folder, "SHA256SUMS"), sums.encode(), title="write the list of wheels"))
    steps.append(WriteFile(wanted, house.requirements().encode(), title="write the locked requirements"))
    steps.append(
        Run(("/bin/sh", "-c", LINK, "sh", cache, folder), title="check every wheel on the host", timeout_s=1800)
    )
    words = ("--no-index", "--find-links", folder, "--require-hashes", "--no-deps", "-r", wanted)
    if facts.uv:
        argv: tuple[str, ...] = (facts.uv, "pip", "install", "--no-config", "--python", settings.python, *words)
    else:
        quiet = ("--isolated", "--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--no-compile")
        argv = (settings.python, "-m", "pip", "install", *quiet, *words)
    steps.append(
        Run(
            alone(settings, argv),
            title=f"install {len(house.wheels)} wheels, without an index, hashes required",
            # Nobody's configuration adds an index or a constraint.
            env={"PIP_CONFIG_FILE": "/dev/null", "UV_OFFLINE": "1"},
            timeout_s=INSTALL_TIMEOUT_S,
        )
    )
    return steps
