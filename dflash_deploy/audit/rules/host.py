"""The machine: space, limits, peer-to-peer, ports and proxies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from dflash_deploy.audit.rules.base import Case, Verdict, fail, ok, rule, unknown, warn
from dflash_deploy.facts.parse import integer, integers, section, texts
from dflash_deploy.model import Where


@rule("disk-space-enough", Where.HOST, weight=10)
def disk_space_enough(case: Case) -> Iterator[Verdict]:
    """Room for the stack's environment, and a file system that can be written and executed from."""
    need = case.stack.installed_mib if case.stack else 0
    home = case.see("host", "disk", case.facts.home)
    free = integer(home.get("free_mib"))
    inodes, counted = integer(home.get("inodes_free")), integer(home.get("inodes_total"))
    if home.get("read_only"):
        yield fail(f"{case.facts.home} is read-only", (), "use another folder")
    elif home.get("noexec"):
        yield fail(
            f"{case.facts.home} is mounted noexec: no compiled file in it can be loaded",
            ("environments and the caches of Triton and flashinfer lie there",),
            "remount it with exec, or put the root and the caches (TRITON_CACHE_DIR, XDG_CACHE_HOME) elsewhere",
        )
    elif inodes is not None and counted and inodes < 50000:
        yield fail(
            f"{inodes} inodes free in {case.facts.home}: 'No space left on device', whatever df says",
            (f"{counted} in all", "an environment takes 40,000"),
            "remove folders of many small files",
        )
    elif free is None:
        yield unknown("free space unknown")
    elif need and free < need:
        yield fail(
            f"{free} MiB free in {case.facts.home}, {case.stack.name if case.stack else ''} takes {need}",
            (),
            "free space, or another folder",
        )
    elif free < 1024:
        yield warn(f"only {free} MiB free in {case.facts.home}", (), "free space: logs and JIT caches grow")
    else:
        yield ok(f"{free} MiB free in {case.facts.home}")


@rule("shm-large-enough", Where.CONTAINER, references=("NVIDIA/nccl#342", "sgl-project/sglang#1986"), weight=12)
def shm_large_enough(case: Case) -> Iterator[Verdict]:
    """/dev/shm of at least 1 GiB where several GPUs share work (Docker's default is 64 MB): NCCL's shared-memory
    transport lives there."""
    if len(case.gpus) < 2:
        return
    shm = case.fact("host", "shm")
    total = integer(shm.get("total_mib")) if isinstance(shm, Mapping) else None
    if total is None:
        yield unknown("/dev/shm was not seen")
    elif total < 1024:
        yield fail(
            f"/dev/shm has {total} MiB",
            [f"{len(case.gpus)} GPUs"],
            "docker run --shm-size 16g (or --ipc=host); in LXC: mount a larger tmpfs",
        )
    else:
        yield ok(f"/dev/shm has {total} MiB")


@rule("limits-high-enough", Where.HOST, weight=25)
def limits_high_enough(case: Case) -> Iterator[Verdict]:
    """Open files (65536 or what a unit sets), threads and, with several GPUs, locked memory."""
    limits = case.see("host", "limits")
    hard = {name: next(reversed(integers(limits.get(name))), None) for name in ("nofile", "memlock", "nproc")}
    files, locked = hard["nofile"], hard["memlock"]
    bounds = [n for n in (hard["nproc"], integer(case.fact("host", "pids_max"))) if n is not None and n >= 0]
    few = bool(bounds) and min(bounds) < 2048
    if few:
        remedy = "docker run --pids-limit -1, TasksMax=infinity in the unit, or ulimit -u"
        yield warn(f"at most {min(bounds)} threads and processes: a server has a thousand", (), remedy)
    low = files is not None and 0 <= files < 4096
    pinned = locked is not None and 0 <= locked < 64 << 20 and len(case.gpus) > 1
    if low:
        yield warn(f"at most {files} open files", (), "LimitNOFILE in the unit, or /etc/security/limits.d")
    if pinned and locked is not None:
        yield warn(f"locked memory is limited to {locked // 1024} KiB", (), "LimitMEMLOCK=infinity in the unit")
    if files is None:
        yield unknown("the limit of open files was not seen")
    elif not low and not pinned and not few:
        yield ok(f"{files if files >= 0 else 'any number of'} open files")


