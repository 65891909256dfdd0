"""``router up|status|down``: SGLang's own router in front of replicas on several hosts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_deploy.cli.common import HostArgument, JsonOption, emit_json
from dflash_deploy.cli.options import BreakLock

if TYPE_CHECKING:
    from dflash_deploy.facts import Facts
    from dflash_deploy.host import Host
    from dflash_deploy.launch import ServiceState
    from dflash_deploy.plan.router import RouterSettings

READY_S = 180.0
Root = Annotated[str | None, typer.Option("--root", help="Folder of the deployment on the host.")]
Inventory = Annotated[str | None, typer.Option("--inventory", help="Another hosts.toml.")]
ModeOption = Annotated[str | None, typer.Option("--mode", help="systemd-system, systemd-user, supervisor or auto.")]
Port = Annotated[int, typer.Option("--port", help="Port of the router; the next one is that of its metrics.")]


def register(app: typer.Typer) -> None:
    """Add this group's commands to ``app``."""
    group = typer.Typer(
        help="SGLang's own router in front of replicas on several hosts.", no_args_is_help=True, rich_markup_mode=None
    )
    for command in (up, status, down):
        group.command()(command)
    app.add_typer(group, name="router")


def up(
    host: HostArgument,
    replica: Annotated[list[str], typer.Option("--replica", help="A host or group that serves; repeatable.")],
    port: Port = 30080,
    bind: Annotated[str, typer.Option("--bind", help="Address that the router listens on.")] = "127.0.0.1",
    policy: Annotated[
        str, typer.Option("--policy", help="cache_aware, power_of_two, round_robin or random.")
    ] = "cache_aware",
    router_arg: Annotated[
        list[str] | None, typer.Option("--router-arg", help="A further argument, repeatable.")
    ] = None,
    wheelhouse: Annotated[str | None, typer.Option("--wheelhouse", metavar="DIR", help="Install from here.")] = None,
    root: Root = None,
    mode: ModeOption = None,
    inventory: Inventory = None,
    break_lock: BreakLock = False,
    as_json: JsonOption = False,
) -> None:
    """Install, start and prove the router: every replica healthy, and an answer through it. A second run changes
    nothing."""
    from dflash_deploy.cli.connection import locked
    from dflash_deploy.cli.recap import Recap
    from dflash_deploy.inventory import resolve_all
    from dflash_deploy.plan.router import replica_urls

    target = resolve_all([host], inventory=inventory)[0]
    urls = replica_urls(resolve_all(replica, inventory=inventory), target)
    options = {"root": root, "mode": mode, "inventory": inventory}
    made = {"port": port, "bind": bind, "policy": policy, "replicas": urls, "args": router_arg or []}
    recap = Recap()
    with recap.printed(host, as_json), _router(host, options, made) as (machine, facts, settings):
        with locked(machine, settings.root, "router", break_lock=break_lock):
            _bring_up(machine, facts, settings, recap, wheelhouse)
        recap.data["url"] = settings.url
        recap.lines += [f"url: {settings.url}", *(f"replica: {url}" for url in urls)]


