"""`chorister serve console`: web pages for a team of analysts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chorister.cli import console
from chorister.cli.serve import Host, Port, commands
from chorister.clock import SystemClock
from chorister.errors import ServiceError


@commands.command("console")
def console_command(
    config: Annotated[
        Path, typer.Option("--config", help="Settings file (TOML); see docs/reference/console.md.")
    ] = Path("console.toml"),
    host: Host = None,
    port: Port = None,
) -> None:
    """Serve web pages for analysts: studies, questions, results. Runs until stopped."""
    try:
        from chorister.console.app import serve
        from chorister.console.config import ConsoleConfig
    except ModuleNotFoundError as error:
        raise ServiceError(
            f"the console needs more packages ({error.name}): pip install 'chorister[console]'"
        ) from error
    given = {"host": host, "port": port}
    settings = ConsoleConfig.load(config)
    settings = settings.model_copy(update={k: v for k, v in given.items() if v is not None})

    def ready(url: str) -> None:
        line = f"console listening on {url}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    serve(settings, SystemClock(), ready=ready)
