"""`chorister serve`: the processes of a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from chorister.cli import app, console
from chorister.clock import SystemClock
from chorister.errors import ServiceError

commands = typer.Typer(no_args_is_help=True, help="Run a server.")
app.add_typer(commands, name="serve")


@commands.callback()
def serve() -> None:
    """Run a server."""


@commands.command("registry")
def registry_command(
    config: Annotated[
        Path, typer.Option("--config", help="Settings in TOML; see docs/reference/registry.md.")
    ] = Path("registry.toml"),
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="The port; 0 lets the system choose.")
    ] = 8080,
    create: Annotated[
        bool, typer.Option("--create", help="Begin a new log: for the very first start only.")
    ] = False,
) -> None:
    """Publish recipes and keep the public log, until stopped."""
    try:
        from chorister.registry.config import RegistryConfig
        from chorister.registry.server import serve
    except ModuleNotFoundError as error:
        raise ServiceError(
            f"servers need more packages ({error.name}): pip install 'chorister[server]'"
        ) from error
    settings = RegistryConfig.load(config)

    def ready(url: str, registry: object) -> None:
        console.print(f"{escape(str(registry))} listening on {url}", highlight=False)

    serve(settings, SystemClock(), host=host, port=port, create=create, ready=ready)