def status(
    host: HostArgument,
    port: Port = 30080,
    root: Root = None,
    mode: ModeOption = None,
    inventory: Inventory = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether the router runs, and how its replicas are. Exit 9 when it or a replica is not well."""
    with _router(host, {"root": root, "mode": mode, "inventory": inventory}, {"port": port}) as (machine, facts, made):
        state = _observe(machine, facts, made)
        workers: list[dict[str, Any]] = []
        if state.running:
            with machine.forward(made.port) as here:
                workers = _workers(f"http://127.0.0.1:{here}")
    well = state.running and bool(workers) and all(each["is_healthy"] for each in workers)
    if as_json:
        emit_json({"ok": well, "host": host, "service": made.service, "workers": workers, **state.as_dict()})
    else:
        print(f"{made.service} on {host}: {'running' if state.running else 'not running'}")
        for each in workers:
            print(f"  {each['url']}: {'healthy' if each['is_healthy'] else 'not healthy'}")
    if not well:
        raise typer.Exit(9)


def down(
    host: HostArgument,
    root: Root = None,
    mode: ModeOption = None,
    inventory: Inventory = None,
    break_lock: BreakLock = False,
    as_json: JsonOption = False,
) -> None:
    """End the router, and keep it from starting at boot. The replicas go on."""
    from dflash_deploy.cli.connection import locked
    from dflash_deploy.cli.recap import Recap, tell
    from dflash_deploy.execute import execute
    from dflash_deploy.model import Plan, Status
    from dflash_deploy.plan.launch import stop_steps

    recap = Recap()
    options = {"root": root, "mode": mode, "inventory": inventory}
    with (
        recap.printed(host, as_json),
        _router(host, options, {}) as (machine, facts, settings),
        locked(machine, settings.root, "router", break_lock=break_lock),
        recap.step("down") as note,
    ):
        state = _observe(machine, facts, settings)
        note.detail = "nothing runs"
        if state.running or state.enabled or state.orphans or state.pid:
            execute(Plan("down", tuple(stop_steps(settings, facts))), machine, on_progress=tell)
            note.status, note.detail = Status.CHANGED, "ended"


@contextlib.contextmanager
def _router(
    name: str, options: Mapping[str, Any], made: Mapping[str, Any]
) -> Iterator[tuple[Host, Facts, RouterSettings]]:
    from dflash_deploy.cli.connection import connected
    from dflash_deploy.facts import gather
    from dflash_deploy.plan.router import POLICIES, ROUTER_PORT, RouterSettings
    from dflash_deploy.settings import effective

    with connected(name, options) as (host, entry):
        facts = gather(host, discover=False)
        # Of the host's table only what concerns the place: the models are the replicas' matter.
        place: dict[str, Any] = {key: entry[key] for key in ("root", "mode") if key in entry}
        base = effective(host.name, facts, options={**options, "stack": "cpu"}, entry=place, serving=False)
        given = {"port": ROUTER_PORT, "bind": "127.0.0.1", "policy": POLICIES[0], "replicas": [], "args": [], **made}
        yield host, facts, RouterSettings.of(base, **given)


def _observe(host: Host, facts: Facts, settings: RouterSettings) -> ServiceState:
    from dflash_deploy.launch import observe

    return observe(host, settings, facts)


def _bring_up(host: Host, facts: Facts, settings: RouterSettings, recap: Any, wheelhouse: str | None) -> None:
    import posixpath

    from dflash_deploy.assets import templates_dir
    from dflash_deploy.cli.recap import tell
    from dflash_deploy.execute import Journal, execute
    from dflash_deploy.launch import present
    from dflash_deploy.model import Plan, Status
    from dflash_deploy.plan.launch import plan_launch, render
    from dflash_deploy.plan.offline import cache_folder, to_upload
    from dflash_deploy.plan.provision import VenvState, plan_provision
    from dflash_deploy.releases.look import look
    from dflash_deploy.wheelhouse.cache import cached
    from dflash_deploy.wheelhouse.check import refuse_damaged
    from dflash_deploy.wheelhouse.house import read_house

    journal = Journal(host, posixpath.join(settings.root, "journal.jsonl"))

    def run(planned: Plan) -> None:
        with recap.step(planned.name) as note:
            outcomes = execute(planned, host, journal=journal, on_progress=tell)
            changed = any(each.status == Status.CHANGED for each in outcomes)
            note.status, note.detail = (Status.CHANGED if changed else Status.OK), planned.reason

    seen = look(host, settings.root, settings.service, bases=[settings.venv]).venvs.get(settings.venv)
    state = VenvState.of_look(seen) if seen is not None else VenvState()
    house = read_house(wheelhouse) if wheelhouse else None
    held = cached(host, cache_folder(settings)) if house else {}
    planned = plan_provision(settings, facts, state, house, held)
    if house is not None and not planned.empty:
        names = {blob.name for blob in to_upload(house, held)}
        refuse_damaged(house, [wheel for wheel in house.wheels if wheel.file in names])
    run(planned)
    files = render(settings, facts, templates_dir(), [settings.stack.pins])
    run(plan_launch(settings, facts, files, present(host, settings, facts, _observe(host, facts, settings))))
    with recap.step("health") as note:
        note.detail = _prove(host, facts, settings)


def _prove(host: Host, facts: Facts, settings: RouterSettings) -> str:
    """Every replica is healthy in the router's eyes, and answers come through it.

    Raises:
        Unhealthy: which replica is not, or what came instead of an answer.
    """
    from dflash_deploy.errors import Unhealthy
    from dflash_deploy.health import Probe
    from dflash_deploy.health.http import NoReply
    from dflash_deploy.health.probes import ask, degenerate
    from dflash_deploy.launch import tail

    deadline, workers = time.monotonic() + READY_S, []
    with host.forward(settings.port) as port:
        url = f"http://127.0.0.1:{port}"
        while True:
            workers = _workers(url)
            if {each["url"] for each in workers if each["is_healthy"]} >= set(settings.replicas):
                break
            alive = _observe(host, facts, settings).running
            if not alive or time.monotonic() > deadline:
                known = {each["url"]: each["is_healthy"] for each in workers}
                what = [f"{each}: {'not healthy' if each in known else 'not registered'}"
                        for each in settings.replicas if not known.get(each)]  # fmt: skip
                raise Unhealthy(
                    f"the router on {host.name} " + ("does not reach every replica" if alive else "does not run"),
                    evidence=[*what, *tail(host, settings, 4)],
                    hint="dflash-deploy health of each replica; its bind must be an address that this host reaches",
                )
            time.sleep(0.5)
        for number in range(2 * len(settings.replicas)):
            try:
                answer = ask(url, Probe(f"The capital city of France is ({number})", 8), timeout_s=600.0)
            except NoReply as error:
                raise Unhealthy(f"no answer through the router on {host.name}", evidence=error.detail) from None
            if fault := answer.error or degenerate(answer.text):
                raise Unhealthy(f"no answer through the router on {host.name}", evidence=fault)
    return f"{len(workers)} replicas healthy, {2 * len(settings.replicas)} answers through it; {settings.policy}"


def _workers(url: str) -> list[dict[str, Any]]:
    """What the router says of its replicas; empty while it does not answer."""
    from dflash_deploy.health.http import NoReply, request

    try:
        found = request(url, "/workers", timeout_s=10).json()
    except NoReply:
        return []
    rows = found.get("workers") if isinstance(found, dict) else None
    return [{"url": str(w.get("url")), "is_healthy": bool(w.get("is_healthy")), "model": w.get("model_id")}
            for w in rows or [] if isinstance(w, dict)]  # fmt: skip
