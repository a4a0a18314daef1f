"""`chorister worker` and `chorister jobs`: run jobs on PostgreSQL, and handle dead ones."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from chorister.canonical import b64url_encode
from chorister.cli import OPERATORS, ROLES, app, console
from chorister.cli.serve import aggregator_database, missing
from chorister.clock import SystemClock, utc_text
from chorister.errors import InvalidInput

if TYPE_CHECKING:
    from chorister.aggregator.jobs.job_queue import JobQueue

commands = typer.Typer(
    no_args_is_help=True, help="Show and revive jobs that workers have given up."
)
app.add_typer(commands, name="jobs", rich_help_panel=OPERATORS)

Config = Annotated[Path, typer.Option("--config", help="The aggregator's settings.")]


@app.command("worker", rich_help_panel=ROLES)
def worker_command(
    config: Config,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=64, help="Jobs at once; default: as the settings say.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65_535, help="Port for this worker's metrics.")
    ] = None,
) -> None:
    """Run an aggregator's jobs until stopped; any number of workers share them (PostgreSQL)."""
    try:
        from chorister.aggregator.config import load_config
        from chorister.aggregator.server import run_worker
    except ModuleNotFoundError as error:
        raise missing(error) from error
    settings = load_config(config)

    def ready() -> None:
        line = f"worker of {settings.role} {settings.url} started"
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    run_worker(settings, SystemClock(), jobs=jobs, metrics_port=metrics_port, ready=ready)


@commands.callback()
def jobs() -> None:
    """Show and revive jobs that workers have given up."""


@commands.command("list")
def list_command(
    config: Config,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List jobs that failed so often that no worker tries them any more."""
    with _queue(config) as queue:
        found = [
            {
                "job": each.number,
                "kind": each.kind,
                "task": b64url_encode(each.task_id) if each.task_id else None,
                "attempts": each.attempts,
                "since": each.since,
            }
            for each in queue.dead_jobs()
        ]
    if json_:
        typer.echo(json.dumps({"dead": found}))
        return
    table = Table(show_edge=False)
    for title in ("job", "kind", "task", "attempts", "since"):
        table.add_column(title, overflow="fold")
    for each in found:
        since = utc_text(int(str(each["since"]))) if each["since"] else ""
        kept = (each["job"], each["kind"], each["task"] or "", each["attempts"])
        table.add_row(*map(str, kept), since)
    console.print(table)


@commands.command("revive")
def revive_command(
    config: Config,
    numbers: Annotated[list[int] | None, typer.Argument(help="The numbers of the jobs.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All dead jobs.")] = False,
) -> None:
    """Let workers try dead jobs again, once their cause is fixed."""
    if bool(numbers) == everything:
        raise InvalidInput("name the jobs to revive, or use --all")
    with _queue(config) as queue:
        revived = queue.revive(None if everything else numbers)
    console.print(f"{revived} jobs will be tried again", highlight=False)


@contextlib.contextmanager
def _queue(path: Path) -> Iterator[JobQueue]:
    with aggregator_database(path) as (_, core):
        if core.queue is None:
            raise InvalidInput(f"{path} does not say `workers = true`: there is no job queue")
        yield core.queue
