"""`chorister recipe`: write, sign and explain recipes, and put them into the public log.

`publish`, `end` and `revoke` may be repeated: what is already in the log stays as it is.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from chorister.canonical import b64url_decode, b64url_encode, key_id
from chorister.cli import JSON, QUESTIONS, CABundle, app, console, print_json, read_file, say
from chorister.clock import SystemClock
from chorister.device import Sandbox
from chorister.device.verifier import Reads, dry_run, query_columns
from chorister.errors import (
    DecodeError,
    InvalidInput,
    NotAuthorized,
    RecipeError,
    SubmissionRefused,
)
from chorister.key_files import read_signing_key
from chorister.policy import Analysis, Policy
from chorister.policy.explain import Section
from chorister.policy.values import parse_duration, visible
from chorister.recipe import Check, Recipe, SignedRecipe, sign
from chorister.recipe.in_words import describe
from chorister.recipe.model import json_schema
from chorister.recipe.outlook import expiring, spread_thin, wasted
from chorister.recipe.template import template
from chorister.transparency.auditor import read_policies
from chorister.transparency.client import RegistryClient
from chorister.transparency.entries import (
    EndReason,
    KeyRevocation,
    RecipeEnd,
    RecipeEntry,
    SignedEntry,
    parse_entry,
)
from chorister.transparency.tree import leaf_hash

commands = typer.Typer(no_args_is_help=True, help="Write, sign, explain and publish recipes.")
app.add_typer(commands, name="recipe", rich_help_panel=QUESTIONS)

PolicyOption = Annotated[Path, typer.Option("--policy", help="The policy, in TOML.")]
RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A signed recipe.")]
RegistryURL = Annotated[str, typer.Option("--registry", help="The registry's URL.")]
Key = Annotated[Path, typer.Option("--key", help="The Ed25519 key to sign with, PEM (PKCS 8).")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Write to this file instead of standard output."),
]


@commands.command("new")
def new_command(
    policy: PolicyOption,
    analysis: Annotated[
        str | None, typer.Option(help="An analysis of the policy; by default the first.")
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Write a series: ask again every 7d, for example."),
    ] = None,
    output: Output = None,
) -> None:
    """Write a recipe that the policy allows, as a draft to edit."""
    rules = Policy.load(policy)
    try:
        seconds = None if every is None else parse_duration(every)
    except ValueError as error:
        raise InvalidInput(f"--every {every}: {error}") from None

    def columns(terms: Analysis, query: str, reads: Reads) -> tuple[str, ...]:
        with Sandbox() as sandbox:
            return query_columns(rules, terms, query, reads, sandbox)

    now = SystemClock().now()
    recipe = template(rules, analysis, now=now, columns=columns, every=seconds)
    value = json.loads(recipe.canonical())
    # In the order of the model, which is easier to read.
    ordered = {name: value[name] for name in Recipe.model_fields if name in value}
    _write(json.dumps(ordered, indent=2, ensure_ascii=False).encode() + b"\n", output)


@commands.command("sign")
def sign_command(
    file: Annotated[Path, typer.Argument(help="A draft, in JSON.")],
    key: Annotated[Path, typer.Option("--key", help="The author's Ed25519 key, PEM (PKCS 8).")],
    output: Output = None,
) -> None:
    """Sign a draft: its canonical JSON becomes a compact JWS.

    With --output FILE, this also writes FILE.entry: the signed entry for the public log, so that
    `recipe publish` does not need the key.
    """
    author = read_signing_key(key, owner_only=False)
    jws = sign(Recipe.draft(read_file(file)), author)
    _write(jws, output)
    if output is not None:
        _write(RecipeEntry.of(jws, author).encode(), _entry_file(output))


@commands.command("explain")
def explain_command(
    file: Annotated[Path, typer.Argument(metavar="RECIPE", help="A signed recipe or a draft.")],
    policy: PolicyOption,
    at: Annotated[
        int | None,
        typer.Option(help="Also check whether the recipe is open at this time (POSIX seconds)."),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Warn if this many devices are too few."),
    ] = None,
    json_: JSON = False,
) -> None:
    """Show the question in words and what it costs, then each check; exit with 1 if one fails.

    The query is compiled as on a device: in a sandbox, on empty tables.
    Whether the recipe is open is checked only with --at, so that you can check next week's recipe.
    If the file is not a recipe, the exit code is 2, and --json prints one failed check, "form".
    """
    data, rules = read_file(file), Policy.load(policy)
    try:
        recipe = read_recipe(data)
    except RecipeError as error:
        if json_:
            form = Check(name="form", passed=False, why=str(error), field=error.field)
            _echo_json([form], [], [], signed=False)
        raise
    signed = isinstance(recipe, SignedRecipe)
    with Sandbox() as sandbox:
        checks = dry_run(recipe, rules, sandbox, now=at)
    body = recipe.recipe if isinstance(recipe, SignedRecipe) else recipe
    allowed = all(outcome.passed for outcome in checks)
    sections = describe(body, rules)
    # Groups and bins that the policy does not permit would take long to count.
    warnings, remarks = _outlook(body, rules, devices) if allowed else ([], [])
    if json_:
        _echo_json(checks, sections, warnings, signed=signed)
    else:
        for section in sections:
            console.print(f"[bold]{escape(visible(section.title))}[/]")
            for line in section.lines:
                say(f"  - {visible(line)}")
        console.print("[bold]Would a device answer it?[/]")
        for outcome in checks:
            mark = "[green]yes[/]" if outcome.passed else "[bold red]NO [/]"
            text = f"{mark} {outcome.name:<14} {escape(visible(outcome.why))}"
            console.print(text, soft_wrap=True)
        for warning in warnings:
            console.print(f"[yellow]warning[/] {escape(warning)}", soft_wrap=True)
        for remark in remarks:
            say(remark)
        if not signed:
            say("This is a draft: no device answers it until you sign it.")
        say("allowed" if allowed else "refused")
    if not allowed:
        raise typer.Exit(1)


def _outlook(recipe: Recipe, policy: Policy, devices: int | None) -> tuple[list[str], list[str]]:
    """Why the answer would be a waste, and what to expect, as studies and the console say it."""
    expected = None
    if devices is not None:
        often = recipe.answers / recipe.window_count
        expected = devices * float(recipe.participation.probability) * often
    warnings = list(wasted(recipe, policy, expected))
    thin = [] if warnings else spread_thin(recipe, expected)
    return warnings, [*thin, *expiring(recipe, policy)]


def _echo_json(
    checks: list[Check], sections: list[Section], warnings: list[str], *, signed: bool
) -> None:
    rows = [{"name": c.name, "passed": c.passed, "why": c.why} for c in checks]
    allowed = all(outcome.passed for outcome in checks)
    question = [asdict(section) for section in sections]
    result = {"allowed": allowed, "signed": signed, "checks": rows}
    print_json({**result, "question": question, "warnings": warnings})


@commands.command("schema")
def schema_command(output: Output = None) -> None:
    """Print the JSON Schema of recipes."""
    _write(json.dumps(json_schema(), indent=2, ensure_ascii=False).encode() + b"\n", output)


def read_recipe(data: bytes) -> Recipe | SignedRecipe:
    """Parse a draft if the data is a JSON object, else a JWS."""
    if data.lstrip()[:1] == b"{":
        return Recipe.draft(data)
    return SignedRecipe.parse(data.strip())


def _write(data: bytes, output: Path | None) -> None:
    if output is None:
        typer.echo(data.decode().rstrip("\n"))
        return
    try:
        output.write_bytes(data)
    except OSError as error:
        raise InvalidInput(f"can't write {output}: {error.strerror}") from None


# --- The public log -------------------------------------------------------------------------------


class Reason(StrEnum):
    """Why a recipe ends."""

    WITHDRAWN = "withdrawn"
    TARGET_REACHED = "target-reached"


@commands.command("publish")
def publish_command(
    file: RecipeFile,
    registry: RegistryURL,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key",
            help="The author's Ed25519 key; not needed with the .entry file of `recipe sign`.",
        ),
    ] = None,
    ca_bundle: CABundle = None,
    json_: JSON = False,
) -> None:
    """Publish a signed recipe in the public log; exit with 1 if the registry refuses it.

    The author's key is looked up in the policies that the registry publishes.
    """
    signed = SignedRecipe.parse(read_file(file).strip())
    with _refusals(json_):
        keys = [b64url_encode(key) for key in _author_keys(registry, ca_bundle, signed)]
        SignedRecipe.open(signed.jws, keys)
        entry = _entry(file, signed, key)
        _submit(entry, registry, ca_bundle, json_, body=signed.jws)


def _entry_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.entry")


def _entry(file: Path, signed: SignedRecipe, key: Path | None) -> RecipeEntry:
    """Return the recipe's entry for the log: signed now, or when the recipe was."""
    if key is not None:
        return RecipeEntry.of(signed.jws, read_signing_key(key, owner_only=False))
    path = _entry_file(file)
    if not path.exists():
        raise InvalidInput(
            f"the log needs the author's signature on the recipe's entry: pass --key, or keep "
            f"{path.name} from `chorister recipe sign --output` next to the recipe"
        )
    entry = parse_entry(read_file(path))
    if not isinstance(entry, RecipeEntry):
        raise InvalidInput(f"{path} is not the entry of a recipe")
    entry.check_signature()
    entry.open_body(signed.jws)
    return entry


