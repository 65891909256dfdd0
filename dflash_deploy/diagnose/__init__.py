"""Watching a start and naming what went wrong: log parser, signature table, diagnosis, redacted bundle."""

from dflash_deploy.diagnose.bundle import make_bundle, redact
from dflash_deploy.diagnose.diagnosis import Cause, Diagnosis, diagnose, diagnose_watcher
from dflash_deploy.diagnose.follow import STALL_LIMITS, Outcome, follow_until_ready
from dflash_deploy.diagnose.signatures import Signature, by_id, match_line, table
from dflash_deploy.diagnose.starts import learned_limits, read_starts, record_start
from dflash_deploy.diagnose.watch import Event, FirstError, Match, Phase, Watcher, WatchState

__all__ = [
    "STALL_LIMITS",
    "Cause",
    "Diagnosis",
    "Event",
    "FirstError",
    "Match",
    "Outcome",
    "Phase",
    "Signature",
    "WatchState",
    "Watcher",
    "by_id",
    "diagnose",
    "diagnose_watcher",
    "follow_until_ready",
    "learned_limits",
    "make_bundle",
    "match_line",
    "read_starts",
    "record_start",
    "redact",
    "table",
]
