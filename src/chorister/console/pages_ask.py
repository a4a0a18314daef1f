"""Asking: one question or a whole algorithm, with its cost and precision before it is asked."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from chorister.analyst.algorithms.algorithm_run import AlgorithmRun
from chorister.analyst.question import QuestionCost, check_target
from chorister.console.access import NotFound
from chorister.console.algorithms import ALGORITHMS, AlgorithmForm, plan_run
from chorister.console.background import RunRecord
from chorister.console.forms import Form, asked_question, field_choices, form_of, whole
from chorister.console.pages_studies import find_study
from chorister.console.web import Visit
from chorister.console.workspace import StudyView
from chorister.errors import ChoristerError


def show_ask(visit: Visit) -> Response:
    """Show the form, empty or filled in from an earlier round."""
    view = find_study(visit, to_ask=True)
    form = Form([])
    like = visit.request.query_params.get("like", "")
    if like.isascii() and like.isdigit() and len(like) <= 6:
        form = form_of(view.round(int(like)).recipe, view.study)
    return _ask_page(visit, view, form, None, error="")


def price(visit: Visit) -> Response:
    """Show what the question would cost: a part of the page, or the whole page without htmx."""
    view = find_study(visit, to_ask=True)
    cost, error = _priced(view, visit.form)
    if visit.by_htmx:
        return visit.page("_cost.html", cost=cost, error=error, view=view)
    return _ask_page(visit, view, visit.form, cost, error=error)


def ask(visit: Visit) -> Response:
    """Ask the question, and go to the page of the study, where its cohort fills."""
    view = find_study(visit, to_ask=True)
    try:
        question, target = asked_question(view.study, visit.form)
        round_ = view.study.post(question, target=target)
    except ChoristerError as error:
        return _ask_page(visit, view, visit.form, None, error=str(error), status=422)
    visit.workspace.waiters.wait(view.connection.name, view.study, round_)
    return visit.go_to(f"{view.path}#round-{round_.number}")


def _priced(view: StudyView, form: Form) -> tuple[QuestionCost | None, str]:
    if not form.chosen("use:"):
        return None, ""
    try:
        question, target = asked_question(view.study, form)
        check_target(question, target)
        return question.cost(reports=whole(form.get("expect"), "the number of reports")), ""
    except ChoristerError as error:
        return None, str(error)


def _ask_page(
    visit: Visit, view: StudyView, form: Form, cost: QuestionCost | None, *, error: str,
    status: int = 200,
) -> Response:  # fmt: skip
    fields = field_choices(view.study)
    return visit.page(
        "ask.html",
        status=status,
        view=view,
        form=form,
        fields=fields,
        number_fields=[field for field in fields if field.type != "text"],
        terms=view.study.terms,
        cost=cost,
        error=error,
        knows_devices=view.connection.fleet.devices is not None,
    )


def _algorithm(visit: Visit, view: StudyView) -> AlgorithmForm:
    found = ALGORITHMS.get(visit.at("algorithm"))
    if found is None or not found.fits(view.study):
        raise NotFound
    return found


def _values(visit: Visit, algorithm: AlgorithmForm) -> dict[str, str]:
    return {each.name: visit.form.get(each.name) for each in algorithm.inputs}


def _planned(
    visit: Visit, view: StudyView, algorithm: AlgorithmForm, values: dict[str, str], *, take: bool
) -> AlgorithmRun[Any]:
    key = (view.key, algorithm.name, len(view.study.rounds), tuple(sorted(values.items())))
    return visit.workspace.runs.planned(
        key, lambda: plan_run(algorithm, view.study, values), take=take
    )


def show_form(visit: Visit) -> Response:
    view = find_study(visit, to_ask=True)
    algorithm = _algorithm(visit, view)
    values = {each.name: each.value for each in algorithm.inputs}
    return _run_page(visit, view, algorithm, values, None, error="")


def plan(visit: Visit) -> Response:
    view = find_study(visit, to_ask=True)
    algorithm = _algorithm(visit, view)
    values = _values(visit, algorithm)
    run, error = None, ""
    try:
        run = _planned(visit, view, algorithm, values, take=False)
    except ChoristerError as problem:
        error = str(problem)
    if visit.by_htmx:
        return visit.page("_plan.html", run=run, error=error, view=view)
    return _run_page(visit, view, algorithm, values, run, error=error)


def start(visit: Visit) -> Response:
    view = find_study(visit, to_ask=True)
    algorithm = _algorithm(visit, view)
    values = _values(visit, algorithm)
    try:
        run = _planned(visit, view, algorithm, values, take=True)
        record = visit.workspace.runs.start(
            view.key, algorithm=algorithm.name, values=values, by=visit.analyst, run=run
        )
    except ChoristerError as error:
        return _run_page(visit, view, algorithm, values, None, error=str(error), status=422)
    return visit.go_to(f"{view.path}#run-{record.number}")


def go_on(visit: Visit) -> Response:
    """Resume an interrupted run, without asking any question again."""
    view = find_study(visit, to_ask=True)
    record = _record(visit, view)
    algorithm = ALGORITHMS.get(record.algorithm)
    if algorithm is None:
        raise NotFound
    if record.can_resume:
        run = plan_run(algorithm, view.study, record.values)
        visit.workspace.runs.start(
            view.key, algorithm=algorithm.name, values=record.values, by=visit.analyst, run=run,
            number=record.number,
        )  # fmt: skip
    return visit.go_to(f"{view.path}#run-{record.number}")


def show_run(visit: Visit) -> Response:
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
    view = find_study(visit)
    record = _record(visit, view)
    spec = visit.workspace.runs.picture(view.key, record.number)
    if spec is None:
        raise NotFound
    key = (view.key, "run", record.number, len(record.rounds))
    return visit.svg(visit.web.charts.svg(key, visit.look, lambda: spec))


def _record(visit: Visit, view: StudyView) -> RunRecord:
    record = visit.workspace.runs.get(view.key, visit.number())
    if record is None:
        raise NotFound
    return record


def _run_page(
    visit: Visit, view: StudyView, algorithm: AlgorithmForm, values: dict[str, str],
    run: AlgorithmRun[Any] | None, *, error: str, status: int = 200,
) -> Response:  # fmt: skip
    return visit.page(
        "run.html",
        status=status,
        view=view,
        algorithm=algorithm,
        values=values,
        fields=field_choices(view.study),
        run=run,
        error=error,
    )
