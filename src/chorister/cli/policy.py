"""`chorister policy`: what a policy means, and what changes from one to the next."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from chorister.cli import JSON, QUESTIONS, app, console, print_json, say
from chorister.policy import Policy
from chorister.policy.bounds import CostBound, analysis_cost, device_cost, field_cost
from chorister.policy.contradictions import findings
from chorister.policy.diff import diff
from chorister.policy.explain import explain
from chorister.policy.values import legible

commands = typer.Typer(
    no_args_is_help=True, help="Check, explain and compare policies: what a device allows."
)
app.add_typer(commands, name="policy", rich_help_panel=QUESTIONS)

File = Annotated[Path, typer.Argument(help="A policy, in TOML.")]


@commands.command("check")
def check_command(file: File, json_: JSON = False) -> None:
    """Explain a policy in words; exit with 1 if it contradicts itself."""
    policy = Policy.load(file)
    found = findings(policy)
    contradictions = [finding for finding in found if finding.kind == "contradiction"]
    if json_:
        remarks = [finding for finding in found if finding.kind == "remark"]
        result = {
            "consistent": not contradictions,
            "digest": policy.digest.hex(),
            "contradictions": [{"field": f.field, "why": f.why} for f in contradictions],
            "remarks": [{"field": f.field, "why": f.why} for f in remarks],
            "cost": _costs(policy),
            "explanation": [asdict(section) for section in explain(policy)],
        }
        print_json(result)
    else:
        for section in explain(policy):
            console.print(f"[bold]{escape(section.title)}[/]")
            for line in section.lines:
                say(f"  - {legible(line)}")
        for finding in found:
            colour = "red" if finding.kind == "contradiction" else "yellow"
            why = escape(legible(finding.why))
            text = f"[{colour}]{finding.kind}[/] {escape(finding.field)}: {why}"
            console.print(text, soft_wrap=True)
        say(f"policy {policy.name} {'contradicts itself' if contradictions else 'is consistent'}")
    if contradictions:
        raise typer.Exit(1)


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
            say(f"  - {change.field}: {legible(change.what)}")
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
