"""`chorister privacy`: what a release reveals, what it needs, and what several add up to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.progress import track
from rich.table import Table

from chorister.cli import JSON, QUESTIONS, app, console, print_json
from chorister.cli.curve import COHORTS, LOCAL_EPSILONS, Point, check_target, draw
from chorister.errors import InvalidInput
from chorister.privacy import (
    Bound,
    Crowd,
    FixedSequence,
    Mechanism,
    Method,
    Release,
    Setting,
    compose,
    delta,
    epsilon,
    local_epsilon,
    min_cohort,
)
from chorister.privacy.cache import remember
from chorister.privacy.composition import CompositionName
from chorister.privacy.decimals import UP

privacy = typer.Typer(
    name="privacy",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Compute what a sum over a cohort reveals: epsilon, delta, cohort, local epsilon.",
)
app.add_typer(privacy, rich_help_panel=QUESTIONS)

Cohort: TypeAlias = Annotated[int, typer.Option("--cohort", help="The minimum number of reports.")]
LocalEpsilon: TypeAlias = Annotated[
    str, typer.Option("--local-epsilon", help="The local epsilon of one report (eps0).")
]
Epsilon: TypeAlias = Annotated[str, typer.Option("--epsilon", help="Epsilon of the aggregate.")]
Delta: TypeAlias = Annotated[str, typer.Option("--delta", help="Delta of the aggregate.")]
MechanismOption: TypeAlias = Annotated[
    Mechanism, typer.Option("--mechanism", help="How devices randomize their bits.")
]
MethodOption: TypeAlias = Annotated[
    Method | None, typer.Option("--method", help="Only this method; by default all of them.")
]
CrowdOption: TypeAlias = Annotated[
    Crowd,
    typer.Option(
        "--crowd",
        help="What hides a device: other people assumed honest, or both aggregators' noise.",
    ),
]
HonestFraction: TypeAlias = Annotated[
    str, typer.Option("--honest-fraction", help="The honest share of the crowd, such as 9/10.")
]

_MEANING = {
    Method.EXACT: "certified supremum over everyone else's data; devices enforce this",
    Method.CLONES: "Feldman, McMillan, Talwar 2022, applied to our sums",
    Method.CLOSED_FORM: "the paper's theorem",
    Method.RENYI: "certified Renyi divergence at the best order",
}


def _setting(local: str, mechanism: Mechanism, crowd: Crowd, honest_fraction: str) -> Setting:
    return Setting(
        local_epsilon=local, mechanism=mechanism, crowd=crowd, honest_fraction=honest_fraction
    )


def _parameters(setting: Setting, **others: object) -> dict[str, str]:
    known = {
        "local_epsilon": setting.local_epsilon.normalize(UP),
        "mechanism": setting.mechanism,
        "crowd": setting.crowd,
        "honest_fraction": setting.honest_fraction,
    }
    return {name: str(value) for name, value in (known | others).items()}


def _remembered_epsilon(setting: Setting, cohort: int, wanted: str, method: Method) -> Bound:
    def compute() -> dict[str, float]:
        found = epsilon(setting, cohort=cohort, delta=wanted, method=method)
        lower = {} if found.lower is None else {"lower": found.lower}
        return {"upper": found.upper} | lower

    key = _parameters(setting, cohort=cohort, delta=wanted, method=method)
    answer = remember("epsilon", key, compute)
    return Bound(upper=answer["upper"], lower=answer.get("lower"), method=method)


def _remembered_cohort(setting: Setting, target: str, wanted: str, method: Method) -> int:
    def compute() -> dict[str, float]:
        return {"min_cohort": min_cohort(setting, epsilon=target, delta=wanted, method=method)}

    key = _parameters(setting, epsilon=target, delta=wanted, method=method)
    return int(remember("min_cohort", key, compute)["min_cohort"])


def _assumption(setting: Setting) -> str:
    """Say what the figures assume."""
    if setting.crowd is Crowd.NOISED:
        return "Holds if one of the two aggregators is honest, even if all other clients are not."
    if setting.honest_fraction == 1:
        return "Assumes that every member of the cohort is honest; `--crowd noised` does not."
    return (
        f"Assumes that at least {setting.honest_fraction} of every released cohort is honest; "
        "`--crowd noised` does not."
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("method")
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("what it is")
    return table


def _style(method: Method) -> str:
    return "bold green" if method is Method.EXACT else ""


def _describe(setting: Setting) -> str:
    return f"{setting.mechanism} one-hot, local epsilon {setting.local_epsilon}"


@privacy.command("epsilon")
def show_epsilon(
    cohort: Cohort,
    local: LocalEpsilon,
    wanted: Delta,
    mechanism: MechanismOption = Mechanism.ASYMMETRIC,
    method: MethodOption = None,
    crowd: CrowdOption = Crowd.HONEST,
    honest_fraction: HonestFraction = "1",
    as_json: JSON = False,
) -> None:
    """Compute the epsilon of one release over a cohort, at a given delta."""
    setting = _setting(local, mechanism, crowd, honest_fraction)

    def bound(each: Method) -> Bound:
        return _remembered_epsilon(setting, cohort, wanted, each)

    title = f"Epsilon of {cohort:,} reports, {_describe(setting)}, delta {wanted}"
    _show_bounds("epsilon", title, bound, method, ".6f", as_json)
    if not as_json:
        console.print(_assumption(setting))


def _show_bounds(
    name: str,
    title: str,
    bound: Callable[[Method], Bound],
    method: Method | None,
    form: str,
    as_json: bool,
) -> None:
    """Print one row per method, or one for the given method."""
    if as_json:
        found = bound(method or Method.EXACT)
        print_json({name: found.upper, "lower": found.lower, "method": found.method})
        return
    table = _table(title, name, "truth is at least")
    for each in [method] if method else list(Method):
        try:
            found = bound(each)
        except InvalidInput as refusal:
            if method or each is not Method.CLOSED_FORM:
                raise
            table.add_row(each, "refused", "", str(refusal), style="dim")
            continue
        lower = "" if found.lower is None else format(found.lower, form)
        table.add_row(each, format(found.upper, form), lower, _MEANING[each], style=_style(each))
    console.print(table)


@privacy.command("delta")
def show_delta(
    cohort: Cohort,
    local: LocalEpsilon,
    target: Epsilon,
    mechanism: MechanismOption = Mechanism.ASYMMETRIC,
    method: MethodOption = None,
    crowd: CrowdOption = Crowd.HONEST,
    honest_fraction: HonestFraction = "1",
    as_json: JSON = False,
) -> None:
    """Compute the delta of one release over a cohort, at a given epsilon."""
    setting = _setting(local, mechanism, crowd, honest_fraction)

    def bound(each: Method) -> Bound:
        return delta(setting, cohort=cohort, epsilon=target, method=each)

    title = f"Delta of {cohort:,} reports, {_describe(setting)}, epsilon {target}"
    _show_bounds("delta", title, bound, method, ".3e", as_json)
    if not as_json:
        console.print(_assumption(setting))


@privacy.command("cohort")
def show_cohort(
    target: Epsilon,
    local: LocalEpsilon,
    wanted: Delta,
    mechanism: MechanismOption = Mechanism.ASYMMETRIC,
    method: MethodOption = None,
    crowd: CrowdOption = Crowd.HONEST,
    honest_fraction: HonestFraction = "1",
    as_json: JSON = False,
) -> None:
    """Compute the smallest cohort for a given epsilon and delta."""
    setting = _setting(local, mechanism, crowd, honest_fraction)
    if as_json:
        chosen = method or Method.EXACT
        least = _remembered_cohort(setting, target, wanted, chosen)
        print_json({"min_cohort": least, "method": chosen})
        return
    title = f"Smallest cohort for epsilon {target}, delta {wanted}, {_describe(setting)}"
    table = _table(title, "cohort", "times exact")
    cohorts: dict[Method, int] = {}
    refusals: list[InvalidInput] = []
    for each in [method] if method else list(Method):
        try:
            cohorts[each] = _remembered_cohort(setting, target, wanted, each)
        except InvalidInput as refusal:
            refusals.append(refusal)
            table.add_row(each, "refused", "", str(refusal), style="dim")
            continue
        exact = cohorts.get(Method.EXACT)
        ratio = "" if exact is None else f"{cohorts[each] / exact:.1f}"
        table.add_row(each, f"{cohorts[each]}", ratio, _MEANING[each], style=_style(each))
    if not cohorts:
        raise refusals[0]
    console.print(table)
    if Method.EXACT in cohorts:
        others = ", ".join(
            f"{cohorts[each]} {words}"
            for each, words in ((Method.CLONES, "by clones"), (Method.CLOSED_FORM, "closed form"))
            if each in cohorts
        )
        console.print(
            f"[bold green]{cohorts[Method.EXACT]}[/] certified" + (f" ({others})" if others else "")
        )
    console.print(_assumption(setting))


@privacy.command("local")
def show_local(
    cohort: Cohort,
    target: Epsilon,
    wanted: Delta,
    mechanism: MechanismOption = Mechanism.ASYMMETRIC,
    method: MethodOption = None,
    crowd: CrowdOption = Crowd.HONEST,
    honest_fraction: HonestFraction = "1",
    as_json: JSON = False,
) -> None:
    """Compute the largest local epsilon that a cohort supports."""
    chosen = method or Method.EXACT
    largest = local_epsilon(
        cohort=cohort,
        epsilon=target,
        delta=wanted,
        mechanism=mechanism,
        crowd=crowd,
        honest_fraction=honest_fraction,
        method=chosen,
    )
    if as_json:
        print_json({"local_epsilon": float(largest), "method": chosen})
        return
    setting = _setting(str(largest), mechanism, crowd, honest_fraction)
    console.print(
        f"Local epsilon [bold green]{largest}[/] ({mechanism}, by {chosen}) is the largest for "
        f"which {cohort:,} reports give epsilon {target} at delta {wanted}."
    )
    console.print(_assumption(setting))


@privacy.command("compose")
def show_compose(
    cohort: Cohort,
    local: LocalEpsilon,
    wanted: Delta,
    count: Annotated[int, typer.Option("--count", help="The number of releases.")],
    mechanism: MechanismOption = Mechanism.ASYMMETRIC,
    crowd: CrowdOption = Crowd.HONEST,
    honest_fraction: HonestFraction = "1",
    as_json: JSON = False,
) -> None:
    """Compute what several releases add up to, at one delta for all of them."""
    setting = _setting(local, mechanism, crowd, honest_fraction)
    sequence = FixedSequence.repeated(Release(setting=setting, cohort=cohort), count)
    composed = compose(sequence, wanted)
    name, value = composed.best
    values = {
        CompositionName.BASIC: composed.basic,
        CompositionName.ADVANCED: composed.advanced,
        CompositionName.RENYI: composed.renyi,
        CompositionName.EXACT: composed.exact,
    }
    refusals = dict(composed.refusals)
    if as_json:
        known = {each: total if math.isfinite(total) else None for each, total in values.items()}
        best = {"best": value, "best_name": name}
        print_json(known | best | ({"refused": refusals} if refusals else {}))
        return
    title = (
        f"Epsilon of {count} releases of {cohort:,} reports, {_describe(setting)}, delta {wanted}"
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("composition")
    table.add_column("epsilon", justify="right")
    table.add_column("can a ledger use it?")
    filters = {
        CompositionName.BASIC: "yes: a filter",
        CompositionName.RENYI: "yes, at an order fixed in the policy",
    }
    for each, total in values.items():
        if each in refusals:
            table.add_row(each, "refused", refusals[each], style="dim")
            continue
        allowed = filters.get(each, "no: the sequence must be fixed in advance")
        table.add_row(each, f"{total:.5f}", allowed, style="bold green" if each == name else "")
    console.print(table)
    console.print(_assumption(setting))


@privacy.command("curve")
def show_curve(
    to: Annotated[Path, typer.Option("--to", help="An .svg, .png or .html file.")] = Path(
        "privacy-curve.svg"
    ),
    wanted: Delta = "1e-6",
    mechanism: MechanismOption = Mechanism.ASYMMETRIC,
    crowd: CrowdOption = Crowd.HONEST,
    as_json: JSON = False,
) -> None:
    """Plot epsilon against the cohort's size for every method, and print a table."""
    check_target(to)
    points: list[Point] = []
    jobs = [(local, cohort) for local in LOCAL_EPSILONS for cohort in COHORTS]
    for local, cohort in track(
        jobs, description="computing", console=console, transient=True, disable=as_json
    ):
        setting = _setting(str(local), mechanism, crowd, "1")
        for method in Method:
            try:
                found = _remembered_epsilon(setting, cohort, wanted, method)
            except InvalidInput:
                if method is not Method.CLOSED_FORM:
                    raise
                continue  # the theorem does not apply here, so its curve starts further right
            points.append(
                Point(local_epsilon=local, cohort=cohort, method=method, epsilon=found.upper)
            )
    draw(points, to, delta=wanted, mechanism=mechanism)
    if as_json:
        rows = [asdict(point) for point in points]
        print_json({"file": str(to), "delta": float(wanted), "points": rows})
        return
    table = Table(title=f"Epsilon at delta {wanted}", title_justify="left", title_style="bold")
    table.add_column("local epsilon", justify="right")
    table.add_column("cohort", justify="right")
    for method in Method:
        table.add_column(method, justify="right", style=_style(method))
    for local, cohort in jobs:
        row = {
            point.method: f"{point.epsilon:.4f}"
            for point in points
            if (point.local_epsilon, point.cohort) == (local, cohort)
        }
        table.add_row(str(local), f"{cohort:,}", *(row.get(m, "refused") for m in Method))
    console.print(table)
    console.print(f"Wrote [bold]{to}[/].")