@rule(
    "p2p-path-clear",
    Where.HOST,
    references=("vllm-project/vllm#33041", "local-inference-lab/rtx6kpro#15", "NVIDIA/nccl#1999"),
    weight=16,
)
def p2p_path_clear(case: Case) -> Iterator[Verdict]:
    """With several GPUs on PCIe, peer-to-peer writes must not be redirected: a translating IOMMU or ACS redirection
    makes the first all-reduce hang, and the wedge needs a GPU reset."""
    if len(case.gpus) < 2:
        return
    topology = str(case.fact("gpu", "smi", "topology") or "")
    if re.search(r"\bNV\d+\b", topology):
        yield ok("the GPUs are joined by NVLink")
        return
    disabled = case.variable("NCCL_P2P_DISABLE") == "1"
    translated = [kind for kind in texts(case.fact("iommu", "types")) if kind.startswith("DMA")]
    redirect = case.fact("iommu", "acs_redirect")
    evidence = [f"IOMMU groups of type {', '.join(translated)}"] if translated else []
    evidence += [f"ACS ReqRedir+ on {device[:60]}" for device in texts(redirect)[:3]]
    remedy = (
        "on the host: iommu=pt (or off) and ACS off in the firmware; "
        "else NCCL_P2P_DISABLE=1 together with --disable-custom-all-reduce"
    )
    if evidence and not disabled:
        yield fail("peer-to-peer between GPUs would be redirected by the IOMMU or ACS", evidence, remedy)
    elif disabled and case.argument("--disable-custom-all-reduce") is None:
        yield warn("NCCL_P2P_DISABLE=1 without --disable-custom-all-reduce", (), "disable both")
    elif redirect is None and not disabled:
        names = {gpu.name for gpu in case.gpus}
        if any("RTX PRO 6000" in name or "RTX 6000" in name for name in names):
            yield warn(
                "workstation cards on PCIe: all-reduce is known to hang there",
                [*sorted(names), "ACS could not be read (lspci -vvv needs root)"],
                remedy,
            )
        else:
            yield unknown("ACS could not be read (lspci -vvv needs root)")
    else:
        yield ok("nothing redirects peer-to-peer")


@rule("p2p-supported", Where.HOST, references=("NVIDIA/nccl-tests#117",), weight=15)
def p2p_supported(case: Case) -> Iterator[Verdict]:
    """GeForce cards without peer-to-peer must not be used as if they had it: all-reduce hangs where a driver advertised
    it."""
    if len(case.gpus) < 2 or not all("GeForce RTX" in gpu.name for gpu in case.gpus):
        return
    matrix = str(case.fact("gpu", "smi", "p2p") or "")
    if case.variable("NCCL_P2P_DISABLE") == "1":
        yield ok("peer-to-peer is switched off")
    elif any("RTX 40" in gpu.name or "RTX 50" in gpu.name for gpu in case.gpus):
        advertised = bool(re.search(r"GPU\d+(?:\s+(?:X|OK))+\s", matrix + " ")) and "OK" in matrix
        evidence = [gpu.name for gpu in case.gpus[:1]] + (
            ["the driver advertises peer-to-peer"] if advertised else ["the driver does not advertise it"]
        )
        (verdict) = fail if advertised else warn
        yield verdict(
            "these cards have no peer-to-peer",
            evidence,
            "NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce, or a driver without the false advertisement",
        )
    else:
        yield unknown("peer-to-peer of these cards is not in the table")


@rule("ports-free", Where.HOST, references=("sgl-project/sglang#9396",), weight=20)
def ports_free(case: Case) -> Iterator[Verdict]:
    """The HTTP port, and the internal ones beside it (dist-init and ZMQ take the range from port + 100 on unless they
    are set), must be free."""
    asked = case.see("ports", "asked")
    taken = [
        f"{port}: {section(asked, port).get('command') or 'held by a process that this account may not see'} "
        f"(pid {section(asked, port).get('pid')})"
        for port in asked
        if section(asked, port).get("free") is False
    ]
    if taken:
        yield fail("a port is in use", taken, "stop its owner (dflash-deploy down), or choose another port")
    elif asked:
        yield ok(f"free: {', '.join(asked)}")


@rule(
    "no-proxy-covers-loopback",
    Where.HOST,
    references=("sgl-project/sglang#9814", "sgl-project/sglang#28503"),
    weight=18,
)
def no_proxy_covers_loopback(case: Case) -> Iterator[Verdict]:
    """With a proxy set, no_proxy must name 127.0.0.1, localhost and 0.0.0.0: the server's own warm-up request goes
    there. The proxy's URL must parse."""
    names = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy", "HTTPS_PROXY")
    proxies = {name: case.variable(name) for name in names if case.variable(name)}
    if not proxies:
        return
    for name, value in proxies.items():
        try:
            urlsplit(value if "//" in value else f"//{value}").port  # noqa: B018  (it raises for a bad port)
        except ValueError:
            yield fail(f"{name} is no URL", [value], f"correct or unset {name} for the service")
    covered = {item.strip() for item in (case.variable("no_proxy") or case.variable("NO_PROXY")).split(",")}
    host = case.argument("--host") or "127.0.0.1"
    wanted = {"127.0.0.1", "localhost", host} if host else {"127.0.0.1", "localhost"}
    missing = sorted(wanted - covered) if "*" not in covered else []
    if missing:
        yield fail(
            f"no_proxy does not cover {', '.join(missing)}",
            [f"{name}={value}" for name, value in proxies.items()],
            f"unset the proxies for the service, or add {','.join(missing)} to no_proxy",
        )
    else:
        yield ok("no_proxy covers the loopback")
