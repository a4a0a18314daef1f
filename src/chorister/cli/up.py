"""`chorister up`, `down` and `doctor`: everything on one machine, and what is wrong with it."""

from __future__ import annotations

import atexit
import contextlib
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from chorister.cli import JSON, START, app, console, needs_extra, print_json, say
from chorister.errors import InvalidInput, ServiceError

if TYPE_CHECKING:
    from chorister.fleet.deployment import Deployment
    from chorister.fleet.deployment_files import SampleTerms

FOLDER = Path("chorister-local")
_START_TIMEOUT_SECONDS = 600.0
_TRACK_WINDOWS = 12

_MARKS = {"good": "[green]✓[/]", "note": "[yellow]![/]", "bad": "[red]✗[/]"}

Folder = Annotated[Path, typer.Argument(help="The folder for all files.")]


@app.command(rich_help_panel=START)
def up(
    folder: Folder = FOLDER,
    fleet: Annotated[
        int | None, typer.Option(min=0, help="Also run this many simulated devices.")
    ] = None,
    track: Annotated[
        bool,
        typer.Option(
            "--track", help="Ask a series of one-minute windows, with answers that change."
        ),
    ] = False,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in the foreground; Ctrl-C stops everything.")
    ] = False,
    json_: JSON = False,
) -> None:
    """Start registry, leader, helper and console on this machine; `chorister down` stops them.

    The first start creates keys, tokens and a sample policy; later starts continue with them. As
    one person runs both aggregators, there is no protection against whoever runs this machine.
    """
    with needs_extra("server"):
        import uvicorn  # noqa: F401 (or the servers fail, after keys and folders were created)

        from chorister.fleet.deployment import Deployment
        from chorister.fleet.supervisor import Supervisor, running_pid
    new = not Deployment.exists(folder)
    deployment = Deployment.create(folder, _terms()) if new else Deployment.open(folder)
    pid = running_pid(deployment)
    if pid is None:
        deployment.check_format()
    devices = _fleet_size(deployment, fleet, running=pid is not None)
    if pid is None:
        deployment.check_ports()
    if track and (foreground or not devices):
        raise InvalidInput("--track asks the simulated devices: add --fleet 500, in the background")
    if foreground:
        _print_addresses(deployment, devices, new=new, json_=json_)
        Supervisor(deployment=deployment, fleet=devices).run()
        return
    if pid is None:
        status = console.status("starting")
        with status if not json_ else contextlib.nullcontext():
            supervisor = _start(deployment, devices)
            _await_devices(deployment, devices, supervisor, status.update)
    if track:
        _ask_series(deployment, devices)
    _print_addresses(deployment, devices, new=new, json_=json_, running=pid is not None)
    if track and not json_:
        say(
            f"\nA series is being answered: {_TRACK_WINDOWS} windows of a minute. In Python:\n"
            f'  study = chorister.connect("{deployment.profile}").study("commutes", '
            'analysis="user.profile")\n'
            "  study.tracks()[0].collect().plot()"
        )


@app.command(rich_help_panel=START)
def down(folder: Folder = FOLDER, json_: JSON = False) -> None:
    """Stop what `chorister up` started. Nothing is lost."""
    from chorister.fleet.deployment import Deployment
    from chorister.fleet.supervisor import stop_running

    stopped = stop_running(Deployment.open(folder))
    if json_:
        print_json({"stopped": stopped})
    else:
        say("stopped" if stopped else "nothing was running")


@app.command(rich_help_panel=START)
def doctor(
    folder: Annotated[
        Path | None,
        typer.Argument(help=f"A folder that `chorister up` created (default: {FOLDER})."),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            "--config", help="Instead: the settings file of a registry, leader or helper."
        ),
    ] = None,
    json_: JSON = False,
) -> None:
    """Check settings, keys, permissions, clocks, reachability and the sandbox.

    Changes nothing; exits with 1 if there are problems. Give it a folder that `chorister up`
    created; or, on an operator's machine, --config once for each server that runs there. Without
    either, it checks the default folder, if there is one, and this installation.
    """
    with needs_extra("server"):
        from chorister.fleet.deployment import Deployment
        from chorister.fleet.health_check import HealthCheck
    if folder is not None and config:
        raise InvalidInput("give a folder or --config, not both")
    health_check = HealthCheck()
    if config:
        for path in config:
            health_check.server(path)
    elif folder is not None or Deployment.exists(FOLDER):
        health_check.deployment(Deployment.open(folder or FOLDER))
    health_check.sandbox()
    findings = health_check.findings
    bad = sum(each.state == "bad" for each in findings)
    if json_:
        print_json({"healthy": not bad, "findings": [asdict(each) for each in findings]})
    else:
        for each in findings:
            line = f"{_MARKS[each.state]} {escape(each.what)}: {escape(each.why)}"
            console.print(line, soft_wrap=True)
            if each.remedy:
                say(f"    {each.remedy}")
        if not config and len({each.what for each in findings}) == 1:
            say(f"There is no deployment in {FOLDER}, so only this installation was checked.")
        say(f"{bad} problem{'' if bad == 1 else 's'} found" if bad else "no problems found")
    if bad:
        raise typer.Exit(1)


