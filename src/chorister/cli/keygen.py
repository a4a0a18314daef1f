"""`chorister keygen`: create the keys, secrets and tokens of operators and analysts.

Private keys are written to files that only their owner can read, never over an existing file; what
others need to know is printed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from chorister.canonical import b64url_encode, sha256
from chorister.cli import OPERATORS, app
from chorister.key_files import (
    new_secret,
    token_digest,
    write_collector_key,
    write_private,
    write_signing_key,
)

commands = typer.Typer(no_args_is_help=True, help="Create keys, secrets and tokens.")
app.add_typer(commands, name="keygen", rich_help_panel=OPERATORS)

File = Annotated[Path, typer.Argument(help="The file to write; it must not exist.")]
JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@commands.callback()
def keygen() -> None:
    """Create keys, secrets and tokens, each in a file that only you can read."""


@commands.command("cosigning")
def cosigning_command(file: File, json_: JSON = False) -> None:
    """Create an Ed25519 key for cosigning (PEM); policies list its public key.

    Use it for the log's key and for authors' keys, too.
    """
    _print(json_, public_key=write_signing_key(file))


@commands.command("collector")
def collector_command(
    file: File,
    config_id: Annotated[int, typer.Option(min=0, max=255, help="The id of the config.")] = 1,
    json_: JSON = False,
) -> None:
    """Create an analyst's HPKE key pair (JSON), to which both aggregators seal results.

    Recipes and policies name it by its digest; both aggregators need its config.
    """
    config = write_collector_key(file, config_id)
    _print(json_, hpke_config=b64url_encode(config), digest=sha256(config).hex())


@commands.command("secret")
def secret_command(file: File, json_: JSON = False) -> None:
    """Create 32 random bytes: an at-rest key, or the verify key that leader and helper share."""
    write_private(file, new_secret().encode() + b"\n")
    _print(json_, bytes=32)


@commands.command("token")
def token_command(file: File, json_: JSON = False) -> None:
    """Create a bearer token; whoever accepts it gets only its digest."""
    token = new_secret()
    write_private(file, token.encode() + b"\n")
    _print(json_, digest=token_digest(token.encode()).hex())


def _print(json_: bool, **public: str | int) -> None:
    """Print what may be public, one value per line, to be copied."""
    if json_:
        typer.echo(json.dumps(public))
    else:
        for name, value in public.items():
            typer.echo(f"{name} {value}")