@commands.command("end")
def end_command(
    file: RecipeFile,
    registry: RegistryURL,
    key: Key,
    reason: Annotated[Reason, typer.Option(help="Why it ends.")] = Reason.WITHDRAWN,
    ca_bundle: CABundle = None,
    json_: JSON = False,
) -> None:
    """End a recipe early, with the key that signed it: devices no longer answer it."""
    signed = SignedRecipe.parse(read_file(file).strip())
    why = EndReason.WITHDRAWN if reason is Reason.WITHDRAWN else EndReason.TARGET_REACHED
    end = RecipeEnd(recipe_digest=signed.digest, reason=why).signed(
        read_signing_key(key, owner_only=False)
    )
    with _refusals(json_):
        _submit(end, registry, ca_bundle, json_)


@commands.command("revoke")
def revoke_command(
    author: Annotated[
        str, typer.Option(help="The author key to revoke, 43 characters as in the policy.")
    ],
    registry: RegistryURL,
    key: Key,
    ca_bundle: CABundle = None,
    json_: JSON = False,
) -> None:
    """Revoke an author key permanently: devices no longer answer anything it signed.

    Sign with that key itself, with another author key of its analysis, or with the log's key.
    """
    try:
        revoked = b64url_decode(author)
    except DecodeError as error:
        raise InvalidInput(f"--author: {error}") from None
    revocation = KeyRevocation(key=revoked).signed(read_signing_key(key, owner_only=False))
    with _refusals(json_):
        _submit(revocation, registry, ca_bundle, json_)


