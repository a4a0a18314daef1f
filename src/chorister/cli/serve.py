"""`chorister serve`: run the servers of a deployment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from chorister.cli import ROLES, app, console
from chorister.clock import SystemClock
from chorister.errors import InvalidInput, ServiceError

if TYPE_CHECKING:
    from chorister.aggregator.config import HelperConfig, LeaderConfig
    from chorister.aggregator.service import Core

commands = typer.Typer(no_args_is_help=True, help="Run a server.")
app.add_typer(commands, name="serve", rich_help_panel=ROLES)

Config = Annotated[
    Path, typer.Option("--config", help="Settings in TOML; see docs/reference/aggregator.md.")
]
Host = Annotated[str | None, typer.Option(help="The address to listen on; overrides the settings.")]
Port = Annotated[
    int | None,
    typer.Option(min=0, max=65_535, help="The port; 0 for any free port. Overrides the settings."),
]
BeginLog = Annotated[
    bool,
    typer.Option(
        "--begin-log", help="Cosign a log that is new to this aggregator: first start only."
    ),
]
Adopt = Annotated[
    Path | None,
    typer.Option(
        "--adopt-checkpoint",
        help="Continue from this checkpoint, the newest one cosigned here, after losing `head`.",
    ),
]


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
        int, typer.Option(min=0, max=65_535, help="The port; 0 for any free port.")
    ] = 8080,
    create: Annotated[
        bool, typer.Option("--create", help="Create a new log: first start only.")
    ] = False,
) -> None:
    """Publish recipes and keep the public log, until stopped."""
    try:
        from chorister.registry.server import RegistryConfig, serve
    except ModuleNotFoundError as error:
        raise missing(error) from error
    settings = RegistryConfig.load(config)

    def ready(url: str, registry: object) -> None:
        console.print(f"{escape(str(registry))} listening on {url}", highlight=False)

    serve(settings, SystemClock(), host=host, port=port, create=create, ready=ready)


@commands.command("leader")
def leader_command(
    config: Config = Path("leader.toml"),
    host: Host = None,
    port: Port = None,
    begin_log: BeginLog = False,
    adopt_checkpoint: Adopt = None,
) -> None:
    """Accept reports, verify them with the helper, and release noisy sums, until stopped."""
    _serve_aggregator("leader", config, host, port, begin_log, adopt_checkpoint)


@commands.command("helper")
def helper_command(
    config: Config = Path("helper.toml"),
    host: Host = None,
    port: Port = None,
    begin_log: BeginLog = False,
    adopt_checkpoint: Adopt = None,
) -> None:
    """Verify reports with the leader, until stopped."""
    _serve_aggregator("helper", config, host, port, begin_log, adopt_checkpoint)


def _serve_aggregator(
    role: str, path: Path, host: str | None, port: int | None, begin: bool, adopt: Path | None
) -> None:
    try:
        from chorister.aggregator.config import load_config
        from chorister.aggregator.server import serve
    except ModuleNotFoundError as error:
        raise missing(error) from error
    settings = load_config(path)
    if settings.role != role:
        raise InvalidInput(
            f"{path} is for a {settings.role}: run `chorister serve {settings.role}`"
        )
    given = {"host": host, "port": port}
    settings = settings.model_copy(update={k: v for k, v in given.items() if v is not None})

    def ready(url: str) -> None:
        line = f"{role} {settings.url} listening on {url}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    serve(settings, SystemClock(), begin_log=begin, adopt=adopt, ready=ready)


@contextlib.contextmanager
def aggregator_database(path: Path) -> Iterator[tuple[LeaderConfig | HelperConfig, Core]]:
    """Open the database of the aggregator with these settings, without starting a server."""
    try:
        from chorister.aggregator.config import load_config
        from chorister.aggregator.service import open_core
    except ModuleNotFoundError as error:
        raise missing(error) from error
    config = load_config(path)
    core = open_core(config, SystemClock(), migrate=False)
    try:
        yield config, core
    finally:
        core.database.close()


def missing(error: ModuleNotFoundError) -> ServiceError:
    """Return the error for a server's packages that are not installed."""
    return ServiceError(
        f"servers need more packages ({error.name}): pip install 'chorister[server]'"
    )
