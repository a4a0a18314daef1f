"""Asking: one question or a whole algorithm, with its cost and precision before it is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.responses import Response

from chorister.analyst.algorithms.algorithm_run import AlgorithmRun
from chorister.analyst.question import QuestionCost, check_target
from chorister.console.access import NotFound
from chorister.console.algorithms import ALGORITHMS, AlgorithmForm, plan_run
from chorister.console.background import RunRecord
from chorister.console.forms import (
    Form,
    asked_question,
    at_field,
    field_choices,
    form_of,
    map_fields,
    suggested_form,
    whole,
)
from chorister.console.pages_studies import find_study
from chorister.console.web import Visit
from chorister.console.workspace import StudyView
from chorister.errors import ChoristerError, MissingInput

_AT_INPUTS: Final = frozenset({"epsilon", "delta", "local_epsilon", "min_cohort"})
_INPUTS: Final = {"window": "hours", "ends": "hours", "participation": "share"}
"""The inputs of the form whose names differ from what an error is about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FormProblem:
    """Why a form can't be priced yet, and at which of its fields to say so."""

    why: str
    field: str = ""
    missing: bool = False  # nothing is wrong: something is still to be filled in

    @classmethod
    def of(cls, error: ChoristerError) -> FormProblem:
        field = str(getattr(error, "field", None) or getattr(error, "check", ""))
        field = _INPUTS.get(field, field)
        last = field.rpartition(".")[2]  # of a budget's path, or of a recipe's
        field = last if last in _AT_INPUTS else field
        return cls(why=str(error), field=field, missing=isinstance(error, MissingInput))

    @property
    def submitted(self) -> FormProblem:
        """The same once the form was sent: what is missing is a problem now."""
        return replace(self, missing=False)


def show_ask(visit: Visit) -> Response:
    """Show the form, empty or filled in from an earlier round."""
    view = find_study(visit, to_ask=True)
    form = suggested_form(view.study, view.connection.suggestions)
    like = visit.request.query_params.get("like", "")
    if like.isascii() and like.isdigit() and len(like) <= 6:
        form = form_of(view.round(int(like)).recipe, view.study)
    return _ask_page(visit, view, form, None, None)


def price(visit: Visit) -> Response:
    """Show what the question would cost: a part of the page, or the whole page without htmx."""
    view = find_study(visit, to_ask=True)
    cost, problem = _priced(view, visit.form)
    if visit.by_htmx:
        return visit.page("_cost.html", cost=cost, problem=problem, view=view)
    return _ask_page(visit, view, visit.form, cost, problem)


def ask(visit: Visit) -> Response:
    """Ask the question, and go to the page of the study, where its cohort fills."""
    view = find_study(visit, to_ask=True)
    try:
        question, target = asked_question(view.study, visit.form)
        round_ = view.study.post(question, target=target)
    except ChoristerError as error:
        problem = FormProblem.of(error).submitted
        return _ask_page(visit, view, visit.form, None, problem, status=422)
    visit.workspace.waiters.wait(view.connection.name, view.study, round_)
    return visit.go_to(f"{view.path}#round-{round_.number}")


def _priced(view: StudyView, form: Form) -> tuple[QuestionCost | None, FormProblem | None]:
    if not form.chosen("use:"):
        return None, None
    try:
        question, target = asked_question(view.study, form)
        check_target(question, target)
        with at_field("expect"):
            reports = whole(form.get("expect"), "the number of reports")
        return question.cost(reports=reports, target=target), None
    except ChoristerError as error:
        return None, FormProblem.of(error)


def _ask_page(
    visit: Visit, view: StudyView, form: Form, cost: QuestionCost | None,
    problem: FormProblem | None, *, status: int = 200,
) -> Response:  # fmt: skip
    return visit.page(
        "ask.html",
        status=status,
        view=view,
        form=form,
        fields=field_choices(view.study),
        map_fields=map_fields(view.study),
        terms=view.study.terms,
        cost=cost,
        problem=problem,
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
    # What was asked in other studies counts as well.
    asked = len(view.study.fleet.archive.all_rounds())
    key = (view.key, algorithm.name, asked, tuple(sorted(values.items())))
    return visit.workspace.runs.planned(
        key, lambda: plan_run(algorithm, view.study, values), take=take
    )


def show_form(visit: Visit) -> Response:
    view = find_study(visit, to_ask=True)
    algorithm = _algorithm(visit, view)
    values = algorithm.beginning(view.study, view.connection.suggestions)
    return _run_page(visit, view, algorithm, values, None, None)


def plan(visit: Visit) -> Response:
    view = find_study(visit, to_ask=True)
    algorithm = _algorithm(visit, view)
    values = _values(visit, algorithm)
    run, problem = None, None
    try:
        run = _planned(visit, view, algorithm, values, take=False)
    except ChoristerError as error:
        problem = FormProblem.of(error)
    if visit.by_htmx:
        done = _same_run(visit, view, algorithm, values)
        return visit.page("_plan.html", run=run, problem=problem, view=view, done=done)
    return _run_page(visit, view, algorithm, values, run, problem)


def _same_run(
    visit: Visit, view: StudyView, algorithm: AlgorithmForm, values: dict[str, str]
) -> RunRecord | None:
    """The finished run of the same algorithm with the same values: its questions cost nothing."""
    for record in visit.workspace.runs.of(view.key):
        if (record.algorithm, record.values, record.state) == (algorithm.name, values, "finished"):
            return record
    return None


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
        problem = FormProblem.of(error).submitted
        return _run_page(visit, view, algorithm, values, None, problem, status=422)
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
    return visit.svg(visit.web.charts.svg(key, visit.chart_style, lambda: spec))


def _record(visit: Visit, view: StudyView) -> RunRecord:
    record = visit.workspace.runs.get(view.key, visit.number())
    if record is None:
        raise NotFound
    return record


def _run_page(
    visit: Visit, view: StudyView, algorithm: AlgorithmForm, values: dict[str, str],
    run: AlgorithmRun[Any] | None, problem: FormProblem | None, *, status: int = 200,
) -> Response:  # fmt: skip
    return visit.page(
        "run.html",
        status=status,
        view=view,
        algorithm=algorithm,
        values=values,
        choices={each.name: algorithm.choices(view.study, each) for each in algorithm.inputs},
        run=run,
        problem=problem,
        done=_same_run(visit, view, algorithm, values),
    )