def _author_keys(registry: str, ca_bundle: Path | None, signed: SignedRecipe) -> list[bytes]:
    """Return the author's key, of which a JWS has only the thumbprint."""
    with RegistryClient(registry, ca_bundle=ca_bundle) as client:
        authors = read_policies(client).authority.authors
    listed = authors.get(signed.recipe.analysis, frozenset())
    found = [key for key in listed if key_id(key) == signed.key_id]
    if not found:
        raise NotAuthorized(
            f"no policy of this registry lists key {signed.key_id} for {signed.recipe.analysis}"
        )
    return found


def _submit(
    entry: SignedEntry, registry: str, ca_bundle: Path | None, json_: bool, *, body: bytes = b""
) -> None:
    with RegistryClient(registry, ca_bundle=ca_bundle) as client:
        index = client.submit(entry, body)
    if json_:
        print_json({"ok": True, "index": index, "address": leaf_hash(entry.encode()).hex()})
    else:
        say(f"entry {index} of the log; public with the next checkpoint")


@contextlib.contextmanager
def _refusals(json_: bool) -> Iterator[None]:
    """Exit with 1 if the registry refuses; let other errors through."""
    try:
        yield
    except (NotAuthorized, SubmissionRefused) as error:
        if json_:
            print_json({"ok": False, "why": str(error)})
        else:
            console.print(f"[bold red]refused[/]: {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None
