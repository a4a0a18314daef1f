"""`chorister policy`: what a policy means, and what changes from one to the next."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from chorister.cli import (
    JSON,
    QUESTIONS,
    PlainConsole,
    app,
    console,
    print_json,
    read_file,
    say,
)
from chorister.errors import InvalidInput
from chorister.fleet.first_policy import (
    LOCAL_HELPER,
    LOCAL_LEADER,
    FirstTerms,
    check_epsilon,
    check_period,
    declared_fields,
    read_table,
    write_first_policy,
)
from chorister.policy import Policy
from chorister.policy.bounds import CostBound, analysis_cost, device_cost, field_cost
from chorister.policy.diff import diff
from chorister.policy.explain import explain
from chorister.policy.problems import PolicyProblem, problems

commands = typer.Typer(
    no_args_is_help=True, help="Write, check, explain and compare policies: what a device allows."
)
app.add_typer(commands, name="policy", rich_help_panel=QUESTIONS)

stderr = PlainConsole(stderr=True)
File = Annotated[Path, typer.Argument(help="A policy, in TOML.")]


Rehearsal = Annotated[
    bool,
    typer.Option("--rehearsal", help="Allow a policy without log, aggregators and keys."),
]


@commands.command("check")
def check_command(file: File, rehearsal: Rehearsal = False, json_: JSON = False) -> None:
    """Explain a policy in words; exit with 1 if it contradicts itself, with 2 if it is malformed.

    All problems are listed at once, each with its line and what to do about it.
    """
    policy, found = problems(read_file(file), rehearsal=rehearsal)
    broken = [problem for problem in found if problem.kind != "remark"]
    if json_:
        _print_check(policy, found)
    elif policy is None:
        for problem in found:
            _print_problem(problem, stderr)
        count = f"{len(found):,} problem{'' if len(found) == 1 else 's'}"
        stderr.print(f"{escape(str(file))} is not a policy yet: {count}", soft_wrap=True)
    else:
        for section in explain(policy):
            console.print(f"[bold]{escape(section.title)}[/]")
            for line in section.lines:
                say(f"  - {line}")
        for problem in found:
            _print_problem(problem, console)
        say(f"policy {policy.name} {'contradicts itself' if broken else 'is consistent'}")
    if broken:
        raise typer.Exit(2 if policy is None else 1)


def _print_problem(problem: PolicyProblem, where: PlainConsole) -> None:
    colour = "yellow" if problem.kind == "remark" else "red"
    line = "" if problem.line is None else f"line {problem.line}: "
    field = f"{escape(problem.field)}: " if problem.field else ""
    text = f"[{colour}]{problem.kind}[/] {line}{field}{escape(problem.why)}"
    where.print(text, soft_wrap=True)
    if problem.remedy:
        where.print(f"  -> {escape(problem.remedy)}", soft_wrap=True)


def _print_check(policy: Policy | None, found: list[PolicyProblem]) -> None:
    rows = {
        kind: [
            {"field": each.field, "why": each.why, "remedy": each.remedy, "line": each.line}
            for each in found
            if each.kind == kind
        ]
        for kind in ("malformed", "contradiction", "remark")
    }
    result: dict[str, object] = {
        "consistent": policy is not None and not rows["contradiction"],
        "problems": rows["malformed"],
        "contradictions": rows["contradiction"],
        "remarks": rows["remark"],
    }
    if policy is not None:
        result["digest"] = policy.digest.hex()
        result["cost"] = _costs(policy)
        result["explanation"] = [asdict(section) for section in explain(policy)]
    print_json(result)


@commands.command("new")
def new_command(
    folder: Annotated[Path, typer.Argument(help="A new folder, for the policy and its keys.")],
    table: Annotated[
        Path | None,
        typer.Option("--from", help="A table (.csv) whose columns are what devices will hold."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The policy's name.")] = None,
    purpose: Annotated[
        str | None, typer.Option(help="Why you ask, in words for the people whose devices answer.")
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--field", help='Without --from: a field and its type, such as "age:integer".'
        ),
    ] = None,
    epsilon: Annotated[
        str | None, typer.Option(help="What everything together may cost a device per period.")
    ] = None,
    period: Annotated[
        str | None, typer.Option(help='How often the budget renews, such as "90d".')
    ] = None,
    reports: Annotated[
        int | None, typer.Option(min=1, max=100, help="How many questions a device may answer.")
    ] = None,
    leader: Annotated[str | None, typer.Option(help="The leader's URL.")] = None,
    helper: Annotated[str | None, typer.Option(help="The helper's URL.")] = None,
    json_: JSON = False,
) -> None:
    """Write a first policy, with new keys, that passes `policy check` and that you can edit.

    At a terminal, prompts for whatever you leave out; otherwise uses the defaults.
    """
    ask = at_terminal() and not json_
    given = declared_fields(fields) if table is None else read_table(table)
    if not given.columns:
        texts = _asked_valid(
            None, "Fields, such as age:integer, score:real, city:text", "age:integer", ask,
            lambda text: declared_fields(text.split(",")),
        )  # fmt: skip
        given = declared_fields(texts.split(","))
    name = _asked(name, "Name of the policy", given.table, ask)
    purpose = _asked(purpose, "Why it is asked, in one sentence", _PURPOSE, ask)
    epsilon = _asked_valid(
        epsilon, "Epsilon that everything may cost a device per period", "1", ask,
        lambda text: check_epsilon(text, None),
    )  # fmt: skip
    period = _asked_valid(period, "Period after which that renews", "90d", ask, check_period)
    terms = FirstTerms(
        name=name,
        purpose=purpose,
        epsilon=epsilon,
        period=period,
        reports=_asked_count(reports, epsilon, ask),
        leader=_asked(leader, "URL of the leader", LOCAL_LEADER, ask),
        helper=_asked(helper, "URL of the helper", LOCAL_HELPER, ask),
    )
    files = write_first_policy(folder, given, terms)
    if json_:
        print_json(
            {
                "policy": str(files.policy),
                "keys": {str(k): v for k, v in files.keys.items()},
                "hpke_config": files.hpke_config,
                "renamed": dict(given.renamed),
            }
        )
        return
    for own, source in given.renamed.items():
        say(f"{source} is the field {own} here: questions and devices use this name")
    say(f"{files.policy} is a policy that passes `chorister policy check`.")
    for path, what in files.keys.items():
        say(f"{path}: {what}")
    say(
        "Both aggregators need the public half of collector.json in their settings, as hpke_config:"
    )
    say(f"  {files.hpke_config}")
    say("Keep the keys secret, and hand each to its owner. Then check the policy again:")
    say(f"  chorister policy check {files.policy}")


_PURPOSE = "Learn how these values are distributed among people"


def at_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty()


def _asked_count(given: int | None, epsilon: str, ask: bool) -> int:
    def check(text: str) -> None:
        if not text.isdecimal() or not 1 <= int(text) <= 100:
            raise InvalidInput(f"enter a whole number from 1 to 100, not {text!r}")
        check_epsilon(epsilon, int(text))

    text = None if given is None else str(given)
    return int(_asked_valid(text, "Questions per device and period", "2", ask, check))


def _asked(given: str | None, question: str, default: str, ask: bool) -> str:
    if given is not None:
        return given
    return str(typer.prompt(question, default=default)) if ask else default


def _asked_valid(
    given: str | None, question: str, default: str, ask: bool, check: Callable[[str], object]
) -> str:
    """Ask until the answer passes the check; what was given as an option is checked once."""
    while True:
        text = _asked(given, question, default, ask)
        try:
            check(text)
        except InvalidInput as error:
            if given is not None or not ask:
                raise
            say(f"  {error}")
        else:
            return text


@commands.command("diff")
def diff_command(old: File, new: File, json_: JSON = False) -> None:
    """Show what can be asked under NEW that could not under OLD, at what cost, and vice versa."""
    changes = diff(Policy.load(old), Policy.load(new))
    if json_:
        print_json({"changes": [asdict(change) for change in changes]})
        return
    titles = {
        "more": "More may be asked or spent",
        "less": "Less may be asked or spent",
        "other": "Also changed",
    }
    for kind, title in titles.items():
        lines = [change for change in changes if change.kind == kind]
        if lines:
            console.print(f"[bold]{title}[/]")
        for change in lines:
            say(f"  - {change.field}: {change.what}")
    if changes:
        say("What a device has spent stays spent: an update never refunds it.")
    else:
        say("Both mean the same.")


def _costs(policy: Policy) -> dict[str, object]:
    return {
        "device": _cost(device_cost(policy)),
        "analyses": {
            name: {
                **_cost(analysis_cost(policy, analysis)),
                "fields": {
                    ref: _cost(field_cost(policy, analysis, field))
                    for ref, field in analysis.fields.items()
                },
            }
            for name, analysis in policy.analyses.items()
        },
    }


def _cost(cost: CostBound) -> dict[str, object]:
    return {
        "epsilon": str(cost.epsilon),
        "delta": str(cost.delta),
        "reports": cost.reports,
        "local_epsilon": str(cost.local_epsilon),
        "local_total": str(cost.local_total),
        "period": cost.period,
    }
