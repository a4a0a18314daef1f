"""The result of a round: chart, table, explanation, the exact recipe, and downloads.

Also the page of all recipes, with the public log of every live fleet as an auditor checks it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import Response

from chorister.analyst.result import Result
from chorister.analyst.rounds import Round
from chorister.console.access import NotFound
from chorister.console.charts import alternative_text, picture
from chorister.console.connections import FleetConnection, LoggedQuestion, LogPage
from chorister.console.pages_studies import find_study
from chorister.console.web import Visit
from chorister.console.workspace import StudyView
from chorister.recipe import Check, Recipe, check

_ROWS: Final = 200


def _result(visit: Visit) -> Result:
    found = find_study(visit).round(visit.number()).result
    if found is None:
        raise NotFound
    return found


def show_round(visit: Visit) -> Response:
    view = find_study(visit)
    round_ = view.round(visit.number())
    result = round_.result
    context: dict[str, Any] = {"view": view, "round": round_, "result": result}
    if result is not None:
        shown = result.top(_ROWS) if len(result) > _ROWS else result
        columns = shown.columns()
        context["names"] = list(shown.labels)
        context["rows"] = [
            {
                "labels": labels,
                "estimate": float(columns["estimate"][i]),
                "low": float(columns["ci_low"][i]),
                "high": float(columns["ci_high"][i]),
                "share": float(columns["estimate"][i]) / result.n_reports,
            }
            for i, labels in enumerate(zip(*shown.labels.values(), strict=True))
        ]
        context["words"] = result.explain().split("\n")
        context["text"] = alternative_text(result)
    return visit.page("round.html", **context)


def round_chart(visit: Visit) -> Response:
    result = _result(visit)
    key = (find_study(visit).key, visit.number())
    return visit.svg(
        visit.web.charts.svg(key, visit.look, lambda: picture(result, look=visit.look))
    )


def result_csv(visit: Visit) -> Response:
    """All rows as CSV."""
    name = f"{visit.at('study')}-{visit.number()}.csv"
    return Response(
        _result(visit).to_csv(),
        media_type="text/csv; charset=utf-8",
        headers={"content-disposition": f'attachment; filename="{name}"'},
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
