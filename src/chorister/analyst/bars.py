"""A bar that shows how a cohort fills."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from chorister.analyst import fleet
from chorister.analyst.rounds import Round

__all__ = ["waiting_bar"]


@contextmanager
def waiting_bar(study: str, round_: Round, wanted: bool | None) -> Iterator[fleet.Tell]:
    """Yield what a fleet calls while it waits; a bar on the terminal unless `wanted` is False."""
    shown = sys.stderr.isatty() if wanted is None else wanted
    if not shown:
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[words]}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"{study}, round {round_.number}", total=1.0, words="asked")

        def tell(progress: fleet.Progress) -> None:
            bar.update(task, completed=progress.filled, words=progress.waiting_for)

        yield tell
