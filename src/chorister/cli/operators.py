"""For operators: `chorister keygen`, and `keys`, `tasks` and `jobs` of an aggregator.

Private keys are written to new files that only their owner can read; what others need is printed.
The commands about an aggregator read its own database, so only its operator can use them.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chorister.canonical import b64url_encode, sha256
from chorister.cli import JSON, OPERATORS, app, needs_extra, print_json, print_table, say
from chorister.clock import SystemClock, utc_minute, utc_text
from chorister.errors import InvalidInput
from chorister.key_files import (
    new_secret,
    token_digest,
    write_collector_key,
    write_private,
    write_signing_key,
)

if TYPE_CHECKING:
    from chorister.aggregator.config import HelperConfig, LeaderConfig
    from chorister.aggregator.jobs.job_queue import JobQueue
    from chorister.aggregator.service import Core
    from chorister.aggregator.storage.counters import TaskStatus

File = Annotated[Path, typer.Argument(help="The file to write; it must not exist.")]
Config = Annotated[Path, typer.Option("--config", help="The aggregator's settings file.")]


def _group(name: str, words: str) -> typer.Typer:
    commands = typer.Typer(no_args_is_help=True, help=words)
    app.add_typer(commands, name=name, rich_help_panel=OPERATORS)
    return commands


# --- chorister keygen ---------------------------------------------------------------------------

keygen = _group("keygen", "Create keys, secrets and tokens, each in a file that only you can read.")


@keygen.command("cosigning")
def create_cosigning_key(file: File, json_: JSON = False) -> None:
    """Create an Ed25519 key for cosigning (PEM); policies list its public key.

    The log and the authors of recipes need keys of the same kind.
    """
    _print_public(json_, public_key=write_signing_key(file))


@keygen.command("collector")
def create_collector_key(
    file: File,
    config_id: Annotated[int, typer.Option(min=0, max=255, help="The id of the config.")] = 1,
    json_: JSON = False,
) -> None:
    """Create an analyst's HPKE key pair (JSON), to which both aggregators seal results.

    Recipes and policies name it by its digest; both aggregators need its config.
    """
    config = write_collector_key(file, config_id)
    _print_public(json_, hpke_config=b64url_encode(config), digest=sha256(config).hex())


@keygen.command("secret")
def create_secret(file: File, json_: JSON = False) -> None:
    """Create 32 random bytes: an at-rest key, or the verify key that leader and helper share."""
    write_private(file, new_secret().encode() + b"\n")
    _print_public(json_, bytes=32)


@keygen.command("token")
def create_token(file: File, json_: JSON = False) -> None:
    """Create a bearer token; the server that accepts it needs only its digest."""
    token = new_secret()
    write_private(file, token.encode() + b"\n")
    _print_public(json_, digest=token_digest(token.encode()).hex())


def _print_public(json_: bool, **public: str | int) -> None:
    """Print what may be public, one value per line, to be copied."""
    if json_:
        print_json(public)
    else:
        for name, value in public.items():
            typer.echo(f"{name} {value}")


# --- chorister keys -----------------------------------------------------------------------------

keys = _group("keys", "List and rotate an aggregator's report keys, to which devices seal reports.")


@keys.command("list")
def list_keys(config: Config, json_: JSON = False) -> None:
    """List all report keys ever created: waiting, in use, retired or destroyed."""
    with _aggregator_database(config) as (_, core):
        found: list[dict[str, Any]] = [
            {
                "config_id": each.config[0],
                "digest": sha256(each.config).hex(),
                "state": each.state,
                "created": each.created,
                "published": each.published,
                "retired": each.retired,
            }
            for each in core.keys.list_keys()
        ]
    if json_:
        print_json({"keys": found})
        return
    for row in found:
        row["digest"] = row["digest"][:16]
        for name in ("created", "published", "retired"):
            row[name] = "" if row[name] is None else utc_minute(row[name])
    titles = ("id", "digest", "state", "created", "published", "retired")
    print_table(titles, (list(row.values()) for row in found))


@keys.command("rotate")
def rotate_key(config: Config, json_: JSON = False) -> None:
    """Create the next report key now; the running aggregator publishes it in the log.

    An aggregator also rotates its keys automatically (`hpke_lifetime` in its settings). Devices use
    the new key from the next checkpoint that both aggregators cosign. The previous key still opens
    reports that were sealed to it, and is destroyed once there can be no more of them.
    """
    with _aggregator_database(config) as (_, core):
        waiting = core.keys.unpublished()
        made = waiting[0] if waiting else core.keys.generate()
    if json_:
        print_json({"config_id": made[0], "digest": sha256(made).hex(), "made": not waiting})
    elif waiting:
        say(f"key {made[0]} is already waiting to be published")
    else:
        say(f"created key {made[0]}; a running aggregator publishes it within a minute")


# --- chorister tasks ----------------------------------------------------------------------------

tasks = _group("tasks", "Show an aggregator's tasks, with exact counts.")


@tasks.command("list")
def list_tasks(
    config: Config,
    recipe: Annotated[
        str | None, typer.Option(help="Only tasks of recipes whose digest starts with this (hex).")
    ] = None,
    json_: JSON = False,
) -> None:
    """List all tasks: their state, reports uploaded and verified, and what they are waiting for."""
    found = [each for each in _read_tasks(config) if each["recipe"].startswith(recipe or "")]
    if json_:
        print_json({"tasks": found})
        return
    print_table(
        ("task", "analysis", "group", "state", "uploaded", "verified", "rejected"),
        (
            (
                each["task"][:12],
                each["analysis"],
                _group_text(each["group"]),
                each["state"],
                each["uploaded"],
                each["verified"],
                sum(sum(reasons.values()) for reasons in each["rejected"].values()),
            )
            for each in found
        ),
    )
    for each in found:
        if each["waiting_for"]:
            say(f"{each['task'][:12]} is waiting for: {'; '.join(each['waiting_for'])}")


# An id in base64url may start with a dash without being an option.
@tasks.command("show", context_settings={"ignore_unknown_options": True})
def show_task(
    task: Annotated[str, typer.Argument(help="The task's id in base64url, or its beginning.")],
    config: Config,
    json_: JSON = False,
) -> None:
    """Show one task: rejected reports by reason, and why its jobs fail."""
    found = [each for each in _read_tasks(config) if each["task"].startswith(task)]
    if len(found) != 1:
        raise InvalidInput(f"{len(found)} tasks have an id that starts with {task}")
    (one,) = found
    if json_:
        print_json(one)
        return
    for name, value in one.items():
        if name == "rejected":
            lines = [f"{who}: {why} {n}" for who, r in value.items() for why, n in r.items()]
            value = "; ".join(lines) or "none"
        elif name == "waiting_for":
            value = "; ".join(value) or "nothing"
        say(f"{name:>15}  {value}")


def _group_text(group: str) -> str:
    """Return a task's group and arm in words, from its canonical JSON."""
    named = json.loads(group)
    words = [f"{field}: {value}" for field, value in named["groups"].items()]
    if "arm" in named:
        words.append(f"arm: {named['arm']}")
    return ", ".join(words) or "everyone"


