"""The host's cache of wheels: every file once, named by its digest."""

from __future__ import annotations

from dflash_deploy.host.base import Host


def cached(host: Host, folder: str) -> dict[str, int]:
    """Digest → size in bytes of what the cache holds; unfinished uploads do not count."""
    script = 'find "$1" -maxdepth 1 -type f ! -name "*.part" -printf "%f %s\\n" 2>/dev/null || :'
    lines = host.run(["/bin/sh", "-c", script, "sh", folder], timeout_s=60).out.splitlines()
    return {name: int(size) for name, _, size in (line.partition(" ") for line in lines) if size.isdigit()}
