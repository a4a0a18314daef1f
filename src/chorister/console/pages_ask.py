"""Asking the next question: pick fields, see what it costs and how precise it will be, ask."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from chorister.analyst.cost import QuestionCost
from chorister.analyst.question import check_target
from chorister.console.errors import Forbidden
from chorister.console.forms import Form, asked_question, field_kinds, whole
from chorister.console.pages_studies import find_study
from chorister.console.prefill import form_of
from chorister.console.web import Visit
from chorister.console.workspace import StudyView
from chorister.errors import ChoristerError

__all__ = ["ask", "price", "show_ask"]


def show_ask(visit: Visit) -> Response:
    """The form, empty or filled in as an earlier round was."""
    view = find_study(visit, to_ask=True)
    form = Form([])
    like = visit.request.query_params.get("like", "")
    if like.isascii() and like.isdigit() and len(like) <= 6:
        form = form_of(view.round(int(like)).recipe, view.study)
    return _page(visit, view, form, None, error="")


def price(visit: Visit) -> Response:
    """What the question in the form would cost: a part of the page, or all of it without htmx."""
    view = find_study(visit, to_ask=True)
    cost, error = _priced(view, visit.form)
    if visit.request.headers.get("hx-request") == "true":
        return visit.page("_cost.html", cost=cost, error=error, view=view)
    return _page(visit, view, visit.form, cost, error=error)


def ask(visit: Visit) -> Response:
    """Ask it, and go to the study's page, where its cohort fills."""
    view = find_study(visit)
    if not view.may_ask:
        raise Forbidden("This study is shared with you to look at, not to ask in.")
    try:
        question, target = asked_question(view.study, visit.form)
        round_ = view.study.post(question, target=target)
    except ChoristerError as error:
        return _page(visit, view, visit.form, None, error=str(error), status=422)
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


def _page(
    visit: Visit, view: StudyView, form: Form, cost: QuestionCost | None, *, error: str,
    status: int = 200,
) -> Response:  # fmt: skip
    terms = view.study.terms
    fields = field_kinds(view.study)
    context: dict[str, Any] = {
        "view": view,
        "form": form,
        "fields": fields,
        "number_fields": [field for field in fields if field.type != "text"],
        "terms": terms,
        "cost": cost,
        "error": error,
        "knows_devices": view.connection.fleet.devices is not None,
    }
    return visit.page("ask.html", status=status, **context)
