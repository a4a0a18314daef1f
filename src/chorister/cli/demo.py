"""`chorister demo`: a real private study on this machine, from an event on a device to a report.

Registry, leader and helper are three processes on loopback with fresh keys; every device has its
own encrypted store, policy, ledger and audit log. Only the people's data is simulated, so that the
truth is known, and when devices poll.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from chorister.cli import JSON, START, app, console, needs_extra, print_json, say
from chorister.cli.demo_scenarios import SCENARIOS, DemoAlgorithm
from chorister.errors import InvalidInput

REPORT = Path("chorister-demo.html")


@app.command(rich_help_panel=START)
def demo(
    algorithm: Annotated[
        DemoAlgorithm, typer.Option(help="The algorithm to show.", case_sensitive=False)
    ] = DemoAlgorithm.NGRAMS,
    devices: Annotated[int, typer.Option(help="Number of simulated devices.")] = 2000,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed for the people's data. Noise has no seed.")
    ] = 1,
    as_json: JSON = False,
    report: Annotated[
        Path | None,
        typer.Option(help=f"File for the HTML report (default: {REPORT}; none with --json)."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Also write the chart as an SVG file.")
    ] = None,
) -> None:
    """Run a real private study on this machine, and compare its result with the truth.

    Starts a registry and two aggregators on loopback with fresh keys, creates a fleet of devices,
    and asks them one question after another. Shows the estimates with their intervals next to the
    truth, what each device spent, what the aggregators saw and could not see, and a question that
    the devices refuse. At the end, everything but the report is deleted.
    """
    scenario = SCENARIOS[algorithm]
    if devices < scenario.least_devices:
        raise InvalidInput(
            f"--devices must be at least {scenario.least_devices:,}: fewer can't hide each other"
        )
    target = report if report is not None or as_json else REPORT
    for file in (target, picture):
        if file is not None and not file.absolute().parent.is_dir():
            raise InvalidInput(f"the folder {file.absolute().parent} does not exist")
    with needs_extra("server"):
        from chorister.cli.demo_pages import (
            as_json_tree,
            print_outcome,
            write_picture,
            write_report,
        )
        from chorister.cli.demo_run import LiveSteps, run_demo, temporary_folder
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with (
        exit_on_sigterm(),
        temporary_folder(devices) as place,
        Progress(*columns, console=console, disable=as_json) as bar,
    ):
        steps = LiveSteps(bar)
        outcome = run_demo(place, scenario, devices=devices, seed=seed, show=steps)
        steps.finish()
    if target is not None:
        write_report(outcome, target, devices=devices)
    if picture is not None:
        write_picture(outcome, picture)
    if as_json:
        print_json(as_json_tree(outcome, devices=devices))
        return
    print_outcome(outcome, console, devices=devices)
    if target is not None:
        say(f"\nReport: {target.absolute()}")
    if algorithm is not DemoAlgorithm.TREND:
        say("See a question over time: chorister demo --algorithm trend")


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does: servers stop, files are deleted."""

    def end(_: int, __: FrameType | None) -> None:
        sys.exit(143)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
