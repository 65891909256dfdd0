"""Climbs the ladder: each rung asks one question about the served model and says what the answer proves."""

from __future__ import annotations

import hashlib
import json
import posixpath
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dflash_deploy.diagnose.signatures import KINDS, match_line
from dflash_deploy.errors import DflashError, UsageError
from dflash_deploy.health.acceptance import Acceptance, gather_acceptance
from dflash_deploy.health.http import NoReply, request
from dflash_deploy.health.probes import GENERAL, Answer, Probe, ask, degenerate, tiny_pair_probes
from dflash_deploy.health.report import HealthReport, Level, Rung, RungStatus
from dflash_deploy.host.base import Host
from dflash_deploy.launch.look import faults as host_faults
from dflash_deploy.launch.look import kernel_lines, look
from dflash_deploy.launch.look import load as host_load
from dflash_deploy.settings import Settings

HEALTH_TIMEOUT_S = 30.0
"""SGLang answers /health after at most 20 s, with 503 when no token came."""

HEALTH_EVERY_S = 30.0
"""A watch asks /health so often: for each, the server computes a request of its own between those of its users."""


@dataclass(frozen=True)
class Options:
    """How to check."""

    key: str = ""
    """API key of the server."""
    probes: tuple[Probe, ...] = ()
    """Prompts with expected answers; the tiny pair brings its own."""
    reference: tuple[Probe, ...] = ()
    """Recorded answers of the same target without speculation, for the lossless rung."""
    concurrency: int = 4
    min_acceptance: float = 0.0
    """Floor of tokens per step. 0: 1.5 for the tiny pair, 1.1 for others."""
    soak_s: float = 60.0
    thorough: bool = False
    """Ask also what takes an interpreter long: a prompt beyond the draft's window."""
    timeout_s: float = 180.0
    """Deadline of one request in seconds."""


@dataclass
class _Verdict:
    status: RungStatus
    evidence: list[str] = field(default_factory=list)
    hint: str = ""


_Check = Callable[["_Ladder"], _Verdict]


def _ok(*evidence: str) -> _Verdict:
    return _Verdict(RungStatus.OK, list(evidence))


def _bad(*evidence: str, hint: str = "") -> _Verdict:
    return _Verdict(RungStatus.FAILED, list(evidence), hint)


