"""One deployment as the commands use it: the host, its facts, its settings, and each step's plan."""

from __future__ import annotations

import contextlib
import posixpath
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_deploy.model import Plan

if TYPE_CHECKING:
    from dflash_deploy.execute import Journal
    from dflash_deploy.facts import Facts
    from dflash_deploy.host import Host
    from dflash_deploy.launch import ServiceState
    from dflash_deploy.patching.judge import TreeState
    from dflash_deploy.patching.manifest import Manifest
    from dflash_deploy.settings import Settings
    from dflash_deploy.wheelhouse import House

DEFAULT_ROOT = "~/.local/share/dflash-deploy"


def talk(text: str) -> None:
    """A line for a person, on stderr."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Deployment:
    """A connected host with its facts and settings."""

    host: Host
    facts: Facts
    settings: Settings
    uploads: Mapping[str, str]
    """Path on the host → folder on this side, for models that exist here only."""
    house: House | None = None
    """Wheels to install from, instead of an index."""

    @property
    def journal(self) -> Journal:
        from dflash_deploy.execute import Journal

        return Journal(self.host, posixpath.join(self.settings.root, "journal.jsonl"))

    @contextlib.contextmanager
    def locked(self, what: str, *, break_lock: bool = False) -> Iterator[None]:
        """Hold the host's lock."""
        from dflash_deploy.execute import lock

        with lock(self.host, self.settings.root, what, break_lock=break_lock, on_notice=talk):
            yield

    def provision_plan(self) -> Plan:
        """What the venv still needs."""
        from dflash_deploy.plan.provision import INSPECT, VenvState, plan_provision

        settings = self.settings
        exists = self.host.run(["test", "-e", settings.venv], timeout_s=30).ok
        script = 'test -x "$1" || exit 0; exec "$1" -I -c "$2"'
        inspected = self.host.run(["/bin/sh", "-c", script, "sh", settings.python, INSPECT], timeout_s=120)
        state = VenvState.of(exists, inspected.out, self.host.read(settings.stamp) if exists else None)
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
        from dflash_deploy.execute import local_tree, remote_tree
        from dflash_deploy.plan.provision import ModelState, plan_models

        settings = self.settings
        pair = templates_dir() / "tiny-pair"
        differs = False
        if settings.tiny_pair:
            differs = remote_tree(self.host, posixpath.join(settings.root, "models", "tiny-pair")) != local_tree(pair)
        states = {
            path: ModelState(on_host=has_model(self.host, path), local=self.uploads.get(path, ""))
            for path in (settings.model, settings.draft_model)
            if path and not settings.tiny_pair
        }
        return plan_models(settings, states, str(pair), pair_differs=differs)

    def tree_state(self) -> TreeState:
        """Where SGLang's tree in the venv stands against the stack's patch sets."""
        from dflash_deploy.cli.patch import choose_sets, payload_of, rules
        from dflash_deploy.patching import tree

        site, sets = choose_sets(self.host, self.settings.venv, self.patch_sets())
        device = self.settings.stack.device
        return tree.inspect(self.host, site, sets, payload=payload_of(sets), device=device, rules=rules())

    def patch_sets(self) -> list[str]:
        """The stack's sets, whatever the algorithm: another algorithm is then only a restart away."""
        return list(self.settings.stack.patch_sets)

    def service(self) -> ServiceState:
        from dflash_deploy.launch import observe

        return observe(self.host, self.settings, self.facts)

    def applied(self) -> Manifest | None:
        """The manifest of the patched tree as it lies on the host; None when nothing is patched there."""
        from dflash_deploy.cli.patch import PACKAGE
        from dflash_deploy.patching import tree

        return tree.read(self.host, self.settings.venv, PACKAGE).manifest

    def launch_plan(self, state: ServiceState, manifest: Manifest | None) -> Plan:
        """What the service still needs to run as set.

        Args:
            manifest: of the patched tree; None: the tree is not there yet.
        """
        from dflash_deploy.assets import templates_dir
        from dflash_deploy.execute import local_tree
        from dflash_deploy.launch import present
        from dflash_deploy.plan.launch import plan_launch, render
        from dflash_deploy.plan.provision import pins_digest

        settings = self.settings
        content = [pins_digest(settings.stack)]
        if manifest is not None:
            content += [f"{path} {entry.patched}" for path, entry in sorted(manifest.files.items())]
            content.append(manifest.payload)
        if settings.tiny_pair:
            content += [f"{path} {digest}" for path, digest in local_tree(templates_dir() / "tiny-pair").items()]
        files = render(settings, self.facts, templates_dir(), content)
        return plan_launch(settings, self.facts, files, present(self.host, settings, self.facts, state))


