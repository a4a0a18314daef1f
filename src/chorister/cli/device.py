"""`chorister device`: store events, answer recipes, and see what was sent."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from chorister.cli import JSON, ROLES, app, console, read_file
from chorister.cli.device_folder import (
    DeviceSettings,
    InFile,
    InKeyring,
    create_device,
    open_device,
)
from chorister.clock import utc_minute
from chorister.device import Run, Status
from chorister.device.audit_pages import as_html, as_json, as_text
from chorister.device.loop import keep_running
from chorister.errors import InvalidInput
from chorister.policy.values import duration_text
from chorister.recipe import SignedRecipe

commands = typer.Typer(
    no_args_is_help=True, help="Run a device: store events, answer recipes, see what was sent."
)
app.add_typer(commands, name="device", rich_help_panel=ROLES)
audit_commands = typer.Typer(
    invoke_without_command=True,
    help="Read the audit log: what was asked, decided, charged and sent.",
)
commands.add_typer(audit_commands, name="audit")

Folder = Annotated[
    Path,
    typer.Option("--folder", "-f", envvar="CHORISTER_DEVICE", help="The device's folder."),
]
# For a group of commands, whose help needs no folder.
AnyFolder = Annotated[
    Path | None,
    typer.Option("--folder", "-f", envvar="CHORISTER_DEVICE", help="The device's folder."),
]


@commands.command()
def init(
    folder: Folder,
    policy: Annotated[Path, typer.Option(help="What the device allows, in TOML.")],
    registry: Annotated[str, typer.Option(help="URL of the public log.")],
    key_file: Annotated[
        Path | None, typer.Option(help="Store the key in this file, outside the folder.")
    ] = None,
    head_file: Annotated[
        Path | None, typer.Option(help="Store the ledger's head in this file, outside the folder.")
    ] = None,
    keyring: Annotated[
        str | None,
        typer.Option(help="Store key and head in the system's keyring, under this name."),
    ] = None,
    proxy: Annotated[
        str | None, typer.Option(help="URL of a proxy that hides the network address.")
    ] = None,
    ca_bundle: Annotated[
        Path | None, typer.Option(help="The only certificate authorities to trust, PEM.")
    ] = None,
    opt_in: Annotated[bool, typer.Option(help="The person agrees to take part.")] = False,
) -> None:
    """Create a device: a folder with two encrypted databases, and a key elsewhere."""
    if (key_file is None) == (keyring is None):
        raise InvalidInput(
            "give either --key-file or --keyring: the key must be outside the folder"
        )
    settings = DeviceSettings(
        registry=registry,
        key=InKeyring(name=keyring) if keyring else InFile(path=str(_absolute(key_file))),
        head=_head(head_file, keyring),
        proxy=proxy,
        ca_bundle=None if ca_bundle is None else str(_absolute(ca_bundle)),
    )
    with create_device(folder, policy, settings) as device:
        if opt_in:
            device.opt_in()
    if settings.head is None:
        console.print("There is no head store: a restored backup of the ledger would go unnoticed.")
    console.print(f"created a device in {escape(str(folder))}", highlight=False)


def _head(head_file: Path | None, keyring: str | None) -> InFile | InKeyring | None:
    if head_file is not None:
        return InFile(path=str(_absolute(head_file)))
    return InKeyring(name=keyring) if keyring else None


def _absolute(path: Path | None) -> Path:
    return Path() if path is None else path.absolute()


@commands.command()
def donate(
    folder: Folder,
    table: Annotated[str, typer.Argument(help="A stream or a profile.")],
    file: Annotated[
        typer.FileText, typer.Argument(help="One JSON object per line; - for standard input.")
    ] = "-",  # type: ignore[assignment]  # Click opens it
) -> None:
    """Store events of a stream, or replace the row of a profile."""
    events = list(_events(file))
    with open_device(folder) as device:
        if table in device.policy.profiles:
            kept = all(device.set_profile(table, event) for event in events)
        else:
            kept = device.donate_many(table, events)
    if not kept:
        console.print("nothing was stored: the person has not opted in")
        raise typer.Exit(1)
    console.print(f"stored {len(events)}", highlight=False)


def _events(file: Iterator[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                event = json.loads(line)
            except ValueError as error:
                raise InvalidInput(f"line {number} is not JSON: {error}") from None
            if not isinstance(event, dict):
                raise InvalidInput(f"line {number} is not a JSON object")
            yield event


@commands.command()
def run(
    folder: Folder,
    once: Annotated[bool, typer.Option(help="Do what is due now, then exit.")] = False,
    json_: JSON = False,
) -> None:
    """Poll the log, answer what policy and budget allow, send what is due."""
    with open_device(folder) as device:
        if once:
            while (done := device.run_once()).waiting:  # for another process
                time.sleep(device.quiet_seconds())
            _show_run(done, json_)
            return
        try:
            for each in keep_running(device):
                _show_run(each, json_)
        except KeyboardInterrupt:
            console.print("stopped; reports in the outbox are sent after the next start")


def _show_run(done: Run, json_: bool) -> None:
    if json_:
        typer.echo(json.dumps(asdict(done)))
        return
    parts = [
        *([f"nothing was done: {done.silent}"] if done.silent else []),
        *done.problems,
        *(f"refused {id_}" for id_ in done.refused),
        *(f"not selected for {id_}" for id_ in done.declined),
        *(f"answered {id_}" for id_ in done.answered),
        f"{done.uploaded} sent, {done.postponed} to retry, {done.dropped} dropped",
    ]
    for part in parts:
        console.print(escape(part), highlight=False, soft_wrap=True)


@commands.command()
def status(folder: Folder, json_: JSON = False) -> None:
    """Show consent, budgets, the outbox, and what protects this device."""
    with open_device(folder) as device:
        found = device.status()
    if json_:
        typer.echo(json.dumps(found.as_json()))
    else:
        _show_status(found)


def _show_status(found: Status) -> None:
    state = "paused" if found.paused else "opted in" if found.consent.opted_in else "opted out"
    lines = [
        f"policy {found.policy} ({found.policy_digest[:16]}…), {state}",
        f"registry {found.registry}, newest checkpoint {_time(found.checkpoint_time)}",
        f"head of the ledger: {found.head}",
        *([f"silent: {found.silent}"] if found.silent else []),
        *(f"note: {words}" for words in found.weaknesses),
        *(
            f"waiting: {each.recipe}, next try {_time(each.next_try)}, {each.tries} tries"
            for each in found.outbox
        ),
    ]
    for line in lines:
        console.print(escape(line), highlight=False, soft_wrap=True)
    table = Table("budget", "epsilon left", "delta left", "reports left", "renews")
    for each in found.budgets:
        table.add_row(
            escape(each.limit),
            f"{each.remaining.epsilon:f} of {each.allowed.epsilon:f}",
            f"{each.remaining.delta:.3g} of {each.allowed.delta:.3g}",
            f"{each.remaining_reports} of {each.allowed_reports}",
            "never" if each.renews is None else _time(each.renews),
        )
    if found.budgets:
        console.print(table)


def _time(seconds: int | None) -> str:
    if seconds is None:
        return "none"
    return utc_minute(seconds)


@commands.command()
def pause(
    folder: Folder, off: Annotated[bool, typer.Option("--off", help="Resume.")] = False
) -> None:
    """Stop polling, querying and uploading until `pause --off`. Donations are still stored."""
    with open_device(folder) as device:
        if off:
            device.resume()
        else:
            device.pause()
    console.print("resumed" if off else "paused")


@commands.command()
def consent(
    folder: Folder,
    opted_in: Annotated[bool, typer.Option("--in/--out", help="Take part, or stop taking part.")],
    keep: Annotated[bool, typer.Option("--keep", help="With --out: don't delete events.")] = False,
) -> None:
    """Opt in or out. Opting out stops everything, empties the outbox and deletes all events."""
    with open_device(folder) as device:
        if opted_in:
            device.opt_in()
        else:
            device.opt_out(purge=not keep)
    console.print("opted in" if opted_in else "opted out")


@commands.command()
def purge(
    folder: Folder,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask for confirmation.")] = False,
) -> None:
    """Delete all events and profiles, but not the spent budget and the audit log."""
    if not yes:
        typer.confirm("Delete all events and profiles?", abort=True)
    with open_device(folder) as device:
        device.purge()
    console.print("deleted all events and profiles; what was spent stays spent")


@commands.command()
def explain(
    folder: Folder,
    recipe: Annotated[Path, typer.Argument(help="A signed recipe (JWS).")],
    json_: JSON = False,
) -> None:
    """Would this device answer a recipe now? Show every check; exit with 1 if not."""
    signed = SignedRecipe.parse(read_file(recipe).strip())
    with open_device(folder) as device:
        checks = device.explain(signed)
    allowed = all(each.passed for each in checks)
    if json_:
        typer.echo(json.dumps({"allowed": allowed, "checks": [asdict(each) for each in checks]}))
    else:
        for each in checks:
            mark = "[green]yes[/]" if each.passed else "[red]no[/]"
            console.print(f"{mark} {each.name}: {escape(each.why)}", highlight=False)
        closes = signed.recipe.window.answer_seconds
        console.print(f"answered for {duration_text(closes)}", highlight=False)
    if not allowed:
        raise typer.Exit(1)


@audit_commands.callback()
def audit(
    context: typer.Context,
    folder: AnyFolder = None,
    json_: JSON = False,
    html: Annotated[bool, typer.Option("--html", help="Print a web page.")] = False,
    newest: Annotated[int | None, typer.Option(help="Show only this many, the newest.")] = None,
) -> None:
    """Show who asked what, what was decided and why, what it cost and what was sent."""
    if context.invoked_subcommand is not None:
        context.obj = folder
        return
    with open_device(_named(folder)) as device:
        records = list(device.audit.records(newest=newest))
    typer.echo(as_html(records) if html else as_json(records) if json_ else as_text(records))


@audit_commands.command("verify")
def audit_verify(context: typer.Context, folder: AnyFolder = None, json_: JSON = False) -> None:
    """Verify the chains of the audit log and the ledger; exit with 2 if one is broken."""
    with open_device(_named(folder or context.obj)) as device:
        device.verify()
        count, head = device.audit.verify(), device.audit.head()
    if json_:
        typer.echo(json.dumps({"records": count, "head": head}))
    else:
        console.print(f"{count} records, in order, none changed; newest {head}", highlight=False)


def _named(folder: Path | None) -> Path:
    if folder is None:
        raise InvalidInput("give --folder FOLDER, or set CHORISTER_DEVICE")
    return folder
