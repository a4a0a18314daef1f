"""`chorister doctor`: what is wrong with a deployment, and what to do about it.

Looks and changes nothing. Exit codes: 0 all is well, or there are notes only; 1 something is wrong.
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
        Path | None, typer.Argument(help=f"A folder of `chorister up`; {FOLDER} if left out.")
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", help="Instead: a registry's, leader's or helper's settings."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check settings, keys, permissions, clocks, reachability and the sandbox; exit with 1 if bad.

    With a folder of `chorister up` everything in it; on an operator's machine give --config once
    for each server that runs there.
    """
    try:
        from chorister.fleet.deployment import Deployment
        from chorister.fleet.examination import Examination
    except ModuleNotFoundError as error:
        raise missing(error) from error
    if folder is not None and config:
        raise InvalidInput("give a folder or --config, not both")
    examination = Examination()
    if config:
        for path in config:
            examination.server(path)
    else:
        examination.deployment(Deployment.open(folder or FOLDER))
    examination.sandbox()
    findings = examination.findings
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
        console.print("all is well" if not bad else f"{bad} to mend", highlight=False)
    if bad:
        raise typer.Exit(1)