@contextlib.contextmanager
def deployment(name: str, options: Mapping[str, Any], *, serving: bool = True) -> Iterator[Deployment]:
    """Resolve, connect, look, settle.

    Args:
        options: of the command line: those of :func:`~dflash_deploy.settings.effective`, ``inventory``, ``accept_new``.

    Raises:
        UsageError, HostError, UnreadableFact, Incompatible
    """
    from dflash_deploy.facts import gather
    from dflash_deploy.host import connect
    from dflash_deploy.inventory import resolve
    from dflash_deploy.settings import effective
    from dflash_deploy.wheelhouse.house import read_house

    target = resolve(name, inventory=options.get("inventory"))
    folder = options.get("wheelhouse") or target.options.get("wheelhouse")
    house = read_house(str(folder)) if folder else None
    host = connect(target, accept_new=bool(options.get("accept_new")) or target.accept_new, on_notice=talk)
    try:
        entry = dict(target.options)
        if "env_file" in entry:
            entry["env"] = {**env_of_file(str(entry["env_file"])), **dict(entry.get("env", {}))}
        root = str(options.get("root") or entry.get("root") or DEFAULT_ROOT)
        venv = options.get("venv") or entry.get("venv")
        places = [expand(str(path), host.home) for path in (root, venv) if path]
        facts = gather(host, paths=places, discover=False)
        settings = effective(target.name, facts, options=options, entry=entry, serving=serving)
        settings, uploads = _place_models(host, settings) if serving else (settings, {})
        yield Deployment(host, facts, settings, uploads, house)
    finally:
        host.close()


def _place_models(host: Host, settings: Settings) -> tuple[Settings, dict[str, str]]:
    """Where each named model is: on the host as given, else here, to be uploaded below the root."""
    from dflash_deploy.plan.provision import uploaded_path

    if settings.tiny_pair:
        return settings, {}
    uploads: dict[str, str] = {}

    def place(path: str) -> str:
        there = expand(path, host.home)
        if not path or has_model(host, there):
            return there if path else ""
        here = Path(path).expanduser()
        if (here / "config.json").is_file():
            there = uploaded_path(settings, str(here.resolve()))
            uploads[there] = str(here.resolve())
        return there

    return replace(settings, model=place(settings.model), draft_model=place(settings.draft_model)), uploads


def has_model(host: Host, path: str) -> bool:
    """A folder with a configuration is there."""
    return host.run(["test", "-f", posixpath.join(path, "config.json")], timeout_s=30).ok


def expand(path: str, home: str) -> str:
    """``~`` and relative paths from the home folder of the host's user."""
    path = home + path[1:] if path == "~" or path.startswith("~/") else path
    return posixpath.normpath(posixpath.join(home, path))


def env_of_file(path: str) -> dict[str, str]:
    """``NAME=value`` lines of a file on this side.

    Raises:
        UsageError: it cannot be read.
    """
    from dflash_deploy.errors import UsageError

    try:
        lines = Path(path).expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the env_file {path} cannot be read", evidence=str(error)) from None
    pairs = [
        line.strip().removeprefix("export ").partition("=")
        for line in lines
        if "=" in line and not line.lstrip().startswith("#")
    ]
    return {name.strip(): value.strip().strip("\"'") for name, _, value in pairs}
