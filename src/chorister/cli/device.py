"""`chorister device`: store events, answer recipes, and see what was sent."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from pydantic import Field, ValidationError
from rich.markup import escape

from chorister.canonical import Model, first_error
from chorister.cli import JSON, ROLES, app, console, print_json, print_table, read_file, say
from chorister.clock import utc_minute
from chorister.device import (
    Device,
    HeadFile,
    HeadKeyring,
    HTTPTransport,
    KeyFile,
    KeyringKey,
    Run,
    Status,
)
from chorister.device.audit_pages import as_html, as_json, as_text, totals
from chorister.device.loop import keep_running
from chorister.errors import InvalidInput
from chorister.http_client import authorities
from chorister.policy import Policy
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
    key = _place(key_file, keyring)
    if key is None or (key_file and keyring):
        raise InvalidInput(
            "give either --key-file or --keyring: the key must be outside the folder"
        )
    settings = DeviceSettings(
        registry=registry,
        key=key,
        head=_place(head_file, keyring),
        proxy=proxy,
        ca_bundle=None if ca_bundle is None else str(ca_bundle.absolute()),
    )
    with create_device(folder, policy, settings) as device:
        if opt_in:
            device.opt_in()
    if settings.head is None:
        say("There is no head store: a restored backup of the ledger would go unnoticed.")
    say(f"created a device in {folder}")


def _place(file: Path | None, keyring: str | None) -> InFile | InKeyring | None:
    if file is not None:
        return InFile(path=str(file.absolute()))
    return InKeyring(name=keyring) if keyring else None


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
        say("nothing was stored: the person has not opted in")
        raise typer.Exit(1)
    say(f"stored {len(events)}")


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
            say("stopped; reports in the outbox are sent after the next start")


def _show_run(done: Run, json_: bool) -> None:
    if json_:
        print_json(asdict(done))
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
        say(part)


@commands.command()
def status(folder: Folder, json_: JSON = False) -> None:
    """Show consent, budgets, the outbox, and what protects this device."""
    with open_device(folder) as device:
        found = device.status()
    if json_:
        print_json(found.as_json())
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
        *(
            f"may answer: {each.recipe}, again in the windows from "
            f"{', '.join(_time(time) for time in each.opens)}"
            for each in found.series
        ),
    ]
    for line in lines:
        say(line)
    if found.budgets:
        print_table(
            ("budget", "epsilon left", "delta left", "reports left", "renews"),
            [
                (
                    each.limit,
                    f"{each.remaining.epsilon:f} of {each.allowed.epsilon:f}",
                    f"{each.remaining.delta:.3g} of {each.allowed.delta:.3g}",
                    f"{each.remaining_reports} of {each.allowed_reports}",
                    "never" if each.renews is None else _time(each.renews),
                )
                for each in found.budgets
            ],
        )


def _time(seconds: int | None) -> str:
    return "none" if seconds is None else utc_minute(seconds)


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
    say("resumed" if off else "paused")


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
    say("opted in" if opted_in else "opted out")


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
    say("deleted all events and profiles; what was spent stays spent")


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
        print_json({"allowed": allowed, "checks": [asdict(each) for each in checks]})
    else:
        for each in checks:
            mark = "[green]yes[/]" if each.passed else "[red]no[/]"
            console.print(f"{mark} {each.name}: {escape(each.why)}")
        asked = signed.recipe
        where = "" if asked.series is None else f" in each of {asked.window_count:,} windows"
        say(f"devices may answer it for {duration_text(asked.window.answer_seconds)}{where}")
    if not allowed:
        raise typer.Exit(1)


@audit_commands.callback()
def audit(
    context: typer.Context,
    folder: AnyFolder = None,
    json_: JSON = False,
    html: Annotated[bool, typer.Option("--html", help="Print a web page.")] = False,
    newest: Annotated[int | None, typer.Option(metavar="N", help="Only the newest N.")] = None,
) -> None:
    """Show who asked what, what was decided and why, what it cost and what was sent."""
    if context.invoked_subcommand is not None:
        context.obj = folder
        return
    with open_device(_named(folder)) as device:
        records = list(device.audit.records(newest=newest))
    if html or json_:
        typer.echo(as_html(records) if html else as_json(records))
        return
    for line in totals(records):
        typer.echo(line)
    typer.echo(as_text(records))


@audit_commands.command("verify")
def audit_verify(context: typer.Context, folder: AnyFolder = None, json_: JSON = False) -> None:
    """Verify the chains of the audit log and the ledger; exit with 2 if one is broken."""
    with open_device(_named(folder or context.obj)) as device:
        device.verify()
        count, head = device.audit.verify(), device.audit.head()
    if json_:
        print_json({"records": count, "head": head})
    else:
        say(f"{count} records, in order, none changed; newest {head}")


def _named(folder: Path | None) -> Path:
    if folder is None:
        raise InvalidInput("give --folder FOLDER, or set CHORISTER_DEVICE")
    return folder


# --- The folder of a command-line device: its policy, and where everything else is ----------------

_SETTINGS: Final = "device.json"
_POLICY: Final = "policy.toml"


class InFile(Model):
    """Stored in a file outside the folder."""

    kind: Literal["file"] = "file"
    path: str

    def source(self, folder: Path) -> KeyFile:
        return KeyFile(self.path, store=folder)

    def head(self) -> HeadFile:
        return HeadFile(self.path)


class InKeyring(Model):
    """Stored in the system's keyring."""

    kind: Literal["keyring"] = "keyring"
    name: str

    def source(self, folder: Path) -> KeyringKey:  # noqa: ARG002 (as InFile's)
        return KeyringKey(self.name)

    def head(self) -> HeadKeyring:
        return HeadKeyring(self.name)


