"""The result of a round: chart, table, explanation, the exact recipe, and downloads.

Also the page of all recipes, with the public log of every live fleet as an auditor checks it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from starlette.responses import Response

from chorister.analyst.algorithms.algorithm_run import AlgorithmResult
from chorister.analyst.display import as_shown, place_name
from chorister.analyst.estimate import part_columns
from chorister.analyst.postprocessing import Comparison
from chorister.analyst.result import Result
from chorister.analyst.rounds import Round
from chorister.analyst.trend import Trend
from chorister.console.access import NotFound
from chorister.console.charts import alternative_text, differences, picture
from chorister.console.connections import FleetConnection, LoggedQuestion, LogPage
from chorister.console.pages_studies import find_study
from chorister.console.web import Visit
from chorister.console.workspace import StudyView
from chorister.encoding import Grid
from chorister.recipe import Check, Recipe, check

_ROWS: Final = 200
_NOISE_ROWS: Final = 12  # that may be 0


def _result(visit: Visit) -> Result:
    found = find_study(visit).round(visit.number()).result
    if found is None:
        raise NotFound
    return found


def show_round(visit: Visit) -> Response:
    view = find_study(visit)
    round_ = view.round(visit.number())
    if round_.recipe.series is not None:
        return visit.go_to(f"{view.path}/series/{round_.number}")
    result = round_.result
    context: dict[str, Any] = {"view": view, "round": round_, "result": result}
    if result is not None:
        context["names"] = list(result.labels)
        context["rows"] = _table_rows(result)
        context["words"] = as_shown(result).explain().split("\n")
        context["text"] = alternative_text(result)
        context["sides"] = list(_sides(view, round_))
    return visit.page("round.html", **context)


def _table_rows(result: Result) -> list[dict[str, Any]]:
    """Rows above the noise first, by simultaneous intervals."""
    columns, shares = as_shown(result).columns(), result.shares
    above = columns["ci_low"] > 0.0
    order = np.arange(len(result))
    if len(result) > _ROWS:
        order = np.argsort(-columns["estimate"], kind="stable")[:_ROWS]
    noise = order[~above[order]]
    order = np.concatenate([order[above[order]], noise[:_NOISE_ROWS]])
    named = [
        [place_name(feature, label) for label in column] if isinstance(feature, Grid) else column
        for column, feature in zip(
            result.labels.values(),
            [*[None] * (len(result.labels) - len(result.features)), *result.features],
            strict=True,
        )
    ]
    return [
        {
            "labels": [column[i] for column in named],
            "estimate": float(columns["estimate"][i]),
            "low": float(columns["ci_low"][i]),
            "high": float(columns["ci_high"][i]),
            "share": float(shares[i]),
            "above": bool(above[i]),
        }
        for i in order.tolist()
    ]


def round_chart(visit: Visit) -> Response:
    result = _result(visit)
    key = (find_study(visit).key, visit.number())
    return visit.svg(
        visit.web.charts.svg(
            key, visit.chart_style, lambda: picture(result, style=visit.chart_style)
        )
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedSide:
    """One cohort that can be compared: a round, or one group of it."""

    key: str  # in the address
    title: str
    result: Result


def _sides(view: StudyView, round_: Round) -> Iterator[ComparedSide]:
    """All cohorts of the study that were asked about the same features, this round's first."""
    asked = round_.recipe.features
    rounds = [round_, *(each for each in view.rounds if each.number != round_.number)]
    for each in rounds:
        if each.result is None or each.recipe.features != asked:
            continue
        if not part_columns(each.recipe):
            yield ComparedSide(
                key=str(each.number), title=f"round {each.number}", result=each.result
            )
            continue
        for i, part in enumerate(each.result.parts):
            title = f"{', '.join(part.group)} (round {each.number})"
            alone = each.result.group(*part.group)
            yield ComparedSide(key=f"{each.number}.{i}", title=title, result=alone)


def _chosen_sides(visit: Visit) -> tuple[StudyView, Round, list[ComparedSide], list[ComparedSide]]:
    view = find_study(visit)
    round_ = view.round(visit.number())
    if round_.result is None:
        raise NotFound
    sides = list(_sides(view, round_))
    wanted = [visit.request.query_params.get(name) for name in ("first", "second")]
    chosen = [side for key in wanted for side in sides if side.key == key]
    if len(chosen) != 2 or chosen[0].key == chosen[1].key:
        raise NotFound
    return view, round_, sides, chosen


def _compared(first: ComparedSide, second: ComparedSide) -> Comparison:
    """With intervals for all rows at once, that also cover who happened to answer."""
    return first.result.simultaneous().compare(second.result.simultaneous(), population=True)


