"""`chorister log`: read a public log and verify everything in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from chorister.canonical import key_id
from chorister.cli import JSON, OPERATORS, CABundle, app, console, print_json, read_file, say
from chorister.clock import SystemClock, utc_minute
from chorister.errors import ChoristerError, InternalError, InvalidInput, LogForked
from chorister.policy import Policy
from chorister.policy.values import visible
from chorister.recipe import SignedRecipe
from chorister.transparency.auditor import (
    Audit,
    LogPolicies,
    audit,
    read_policies,
    replay,
)
from chorister.transparency.checkpoint import SignedCheckpoint
from chorister.transparency.client import CHECKPOINT, FolderSource, HTTPSource
from chorister.transparency.entries import (
    EndReason,
    HPKEConfigEntry,
    KeyRevocation,
    RecipeEnd,
    RecipeEntry,
)
from chorister.transparency.note import MAX_NOTE
from chorister.transparency.state import Logged, LogState
from chorister.transparency.tiles import Source, read_entries
from chorister.transparency.tree import inclusion_proof
from chorister.transparency.trust import standard_policy

commands = typer.Typer(no_args_is_help=True, help="Read and verify the public log.")
app.add_typer(commands, name="log", rich_help_panel=OPERATORS)

Where = Annotated[str, typer.Argument(metavar="URL|DIR", help="A registry's URL or a folder.")]
Policies = Annotated[
    list[Path] | None,
    typer.Option(help="A policy whose keys to trust; by default those that the log publishes."),
]
EarlierPolicies = Annotated[
    list[Path] | None, typer.Option(help="A former policy, under which old entries were logged.")
]


@commands.command("verify")
def verify_command(
    where: Where,
    policy: Policies = None,
    earlier_policy: EarlierPolicies = None,
    since: Annotated[
        list[Path] | None,
        typer.Option(help="An earlier checkpoint, which the log must extend."),
    ] = None,
    fresh: Annotated[
        bool | None,
        typer.Option(help="Require a recent checkpoint, or not; by default only at a URL."),
    ] = None,
    ca_bundle: CABundle = None,
    json_: JSON = False,
) -> None:
    """Verify the whole log from scratch; exit with 1 at the first error."""
    own = load_policies(policy, earlier_policy)
    kept = [SignedCheckpoint.parse(read_file(path)) for path in since or ()]
    must_be_fresh = _is_url(where) if fresh is None else fresh
    with open_source(where, ca_bundle) as source, errors_reported(json_):
        found = audit(
            source,
            authority=(own or read_policies(source)).authority,
            judge_all=own is None,
            clock=SystemClock() if must_be_fresh else None,
            earlier=kept,
        )
    if json_:
        print_json(_summary(found, own_policies=own is not None))
    else:
        _print_summary(found, own_policies=own is not None)


def load_policies(policies: list[Path] | None, earlier: list[Path] | None) -> LogPolicies | None:
    """Read the policies of whoever runs a command; None if they rely on those of the log."""
    if not policies:
        if earlier:
            raise InvalidInput("--earlier-policy needs --policy as well, for the current policy")
        return None
    return LogPolicies(
        policies=tuple(Policy.load(path) for path in policies),
        earlier=tuple(Policy.load(path) for path in earlier or ()),
    )


@commands.command("show")
def show_command(
    where: Where,
    entry: Annotated[
        int | None, typer.Option(min=0, help="Show one entry in full, with its inclusion proof.")
    ] = None,
    ca_bundle: CABundle = None,
    json_: JSON = False,
) -> None:
    """List the entries. This does not verify the checkpoint's signatures: use `log verify`."""
    with open_source(where, ca_bundle) as source, errors_reported(json_):
        checkpoint = SignedCheckpoint.parse(source.read(CHECKPOINT, limit=MAX_NOTE)).checkpoint
        state, recipes = LogState(), dict[int, SignedRecipe]()
        entries = list(replay(source, state, read_entries(source, 0, checkpoint.size), recipes))
    current = set[bytes]()
    if state.last_list is not None:
        listed = state.current(state.last_list.entry.time)
        current = {address for _, address in listed.hpke_configs}
        current |= {recipe.address for recipe in listed.recipes}
    leaves = [logged.leaf for logged in entries]
    rows = [describe(logged, recipes.get(logged.index), current) for logged in entries]
    if entry is not None:
        if entry >= len(rows):
            raise InvalidInput(
                f"the log has {len(rows)} entries: choose one of 0 to {len(rows) - 1}"
            )
        detail = rows[entry] | {
            "proof": [node.hex() for node in inclusion_proof(entry, leaves)],
            "size": checkpoint.size,
            "root": checkpoint.root.hex(),
        }
        if json_:
            print_json(detail)
        else:
            for name, value in detail.items():
                console.print(f"[bold]{name}[/] {escape(str(value))}")
    elif json_:
        print_json({"origin": checkpoint.origin, "entries": rows})
    else:
        _print_rows(rows)


@commands.command("policy")
def policy_command(
    policy: Annotated[Path, typer.Argument(help="A policy, in TOML.")],
) -> None:
    """Print whose signatures a policy requires, for standard tools (c2sp.org/tlog-policy).

    The key in the line that begins with `log` is what the operator of a witness needs.
    """
    typer.echo(standard_policy(Policy.load(policy)), nl=False)


# --- Sources -------------------------------------------------------------------------------------


def _is_url(where: str) -> bool:
    return where.startswith(("http://", "https://"))


