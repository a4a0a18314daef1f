"""`chorister doctor`: what is wrong with a deployment, and what to do about it.

It changes nothing. Exit codes: 0 if there are no problems (there may be notes), else 1.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from chorister.cli import START, app, console
from chorister.cli.serve import missing
from chorister.cli.up import FOLDER
from chorister.errors import InvalidInput

_MARKS = {"good": "[green]✓[/]", "note": "[yellow]![/]", "bad": "[red]✗[/]"}


@app.command(rich_help_panel=START)
def doctor(
    folder: Annotated[
        Path | None, typer.Argument(help=f"A folder of `chorister up` (default: {FOLDER}).")
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            "--config", help="Instead: the settings file of a registry, leader or helper."
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check settings, keys, permissions, clocks, reachability and the sandbox.

    Exits with 1 if there are problems. Give it a folder of `chorister up`; or, on an operator's
    machine, --config once for each server that runs there.
    """
    try:
        from chorister.fleet.deployment import Deployment
        from chorister.fleet.health_check import HealthCheck
    except ModuleNotFoundError as error:
        raise missing(error) from error
    if folder is not None and config:
        raise InvalidInput("give a folder or --config, not both")
    health_check = HealthCheck()
    if config:
        for path in config:
            health_check.server(path)
    else:
        health_check.deployment(Deployment.open(folder or FOLDER))
    health_check.sandbox()
    findings = health_check.findings
    bad = sum(each.state == "bad" for each in findings)
    if json_:
        found = {"healthy": not bad, "findings": [asdict(each) for each in findings]}
        typer.echo(json.dumps(found))
    else:
        for each in findings:
            line = f"{_MARKS[each.state]} {escape(each.what)}: {escape(each.why)}"
            console.print(line, highlight=False, soft_wrap=True)
            if each.remedy:
                console.print(f"    {escape(each.remedy)}", highlight=False, soft_wrap=True)
        problems = f"{bad} problem{'' if bad == 1 else 's'} found"
        console.print(problems if bad else "no problems found", highlight=False)
    if bad:
        raise typer.Exit(1)