class _Ladder:
    def __init__(
        self, host: Host, settings: Settings, options: Options, base_url: str, before: HealthReport | None = None
    ) -> None:
        self.host, self.settings, self.options, self.base_url = host, settings, options, base_url
        self.before = before
        self.data: dict[str, Any] = {"url": settings.url}
        self.metas: list[dict[str, Any]] = []
        self.info: dict[str, Any] = {}
        self.seen: dict[str, Any] = {}
        self.good: dict[str, Any] = {}
        self._baselines: dict[str, dict[str, Any]] | None = None

    # -- live ------------------------------------------------------------------------------------------------------
    def look(self) -> dict[str, Any]:
        """Ask the host itself: port owner, process tree, patch manifest, disk, GPUs, kernel."""
        seen = look(self.host, self.settings)
        if "error" not in seen:
            self.seen = seen
        return seen

    def process(self) -> _Verdict:
        seen = self.look()
        if "error" in seen:
            return _bad(f"the host could not be looked at: {seen['error']}")
        if not seen["listening"]:
            return _bad(
                f"nothing listens on port {self.settings.port}",
                hint=f"dflash-deploy logs {self.host.name}; dflash-deploy launch {self.host.name}",
            )
        if not seen["owners"]:
            return _bad(
                f"port {self.settings.port} is owned by another process, of another user",
                hint=f"ss -ltnp 'sport = :{self.settings.port}' on the host, as root",
            )
        tree = seen["tree"]
        self.data["processes"] = [{k: p[k] for k in ("pid", "parent", "state", "rss_kib")} for p in tree]
        owner = tree[0]
        if "sglang" not in owner["command"]:
            return _bad(
                f"port {self.settings.port} is owned by another process: pid {owner['pid']} {owner['command'][:120]}"
            )
        if self.settings.python not in owner["command"] and "sglang::" not in owner["command"]:
            return _bad(
                f"port {self.settings.port} is owned by another process, not from {self.settings.venv}: "
                f"{owner['command'][:120]}",
                hint="end that server, or name its venv",
            )
        for entry in tree:
            if entry["state"] in "TtZ" and "sglang" in (entry["command"] or "sglang"):
                word = {"Z": "is gone (zombie)"}.get(entry["state"], "is stopped (state T)")
                return _bad(f"scheduler process {entry['pid']} {word}: {entry['command'][:80] or 'no command line'}")
        names = [p["command"] for p in tree]
        for wanted in ("sglang::scheduler", "sglang::detokenizer"):
            if any(n.startswith("sglang::") for n in names) and not any(n.startswith(wanted) for n in names):
                return _bad(f"{wanted[8:]} process of the server is gone: scheduler process is gone or hung")
        count = f"{len(tree)} process{'es' if len(tree) > 1 else ''}"
        return _ok(f"pid {owner['pid']} listens on port {self.settings.port}, {count}")

    def machine(self) -> _Verdict:
        wrong = [line for line in host_faults(self.seen) if "is stopped" not in line]
        if wrong:
            return _bad(*wrong, *kernel_lines(self.seen))
        service = self.seen.get("service") or {}
        told = [host_load(self.seen) or "nothing to be seen"]
        if service.get("restarts"):
            told.append(f"restarted {service['restarts']} times: dflash-deploy diagnose {self.host.name} says why")
        self.data["restarts"] = service.get("restarts") or 0
        self.data["gpus"] = (self.seen.get("gpu") or {}).get("gpus") or []
        return _ok(*told, *kernel_lines(self.seen)[-3:])

    # -- ready -----------------------------------------------------------------------------------------------------
    def health(self) -> _Verdict:
        if self.before is not None and self.before.ok:
            asked = float(self.before.data.get("health_asked") or 0.0)
            same = _pids(self.before.data) == _pids(self.data)
            if same and 0 <= time.time() - asked < HEALTH_EVERY_S:
                self.data["health_asked"] = asked
                return _ok(f"/health answered 200 {time.time() - asked:.0f} s ago, to the same processes")
        try:
            reply = request(self.base_url, "/health", key=self.options.key, timeout_s=HEALTH_TIMEOUT_S)
        except NoReply as error:
            if error.kind == "timeout":
                return _bad(f"health: no answer within {HEALTH_TIMEOUT_S:g} s: the HTTP process hangs")
            return _bad(f"/health: {error.detail}")
        if reply.status == 200:
            self.data["health_asked"] = time.time()
            return _ok(f"/health answers 200 after {reply.seconds:.1f} s")
        if reply.status in (401, 403):
            return _bad(
                f"HTTP {reply.status} to /health: the server is alive and wants an API key", hint="--api-key-env NAME"
            )
        if reply.status == 503 and reply.seconds < 15.0:
            return _Verdict(RungStatus.STARTING, ["/health answers 503 at once: starting or shutting down"])
        if reply.status == 503:
            return _bad(
                f"/health answers 503 after {reply.seconds:.0f} s: no response from the detokenizer or scheduler"
            )
        return _bad(f"/health answers {reply.status}: {reply.body[:120]!r}: this is not SGLang")

    def arguments(self) -> _Verdict:
        try:
            reply = request(self.base_url, "/server_info", key=self.options.key, timeout_s=HEALTH_TIMEOUT_S)
            if reply.status == 404:  # releases before 0.5.13
                reply = request(self.base_url, "/get_server_info", key=self.options.key, timeout_s=HEALTH_TIMEOUT_S)
        except NoReply as error:
            hangs = ": no response from the scheduler, which hangs" if error.kind == "timeout" else ""
            return _bad(f"/server_info: {error.detail}{hangs}")
        info = reply.json()
        if reply.status != 200 or not isinstance(info, dict):
            return _bad(f"/server_info answers {reply.status}: {reply.body[:120]!r}")
        self.info = info
        self.data["model"] = info.get("served_model_name") or info.get("model_path")
        self.data["version"] = info.get("version")
        wrong = []
        for key, value in planned_arguments(self.settings).items():
            if key in info and not _same(info[key], value):
                wrong.append(f"effective argument {key} is {info[key]!r}, planned: {value!r}")
        version = info.get("version")
        if version is not None and str(version) != self.settings.stack.sglang:
            wrong.append(f"effective argument version is {version!r}, planned: {self.settings.stack.sglang!r}")
        if wrong:
            again = f"dflash-deploy down {self.host.name}; dflash-deploy launch {self.host.name}"
            return _bad(*wrong, hint=again)
        return _ok(
            f"SGLang {version}, {info.get('speculative_algorithm') or 'no speculation'}, {info.get('model_path')}"
        )

    def patches(self) -> _Verdict:
        if not self.settings.stack.patch_sets and self.settings.algorithm != "DDTREE":
            return _Verdict(RungStatus.SKIPPED, ["this stack needs no patches"])
        found = self.seen.get("manifest") if self.seen else self.look().get("manifest")
        again = f"dflash-deploy patch {self.host.name}, then restart the service"
        if not found:
            return _bad("patch manifest: missing from the venv", hint=again)
        if "error" in found:
            return _bad(f"patch manifest: differs from its schema: {found['error']}", hint=again)
        faults = [f"patch manifest: {name} differs" for name in found["changed"]]
        faults += [f"patch manifest: {name} is missing" for name in found["missing"]]
        needed = set(self.settings.stack.patch_sets)
        faults += [f"patch manifest: set {name} is missing" for name in sorted(needed - set(found["sets"]))]
        if faults:
            return _bad(*faults, hint=again)
        self.data["patch_sets"] = found["sets"]
        return _ok(f"{found['files']} files as recorded, sets {', '.join(found['sets'])}")

    # -- generate --------------------------------------------------------------------------------------------------
    def probes(self) -> tuple[Probe, ...]:
        return self.options.probes or (tiny_pair_probes() if self.settings.tiny_pair else ()) or GENERAL

    def _ask(self, probe: Probe) -> Answer:
        try:
            return ask(self.base_url, probe, key=self.options.key, timeout_s=self.options.timeout_s)
        except NoReply as error:
            return Answer(0, "", 0, {}, 0.0, f"health: no answer within its deadline: {error.detail}"
                          if error.kind == "timeout" else error.detail)  # fmt: skip

    def _judge(self, probe: Probe, answer: Answer) -> str:
        if answer.error or answer.status != 200:
            return answer.error or f"HTTP {answer.status}"
        if fault := degenerate(answer.text):
            return fault
        if probe.expect and not answer.text.strip().startswith(probe.expect.strip()):
            return f"checked completion differs: {answer.text[:60]!r} is not {probe.expect[:60]!r}"
        return ""

    def completion(self) -> _Verdict:
        told, faults = [], []
        for probe in self.probes():
            answer = self._ask(probe)
            self.metas.append(answer.meta)
            if fault := self._judge(probe, answer):
                faults.append(fault)
            else:
                told.append(f"{answer.tokens} tokens in {answer.seconds:.1f} s: {answer.text.strip()[:60]!r}")
                self.data.setdefault("completion", answer.text)
        return _bad(*faults, *told) if faults else _ok(*told)

    def concurrent(self) -> _Verdict:
        probes = self.probes()
        faults: list[str] = []
        told = []
        for width in sorted({2, max(2, self.options.concurrency)}):
            wanted = [probes[i % len(probes)] for i in range(width)]
            began = time.monotonic()
            with ThreadPoolExecutor(width) as pool:
                answers = list(pool.map(self._ask, wanted))
            took = time.monotonic() - began
            self.metas += [a.meta for a in answers]
            faults += [
                f"with {width} at once: {f}" for p, a in zip(wanted, answers, strict=True) if (f := self._judge(p, a))
            ]
            rate = sum(a.tokens for a in answers) / took if took > 0 else 0.0
            self.data["tokens_per_s"] = round(rate, 2)
            told.append(f"{width} requests at once: {rate:.1f} tokens/s")
        return _bad(*faults) if faults else _ok(*told)

    def requests(self) -> _Verdict:
        """Stop strings, grammars, a prompt beyond the draft's window."""
        faults: list[str] = []
        told: list[str] = []
        for ask_one in (self._stop, self._grammar, self._long):
            fault, words = ask_one()
            if fault:
                faults.append(fault)
            elif words:
                told.append(words)
        return _bad(*faults, *told) if faults else _ok(*told)

    def _post(self, data: dict[str, Any]) -> tuple[int, str, dict[str, Any], str]:
        """(status, text, meta, fault) of one ``/generate``."""
        try:
            reply = request(
                self.base_url, "/generate", data=data, key=self.options.key, timeout_s=self.options.timeout_s
            )
        except NoReply as error:
            return 0, "", {}, error.detail
        body = reply.json()
        if reply.status != 200 or not isinstance(body, dict) or "text" not in body:
            return reply.status, "", {}, reply.body[:200].decode("utf-8", "replace")
        return 200, str(body["text"]), dict(body.get("meta_info") or {}), ""

    def _stop(self) -> tuple[str, str]:
        """An answer is cut where a string of its own middle is made a stop string."""
        probe = next((p for p in self.probes() if isinstance(p.prompt, str)), GENERAL[0])
        sampling: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": min(probe.max_tokens, 16)}
        status, whole, _, fault = self._post({"text": probe.prompt, "sampling_params": sampling})
        if status != 200:
            return f"HTTP {status}: {fault}", ""
        at = len(whole) // 2
        stop = whole[at : at + 2]
        if not stop.strip() or "\ufffd" in whole:
            return "", "stop strings: the answer is too short to cut"
        cut = whole[: whole.index(stop)]
        status, text, _, fault = self._post({"text": probe.prompt, "sampling_params": {**sampling, "stop": [stop]}})
        if status != 200:
            return f"with a stop string: HTTP {status}: {fault}", ""
        if text != cut:
            return f"a stop string is not obeyed: {text[-40:]!r} is not {cut[-40:]!r} (stop {stop!r})", ""
        return "", f"stop string {stop!r} obeyed"

    def _grammar(self) -> tuple[str, str]:
        """A grammar is obeyed, or refused by name; it is never ignored."""
        if str(self.info.get("grammar_backend") or "none") == "none":
            return "", "grammars: switched off"
        sampling = {"temperature": 0.0, "max_new_tokens": 4, "regex": "(yes|no)"}
        status, text, _, fault = self._post({"text": "Is water wet? Answer: ", "sampling_params": sampling})
        if status in (400, 422, 501):
            return "", f"grammars are refused: {fault[:100]}"
        if status != 200:
            return f"with a grammar: HTTP {status}: {fault}", ""
        if not "yes".startswith(text[:3]) and not "no".startswith(text[:2]):
            return f"a grammar is ignored: {text[:40]!r} does not match (yes|no)", ""
        return "", f"grammar obeyed: {text!r}"

    def _long(self) -> tuple[str, str]:
        """A prompt longer than what the drafter sees, or than its usual training length."""
        window = int(self.info.get("speculative_draft_window_size") or 0)
        if self.settings.stack.device == "cpu" and not (self.options.thorough or window):
            return "", "a long prompt: not asked of an interpreter"
        context = int(self.info.get("context_length") or 0)
        # Words are at least a token each with every tokenizer, bytes at most one.
        count = max(2 * window, 200 if self.settings.stack.device == "cpu" else 3000)
        if context:
            count = min(count, (context - 64) // 8)
        prompt = " ".join(("one two three four five six seven eight " * (count // 8 + 1)).split()[:count])
        sampling = {"temperature": 0.0, "max_new_tokens": 24}
        status, text, meta, fault = self._post({"text": prompt, "sampling_params": sampling})
        if status != 200:
            return f"a prompt of {count} words: HTTP {status}: {fault}", ""
        if not text.strip():
            return f"a prompt of {count} words: the completion is empty", ""
        got = gather_acceptance([meta])
        tokens = meta.get("prompt_tokens") or count
        if window and got.steps >= 12 and not got.accepted:
            return (
                f"acceptance beyond the draft window of {window} tokens drops to zero (a prompt of {tokens} tokens)",
                "",
            )
        length = f", {got.length:.2f} tokens a step" if got.steps else ""
        return "", f"a prompt of {tokens} tokens is answered{length}"

    # -- spec ------------------------------------------------------------------------------------------------------
    def speculation(self) -> _Verdict:
        if not self.settings.speculative:
            return _Verdict(RungStatus.SKIPPED, ["this deployment does not speculate"])
        running = self.info.get("speculative_algorithm")
        if str(running or "").upper() != self.settings.algorithm:
            return _bad(
                f"effective argument speculative_algorithm is {running!r}, planned: {self.settings.algorithm!r}"
            )
        got = gather_acceptance(self.metas)
        if not got.steps:
            return _bad("no request reported a verify step: speculation is configured and not active")
        self.data["acceptance_length"] = round(got.length, 4)
        self.data["acceptance_histogram"] = list(got.histogram)
        self.data["acceptance_by_position"] = [round(p, 4) for p in got.by_position]
        self.data["verify_steps"] = got.steps
        floor = self.options.min_acceptance or (1.5 if self.settings.tiny_pair else 1.1)
        told = [
            f"acceptance length {got.length:.2f} over {got.steps} steps (floor {floor:g})",
            "accepted by position: " + " ".join(f"{p:.2f}" for p in got.by_position[:16]),
        ]
        if got.length < floor:
            return _bad(f"acceptance length {got.length:.2f} is below the floor {floor:g}", *told[1:])
        if len(got.by_position) > 6 and got.by_position[0] > 0.3 and sum(got.by_position[4:]) == 0 and got.steps >= 100:
            return _bad("acceptance by position falls to zero after position 4", *told)
        chain = self._chain_length()
        if chain is not None and self.settings.algorithm == "DDTREE":
            told.append(f"a chain alone: {chain:.2f}")
            if got.length < chain - 0.05:
                return _bad(
                    f"the tree accepts less than its own chain ({got.length:.2f} < {chain:.2f}): "
                    "the tree mask is ignored",
                    *told,
                )
        return self._against_last_good(got, told)

    def _against_last_good(self, got: Acceptance, told: list[str]) -> _Verdict:
        """The figures of the last release of this pair that was found healthy on this host, if there was one."""
        self.good = {
            "stack": self.settings.stack.name,
            "acceptance_length": got.length,
            "by_position": list(got.by_position),
            "tokens_per_s": self.data.get("tokens_per_s"),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        last = self.baselines().get(self._key(self.settings.algorithm))
        if last is None:
            return _ok(*told, "the first healthy release of this pair here: its figures are kept")
        told.append(f"last good release ({last['stack']}): {last['acceptance_length']:.2f}")
        if got.length < 0.75 * last["acceptance_length"]:
            what = "acceptance collapsed" if got.length < 1.05 else "the drafter accepts less at every position"
            before = f"recorded for {last['stack']}: {last['acceptance_length']:.2f}"
            return _bad(f"{what}: {got.length:.2f}, {before}", *told)
        for at, (now, before) in enumerate(zip(got.by_position[:6], last["by_position"], strict=False), 1):
            if before >= 0.3 and now < 0.5 * before and got.steps >= 20:
                return _bad(
                    f"acceptance collapsed at position {at}: {now:.2f}, recorded for {last['stack']}: {before:.2f}",
                    *told,
                )
        speed, usual = self.data.get("tokens_per_s"), last.get("tokens_per_s")
        if speed and usual:
            told.append(f"{speed:.1f} tokens/s, last good release {usual:.1f}")
            # A CPU is shared with whatever else runs; a GPU is not.
            if self.settings.stack.device == "cuda" and speed < 0.4 * usual:
                return _bad(f"throughput collapsed: {speed:.1f} tokens/s, recorded: {usual:.1f}", *told)
        return _ok(*told)

    def _chain_length(self) -> float | None:
        """Acceptance of the tree's first chain in the same steps where the worker reports it; else that of DFLASH with
        the same pair and prompts, as recorded on this host."""
        values = [float(m["spec_chain_accept_length"]) for m in self.metas if m.get("spec_chain_accept_length")]
        if not values:
            states = self.info.get("internal_states") or [{}]
            values = [float(s["avg_spec_chain_accept_length"]) for s in states if s.get("avg_spec_chain_accept_length")]
        if values:
            return statistics.fmean(values)
        recorded = self.baselines().get(self._key("DFLASH"))
        return float(recorded["acceptance_length"]) if recorded else None

    def _key(self, algorithm: str) -> str:
        """What figures may be compared: the same pair and prompts."""
        settings = self.settings
        asked = hashlib.sha256(repr([probe.as_dict() for probe in self.probes()]).encode()).hexdigest()[:8]
        nodes = str(settings.budget) if algorithm == "DDTREE" else ""
        return "|".join((algorithm, nodes, settings.model, settings.draft_model, asked, str(self.options.concurrency)))

    def baselines(self) -> dict[str, dict[str, Any]]:
        """The recorded figures; entries that cannot be read are left out."""
        if self._baselines is None:
            try:
                table = json.loads(self.host.read(self._baseline_file) or b"{}")
                self._baselines = {
                    str(key): {**row, "acceptance_length": float(row["acceptance_length"]),
                               "by_position": [float(p) for p in row["by_position"]], "stack": str(row["stack"])}
                    for key, row in table.items()
                    if isinstance(row, dict) and "by_position" in row and "stack" in row
                }  # fmt: skip
            except (ValueError, KeyError, TypeError, AttributeError):
                self._baselines = {}
        return self._baselines

    @property
    def _baseline_file(self) -> str:
        return posixpath.join(self.settings.root, "health-baseline.json")

    def keep_good(self) -> None:
        """This release was found healthy. Its figures replace those of another release, never its own: a slow decline
        must not become the measure."""
        key = self._key(self.settings.algorithm)
        last = self.baselines().get(key)
        if not self.good or (last is not None and last["stack"] == self.good["stack"]):
            return
        table = {**self.baselines(), key: self.good}
        try:
            self.host.write(self._baseline_file, json.dumps(table, indent=1).encode())
        except DflashError:
            self.data["baseline"] = "could not be recorded"

    # -- lossless, soak --------------------------------------------------------------------------------------------
    def lossless(self) -> _Verdict:
        faults: list[str] = []
        with ThreadPoolExecutor(max(1, min(self.options.concurrency, 8))) as pool:
            answers = list(pool.map(self._ask, self.options.reference))
        for probe, answer in zip(self.options.reference, answers, strict=True):
            if answer.error or answer.text != probe.expect:
                at = next((i for i, (a, b) in enumerate(zip(answer.text, probe.expect, strict=False)) if a != b), 0)
                faults.append(
                    answer.error
                    or f"differs at character {at}: {answer.text[at : at + 30]!r}, not {probe.expect[at : at + 30]!r}"
                )
        count = len(self.options.reference)
        if faults:
            return _bad(
                f"{len(faults)} of {count} greedy completions are wrong answers against the reference", *faults[:5]
            )
        return _ok(f"{count} greedy completions equal the reference without speculation")

    def soak(self) -> _Verdict:
        def memory() -> int:
            return sum(int(p["rss_kib"]) for p in self.look().get("tree", ()))

        probes, asked = self.probes(), 0
        faults: list[str] = []
        before, began = memory(), time.monotonic()
        halfway = 0
        tokens = 0
        with ThreadPoolExecutor(self.options.concurrency) as pool:
            while time.monotonic() - began < self.options.soak_s and not faults:
                wanted = [probes[(asked + i) % len(probes)] for i in range(self.options.concurrency)]
                answers = list(pool.map(self._ask, wanted))
                asked += len(answers)
                tokens += sum(a.tokens for a in answers)
                faults += [f for p, a in zip(wanted, answers, strict=True) if (f := self._judge(p, a))]
                if not halfway and time.monotonic() - began > self.options.soak_s / 2:
                    halfway = memory()
        after = memory()
        self.data["soak"] = {"requests": asked, "tokens": tokens, "rss_kib": [before, halfway, after]}
        if faults:
            return _bad(f"after {asked} requests:", *faults[:5])
        grown = (after - halfway) / 1024 if halfway else 0.0
        if grown > 512 and after > 1.2 * halfway:
            return _bad(f"memory grew by {grown:.0f} MiB in the second half of the soak")
        return _ok(f"{asked} requests, {tokens} tokens, memory {before // 1024} -> {after // 1024} MiB")


_RUNGS: tuple[tuple[str, Level, str, _Check], ...] = (
    ("process", Level.LIVE, "our server owns the port and none of its processes is stopped or gone", _Ladder.process),
    (
        "host",
        Level.LIVE,
        "the log has room, the weights are whole, no memory limit killed a process, the GPUs answer",
        _Ladder.machine,
    ),
    ("health", Level.READY, "the scheduler and detokenizer produce tokens now", _Ladder.health),
    ("arguments", Level.READY, "the server that answers runs the planned release, model and flags", _Ladder.arguments),
    ("patches", Level.READY, "every patched file has the bytes that were recorded", _Ladder.patches),
    ("completion", Level.GENERATE, "the weights and kernels compute what they should", _Ladder.completion),
    ("concurrent", Level.GENERATE, "batches larger than one work and do not mix requests", _Ladder.concurrent),
    ("requests", Level.GENERATE, "stop strings, grammars and long prompts are obeyed or refused", _Ladder.requests),
    ("speculation", Level.SPEC, "the planned algorithm runs and the target accepts its drafts", _Ladder.speculation),
    ("lossless", Level.LOSSLESS, "speculation does not change greedy output", _Ladder.lossless),
    ("soak", Level.SOAK, "it stays right and does not grow under load", _Ladder.soak),
)


def planned_arguments(settings: Settings) -> dict[str, Any]:
    """What ``/server_info`` should say, by field name, from the planned command line. Flags that name no field are
    left out later.
    """
    argv = settings.server_argv()
    planned: dict[str, Any] = {}
    for at, word in enumerate(argv):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            following = argv[at + 1] if at + 1 < len(argv) else "--"
            planned[name.replace("-", "_")] = value or (True if following.startswith("--") else following)
    for secret in ("api_key", "admin_api_key"):
        planned.pop(secret, None)
    return planned


def _pids(data: Mapping[str, Any]) -> list[int]:
    """The server's processes, as a report's data has them."""
    return [int(process["pid"]) for process in data.get("processes") or ()]


def _same(effective: Any, planned: Any) -> bool:
    if isinstance(planned, bool) or isinstance(effective, bool):
        return bool(effective) == (planned in (True, "True", "true", "1"))
    if isinstance(effective, (int, float)):
        try:
            return float(planned) == float(effective)
        except ValueError:
            return False
    if isinstance(effective, str):
        return (
            posixpath.normpath(effective) == posixpath.normpath(str(planned))
            if "/" in effective
            else effective == str(planned)
        )
    return True  # lists and dicts are parsed from text in many ways: not compared


def diagnosis_of(evidence: Sequence[str]) -> str:
    """Id of the signature that a rung's evidence shows; causes before symptoms."""
    found = [s for line in evidence for s in match_line(line)]
    return min(found, key=lambda s: KINDS.index(s.kind)).id if found else ""


def check(
    host: Host,
    settings: Settings,
    level: Level | str = Level.SPEC,
    on_progress: Callable[[Rung], None] | None = None,
    *,
    options: Options | None = None,
    before: HealthReport | None = None,
) -> HealthReport:
    """Climb the ladder up to ``level``; stop at the first rung that does not hold.

    Args:
        on_progress: told each rung when it is done.
        before: the last report of a watch. What it learnt of the same processes within ``HEALTH_EVERY_S`` is not asked
            again; that the scheduler answers ``/server_info`` is.

    Raises:
        UsageError: the lossless rung without a reference.
        HostError: the host cannot be reached (the service's own faults are in the report).
    """
    level, options = Level(level), options or Options()
    order = list(Level)
    if level is Level.LOSSLESS and not options.reference:
        raise UsageError(
            "the lossless rung compares with recorded answers of the same target without speculation",
            hint="serve once with --algorithm NONE, dflash-deploy health HOST --record FILE, then --reference FILE",
        )
    rungs: list[Rung] = []
    with host.forward(settings.port) as port:
        ladder = _Ladder(host, settings, options, f"http://127.0.0.1:{port}", before)
        broken = False
        for name, at, proves, ask_rung in _RUNGS:
            if order.index(at) > order.index(level):
                break
            if broken:
                rungs.append(Rung(name, at, RungStatus.NOT_RUN, proves))
                continue
            if at is Level.LOSSLESS and not options.reference:
                rungs.append(Rung(name, at, RungStatus.SKIPPED, proves, ("no reference was given",)))
                continue
            began = time.monotonic()
            verdict = ask_rung(ladder)
            found = "" if verdict.status is RungStatus.OK else diagnosis_of(verdict.evidence)
            rung = Rung(
                name, at, verdict.status, proves, tuple(verdict.evidence), found, verdict.hint, time.monotonic() - began
            )
            rungs.append(rung)
            broken = verdict.status in (RungStatus.FAILED, RungStatus.STARTING)
            if on_progress:
                on_progress(rung)
        if not broken:
            ladder.keep_good()
    return HealthReport(settings.host, level, tuple(rungs), ladder.data)


def is_ready(base_url: str, *, key: str = "", timeout_s: float = 5.0) -> bool:
    """Whether ``/health`` answers 200: for :func:`dflash_deploy.diagnose.follow_until_ready`."""
    try:
        return request(base_url, "/health", key=key, timeout_s=timeout_s).status == 200
    except NoReply:
        return False


def record(
    host: Host, settings: Settings, probes: Sequence[Probe], *, key: str = "", timeout_s: float = 180.0
) -> list[dict[str, Any]]:
    """Greedy answers of the running server as rows for a reference file.

    Raises:
        UsageError: a probe got no answer.
    """
    rows = []
    with host.forward(settings.port) as port:
        for probe in probes:
            try:
                answer = ask(f"http://127.0.0.1:{port}", probe, key=key, timeout_s=timeout_s)
            except NoReply as error:
                raise UsageError("the server gave no answer to record", evidence=str(error)) from error
            if answer.error:
                raise UsageError("the server gave no answer to record", evidence=answer.error)
            row = probe.as_dict()
            row.pop("expect")
            rows.append({**row, "text": answer.text, "speculative_tokens": bool(answer.meta.get("spec_verify_ct"))})
    return rows
