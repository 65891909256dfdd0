"""One deployment as the commands use it: the host, its facts, its settings, what lies there, and each step's plan."""

from __future__ import annotations

import contextlib
import json
import posixpath
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_deploy.cli.common import talk as talk
from dflash_deploy.cli.connection import connected, expand, locked, table_of
from dflash_deploy.model import Plan, Step

if TYPE_CHECKING:
    from dflash_deploy.execute import Journal
    from dflash_deploy.facts import Facts
    from dflash_deploy.host import Host
    from dflash_deploy.launch import ServiceState
    from dflash_deploy.model import Blob
    from dflash_deploy.patching.judge import TreeState
    from dflash_deploy.plan.models import ModelState
    from dflash_deploy.plan.provision import VenvState
    from dflash_deploy.releases.model import Look, Release, VenvLook
    from dflash_deploy.settings import Settings
    from dflash_deploy.wheelhouse import House

DEFAULT_ROOT = "~/.local/share/dflash-deploy"
DEFAULT_SERVICE = "dflash-sglang"
HUB = "hub:"
"""Before a name of the hub, where a folder of this side would stand."""
OWN_FOLDERS = ("sglang", ".dflash-deploy", "dflash_kernels")
"""Entries of site-packages that a patched environment does not share with the one it was made from."""


