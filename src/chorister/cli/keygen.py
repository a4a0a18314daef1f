"""`chorister keygen`: the keys, secrets and tokens of operators and analysts.

Private halves go into files that only their owner can read, and never replace one that is there;
what others need to know is printed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from chorister._native import HPKEKeypair
from chorister.canonical import b64url_encode, sha256
from chorister.cli import OPERATORS, app

commands = typer.Typer(no_args_is_help=True, help="Make keys, secrets and tokens.")
app.add_typer(commands, name="keygen", rich_help_panel=OPERATORS)

File = Annotated[Path, typer.Argument(help="The file to write; it must not exist.")]
JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@commands.callback()
def keygen() -> None:
    """Make keys, secrets and tokens, each in a file that only you can read."""


@commands.command("cosigning")
def cosigning_command(file: File, json_: JSON = False) -> None:
    """An Ed25519 key to cosign with (PEM); policies list the public half.

    The log's key and authors' keys are of the same kind.
    """
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write(file, pem)
    _tell(json_, public_key=b64url_encode(key.public_key().public_bytes_raw()))


@commands.command("collector")
def collector_command(
    file: File,
    config_id: Annotated[int, typer.Option(min=0, max=255, help="The config's id.")] = 1,
    json_: JSON = False,
) -> None:
    """An analyst's HPKE key pair (JSON), to which both aggregators seal results.

    Recipes and policies name it by its digest; both aggregators are given its config.
    """
    keys = HPKEKeypair.generate(config_id)
    document = {
        "config": b64url_encode(keys.config),
        "config_id": config_id,
        "public_key": b64url_encode(keys.public_key),
        "private_key": b64url_encode(keys.private_key()),
    }
    _write(file, json.dumps(document, indent=1).encode() + b"\n")
    _tell(json_, hpke_config=b64url_encode(keys.config), digest=sha256(keys.config).hex())


@commands.command("secret")
def secret_command(file: File, json_: JSON = False) -> None:
    """32 random bytes: an at-rest key, or the verify key that leader and helper share."""
    from chorister.aggregator.secret_files import new_secret

    _write(file, new_secret().encode() + b"\n")
    _tell(json_, bytes=32)


@commands.command("token")
def token_command(file: File, json_: JSON = False) -> None:
    """A bearer token; whoever accepts it is given its digest alone."""
    from chorister.aggregator.secret_files import new_secret, token_digest

    token = new_secret()
    _write(file, token.encode() + b"\n")
    _tell(json_, digest=token_digest(token.encode()).hex())


def _write(file: Path, data: bytes) -> None:
    from chorister.aggregator.secret_files import write_private

    write_private(file, data)


def _tell(json_: bool, **public: str | int) -> None:
    """What may be known, alone on its lines, to be copied."""
    if json_:
        typer.echo(json.dumps(public))
    else:
        for name, value in public.items():
            typer.echo(f"{name} {value}")
