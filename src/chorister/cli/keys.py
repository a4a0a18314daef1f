"""`chorister keys`: an aggregator's report keys, to which devices seal.

The aggregator makes, logs, retires and destroys them by itself (`hpke_lifetime` in its settings);
an operator looks, or asks for the next one before its time.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from chorister.canonical import sha256
from chorister.cli import OPERATORS, app, console
from chorister.cli.serve import missing
from chorister.clock import SystemClock

if TYPE_CHECKING:
    from chorister.aggregator.hpke_keys import KeyRing

commands = typer.Typer(no_args_is_help=True, help="An aggregator's report keys: look, rotate.")
app.add_typer(commands, name="keys", rich_help_panel=OPERATORS)

Config = Annotated[Path, typer.Option("--config", help="The aggregator's settings.")]
JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@commands.command("list")
def list_command(config: Config, json_: JSON = False) -> None:
    """All report keys ever made: waiting for the log, in use, retired or destroyed."""
    with _opened(config) as keys:
        found = [
            {
                "config_id": each.config[0],
                "digest": sha256(each.config).hex(),
                "state": each.state,
                "created": each.created,
                "published": each.published,
                "retired": each.retired,
            }
            for each in keys.listing()
        ]
    if json_:
        typer.echo(json.dumps({"keys": found}))
        return
    table = Table(show_edge=False)
    for title in ("id", "digest", "state", "made", "in the log", "retired"):
        table.add_column(title)
    for row in found:
        times = (_time(row[name]) for name in ("created", "published", "retired"))
        table.add_row(str(row["config_id"]), str(row["digest"])[:16], str(row["state"]), *times)
    console.print(table)


@commands.command("rotate")
def rotate_command(config: Config, json_: JSON = False) -> None:
    """Make the next report key now; the running aggregator signs it and puts it into the log.

    Devices use it from the next checkpoint that both aggregators cosigned. The one before still
    opens what was sealed to it, and is destroyed when nothing can be any more.
    """
    with _opened(config) as keys:
        waiting = keys.unpublished()
        made = waiting[0] if waiting else keys.generate()
    if json_:
        digest = sha256(made).hex()
        typer.echo(json.dumps({"config_id": made[0], "digest": digest, "made": not waiting}))
        return
    if waiting:
        typer.echo(f"key {made[0]} is on its way into the log already")
    else:
        typer.echo(f"made key {made[0]}; the aggregator logs it within a minute while it runs")


def _time(value: object) -> str:
    if not isinstance(value, int):
        return ""
    return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[KeyRing]:
    try:
        from chorister.aggregator.config import load_config
        from chorister.aggregator.service import open_core
    except ModuleNotFoundError as error:
        raise missing(error) from error
    core = open_core(load_config(path), SystemClock(), migrate=False)
    try:
        yield core.keys
    finally:
        core.database.close()