@dataclass
class Deployment:
    """A connected host with its facts and settings."""

    host: Host
    facts: Facts
    settings: Settings
    uploads: Mapping[str, str]
    """Path on the host → folder on this side, or :data:`HUB` and a name, for models that are not there yet."""
    look: Look
    """What lay on the host when it was last looked at."""
    inputs: str = ""
    """Digest of the patch sets that are wanted."""
    house: House | None = None
    """Wheels to install from, instead of an index."""
    key: str | None = field(default=None, repr=False)
    """The server's API key; None: not looked for yet."""

    @property
    def journal(self) -> Journal:
        from dflash_deploy.execute import Journal

        return Journal(self.host, posixpath.join(self.settings.root, "journal.jsonl"))

    def refresh(self) -> Look:
        """Look again."""
        self.look = look_at(self.host, self.facts, self.settings, self.inputs)
        return self.look

    # environment and patches

    def venv_state(self, path: str) -> VenvState:
        """What stands at an environment's path."""
        from dflash_deploy.plan.provision import VenvState

        found = self.look.venvs.get(path)
        if found is None:
            return VenvState()
        return VenvState.of_look(found)

    def complete(self, path: str) -> bool:
        """The environment holds the stack to the last package."""
        from dflash_deploy.plan.provision import is_complete

        return is_complete(self.settings.stack, self.venv_state(path))

    def source(self) -> str:
        """The environment that a patched one is made from: as installed, or of the layout before releases."""
        legacy = posixpath.join(self.settings.root, "venv")
        if not self.complete(self.settings.base_venv) and self.complete(legacy):
            return legacy
        return self.settings.base_venv

    def choose_venv(self) -> None:
        """Settle on the environment that these patch sets are in already, if there is one and it is whole."""
        from dflash_deploy.plan.release import known_venv

        if self.settings.managed and self.patch_sets():
            found = known_venv(self.settings, self.look, self.inputs)
            path = found if found and self.complete(found) else self.settings.base_venv
            self.settings = replace(self.settings, venv=path)

    @property
    def patched(self) -> VenvLook | None:
        """The environment of the settings, if all patches are in it as they should be."""
        found = self.look.venvs.get(self.settings.venv)
        if found is None or not found.intact or (found.manifest is None and self.patch_sets()):
            return None
        return found if not self.patch_sets() or self.inputs in (found.stamp.get("inputs") or ()) else None

    def provision_plan(self) -> Plan:
        """What the environment still needs."""
        from dflash_deploy.plan.provision import plan_provision

        settings = self.settings
        if settings.managed and settings.venv == settings.base_venv and self.source() != settings.base_venv:
            return Plan("provision", (), f"{settings.stack.name} is installed in {self.source()}")
        state = self.venv_state(settings.venv)
        if self.house is None:
            return plan_provision(settings, self.facts, state)
        from dflash_deploy.plan.offline import cache_folder, to_upload
        from dflash_deploy.wheelhouse.cache import cached
        from dflash_deploy.wheelhouse.check import refuse_damaged

        held = cached(self.host, cache_folder(settings))
        planned = plan_provision(settings, self.facts, state, self.house, held)
        if not planned.empty:
            # What is to travel is looked at before anything changes.
            names = {blob.name for blob in to_upload(self.house, held)}
            refuse_damaged(self.house, [wheel for wheel in self.house.wheels if wheel.file in names])
        return planned

    def models_plan(self) -> Plan:
        """Which models still have to travel."""
        from dflash_deploy.assets import templates_dir
        from dflash_deploy.execute import local_tree
        from dflash_deploy.plan.provision import plan_models

        settings = self.settings
        pair = templates_dir() / "tiny-pair"
        differs = settings.tiny_pair and self.look.trees.get(pair_folder(settings)) != local_tree(pair)
        states = {
            path: self._model_state(path)
            for path in (settings.model, settings.draft_model)
            if path and not settings.tiny_pair
        }
        return plan_models(settings, states, str(pair), pair_differs=differs)

    def _model_state(self, path: str) -> ModelState:
        from dflash_deploy.errors import UsageError
        from dflash_deploy.plan.models import ModelState, hub_parts
        from dflash_deploy.wheelhouse.cache import cached

        source = self.uploads.get(path, "")
        if self.look.models.get(path, False) or not source:
            return ModelState(on_host=self.look.models.get(path, False))
        if not source.startswith(HUB):
            talk(f"  reading {source} ...")
            return ModelState(local=source, blobs=blobs_of(Path(source)), present=cached(self.host, f"{path}.blobs"))
        name = source.removeprefix(HUB)
        if self.house is not None:
            raise UsageError(
                f"{name} is a name of the hub, and this host is provisioned without a network",
                hint=f"hf download {name} --local-dir DIR where there is one, then name DIR: it is uploaded",
            )
        repo, revision = hub_parts(name) or (name, "")
        return ModelState(repo=repo, revision=revision)

    def tree_state(self, path: str) -> TreeState:
        """Where SGLang's tree in an environment stands against the stack's patch sets."""
        from dflash_deploy.cli.patch import choose_sets, payload_of, rules
        from dflash_deploy.patching import tree

        site, sets = choose_sets(self.host, path, self.patch_sets())
        device = self.settings.stack.device
        return tree.inspect(self.host, site, sets, payload=payload_of(sets), device=device, rules=rules())

    def patch_sets(self) -> list[str]:
        """The stack's sets, whatever the algorithm: another algorithm is then only a restart away."""
        return list(self.settings.stack.patch_sets)

    # service

    def service(self) -> ServiceState:
        from dflash_deploy.launch import observe

        return observe(self.host, self.settings, self.facts)

    def seen_service(self) -> ServiceState:
        """The service as it was when the host was looked at."""
        from dflash_deploy.launch import state_of

        return state_of(self.settings, self.look.services.get(self.settings.service) or {})

    def own_ports(self) -> set[int]:
        """Ports that a service of this deployment holds now, and that its restart sets free."""
        found = self.look.running_release
        if found is not None and found.settings:
            return {int(found.settings.get("port", 0))}
        return {self.settings.port} if found is not None or self.seen_service().running else set()

    def launch_plan(self) -> Plan:
        """What the release still needs to run as set. Settles the release's id.

        An environment that has yet to be made counts as one without patches.
        """
        from dflash_deploy.assets import templates_dir
        from dflash_deploy.execute import local_tree
        from dflash_deploy.plan.launch import Present, plan_launch, render, unit_path
        from dflash_deploy.plan.release import end_steps, release_steps

        venv = self.look.venvs.get(self.settings.venv)
        manifest = venv.manifest if venv is not None else None
        content = [self.settings.stack.pins]
        if manifest is not None:
            content += [f"{path} {entry.patched}" for path, entry in sorted(manifest.files.items())]
            content.append(manifest.payload)
        if self.settings.tiny_pair:
            content += [f"{path} {digest}" for path, digest in local_tree(templates_dir() / "tiny-pair").items()]
        templates = templates_dir()
        wanted = replace(self.settings, release="")
        fingerprint = render(wanted, self.facts, templates, content).fingerprint
        self.settings = settings = replace(wanted, release=self.look.next_id(fingerprint))
        files = render(settings, self.facts, templates, content)
        state = self.seen_service()
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        steps: list[Step] = []
        if self.look.legacy and state.running and not self.look.releases:
            steps += self._adopt()
        steps += release_steps(settings, self.facts, files, self.look, manifest, created)
        current = self.look.current_release
        if current is not None and current.launch:
            steps += end_steps(settings, self.facts, current, unless=(settings.mode, settings.service))
        unit = unit_path(settings, self.facts)
        ours = {settings.env_file: files.env, settings.runner: files.runner, settings.secrets_file: files.secrets}
        ours[settings.staged_unit] = files.unit
        from dflash_deploy.execute import digest

        digests = {path: digest(data) for path, data in ours.items()}
        digests[unit] = self.look.files.get(unit, "")
        present = Present(digests, state.enabled, state.running, state.fingerprint)
        plan = plan_launch(settings, self.facts, files, present)
        reason = plan.reason if plan.steps or not steps else f"files of release {settings.release} are mended"
        return Plan("launch", (*steps, *plan.steps), reason)

    def api_key(self) -> str:
        """The key that the server asks for; ``""``: none. It is in the settings, or in a 0600 file on the host."""
        if self.key is None:
            self.key = self.settings.env.get("SGLANG_API_KEY") or self._recorded_key()
        return self.key

    def _recorded_key(self) -> str:
        from dflash_deploy.errors import CommandFailed

        if not self.settings.release:
            return ""
        try:
            text = (self.host.read(self.settings.secrets_file) or b"").decode("utf-8", "replace")
        except CommandFailed:
            return ""
        for line in text.splitlines():
            name, _, value = line.partition(": ")
            if name == "api-key":
                return str(json.loads(value))
        return ""

    def _adopt(self) -> list[Step]:
        from dflash_deploy.assets import templates_dir
        from dflash_deploy.plan.launch import unit_path
        from dflash_deploy.plan.release import adopt_steps

        record = dict((self.look.services.get(self.settings.service) or {}).get("record") or {})
        if not record.get("command"):
            return []
        old = replace(self.settings, release="")
        runner = (templates_dir() / "serve.py").read_bytes()
        return adopt_steps(old, self.look, record, runner, unit_path(old, self.facts))

    def of_release(self, release: Release) -> Deployment:
        """The same host with the settings that a release was made with."""
        from dflash_deploy.settings import Settings

        settings = replace(Settings.of_record(self.host.name, release.settings), root=self.settings.root)
        return replace(self, settings=settings, key=None)


