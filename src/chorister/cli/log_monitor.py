"""`chorister log monitor`: watch a log, and report what is asked."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from chorister.cli import JSON, CABundle, console, say
from chorister.cli.log import (
    EarlierPolicies,
    Policies,
    Where,
    commands,
    describe,
    errors_reported,
    load_policies,
    open_source,
    problem,
)
from chorister.clock import SystemClock
from chorister.errors import ChoristerError, LogWithheld, ServiceError, Unreachable
from chorister.http_client import WebClient
from chorister.policy import Policy
from chorister.policy.explain import Section
from chorister.policy.values import visible
from chorister.recipe import SignedRecipe
from chorister.recipe.in_words import describe as describe_question
from chorister.transparency.auditor import LogPolicies, read_policies
from chorister.transparency.entries import ListEntry
from chorister.transparency.monitor import LogMonitor
from chorister.transparency.state import Logged

Post = Callable[[dict[str, Any]], None]


@commands.command("monitor")
def monitor_command(
    where: Where,
    kept: Annotated[
        Path | None,
        typer.Option(help="File for the newest checkpoint, where a restart continues."),
    ] = None,
    policy: Policies = None,
    earlier_policy: EarlierPolicies = None,
    every: Annotated[int, typer.Option(min=1, help="Seconds between two checks.")] = 60,
    once: Annotated[bool, typer.Option("--once", help="Check once, then exit.")] = False,
    webhook: Annotated[
        str | None,
        typer.Option(help="Post each new entry, and any error in the log, to this URL as JSON."),
    ] = None,
    ca_bundle: CABundle = None,
    json_: JSON = False,
) -> None:
    """Watch a log: print each new question in words, and exit with 1 if the log is wrong.

    Every entry and body is verified, and each check has to extend the one before. `log verify` also
    checks tiles, the list and the candidate.
    """
    own = load_policies(policy, earlier_policy)
    post = _poster(webhook)
    with open_source(where, ca_bundle) as source, errors_reported(json_), _alarm(post):
        rules = own or read_policies(source)
        monitor = LogMonitor(source, authority=rules.authority, clock=SystemClock(), kept=kept)
        # What is still to be sent, if the webhook is away.
        unsent = deque[Logged]()
        while True:
            try:
                new = monitor.fetch_new()
                unsent += (each for each in new if not isinstance(each.entry, ListEntry))
                while unsent:
                    _report(unsent[0], monitor.recipes.get(unsent[0].index), rules, post, json_)
                    unsent.popleft()
                monitor.keep()
            except (LogWithheld, ServiceError) as error:
                if once:
                    raise
                say(f"{error}; trying again in {every} s")
            if once:
                return
            time.sleep(every)


def _report(
    logged: Logged, recipe: SignedRecipe | None, rules: LogPolicies, post: Post, json_: bool
) -> None:
    """Post an entry and print it."""
    row = describe(logged, recipe, set())
    del row["current"]
    sections = [] if recipe is None else _question(recipe, (*rules.policies, *rules.earlier))
    if sections:
        row["question"] = [asdict(section) for section in sections]
    post(row)
    if json_:
        typer.echo(json.dumps(row, ensure_ascii=False))
        return
    text = f"[bold]{row['index']}[/] {row['kind']}: {escape(row['what'])}, by {row['by'][:8]}"
    console.print(text, soft_wrap=True)
    for section in sections:
        for line in section.lines:
            say(f"    - {visible(line)}")


def _question(recipe: SignedRecipe, policies: Sequence[Policy]) -> list[Section]:
    """Describe a question by the policy that names its analysis."""
    asked = recipe.recipe
    fitting = (each for each in policies if asked.analysis in each.analyses)
    return describe_question(asked, next(fitting, policies[0]))


def _poster(webhook: str | None) -> Post:
    def post(row: dict[str, Any]) -> None:
        if webhook is None:
            return
        try:
            with WebClient(timeout=30.0) as web:
                answer = web.exchange("POST", webhook, body=json.dumps(row).encode(), limit=65_536)
        except Unreachable as error:
            raise ServiceError(f"the webhook can't be reached: {error}") from error
        if answer.status >= 300:
            raise ServiceError(f"the webhook answers {answer.status}")  # it may have lost the entry

    return post


@contextmanager
def _alarm(post: Post) -> Iterator[None]:
    """Post what is wrong with the log, too: nobody may be looking at the terminal."""
    try:
        yield
    except ServiceError:
        raise  # nothing is known about the log
    except ChoristerError as error:
        try:
            post({"kind": "alarm", **problem(error)})
        except ServiceError as failed:
            say(str(failed))
        raise