def compare_results(visit: Visit) -> Response:
    """Two groups or rounds side by side: each share of its own reports."""
    view, round_, sides, (first, second) = _chosen_sides(visit)
    found = _compared(first, second)
    order = np.argsort(-np.abs(found.difference), kind="stable")[:_ROWS].tolist()
    names = [" · ".join(labels) for labels in zip(*found.labels.values(), strict=True)]
    rows = [
        {
            "label": names[i],
            "first": float(found.first[i]),
            "second": float(found.second[i]),
            "low": float(found.ci_low[i]),
            "high": float(found.ci_high[i]),
            "difference": float(found.difference[i]),
            "differs": bool(found.ci_low[i] > 0.0 or found.ci_high[i] < 0.0),
        }
        for i in (sorted(order) if len(names) <= _ROWS else order)
    ]
    return visit.page(
        "compare.html", view=view, round=round_, sides=sides, first=first, second=second,
        found=found, rows=rows, words=found.explain(),
    )  # fmt: skip


def comparison_chart(visit: Visit) -> Response:
    view, _, _, (first, second) = _chosen_sides(visit)
    key = (view.key, "compare", first.key, second.key)
    return visit.svg(
        visit.web.charts.svg(
            key, visit.chart_style,
            lambda: differences(
                _compared(first, second), first=first.title, second=second.title
            ),
        )
    )  # fmt: skip


_EXPORTS: Final[dict[str, tuple[str, Callable[[Any], str | bytes | None]]]] = {
    "csv": ("text/csv; charset=utf-8", lambda found: found.to_csv()),
    "parquet": ("application/vnd.apache.parquet", lambda found: found.to_parquet()),
    "json": ("application/json", lambda found: found.to_json()),
    "html": ("text/html; charset=utf-8", lambda found: found.to_html()),
}


def export_result(visit: Visit) -> Response:
    """All rows of a round, as a file, with the intervals that the page shows."""
    return exported(visit, as_shown(_result(visit)), f"round-{visit.number()}")


def export_run(visit: Visit) -> Response:
    """What a run found, as a file; if it did not finish, the last round that it has."""
    view = find_study(visit)
    record = visit.workspace.runs.get(view.key, visit.number())
    found: Result | AlgorithmResult | None = visit.workspace.runs.result(view.key, visit.number())
    if record is not None and found is None and record.rounds:
        last = view.round(record.rounds[-1]).result
        found = None if last is None else as_shown(last)
    if found is None:
        raise NotFound
    return exported(visit, found, f"run-{visit.number()}")


def exported(visit: Visit, found: Result | AlgorithmResult | Trend, name: str) -> Response:
    """Answer with a file, in the format that the path names."""
    kind = visit.at("format")
    if kind not in _EXPORTS:
        raise NotFound
    media_type, write = _EXPORTS[kind]
    file = f"{visit.at('study')}-{name}.{kind}"
    return Response(
        write(found),
        media_type=media_type,
        headers={"content-disposition": f'attachment; filename="{file}"'},
    )


def show_recipe(visit: Visit) -> Response:
    """The recipe as devices get it: canonical JSON."""
    round_ = find_study(visit).round(visit.number())
    return Response(round_.recipe.canonical(), media_type="application/json")


def list_recipes(visit: Visit) -> Response:
    """The public log of every live fleet, and the rounds that the analyst may see."""
    views = visit.workspace.visible(visit.analyst)
    rounds = {
        (view.connection.name, round_.recipe.digest): (view, round_)
        for view in views
        for round_ in view.rounds
    }
    logs: list[tuple[FleetConnection, LogPage, list[RecipeCard]]] = []
    for connection in visit.workspace.usable(visit.analyst):
        page = visit.workspace.logs.of(connection)
        if page is None:
            continue
        cards = []
        for question in page.questions:
            recipe = question.signed.recipe
            view, round_ = rounds.pop((connection.name, recipe.digest), (None, None))
            cards.append(_card(recipe, connection, view, round_, question))
        logs.append((connection, page, cards))
    # Rounds that are in no log: rehearsals, and those just asked.
    others = [_card(each.recipe, view.connection, view, each) for view, each in rounds.values()]
    others.sort(key=lambda card: card.recipe.window.opens, reverse=True)
    return visit.page("recipes.html", logs=logs, others=others)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeCard:
    """A recipe on the page."""

    recipe: Recipe
    view: StudyView | None  # the study, if the analyst may see it
    round: Round | None
    question: LoggedQuestion | None  # its entry in the log
    failed: list[Check]
    json: str


def _card(
    recipe: Recipe,
    connection: FleetConnection,
    view: StudyView | None,
    round_: Round | None,
    question: LoggedQuestion | None = None,
) -> RecipeCard:
    return RecipeCard(
        recipe=recipe,
        view=view,
        round=round_,
        question=question,
        failed=[each for each in check(recipe, connection.policy) if not each.passed],
        json=json.dumps(json.loads(recipe.canonical()), indent=2, ensure_ascii=False),
    )