@contextlib.contextmanager
def open_source(where: str, ca_bundle: Path | None) -> Iterator[Source]:
    """Open a log at a URL or in a folder."""
    if _is_url(where):
        with HTTPSource(where, ca_bundle=ca_bundle) as source:
            yield source
        return
    folder = Path(where)
    if not folder.is_dir():
        raise InvalidInput(f"{where} is neither a folder nor an http(s) URL")
    # A registry's own folder contains the public one.
    yield FolderSource(folder / "public" if (folder / "leaves").is_file() else folder)


# --- In words ------------------------------------------------------------------------------------


def describe(logged: Logged, recipe: SignedRecipe | None, current: set[bytes]) -> dict[str, Any]:
    """Put an entry into words; `current` has the addresses on the current list."""
    entry = logged.entry
    row: dict[str, Any] = {"index": logged.index, "address": logged.leaf.hex()}
    shown = None
    if isinstance(entry, RecipeEntry):
        name = "a recipe" if recipe is None else recipe.recipe.id
        what = f"{name} of {entry.analysis}, answered until {utc_minute(entry.closes)}"
        shown = entry.body_digest
        row |= {"kind": "recipe", "what": what, "digest": entry.recipe_digest.hex()}
    elif isinstance(entry, RecipeEnd):
        why = "target reached" if entry.reason is EndReason.TARGET_REACHED else "withdrawn"
        row |= {"kind": "end", "what": f"recipe {entry.recipe_digest.hex()[:16]}… {why}"}
    elif isinstance(entry, KeyRevocation):
        row |= {"kind": "revocation", "what": f"author key {key_id(entry.key)}"}
    elif isinstance(entry, HPKEConfigEntry):
        span = f"{utc_minute(entry.not_before)} to {utc_minute(entry.not_after)}"
        shown = entry.address
        row |= {"kind": "hpke config", "what": f"{entry.aggregator}, valid {span}"}
    else:
        what = f"{entry.digest.hex()[:16]}… is current at {utc_minute(entry.time)}"
        return row | {"kind": "list", "what": what, "by": "", "current": False}
    return row | {"by": key_id(entry.signer), "current": shown in current}


def _print_rows(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("#", "kind", "what", "by key", "now"):
        table.add_column(title, overflow="fold", justify="right" if title == "#" else "left")
    for row in rows:
        now = "current" if row["current"] else ""
        table.add_row(str(row["index"]), row["kind"], escape(row["what"]), row["by"][:8], now)
    console.print(table)


def _summary(found: Audit, *, own_policies: bool) -> dict[str, Any]:
    checkpoint, kinds = found.checkpoint, [type(item.entry) for item in found.entries]
    return {
        "ok": True,
        "origin": checkpoint.origin,
        "size": checkpoint.size,
        "root": checkpoint.root.hex(),
        "time": found.time,
        "list": found.last_list.digest.hex(),
        "list_time": found.last_list.time,
        "keys_from": "policy" if own_policies else "log",
        "cosigned_by": [cosignature.name for cosignature in found.cosignatures],
        "recipes": kinds.count(RecipeEntry),
        "open_recipes": len(found.current.recipes),
        "ended": kinds.count(RecipeEnd),
        "revoked_keys": kinds.count(KeyRevocation),
        "hpke_configs": kinds.count(HPKEConfigEntry),
        "unjudged": found.unjudged,
        "candidate": None
        if found.candidate is None
        else {"size": found.candidate.size, "waiting_for": list(found.waiting_for)},
    }


def _print_summary(found: Audit, *, own_policies: bool) -> None:
    summary = _summary(found, own_policies=own_policies)
    lines = {
        "log": found.checkpoint.origin,
        "checkpoint": f"{summary['size']} entries at {utc_minute(found.time)}",
        "root": summary["root"],
        "cosigned by": ", ".join(summary["cosigned_by"]),
        "recipes": f"{summary['recipes']}, of which {summary['open_recipes']} are open",
        "ended": summary["ended"],
        "revoked keys": summary["revoked_keys"],
        "HPKE configs": summary["hpke_configs"],
    }
    if found.unjudged:
        lines["not judged"] = f"{found.unjudged} entries that the given policies do not cover"
    if found.candidate is not None:
        waiting = ", ".join(found.waiting_for)
        lines["candidate"] = f"{found.candidate.size} entries, waiting for {waiting}"
    for name, value in lines.items():
        console.print(f"[bold]{name:>12}[/]  {escape(str(value))}", soft_wrap=True)
    console.print("[green]everything verified[/]")
    if not own_policies:
        say(
            "The keys are those of the policies that the log itself publishes: "
            "pass --policy to check against your own."
        )


@contextlib.contextmanager
def errors_reported(json_: bool) -> Iterator[None]:
    """Exit with 1 if something is wrong with the log; let bugs through."""
    try:
        yield
    except InternalError:
        raise
    except ChoristerError as error:
        found = problem(error)
        if json_:
            print_json(found)
        else:
            text = f"[bold red]wrong[/] ({found['wrong']}): {escape(found['why'])}"
            console.print(text, soft_wrap=True)
            for checkpoint in found.get("evidence", ()):
                say("")
                for line in checkpoint.splitlines():
                    say(visible(line))
        raise typer.Exit(1) from None


def problem(error: ChoristerError) -> dict[str, Any]:
    """Say what is wrong with a log; the evidence of a fork is its checkpoints."""
    found: dict[str, Any] = {"ok": False, "wrong": type(error).__name__, "why": str(error)}
    if isinstance(error, LogForked) and error.evidence:
        found["evidence"] = [checkpoint.decode() for checkpoint in error.evidence]
    return found
