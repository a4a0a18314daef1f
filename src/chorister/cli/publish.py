"""`chorister recipe publish`, `end` and `revoke`: what an author writes into the public log.

All three may be repeated: what is in the log already stays where it is.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from chorister.canonical import b64url_decode, b64url_encode, key_id
from chorister.cli import console
from chorister.cli.recipe import commands, private_key, read_file
from chorister.errors import DecodeError, InvalidInput, NotAuthorized, SubmissionRefused
from chorister.recipe import SignedRecipe
from chorister.transparency.auditor import read_policies
from chorister.transparency.client import RegistryClient
from chorister.transparency.entries import (
    EndReason,
    Entry,
    KeyRevocation,
    RecipeEnd,
    RecipeEntry,
)
from chorister.transparency.sources import HTTPSource

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A signed recipe.")]
RegistryURL = Annotated[str, typer.Option("--registry", help="The registry's URL.")]
Key = Annotated[Path, typer.Option("--key", help="The Ed25519 key to sign with, PEM (PKCS 8).")]
JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class Reason(StrEnum):
    """Why a recipe ends, as the command line spells it."""

    WITHDRAWN = "withdrawn"
    TARGET_REACHED = "target-reached"


@commands.command("publish")
def publish_command(file: RecipeFile, registry: RegistryURL, json_: JSON = False) -> None:
    """Put a signed recipe into the public log; exit with 1 if the registry refuses it.

    Its key is looked up in the policies that the registry publishes.
    """
    signed = SignedRecipe.parse(read_file(file).strip())
    with _refusals(json_):
        keys = [b64url_encode(key) for key in _author_keys(registry, signed)]
        SignedRecipe.open(signed.jws, keys)
        entry = RecipeEntry(author_key=b64url_decode(keys[0]), jws=signed.jws)
        _submit(entry, registry, json_)


@commands.command("end")
def end_command(
    file: RecipeFile,
    registry: RegistryURL,
    key: Key,
    reason: Annotated[Reason, typer.Option(help="Why it ends.")] = Reason.WITHDRAWN,
    json_: JSON = False,
) -> None:
    """End a recipe before its time, with the key that signed it: it is asked no more."""
    signed = SignedRecipe.parse(read_file(file).strip())
    why = EndReason.WITHDRAWN if reason is Reason.WITHDRAWN else EndReason.TARGET_REACHED
    end = RecipeEnd(recipe_digest=signed.digest, reason=why).signed(private_key(key))
    with _refusals(json_):
        _submit(end, registry, json_)


@commands.command("revoke")
def revoke_command(
    author: Annotated[
        str, typer.Option(help="The author key to revoke, 43 characters as in the policy.")
    ],
    registry: RegistryURL,
    key: Key,
    json_: JSON = False,
) -> None:
    """Revoke an author key, for ever: whatever it signed is asked no more.

    Sign with that key itself, with another author key of its analysis, or with the log's.
    """
    try:
        revoked = b64url_decode(author)
    except DecodeError as error:
        raise InvalidInput(f"--author: {error}") from None
    revocation = KeyRevocation(key=revoked).signed(private_key(key))
    with _refusals(json_):
        _submit(revocation, registry, json_)


def _author_keys(registry: str, signed: SignedRecipe) -> list[bytes]:
    """The author's key, which a JWS names by its thumbprint only."""
    with HTTPSource(registry) as source:
        authors = read_policies(source).authority.authors
    listed = authors.get(signed.recipe.analysis, frozenset())
    found = [key for key in listed if key_id(key) == signed.key_id]
    if not found:
        raise NotAuthorized(
            f"no policy of this registry lists the key {signed.key_id} for {signed.recipe.analysis}"
        )
    return found


def _submit(entry: Entry, registry: str, json_: bool) -> None:
    with RegistryClient(registry) as client:
        index = client.submit(entry)
    if json_:
        typer.echo(json.dumps({"ok": True, "index": index, "address": entry.address.hex()}))
    else:
        text = f"entry {index} of the log; public with the next checkpoint"
        console.print(text, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _refusals(json_: bool) -> Iterator[None]:
    """A "no" of the registry is an outcome, with exit code 1; all else is an error."""
    try:
        yield
    except (NotAuthorized, SubmissionRefused) as error:
        if json_:
            typer.echo(json.dumps({"ok": False, "why": str(error)}))
        else:
            text = f"[bold red]refused[/]: {escape(str(error))}"
            console.print(text, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
