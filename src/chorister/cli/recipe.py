"""`chorister recipe`: write a recipe, sign it, and see whether a policy allows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

import typer
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from rich.markup import escape

from chorister.cli import QUESTIONS, app, console
from chorister.clock import SystemClock
from chorister.device import Sandbox
from chorister.device.verifier import Reads, query_columns, verify_query
from chorister.errors import InvalidInput, QueryRefused, RecipeError
from chorister.policy import Analysis, Policy
from chorister.recipe import Check, Recipe, SignedRecipe, check, sign
from chorister.recipe.schema import json_schema
from chorister.recipe.template import template

commands = typer.Typer(no_args_is_help=True, help="Write, sign and explain recipes.")
app.add_typer(commands, name="recipe", rich_help_panel=QUESTIONS)

# Without these there is nothing to compile the query on.
_BEFORE_THE_QUERY: Final = frozenset({"analysis", "query", "fields"})

PolicyOption = Annotated[Path, typer.Option("--policy", help="The policy in TOML.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Where to; else printed.")]


@commands.command("new")
def new_command(
    policy: PolicyOption,
    analysis: Annotated[
        str | None, typer.Option(help="One of the policy's; its first if left out.")
    ] = None,
    output: Output = None,
) -> None:
    """Write a recipe that the policy allows, as a draft to change."""
    rules = Policy.load(policy)

    def columns(terms: Analysis, query: str, reads: Reads) -> tuple[str, ...]:
        with Sandbox() as sandbox:
            return query_columns(rules, terms, query, reads, sandbox)

    recipe = template(rules, analysis, now=SystemClock().now(), columns=columns)
    value = json.loads(recipe.canonical())
    # In the order of the model, which is the order in which one reads a recipe.
    ordered = {name: value[name] for name in Recipe.model_fields}
    _write(json.dumps(ordered, indent=2, ensure_ascii=False).encode() + b"\n", output)


@commands.command("sign")
def sign_command(
    file: Annotated[Path, typer.Argument(help="A draft in JSON.")],
    key: Annotated[Path, typer.Option("--key", help="The author's Ed25519 key, PEM (PKCS 8).")],
    output: Output = None,
) -> None:
    """Sign a draft: canonical JSON in a compact JWS."""
    _write(sign(Recipe.draft(read_file(file)), private_key(key)), output)


@commands.command("explain")
def explain_command(
    file: Annotated[Path, typer.Argument(metavar="RECIPE", help="A signed recipe, or a draft.")],
    policy: PolicyOption,
    at: Annotated[int | None, typer.Option(help="Judge as of this time (POSIX seconds).")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show each check with its outcome in words; exit with 1 where one fails.

    The query is compiled as a device would do it, in a sandbox, on tables without rows.
    Whether the recipe is open is judged only with --at: next week's can be explained today. What
    is no recipe at all exits with 2; with --json it has failed one check, called form.
    """
    data, rules = read_file(file), Policy.load(policy)
    try:
        recipe = read_recipe(data)
    except RecipeError as error:
        if json_:
            form = Check(name="form", passed=False, why=str(error), field=error.field)
            _echo_json([form], signed=False)
        raise
    signed = isinstance(recipe, SignedRecipe)
    checks = check(recipe, rules, now=at)
    if all(outcome.passed for outcome in checks if outcome.name in _BEFORE_THE_QUERY):
        checks.append(_compiled(recipe, rules))
    allowed = all(outcome.passed for outcome in checks)
    if json_:
        _echo_json(checks, signed=signed)
    else:
        for outcome in checks:
            mark = "[green]yes[/]" if outcome.passed else "[bold red]NO [/]"
            text = f"{mark} {outcome.name:<14} {escape(outcome.why)}"
            console.print(text, highlight=False, soft_wrap=True)
        if not signed:
            console.print("a draft: no device answers it before it is signed", highlight=False)
        console.print("allowed" if allowed else "refused", highlight=False)
    if not allowed:
        raise typer.Exit(1)


def _compiled(recipe: Recipe | SignedRecipe, policy: Policy) -> Check:
    """Whether devices can run the query, and find in its result what the features read."""
    body = recipe.recipe if isinstance(recipe, SignedRecipe) else recipe
    try:
        with Sandbox() as sandbox:
            verify_query(policy, body, sandbox)
    except QueryRefused as error:
        return Check(name="query-class", passed=False, why=error.why, field=error.field)
    why = "it compiles on the declared fields alone, and returns what the features read"
    return Check(name="query-class", passed=True, why=why)


def _echo_json(checks: list[Check], *, signed: bool) -> None:
    rows = [{"name": c.name, "passed": c.passed, "why": c.why} for c in checks]
    allowed = all(outcome.passed for outcome in checks)
    # In ASCII, which every terminal and pipe takes.
    typer.echo(json.dumps({"allowed": allowed, "signed": signed, "checks": rows}))


@commands.command("schema")
def schema_command(output: Output = None) -> None:
    """Print the JSON Schema of recipes."""
    _write(json.dumps(json_schema(), indent=2, ensure_ascii=False).encode() + b"\n", output)


def read_recipe(data: bytes) -> Recipe | SignedRecipe:
    """A draft if it is a JSON object, else a JWS."""
    if data.lstrip()[:1] == b"{":
        return Recipe.draft(data)
    return SignedRecipe.parse(data.strip())


def private_key(path: Path) -> Ed25519PrivateKey:
    """An Ed25519 key out of a PEM file."""
    try:
        key = load_pem_private_key(read_file(path), password=None)
    except (TypeError, ValueError, UnsupportedAlgorithm):
        raise InvalidInput(f"{path} is not an unencrypted private key in PEM") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidInput(f"{path} is not an Ed25519 key")
    return key


def read_file(path: Path) -> bytes:
    """The whole file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"can't read {path}: {error.strerror}") from None


def _write(data: bytes, output: Path | None) -> None:
    if output is None:
        typer.echo(data.decode().rstrip("\n"))
        return
    try:
        output.write_bytes(data)
    except OSError as error:
        raise InvalidInput(f"can't write {output}: {error.strerror}") from None