_Place = Annotated[InFile | InKeyring, Field(discriminator="kind")]


class DeviceSettings(Model):
    """`device.json`, readable by its owner only: a proxy's URL may contain a password."""

    registry: str
    key: _Place
    head: _Place | None = None
    proxy: str | None = None
    ca_bundle: str | None = None

    def transport(self) -> HTTPTransport:
        if self.ca_bundle is None:
            return HTTPTransport(proxy=self.proxy)
        return HTTPTransport(proxy=self.proxy, tls=partial(authorities, Path(self.ca_bundle)))


def create_device(folder: Path, policy: Path, settings: DeviceSettings) -> Device:
    """Create the folder, the key if there is none, and both databases."""
    if (folder / _SETTINGS).exists():
        raise InvalidInput(f"{folder} already has a device: choose another folder")
    data = read_file(policy)
    Policy.load(data)
    if settings.ca_bundle is not None:
        authorities(Path(settings.ca_bundle))  # fail now, not at the first poll
    _make_folder(folder)
    _write(folder / _POLICY, data)
    device = _device(folder, settings, create=True)
    # Last: a folder without settings is unfinished.
    _write(folder / _SETTINGS, settings.canonical() + b"\n")
    return device


def open_device(folder: Path) -> Device:
    try:
        settings = DeviceSettings.model_validate_json((folder / _SETTINGS).read_bytes())
    except OSError:
        raise InvalidInput(
            f"there is no device in {folder}: create one with `chorister device init`"
        ) from None
    except ValidationError as error:
        field, message = first_error(error)
        raise InvalidInput(f"{folder / _SETTINGS}: {field or 'it'}: {message}") from None
    return _device(folder, settings)


def _make_folder(folder: Path) -> None:
    """Create a folder for its owner only, even if it already exists."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise InvalidInput(f"{folder} belongs to another user: choose a folder of your own")
        folder.chmod(0o700)
    except OSError as error:
        raise InvalidInput(f"can't use {folder} as the device's folder: {error.strerror}") from None


def _write(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)  # it may be left over from an interrupted init
            file.write(data)
    except OSError as error:
        raise InvalidInput(f"can't write {path}: {error.strerror}") from None


def _device(folder: Path, settings: DeviceSettings, *, create: bool = False) -> Device:
    return Device(
        folder,
        Policy.load(folder / _POLICY),
        settings.key.source(folder),
        registry=settings.registry,
        head=None if settings.head is None else settings.head.head(),
        transport=settings.transport(),
        create=create,
    )