def look_at(host: Host, facts: Facts, settings: Settings, inputs: str) -> Look:
    """Look at a deployment with everything that its plans need to know."""
    from dflash_deploy.plan.launch import unit_path
    from dflash_deploy.releases.look import look

    legacy = posixpath.join(settings.root, "venv")
    bases = (settings.base_venv, legacy) if settings.managed else (settings.venv,)
    unit = unit_path(settings, facts)
    return look(
        host,
        settings.root,
        settings.service,
        bases=bases,
        # An environment of the user's own is looked into whatever its stamp says.
        inputs=inputs if settings.managed else "",
        files=[unit] if unit else [],
        trees=[pair_folder(settings)] if settings.tiny_pair else [],
        models=[path for path in (settings.model, settings.draft_model) if path],
    )


def pair_folder(settings: Settings) -> str:
    """Where the shipped pair lies on the host."""
    return posixpath.join(settings.root, "models", "tiny-pair")


@contextlib.contextmanager
def deployment(
    name: str, options: Mapping[str, Any], *, serving: bool = True, lock: str = "", break_lock: bool = False
) -> Iterator[Deployment]:
    """Resolve, connect, look, settle: for commands that bring a host to what is wanted.

    Args:
        serving: False when only the environment as installed is asked about: no model has to be named.
        lock: what the host's lock is taken for, before anything is looked at; ``""``: it is not taken.
        options: of the command line: those of :func:`~dflash_deploy.settings.effective`, ``inventory``, ``accept_new``.

    Raises:
        UsageError, HostError, UnreadableFact, Incompatible
    """
    from dflash_deploy.cli.patch import inputs_digest
    from dflash_deploy.facts import gather
    from dflash_deploy.settings import effective
    from dflash_deploy.wheelhouse.house import read_house

    given = {key: value for key, value in options.items() if key != "env"}
    with contextlib.ExitStack() as held:
        folder = options.get("wheelhouse") or table_of(name, options).get("wheelhouse")
        house = read_house(str(folder)) if folder else None
        host, entry = held.enter_context(connected(name, options))
        root = str(options.get("root") or entry.get("root") or DEFAULT_ROOT)
        venv = options.get("venv") or entry.get("venv")
        named = [str(options.get(key) or entry.get(key) or "") for key in ("model", "draft_model")]
        pair = posixpath.join(root, "models", "tiny-pair")
        models = [expand(path, host.home) for path in (named if any(named) else [f"{pair}/target", f"{pair}/drafter"])]
        port = options.get("port") or entry.get("port") or 30000
        facts = gather(
            host,
            paths=[expand(str(path), host.home) for path in (root, venv) if path],
            models=[path for path in models if path != host.home],
            ports=[port] if isinstance(port, int) else [],
            discover=False,
        )
        settings = effective(host.name, facts, options=given, entry=entry, serving=serving)
        if not settings.tiny_pair:
            settings = replace(
                settings,
                model=expand(settings.model, host.home) if settings.model else "",
                draft_model=expand(settings.draft_model, host.home) if settings.draft_model else "",
            )
        if lock:
            held.enter_context(locked(host, settings.root, lock, break_lock=break_lock))
        stack = settings.stack
        inputs = inputs_digest(stack.patch_sets, stack.sglang, stack.device)
        seen = look_at(host, facts, settings, inputs)
        settings, uploads = _place_models(settings, seen, named)
        here = Deployment(host, facts, settings, uploads, seen, inputs, house)
        if any(path not in seen.models for path in uploads):
            here.refresh()
        if serving:
            here.choose_venv()
        else:
            here.settings = replace(here.settings, venv=here.source())
        yield here