@app.command("fleet", hidden=True)
def fleet_command(
    folder: Folder,
    devices: Annotated[int, typer.Option(min=1, help="Number of simulated devices.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed for the people's data.")] = 1,
) -> None:
    """Run the simulated devices of a local deployment until stopped."""
    from chorister.cli.demo import exit_on_sigterm
    from chorister.fleet.deployment import Deployment
    from chorister.fleet.simulated_fleet import FleetPlan, SimulatedFleet, keep_answering

    deployment = Deployment.open(folder)
    plan = FleetPlan(devices=devices, seed=seed)
    with exit_on_sigterm(), SimulatedFleet(folder / "fleet", deployment, plan) as fleet:
        for line in keep_answering(fleet, deployment):
            say(line)


def _terms() -> SampleTerms:
    from chorister.fleet.deployment_files import SampleTerms

    return SampleTerms(
        reports=6,
        epsilon="6",
        device_epsilon="12",
        device_reports=12,
        longest_window="2m",
        period="1d",
    )


def _fleet_size(deployment: Deployment, wanted: int | None, *, running: bool) -> int:
    """The wanted number of simulated devices, or as many as there already are."""
    from chorister.fleet.simulated_fleet import FleetPlan, fleet_size, store_plan

    folder = deployment.folder / "fleet"
    there = fleet_size(folder)
    if wanted is None or wanted == there:
        return there
    if wanted < there:
        raise InvalidInput(
            f"there are already {there:,} simulated devices, and devices can't be removed: delete "
            f"{folder} to start over"
        )
    if running:
        where = deployment.folder
        raise InvalidInput(
            f"{where} is already running: `chorister down {where}`, then start it again"
        )
    store_plan(folder, FleetPlan(devices=wanted))
    return wanted


def _ask_series(deployment: Deployment, devices: int) -> None:
    """Ask how people go to work, every minute: of the simulated ones, more and more by bike."""
    from chorister.analyst.live_fleet import LiveFleet, Profile, connect
    from chorister.analyst.request import categories
    from chorister.fleet.people import COMMUTES

    profile = Profile.load(deployment.profile).model_copy(update={"devices": devices})
    fleet: LiveFleet = connect(profile)
    study = fleet.study("commutes", analysis="user.profile")
    if not study.tracks():
        study.track(
            categories("commute", COMMUTES), every="1m", windows=_TRACK_WINDOWS,
            answers_per_device=4, grace="1h",
        ).ask()  # fmt: skip


def _start(deployment: Deployment, devices: int) -> subprocess.Popen[bytes]:
    """Start a supervisor in the background, and wait until the servers are ready."""
    from chorister.fleet.deployment import COMMAND
    from chorister.fleet.supervisor import is_ready, running_pid

    log = deployment.log("up")
    arguments = ["up", str(deployment.folder), "--foreground"]
    if devices:
        arguments += ["--fleet", str(devices)]
    with log.open("wb") as file:
        process = subprocess.Popen(  # noqa: S603 (our own command)
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    # It outlives this command, unless the same process also stops it.
    atexit.register(process.poll)
    deadline = time.monotonic() + _START_TIMEOUT_SECONDS
    while not (running_pid(deployment) is not None and is_ready(deployment)):
        if process.poll() is not None:
            words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = [line for line in words if "error:" in line] or words or ["it wrote nothing"]
            raise ServiceError(f"it did not start: {last[-1].removeprefix('error: ')}")
        if time.monotonic() > deadline:
            process.terminate()
            raise ServiceError(
                f"it did not start within {_START_TIMEOUT_SECONDS:g} s; see {log.parent}"
            )
        time.sleep(0.1)
    return process


def _await_devices(
    deployment: Deployment,
    devices: int,
    supervisor: subprocess.Popen[bytes],
    show: Callable[[str], None],
) -> None:
    """Wait until the simulated devices can answer: a question asked earlier may miss them."""
    from chorister.fleet.simulated_fleet import devices_ready

    before, deadline = -1, 0.0
    while (ready := devices_ready(deployment.folder / "fleet")) < devices:
        show(f"creating devices: {ready:,} of {devices:,}")
        if ready > before:
            before, deadline = ready, time.monotonic() + _START_TIMEOUT_SECONDS
        if supervisor.poll() is not None or time.monotonic() > deadline:
            logs = deployment.log("up").parent
            raise ServiceError(f"only {ready:,} of {devices:,} devices were created; see {logs}")
        time.sleep(0.1)


def _print_addresses(
    deployment: Deployment, devices: int, *, new: bool, json_: bool, running: bool = False
) -> None:
    token = deployment.folder / "console" / "token"
    if json_:
        print_json(
            {
                "folder": str(deployment.folder),
                "console": deployment.console_url,
                "token": str(token),
                "registry": deployment.registry,
                "profile": str(deployment.profile),
                "policy": str(deployment.folder / "policy.toml"),
                "devices": devices,
                "new": new,
            }
        )
        return
    lines = [
        ("console", deployment.console_url),
        ("sign in with", f"the token in {token}"),
        ("registry", deployment.registry),
        ("policy", str(deployment.folder / "policy.toml")),
        ("profile", f"{deployment.profile}  (for chorister.connect)"),
        ("devices", f"{devices:,} simulated" if devices else "none; --fleet N adds simulated ones"),
        ("stop", f"chorister down {deployment.folder}"),
    ]
    again = "Already running." if running else "Started again."
    say("Created keys, tokens and a sample policy." if new else again)
    for name, value in lines:
        say(f"  {name:<13}{value}")
