"""`chorister demo`: a real private study on this machine, from an event on a device to a report.

Registry, leader and helper are three processes on loopback with fresh keys; every device has its
own encrypted store, policy, ledger and audit log. Simulated is what people hold, so that the truth
is known, and when devices look at the log.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from chorister.cli import START, app, console
from chorister.cli.demo_stories import STORIES, Algorithm
from chorister.cli.serve import missing
from chorister.errors import InvalidInput

REPORT = Path("chorister-demo.html")


class LiveSteps:
    """Steps on the terminal, the one under way with a bar."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: Any = None

    def step(self, what: str, total: int = 0) -> Callable[[int, int], None]:
        """Begin a step; the one before is done."""
        self.finish()
        task = self._task = self._bar.add_task(what, total=total or None)

        def tell(done: int, of: int) -> None:
            self._bar.update(task, completed=done, total=of)

        return tell

    def finish(self) -> None:
        """The last step is done."""
        if self._task is not None:
            self._bar.update(self._task, total=1, completed=1)
            self._bar.stop_task(self._task)


@app.command(rich_help_panel=START)
def demo(
    algorithm: Annotated[
        Algorithm, typer.Option(help="What to find out.", case_sensitive=False)
    ] = Algorithm.NGRAMS,
    devices: Annotated[int, typer.Option(help="Simulated devices.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of the people's data; noise has none.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(help=f"The HTML report's file; {REPORT} if left out, none with --json."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Also write the result's picture alone, as SVG.")
    ] = None,
) -> None:
    """Watch a real private study on this machine, beside the truth.

    Starts a registry and two aggregators on loopback with fresh keys, makes a fleet of devices, and
    puts one question after another to them. Shows the estimates with their intervals beside the
    truth, what each device spent, what the aggregators saw and could not see, and a question that
    the devices refuse. Everything is deleted at the end but the report.
    """
    story = STORIES[algorithm]
    if devices < story.least_devices:
        raise InvalidInput(
            f"--devices must be at least {story.least_devices:,}: fewer can't hide each other"
        )
    target = report if report is not None or as_json else REPORT
    for file in (target, picture):
        if file is not None and not file.absolute().parent.is_dir():
            raise InvalidInput(f"the folder {file.absolute().parent} does not exist")
    try:
        from chorister.cli.demo_pages import (
            as_json_tree,
            print_outcome,
            write_picture,
            write_report,
        )
        from chorister.cli.demo_run import run_demo, temporary_place
    except ModuleNotFoundError as error:
        raise missing(error) from error
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with (
        ended_in_order(),
        temporary_place(devices) as place,
        Progress(*columns, console=console, disable=as_json) as bar,
    ):
        steps = LiveSteps(bar)
        outcome = run_demo(place, story, devices=devices, seed=seed, show=steps)
        steps.finish()
    if target is not None:
        write_report(outcome, target, devices=devices)
    if picture is not None:
        write_picture(outcome, picture)
    if as_json:
        print(json.dumps(as_json_tree(outcome, devices=devices)))
        return
    print_outcome(outcome, console, devices=devices)
    if target is not None:
        console.print(f"\nThe report: {escape(str(target.absolute()))}", soft_wrap=True)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM ends as Ctrl-C does: servers are stopped, files deleted."""

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
