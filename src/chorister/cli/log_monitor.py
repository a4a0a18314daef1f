"""`chorister log monitor`: watch a log, and tell what is asked."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from chorister.cli import JSON, CABundle, console, say
from chorister.cli.log import Where, commands, describe, errors_reported, open_source
from chorister.clock import SystemClock
from chorister.errors import LogWithheld, ServiceError, Unreachable
from chorister.http_client import WebClient
from chorister.policy import Policy
from chorister.transparency.auditor import read_policies
from chorister.transparency.entries import ListEntry
from chorister.transparency.monitor import LogMonitor
from chorister.transparency.trust import Authority


@commands.command("monitor")
def monitor_command(
    where: Where,
    kept: Annotated[
        Path | None,
        typer.Option(help="The file for the newest checkpoint, so that a restart goes on there."),
    ] = None,
    policy: Annotated[
        list[Path] | None,
        typer.Option(help="A policy whose keys to trust; by default those that the log publishes."),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Seconds between two looks.")] = 60,
    once: Annotated[bool, typer.Option("--once", help="Look once, and exit.")] = False,
    webhook: Annotated[
        str | None, typer.Option(help="A URL to which each new entry is posted, as JSON.")
    ] = None,
    ca_bundle: CABundle = None,
    json_: JSON = False,
) -> None:
    """Watch a log: print each new entry in words, and exit with 1 if the log is wrong.

    Everything is verified as by `log verify`, and every look has to extend the one before.
    """
    own = [Policy.load(path) for path in policy or ()]
    with open_source(where, ca_bundle) as source, errors_reported(json_):
        authority = Authority.of(own) if own else read_policies(source).authority
        monitor = LogMonitor(source, authority=authority, clock=SystemClock(), kept=kept)
        while True:
            try:
                new = monitor.look()
            except LogWithheld as error:
                if once:
                    raise
                say(f"{error}; trying again in {every} s")
                new = []
            for logged in new:
                if not isinstance(logged.entry, ListEntry):
                    row = describe(logged, monitor.recipes.get(logged.index), set())
                    _tell(row, json_, webhook)
            monitor.keep()
            if once:
                return
            time.sleep(every)


def _tell(row: dict[str, Any], json_: bool, webhook: str | None) -> None:
    row = {name: value for name, value in row.items() if name != "current"}
    if json_:
        typer.echo(json.dumps(row, ensure_ascii=False))
    else:
        text = f"[bold]{row['index']}[/] {row['kind']}: {escape(row['what'])}, by {row['by'][:8]}"
        console.print(text, soft_wrap=True)
    if webhook is not None:
        try:
            with WebClient(timeout=30.0) as web:
                answer = web.exchange("POST", webhook, body=json.dumps(row).encode(), limit=65_536)
        except Unreachable as error:
            raise ServiceError(f"the webhook can't be reached: {error}") from error
        if answer.status >= 300:
            say(f"the webhook answers {answer.status}")
