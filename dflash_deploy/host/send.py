"""Many files to a host at once, over several channels of its connection."""

from __future__ import annotations

import posixpath
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from dflash_deploy.host.base import Host
from dflash_deploy.model import Blob

AT_ONCE = 4
"""Channels. More of them share one connection's encryption and gain nothing."""
TELL_EVERY_S = 2.0


def send(host: Host, blobs: Sequence[Blob], folder: str, say: Callable[[str], None]) -> None:
    """Bring every blob to ``folder`` on the host, named by its digest; the first error ends all.

    Raises:
        CommandFailed: a file has another digest than it should, by name; or the host cannot take it.
        ConnectionLost: the next call goes on from there.
    """
    total = sum(blob.size for blob in blobs)
    done = dict.fromkeys(blobs, 0)
    finished = 0
    lock = threading.Lock()
    began = last = time.monotonic()

    def tell(force: bool = False) -> None:
        nonlocal last
        now = time.monotonic()
        if force or now - last >= TELL_EVERY_S:
            last = now
            sent = sum(done.values())
            rate = sent / max(now - began, 0.001) / (1 << 20)
            say(f"{sent >> 20} of {total >> 20} MiB, {finished} of {len(blobs)} files, {rate:.0f} MiB/s")

    def bring(blob: Blob) -> None:
        nonlocal finished

        def heard(sent: int, _: int) -> None:
            with lock:
                done[blob] = sent
                tell()

        host.upload(blob.source, posixpath.join(folder, blob.sha256), sha256=blob.sha256, on_progress=heard)
        with lock:
            done[blob] = blob.size
            finished += 1
            tell(finished == len(blobs))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        # Large ones first, so that none is left alone at the end.
        jobs = [pool.submit(bring, blob) for blob in sorted(blobs, key=lambda blob: -blob.size)]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
