"""`chorister serve` and `chorister worker`: run the servers of a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chorister.cli import ROLES, app, needs_extra, say
from chorister.clock import SystemClock
from chorister.errors import InvalidInput

commands = typer.Typer(no_args_is_help=True, help="Run a server until it is stopped.")
app.add_typer(commands, name="serve", rich_help_panel=ROLES)

Config = Annotated[Path, typer.Option("--config", help="The settings file, in TOML.")]
Host = Annotated[str | None, typer.Option(help="The address to listen on; overrides the settings.")]
Port = Annotated[
    int | None,
    typer.Option(min=0, max=65_535, help="The port; 0 for any free port. Overrides the settings."),
]
BeginLog = Annotated[
    bool,
    typer.Option(
        "--begin-log", help="First start only: cosign a log that is new to this aggregator."
    ),
]
Adopt = Annotated[
    Path | None,
    typer.Option(
        "--adopt-checkpoint",
        help="If the folder `head` was lost: the newest checkpoint that was cosigned here.",
    ),
]


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
        bool, typer.Option("--create", help="First start only: create a new log.")
    ] = False,
) -> None:
    """Publish recipes and keep the public log."""
    with needs_extra("server"):
        from chorister.registry.server import RegistryConfig, serve
    settings = RegistryConfig.load(config)

    def ready(url: str, _registry: object) -> None:
        say(f"registry {settings.origin} listening on {url}")

    serve(settings, SystemClock(), host=host, port=port, create=create, ready=ready)


@commands.command("leader")
def leader_command(
    config: Config = Path("leader.toml"),
    host: Host = None,
    port: Port = None,
    begin_log: BeginLog = False,
    adopt_checkpoint: Adopt = None,
) -> None:
    """Accept reports, verify them with the helper, and release noisy sums.

    docs/reference/aggregator.md describes the settings.
    """
    _serve_aggregator("leader", config, host, port, begin_log, adopt_checkpoint)


@commands.command("helper")
def helper_command(
    config: Config = Path("helper.toml"),
    host: Host = None,
    port: Port = None,
    begin_log: BeginLog = False,
    adopt_checkpoint: Adopt = None,
) -> None:
    """Verify reports with the leader, and release noisy sums.

    docs/reference/aggregator.md describes the settings.
    """
    _serve_aggregator("helper", config, host, port, begin_log, adopt_checkpoint)


def _serve_aggregator(
    role: str, path: Path, host: str | None, port: int | None, begin: bool, adopt: Path | None
) -> None:
    with needs_extra("server"):
        from chorister.aggregator.config import load_config
        from chorister.aggregator.server import serve
    settings = load_config(path)
    if settings.role != role:
        raise InvalidInput(
            f"{path} is for a {settings.role}: run `chorister serve {settings.role}`"
        )
    settings = settings.model_copy(update=_given(host, port))

    def ready(url: str) -> None:
        say(f"{role} {settings.url} listening on {url}")

    serve(settings, SystemClock(), begin_log=begin, adopt=adopt, ready=ready)


@commands.command("console")
def console_command(
    config: Annotated[
        Path, typer.Option("--config", help="Settings in TOML; see docs/reference/console.md.")
    ] = Path("console.toml"),
    host: Host = None,
    port: Port = None,
) -> None:
    """Serve web pages for analysts: studies, questions, results."""
    with needs_extra("console"):
        from chorister.console.app import serve
        from chorister.console.config import ConsoleConfig
    settings = ConsoleConfig.load(config).model_copy(update=_given(host, port))
    serve(settings, SystemClock(), ready=lambda url: say(f"console listening on {url}"))


def _given(host: str | None, port: int | None) -> dict[str, str | int]:
    return {k: v for k, v in {"host": host, "port": port}.items() if v is not None}


@app.command("worker", rich_help_panel=ROLES)
def worker_command(
    config: Annotated[Path, typer.Option("--config", help="The aggregator's settings file.")],
    jobs: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Number of jobs at once; overrides the settings."),
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65_535, help="Port for this worker's metrics.")
    ] = None,
) -> None:
    """Run an aggregator's jobs until stopped; any number of workers share them (PostgreSQL)."""
    with needs_extra("server"):
        from chorister.aggregator.config import load_config
        from chorister.aggregator.server import run_worker
    settings = load_config(config)
    run_worker(
        settings,
        SystemClock(),
        jobs=jobs,
        metrics_port=metrics_port,
        ready=lambda: say(f"worker of {settings.role} {settings.url} started"),
    )