def _read_tasks(path: Path) -> list[dict[str, Any]]:
    with _aggregator_database(path) as (config, core):
        from chorister.aggregator.storage.counters import task_status

        collectors = frozenset(each.digest for each in config.collectors)
        dead: Counter[bytes | None] = Counter()
        if core.queue is not None:
            dead.update(each.task_id for each in core.queue.dead_jobs())
        return [
            _described(
                each, collectors, leads=config.role == "leader", dead=dead[each.task.task_id]
            )
            for each in task_status(core.database, core.tasks.all())
        ]


def _described(
    status: TaskStatus, collectors: frozenset[bytes], *, leads: bool, dead: int
) -> dict[str, Any]:
    task = status.task
    waiting = list(status.failures)
    if dead:
        waiting.append(f"{dead} jobs that workers have given up on: see `chorister jobs list`")
    if task.collector not in collectors:
        waiting.append(
            f"collector {task.collector.hex()[:16]}… is not in the settings: it can't collect"
        )
    if status.verified < task.min_batch_size:
        waiting.append(f"{task.min_batch_size - status.verified} more verified reports")
    # A helper sees neither uploads nor what the leader rejects before it asks.
    sides = ("upload", "leader", "helper", "disputed") if leads else ("helper",)
    return {
        "task": b64url_encode(task.task_id),
        "recipe": task.recipe_digest.hex(),
        "analysis": task.analysis,
        "group": task.group,
        "state": status.state.name.lower(),
        "minimum": task.min_batch_size,
        "uploaded": status.uploaded,
        "verified": status.verified,
        "rejected": {who: status.rejected(who) for who in sides},
        "unfinished_jobs": status.unfinished_jobs,
        "waiting_for": waiting,
        "opens": task.opens,
        "closes": task.closes,
        "ends": task.ends,
    }


# --- chorister jobs -----------------------------------------------------------------------------

jobs = _group("jobs", "Show and revive jobs that workers have given up on.")


@jobs.command("list")
def list_jobs(config: Config, json_: JSON = False) -> None:
    """List dead jobs: they failed so often that no worker tries them again."""
    with _queue(config) as queue:
        found: list[dict[str, Any]] = [
            {
                "job": each.number,
                "kind": each.kind,
                "task": b64url_encode(each.task_id) if each.task_id else None,
                "attempts": each.attempts,
                "since": each.since,
            }
            for each in queue.dead_jobs()
        ]
    if json_:
        print_json({"dead": found})
        return
    for row in found:
        row["task"] = row["task"] or ""
        row["since"] = utc_text(row["since"]) if row["since"] else ""
    titles = ("job", "kind", "task", "attempts", "since")
    print_table(titles, (list(row.values()) for row in found))


@jobs.command("revive")
def revive_jobs(
    config: Config,
    numbers: Annotated[list[int] | None, typer.Argument(help="The numbers of the jobs.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Revive all dead jobs.")] = False,
) -> None:
    """Let workers try dead jobs again, once their cause is fixed."""
    if bool(numbers) == everything:
        raise InvalidInput("name the jobs to revive, or use --all")
    with _queue(config) as queue:
        revived = queue.revive(None if everything else numbers)
    say(f"{revived} jobs will be tried again")


@contextlib.contextmanager
def _queue(path: Path) -> Iterator[JobQueue]:
    with _aggregator_database(path) as (_, core):
        if core.queue is None:
            raise InvalidInput(f"{path} does not have `workers = true`: there is no job queue")
        yield core.queue


# --- Common to all --------------------------------------------------------------------------------


@contextlib.contextmanager
def _aggregator_database(path: Path) -> Iterator[tuple[LeaderConfig | HelperConfig, Core]]:
    """Open the database of the aggregator with these settings, without starting a server."""
    with needs_extra("server"):
        from chorister.aggregator.config import load_config
        from chorister.aggregator.service import open_core
    config = load_config(path)
    core = open_core(config, SystemClock(), migrate=False)
    try:
        yield config, core
    finally:
        core.database.close()
