"""`chorister tasks`: an aggregator's tasks with exact counts, for its operator.

These commands read the aggregator's own database, so nobody else can use them.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from chorister.canonical import b64url_encode
from chorister.cli import OPERATORS, app, console
from chorister.cli.serve import aggregator_database
from chorister.errors import InvalidInput

if TYPE_CHECKING:
    from chorister.aggregator.storage.statistics import TaskStatus

commands = typer.Typer(no_args_is_help=True, help="Show an aggregator's tasks.")
app.add_typer(commands, name="tasks", rich_help_panel=OPERATORS)

Config = Annotated[Path, typer.Option("--config", help="The aggregator's settings.")]
JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@commands.callback()
def tasks() -> None:
    """Show an aggregator's tasks."""


@commands.command("list")
def list_command(
    config: Config,
    recipe: Annotated[
        str | None, typer.Option(help="Only tasks of recipes whose digest starts with this (hex).")
    ] = None,
    json_: JSON = False,
) -> None:
    """List all tasks: their state, reports uploaded and verified, and what they wait for."""
    found = [each for each in _read_tasks(config) if each["recipe"].startswith(recipe or "")]
    if json_:
        typer.echo(json.dumps({"tasks": found}))
        return
    table = Table(show_edge=False)
    for title in ("task", "analysis", "group", "state", "uploaded", "verified", "rejected"):
        table.add_column(title, overflow="fold")
    for each in found:
        rejected = sum(sum(reasons.values()) for reasons in each["rejected"].values())
        names = (each["task"][:12], each["analysis"], _group_text(each["group"]), each["state"])
        table.add_row(*names, *map(str, (each["uploaded"], each["verified"], rejected)))
    console.print(table)
    for each in found:
        if each["waiting_for"]:
            line = f"{each['task'][:12]} waits for: {'; '.join(each['waiting_for'])}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)


# An id in base64url may start with a dash, and is not an option then.
@commands.command("show", context_settings={"ignore_unknown_options": True})
def show_command(
    task: Annotated[str, typer.Argument(help="The task's id in base64url, or how it starts.")],
    config: Config,
    json_: JSON = False,
) -> None:
    """Show one task: rejected reports by reason, and why its jobs fail."""
    found = [each for each in _read_tasks(config) if each["task"].startswith(task)]
    if len(found) != 1:
        raise InvalidInput(f"{len(found)} tasks have an id that starts with {task}")
    (one,) = found
    if json_:
        typer.echo(json.dumps(one))
        return
    for name, value in one.items():
        if name == "rejected":
            lines = [f"{who}: {why} {n}" for who, r in value.items() for why, n in r.items()]
            value = "; ".join(lines) or "none"
        elif name == "waiting_for":
            value = "; ".join(value) or "nothing"
        console.print(f"{name:>15}  {value}", highlight=False, markup=False, soft_wrap=True)


def _group_text(group: str) -> str:
    """Return a task's group and arm in words, from its canonical JSON."""
    named = json.loads(group)
    words = [f"{field}: {value}" for field, value in named["groups"].items()]
    if "arm" in named:
        words.append(f"arm: {named['arm']}")
    return ", ".join(words) or "everyone"


def _read_tasks(path: Path) -> list[dict[str, Any]]:
    with aggregator_database(path) as (config, core):
        from chorister.aggregator.storage.statistics import task_status

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
        waiting.append(f"{dead} jobs that workers have given up: see `chorister jobs list`")
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
