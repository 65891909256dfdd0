"""The health ladder of a served model, from a living process to lossless speculation."""

from dflash_deploy.health.http import NoReply, stream_completion
from dflash_deploy.health.ladder import Options, check, is_ready, record
from dflash_deploy.health.probes import Probe, parse_probes, read_probes, tiny_pair_probes
from dflash_deploy.health.report import EXIT_CODES, HealthReport, Level, Rung, RungStatus, prometheus

__all__ = [
    "EXIT_CODES",
    "HealthReport",
    "Level",
    "NoReply",
    "Options",
    "Probe",
    "Rung",
    "RungStatus",
    "check",
    "is_ready",
    "parse_probes",
    "prometheus",
    "read_probes",
    "record",
    "stream_completion",
    "tiny_pair_probes",
]