@contextlib.contextmanager
def deployed(
    name: str,
    options: Mapping[str, Any],
    *,
    release: str = "",
    failed: bool = False,
    lock: str = "",
    break_lock: bool = False,
) -> Iterator[Deployment]:
    """What is deployed on a host, with the settings that it was deployed with: for commands that ask or end.

    The release is the named one, else the one that runs, the current, the last. Without any the settings are those of
    the options, ``hosts.toml`` and defaults.

    Args:
        failed: the last release, if it failed, before any other.

    Raises:
        UsageError: there is no release of that name.
    """
    from dflash_deploy.errors import UsageError
    from dflash_deploy.facts import gather
    from dflash_deploy.releases.look import look
    from dflash_deploy.settings import effective

    with contextlib.ExitStack() as held:
        host, entry = held.enter_context(connected(name, options))
        root = expand(str(options.get("root") or entry.get("root") or DEFAULT_ROOT), host.home)
        facts = gather(host, discover=False)
        if lock:
            held.enter_context(locked(host, root, lock, break_lock=break_lock))
        seen = look(host, root, str(options.get("service") or entry.get("service") or DEFAULT_SERVICE))
        chosen = seen.release(release) if release else seen.running_release or seen.current_release
        if release and chosen is None:
            known = ", ".join(each.id for each in seen.releases) or "none"
            raise UsageError(f"there is no release {release} on {name}", evidence=f"there are: {known}")
        if seen.releases and (chosen is None or (failed and not release and seen.releases[-1].failed)):
            chosen = seen.releases[-1]
        given = {key: value for key, value in options.items() if key not in ("root", "inventory", "accept_new", "env")}
        given = {key: value for key, value in given.items() if value is not None}
        if chosen is not None and chosen.settings:
            from dflash_deploy.settings import Settings

            settings = replace(Settings.of_record(host.name, chosen.settings), root=root)
            if "service" in given and given["service"] != settings.service:
                # Another service than the releases': nothing is recorded of it.
                chosen = None
        if chosen is None or not chosen.settings:
            settings = effective(host.name, facts, options={**given, "root": root}, entry=entry, serving=False)
        elif given:
            settings = _overridden(host, facts, settings, given)
        yield Deployment(host, facts, settings, {}, seen)


def _overridden(host: Host, facts: Facts, settings: Settings, given: Mapping[str, Any]) -> Settings:
    """Recorded settings with what the command line says otherwise."""
    from dflash_deploy.settings import Mode, effective

    # Bad values are refused with the usual messages.
    base: dict[str, Any] = {"stack": settings.stack.name, "root": settings.root, **given}
    checked = effective(host.name, facts, options=base, serving=False)
    changes: dict[str, Any] = {key: getattr(checked, key) for key in given if hasattr(checked, key)}
    if "mode" in changes:
        changes["mode"] = Mode(checked.mode)
    return replace(settings, **changes)


def _place_models(settings: Settings, seen: Look, named: list[str]) -> tuple[Settings, dict[str, str]]:
    """Where each named model is: on the host as given, else here, to be uploaded below the root."""
    from dflash_deploy.plan.models import fetched_path, hub_parts
    from dflash_deploy.plan.provision import uploaded_path

    if settings.tiny_pair:
        return settings, {}
    uploads: dict[str, str] = {}

    def place(there: str, name: str) -> str:
        if not there or seen.models.get(there):
            return there
        here = Path(name).expanduser()
        if name and (here / "config.json").is_file():
            there = uploaded_path(settings, str(here.resolve()))
            uploads[there] = str(here.resolve())
        elif parts := hub_parts(name):
            there = fetched_path(settings.root, *parts)
            uploads[there] = HUB + name
        return there

    model, draft = (place(*pair) for pair in zip((settings.model, settings.draft_model), named, strict=True))
    return replace(settings, model=model, draft_model=draft), uploads


def blobs_of(folder: Path) -> tuple[Blob, ...]:
    """The files of a model's folder on this side, with their digests.

    Raises:
        UsageError: one cannot be read.
    """
    from dflash_deploy.errors import UsageError
    from dflash_deploy.model import Blob
    from dflash_deploy.wheelhouse.house import file_sha256

    hidden = (".git", ".cache", "__pycache__")
    found = []
    try:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.is_file() and not set(name.parts) & set(hidden):
                found.append(Blob(str(path), name.as_posix(), file_sha256(path), path.stat().st_size))
    except OSError as error:
        raise UsageError(f"the model in {folder} cannot be read", evidence=str(error)) from None
    return tuple(found)
