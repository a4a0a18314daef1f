"""Running an algorithm: its form, what its rounds would cost, and its pictures as they come."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from chorister.analyst.algorithms.running import Run
from chorister.console.algorithms import ALGORITHMS, Algorithm, plan_run
from chorister.console.errors import NotFound
from chorister.console.forms import field_kinds
from chorister.console.pages_studies import find_study
from chorister.console.runs import RunRecord, waiting_to_go_on
from chorister.console.web import Visit
from chorister.console.workspace import StudyView
from chorister.errors import ChoristerError

__all__ = ["go_on", "plan", "run_picture", "show_form", "show_run", "start"]


def _algorithm(visit: Visit, view: StudyView) -> Algorithm:
    found = ALGORITHMS.get(visit.at("algorithm"))
    if found is None or not found.fits(view.study):
        raise NotFound
    return found


def _values(visit: Visit, algorithm: Algorithm) -> dict[str, str]:
    return {each.name: visit.form.get(each.name) for each in algorithm.inputs}


def show_form(visit: Visit) -> Response:
    """The form of an algorithm."""
    view = find_study(visit, to_ask=True)
    algorithm = _algorithm(visit, view)
    values = {each.name: each.value for each in algorithm.inputs}
    return _page(visit, view, algorithm, values, None, error="")


def plan(visit: Visit) -> Response:
    """What the rounds would cost."""
    view = find_study(visit, to_ask=True)
    algorithm = _algorithm(visit, view)
    values = _values(visit, algorithm)
    run, error = None, ""
    try:
        run = plan_run(algorithm, view.study, values)
    except ChoristerError as problem:
        error = str(problem)
    if visit.request.headers.get("hx-request") == "true":
        return visit.page("_plan.html", run=run, error=error, view=view)
    return _page(visit, view, algorithm, values, run, error=error)


def start(visit: Visit) -> Response:
    """Run it."""
    view = find_study(visit, to_ask=True)
    algorithm = _algorithm(visit, view)
    values = _values(visit, algorithm)
    try:
        run = plan_run(algorithm, view.study, values)
        record = visit.workspace.runs.start(
            view.connection.name, view.study.name, algorithm=algorithm.name, values=values,
            by=visit.analyst, run=run,
        )  # fmt: skip
    except ChoristerError as error:
        return _page(visit, view, algorithm, values, None, error=str(error), status=422)
    return visit.go_to(f"{view.path}#run-{record.number}")


def go_on(visit: Visit) -> Response:
    """Go on with a run that was interrupted: what was asked already is not asked again."""
    view = find_study(visit, to_ask=True)
    record = _record(visit, view)
    algorithm = ALGORITHMS.get(record.algorithm)
    if algorithm is None:
        raise NotFound
    if waiting_to_go_on(record):
        run = plan_run(algorithm, view.study, record.values)
        visit.workspace.runs.start(
            view.connection.name, view.study.name, algorithm=algorithm.name,
            values=record.values, by=visit.analyst, run=run, number=record.number,
        )  # fmt: skip
    return visit.go_to(f"{view.path}#run-{record.number}")


def show_run(visit: Visit) -> Response:
    """A run's page."""
    view = find_study(visit)
    record = _record(visit, view)
    return visit.page(
        "run_result.html",
        view=view,
        run=record,
        algorithm=ALGORITHMS.get(record.algorithm),
        words=record.words.split("\n"),
    )


def run_picture(visit: Visit) -> Response:
    """A run's latest picture."""
    view = find_study(visit)
    record = _record(visit, view)
    name, study = view.connection.name, view.study.name
    spec = visit.workspace.runs.picture(name, study, record.number)
    if spec is None:
        raise NotFound
    key = (name, study, "run", record.number, len(record.rounds))
    return visit.svg(visit.web.charts.svg(key, visit.look, lambda: spec))


def _record(visit: Visit, view: StudyView) -> RunRecord:
    number = visit.number()
    record = visit.workspace.runs.get(view.connection.name, view.study.name, number)
    if record is None:
        raise NotFound
    return record


def _page(
    visit: Visit, view: StudyView, algorithm: Algorithm, values: dict[str, str],
    run: Run[Any] | None, *, error: str, status: int = 200,
) -> Response:  # fmt: skip
    return visit.page(
        "run.html",
        status=status,
        view=view,
        algorithm=algorithm,
        values=values,
        fields=field_kinds(view.study),
        run=run,
        error=error,
    )
