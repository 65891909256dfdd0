"""Reads a server's log as it grows: phases, progress, the first exception of each rank, fatal lines. Bytes in, events
out, constant memory.

The lines are those of SGLang 0.5.11 to 0.5.23. All processes share one log, so a traceback's lines carry no rank: they
belong to the rank
of the line that opened it.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import StrEnum

from dflash_deploy.diagnose.signatures import Signature, match_line

MAX_LINE = 32_768
"""Bytes of a line that are looked at; the rest is dropped."""
MAX_TRACEBACK = 120
"""Lines kept of one traceback: its head and its end."""
MAX_EARLIER = 5
"""Failed starts that are remembered."""
MAX_SCANS = 5_000
"""Distinct suspicious lines that are matched against the whole table in one start."""


class Phase(StrEnum):
    """How far a start has come."""

    SPAWN = "spawn"
    """Interpreter, imports, arguments."""
    DIST_INIT = "dist-init"
    WEIGHTS = "weights"
    KV_CACHE = "kv-cache"
    DRAFT_INIT = "draft-init"
    GRAPHS = "graphs"
    WARM_UP = "warm-up"
    READY = "ready"


@dataclass(frozen=True)
class Event:
    """Something worth telling. ``kind``: phase, progress, exception, match or fatal."""

    kind: str
    text: str
    rank: str = ""
    line: int = 0
    phase: Phase = Phase.SPAWN
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class FirstError:
    """The first exception of one rank. ``exception`` is its last line, ``lines`` the traceback."""

    rank: str
    exception: str
    line: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Match:
    """A signature and the first line that showed it."""

    signature: Signature
    text: str
    line: int
    rank: str


@dataclass
class WatchState:
    """What is known so far. Mutable: the watcher owns it."""

    phase: Phase = Phase.SPAWN
    ranks: dict[str, Phase] = field(default_factory=dict)
    progress: tuple[int, int] | None = None
    """(done, total) of the phase, where the log counts."""
    first_errors: dict[str, FirstError] = field(default_factory=dict)
    matches: dict[str, Match] = field(default_factory=dict)
    fatal: str = ""
    """The line that ends a start; empty as long as there is none."""
    fatal_line: int = 0
    lines: int = 0
    ended: bool = False
    """It was told to end (SIGTERM): what follows is no failure."""
    starts: int = 1
    earlier: list[WatchState] = field(default_factory=list)
    """Starts of the same log that failed before this one, oldest first; the last few."""
    activity: int = 0
    """Counts lines other than access-log lines: proof of progress."""


_ANSI = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[@-_]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_PREFIX = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?((?: [A-Z_]+\d+)*)\] ?")
_RUNNER = re.compile(r"\[serve ")
_RUNNER_START = re.compile(r"\[serve [^\]]*\] start: ")
_TRACE = "Traceback (most recent call last)"
_EXCEPTION = re.compile(
    r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Timeout|Warning|Fault|Refused)?(?:: |:?$)"
    r"|^[a-z_][\w.]+\.[A-Z]\w+(?::|$)"
)
_BARE = re.compile(r"^[\w.]+(?:: ?\S{0,12})?$")
"""An exception without a message, or with a bare key for one."""
_CHAIN = ("During handling of the above", "The above exception was", "Traceback (most recent")
_FATAL = re.compile(
    r"hit an exception|Received sigquit|SIGQUIT received|Initialization failed\.|Fatal Python error"
    r"|Segmentation fault|Watchdog timeout"
    r"|: error: (?:unrecognized|argument |the following)|[Aa]ddress already in use|Capture .{0,40}graph failed|^Killed$"
    r"|core dumped|No space left on device|Floating point exception|Out of memory: Killed"
    r"|(?:rank|scheduler|detokenizer)\S* .{0,20}(?:died|crashed with exit|terminated unexpectedly)"
    r"|Main process exited, code=(?:exited, status=[1-9]|killed|dumped)"
    r"|^\[serve [^\]]*\] (?:not started|cannot start|given up|ended with -?[1-9]\d*$)"
)
_ENDED = re.compile(r"SIGTERM received|crashed with exit code -(?:15|2)\b")
_BENIGN = re.compile(
    r"API \(\S+\) disabled"
    r"|Ignore import error|UserWarning(?!: CUDA init|.{0,80}CUDA capability)|FutureWarning"
    r"|DeprecationWarning|Fail to set RLIMIT"
    r"|No CUDA runtime is found"
    r"|warnings\.warn|generation config|server_args=|is deprecated|Using default .{0,40}config"
    r"|is not available(?:,| and) .{0,30}(?:fall|using)|No (?:HuggingFace )?chat template"
)
# A chunk is searched for each of these literals at once (memchr speed); most lines of a serving log stop here.
_KEYWORDS = tuple(
    (
        b"raceback|rror|ERROR|xception|ail|FAIL|atal|undefined|annot|upported|ot found|o such|space left"
        b"|atchdog|igquit|illed|ut of|imeout|imed out|Xid|nvalid|efused|enied|issing|stuck|hangs|hung"
        b"|recogni|exceed|ignal|unbalanced|anic|oom|already|died|dumped|dead|nan|inf |warmup"
        b"|torch distributed|Load weight|oading |Captur|KV Cache|draft runner|max_total_num_tokens|Uvicorn"
        b"|fired up|erverArgs(|Memory pool|[serve |terminate called|unavailable"
        b"|rash|llegal|ompatible|rejected|egfault|repeated too|restricted|WARN|xit code|=exited|=killed|=dumped"
    ).split(b"|")
)
_REPEATABLE = re.compile(rb"Traceback|\d/\d|egin|allocated|draft|max_total|Uvicorn|fired|ServerArgs|\[serve ")
_SHARDS = re.compile(r"[Ll]oading .*?(?:shards|weights|files).*?(\d+)/(\d+)")
_GRAPH = re.compile(r"Capturing .*?\b(\d+)/(\d+) ?\[")
_INDENT = (" ", "\t")


def _phase_of(text: str, before: Phase, loads: int) -> Phase | None:
    """The phase that this line opens, if it opens one. ``loads``: weight loads begun by this rank."""
    if "Init torch distributed begin" in text:
        return Phase.DRAFT_INIT if loads else Phase.DIST_INIT
    if "Load weight begin" in text:
        return Phase.DRAFT_INIT if loads else Phase.WEIGHTS
    if "draft runner" in text and "DFLASH" in text.upper():
        return Phase.DRAFT_INIT
    if ("KV Cache is allocated" in text or "Memory pool end" in text) and before in (
        Phase.WEIGHTS,
        Phase.DIST_INIT,
        Phase.SPAWN,
    ):
        return Phase.KV_CACHE
    if "raph begin" in text and "Capture" in text:
        return Phase.GRAPHS
    if text.startswith("max_total_num_tokens=") or (before is not Phase.READY and "Uvicorn running" in text):
        return Phase.WARM_UP
    if "fired up and ready to roll" in text:
        return Phase.READY
    return None


class Watcher:
    """Incremental log parser.

    Args:
        thorough: match every line against the whole table (for reports and short logs) instead of the suspicious ones
            alone.
    """

    def __init__(self, *, thorough: bool = False) -> None:
        self.state = WatchState()
        self.recent: deque[str] = deque(maxlen=40)
        """The last lines, as context for an unknown failure."""
        self._thorough = thorough
        self._rest = b""
        self._dropping = False
        self._trace: list[str] | None = None
        self._trace_rank = ""
        self._trace_line = 0
        self._chained = ""
        self._pending_fatal = False
        self._loads: dict[str, int] = {}
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._scans = 0

    def feed(self, data: bytes) -> list[Event]:
        """Take the next bytes of the log; tell what they mean. A line counts once its end has come (or it is too
        long).
        """
        events: list[Event] = []
        data = data.replace(b"\r", b"\n")
        if self._dropping:
            end = data.find(b"\n")
            if end < 0:
                return events
            data, self._dropping = data[end + 1 :], False
        cut = data.rfind(b"\n") + 1
        rest = data[cut:]
        if cut:
            block, self._rest = self._rest + data[:cut], rest
            self._block(block, events)
        else:
            self._rest += rest
        if len(self._rest) > MAX_LINE:
            self._line(self._rest[:MAX_LINE], events)
            self._rest, self._dropping = b"", True
        return events

    def _block(self, block: bytes, events: list[Event]) -> None:
        """Whole lines: look only at those that hold a keyword, and at each line while a traceback is open."""
        if self._thorough:
            for raw in block.split(b"\n"):
                if raw:
                    self._line(raw[:MAX_LINE], events)
            return
        starts: set[int] = set()
        for word in _KEYWORDS:
            at = block.find(word)
            while at >= 0:
                starts.add(block.rfind(b"\n", 0, at) + 1)
                at = block.find(word, block.find(b"\n", at))
        position = 0
        for start in sorted(starts):
            position = self._skip(block, position, start, events)
            if position > start:
                continue  # an open traceback has taken it already
            end = block.find(b"\n", start)
            self._line(block[start : min(end, start + MAX_LINE)], events)
            position = end + 1
        self._skip(block, position, len(block), events)

    def _skip(self, block: bytes, position: int, stop: int, events: list[Event]) -> int:
        """Pass over lines without a keyword up to ``stop``; those inside an open traceback are read. Returns where it
        stands.
        """
        while self._trace is not None and position < stop:
            end = block.find(b"\n", position)
            self._line(block[position : min(end, position + MAX_LINE)], events)
            position = end + 1
        if position < stop:
            count = block.count(b"\n", position, stop)
            self.state.lines += count
            self.state.activity += max(0, count - block.count(b"INFO:  ", position, stop))
            tail = block[max(position, stop - 1200) : stop].split(b"\n")[-5:]
            self.recent.extend(_ANSI.sub(b"", raw[:400]).decode("utf-8", "replace") for raw in tail if raw)
            return stop
        return position

    def note(self, line: str) -> list[Event]:
        """Take what was seen beside the log (a verdict of ours, the host's own state) as one more line of evidence."""
        events: list[Event] = []
        self.recent.append(line[:400])
        self._scan(line, "", events, always=True)
        return events

    def close(self) -> list[Event]:
        """The log has ended: take its last line and an open traceback."""
        events: list[Event] = []
        if self._rest:
            rest, self._rest = self._rest, b""
            self._line(rest[:MAX_LINE], events)
        self._end_trace("", events)
        return events

    def _line(self, raw: bytes, events: list[Event]) -> None:
        state = self.state
        state.lines += 1
        state.activity += b"INFO:  " not in raw[:48]  # an access line, our own probe's perhaps
        key = b""
        if not self._thorough and self._trace is None and not _REPEATABLE.search(raw):
            key = raw[:400].translate(None, b"0123456789")
            if key in self._seen:
                return
        text = _ANSI.sub(b"", raw).decode("utf-8", "replace").rstrip()
        if not text.strip():
            return
        self.recent.append(text[:400])
        rank, body = "", text
        prefix = _PREFIX.search(text, 0, 200)
        if prefix:
            rank, body = prefix.group(1).strip(), text[prefix.end() :]
        if self._in_trace(text, prefix is not None, events):
            return
        if "server_args=ServerArgs(" in body or body.startswith("ServerArgs(") or _RUNNER_START.match(text):
            self._end_trace("", events)
            if state.phase is not Phase.SPAWN or state.first_errors or state.fatal:
                self._restart()
                state = self.state
            return
        self._phase(body, rank, events)
        if _TRACE in body:
            if _FATAL.search(body):
                self._pending_fatal = True
            self._end_trace("", events)
            if not rank and prefix is None:  # one that follows from the last is of the same rank
                rank, self._chained = self._chained, ""
            self._trace, self._trace_rank, self._trace_line = [text], rank, state.lines
            return
        if text.startswith(_CHAIN[:2]):
            self._chained = self._trace_rank
            return
        if key:
            self._seen[key] = None
            if len(self._seen) > 512:
                self._seen.popitem(last=False)
        state.ended = state.ended or _ENDED.search(body) is not None
        if state.ended and not _RUNNER.match(body):
            return
        self._scan(body, rank, events)
        if not state.fatal and _FATAL.search(body):
            self._fatal(body, rank, events)

    def _in_trace(self, text: str, prefixed: bool, events: list[Event]) -> bool:
        """Take a line of the open traceback; False when it is none."""
        if self._trace is None or prefixed:
            return False
        if text.startswith(_INDENT) or text.startswith(_CHAIN) or not text:
            if len(self._trace) >= MAX_TRACEBACK:
                del self._trace[MAX_TRACEBACK // 2]
            self._trace.append(text)
            return True
        if _EXCEPTION.match(text):
            self._trace.append(text)
            rank = self._trace_rank
            told = self._trace[-7:]
            self._end_trace(text, events)
            if not self._scan(text, rank, events) and _BARE.match(text):
                for frame in told:  # "AssertionError" alone: the lines that raised it are the message
                    self._scan(frame.strip(), rank, events)
            return True
        return False

    def _end_trace(self, exception: str, events: list[Event]) -> None:
        if self._trace is None:
            return
        lines, self._trace = self._trace, None
        rank, state = self._trace_rank, self.state
        if exception and rank not in state.first_errors:
            state.first_errors[rank] = FirstError(rank, exception, self._trace_line, tuple(lines))
            events.append(Event("exception", exception, rank, self._trace_line, state.phase))
        if self._pending_fatal:
            self._pending_fatal = False
            self._fatal(exception or lines[0], rank, events)

    def _fatal(self, text: str, rank: str, events: list[Event]) -> None:
        if self.state.fatal:
            return
        self.state.fatal, self.state.fatal_line = text[:2000], self.state.lines
        events.append(Event("fatal", text[:2000], rank, self.state.lines, self.state.phase))

    def _phase(self, body: str, rank: str, events: list[Event]) -> None:
        state = self.state
        before = state.ranks.get(rank, Phase.SPAWN)
        phase = _phase_of(body, before, self._loads.get(rank, 0))
        if "Load weight begin" in body:
            self._loads[rank] = self._loads.get(rank, 0) + 1
        if phase is not None and (phase is not before or rank not in state.ranks):
            state.ranks[rank] = phase
            state.phase, state.progress = phase, None
            if phase is Phase.READY:  # what was seen on the way did not keep it from serving
                state.matches.clear()
                state.first_errors.clear()
                self._seen.clear()
            events.append(Event("phase", body[:200], rank, state.lines, phase))
            return
        counted = _SHARDS.search(body) or _GRAPH.search(body)
        if counted:
            now = (int(counted.group(1)), int(counted.group(2)))
            if now != state.progress and now[1] > 0:
                state.progress = now
                events.append(Event("progress", body[:200], rank, state.lines, state.phase, *now))

    def _scan(self, body: str, rank: str, events: list[Event], *, always: bool = False) -> bool:
        """Match one line against the table; whether it shows anything."""
        if not always and (_BENIGN.search(body) or (self._scans >= MAX_SCANS and not self._thorough)):
            return False
        if not self._thorough:
            self._scans += 1
        found = match_line(body[:4000])
        for signature in found:
            if signature.id not in self.state.matches:
                line = 0 if always else self.state.lines
                self.state.matches[signature.id] = Match(signature, body[:1000], line, rank)
                events.append(Event("match", signature.id, rank, self.state.lines, self.state.phase))
        return bool(found)

    def _restart(self) -> None:
        """A new start in the same log: put the earlier one aside."""
        old = self.state
        failed = [*old.earlier, old] if old.fatal or old.first_errors else old.earlier
        self.state = WatchState(
            lines=old.lines, starts=old.starts + 1, activity=old.activity, earlier=failed[-MAX_EARLIER:]
        )
        old.earlier = []
        self._loads.clear()
        self._seen.clear()
        self._scans = 0
