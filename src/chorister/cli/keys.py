"""`chorister keys`: an aggregator's report keys, to which devices seal their reports.

The aggregator creates, publishes, retires and destroys them by itself (`hpke_lifetime` in its
settings); an operator can list them, or ask for the next one early.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from chorister.canonical import sha256
from chorister.cli import OPERATORS, app, console
from chorister.cli.serve import aggregator_database
from chorister.clock import utc_minute

commands = typer.Typer(no_args_is_help=True, help="List and rotate an aggregator's report keys.")
app.add_typer(commands, name="keys", rich_help_panel=OPERATORS)

Config = Annotated[Path, typer.Option("--config", help="The aggregator's settings.")]
JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@commands.command("list")
def list_command(config: Config, json_: JSON = False) -> None:
    """List all report keys ever created: waiting, in use, retired or destroyed."""
    with aggregator_database(config) as (_, core):
        found = [
            {
                "config_id": each.config[0],
                "digest": sha256(each.config).hex(),
                "state": each.state,
                "created": each.created,
                "published": each.published,
                "retired": each.retired,
            }
            for each in core.keys.list_keys()
        ]
    if json_:
        typer.echo(json.dumps({"keys": found}))
        return
    table = Table(show_edge=False)
    for title in ("id", "digest", "state", "created", "published", "retired"):
        table.add_column(title)
    for row in found:
        times = (_time(row[name]) for name in ("created", "published", "retired"))
        table.add_row(str(row["config_id"]), str(row["digest"])[:16], str(row["state"]), *times)
    console.print(table)


@commands.command("rotate")
def rotate_command(config: Config, json_: JSON = False) -> None:
    """Create the next report key now; the running aggregator publishes it in the log.

    Devices use it from the next checkpoint that both aggregators cosign. The key before it still
    opens reports that were sealed to it, and is destroyed once there can be no more of them.
    """
    with aggregator_database(config) as (_, core):
        waiting = core.keys.unpublished()
        made = waiting[0] if waiting else core.keys.generate()
    if json_:
        digest = sha256(made).hex()
        typer.echo(json.dumps({"config_id": made[0], "digest": digest, "made": not waiting}))
        return
    if waiting:
        typer.echo(f"key {made[0]} is already waiting to be published")
    else:
        typer.echo(f"created key {made[0]}; a running aggregator publishes it within a minute")


def _time(value: object) -> str:
    return utc_minute(value) if isinstance(value, int) else ""
