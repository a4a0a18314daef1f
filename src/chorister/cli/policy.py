"""`chorister policy`: what a policy means, and what changes between two."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from chorister.cli import QUESTIONS, app, console
from chorister.policy import Policy
from chorister.policy.contradictions import findings
from chorister.policy.cost import Cost, analysis_cost, device_cost, field_cost
from chorister.policy.diff import diff
from chorister.policy.explain import explain

commands = typer.Typer(no_args_is_help=True, help="Read policies: what a device allows.")
app.add_typer(commands, name="policy", rich_help_panel=QUESTIONS)

JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
File = Annotated[Path, typer.Argument(help="A policy in TOML.")]


@commands.command("check")
def check_command(file: File, json_: JSON = False) -> None:
    """Explain a policy in words; exit with 1 where it contradicts itself."""
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
        typer.echo(json.dumps(result))
    else:
        for section in explain(policy):
            console.print(f"[bold]{escape(section.title)}[/]", highlight=False)
            for line in section.lines:
                console.print(f"  - {escape(line)}", highlight=False, soft_wrap=True)
        for finding in found:
            colour = "red" if finding.kind == "contradiction" else "yellow"
            text = f"[{colour}]{finding.kind}[/] {escape(finding.field)}: {escape(finding.why)}"
            console.print(text, highlight=False, soft_wrap=True)
        verdict = "contradicts itself" if contradictions else "is consistent"
        console.print(f"policy {escape(policy.name)} {verdict}", highlight=False)
    if contradictions:
        raise typer.Exit(1)


@commands.command("diff")
def diff_command(old: File, new: File, json_: JSON = False) -> None:
    """Say what became askable from OLD to NEW, what it can cost, and what no longer is."""
    changes = diff(Policy.load(old), Policy.load(new))
    if json_:
        typer.echo(json.dumps({"changes": [asdict(change) for change in changes]}))
        return
    titles = {"more": "More may be asked or spent", "less": "Less may", "other": "Also changed"}
    for kind, title in titles.items():
        lines = [change for change in changes if change.kind == kind]
        if lines:
            console.print(f"[bold]{title}[/]", highlight=False)
        for change in lines:
            text = f"  - {escape(change.field)}: {escape(change.what)}"
            console.print(text, highlight=False, soft_wrap=True)
    if not changes:
        console.print("both mean the same", highlight=False)
    else:
        console.print("What a device has spent stays spent: no update refunds.", highlight=False)


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


def _cost(cost: Cost) -> dict[str, object]:
    return {
        "epsilon": str(cost.epsilon),
        "delta": str(cost.delta),
        "reports": cost.reports,
        "local_epsilon": str(cost.local_epsilon),
        "local_total": str(cost.local_total),
        "period": cost.period,
    }
