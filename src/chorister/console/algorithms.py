"""The algorithms that can be run from a page: which inputs each takes, and how it is started."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import ValidationError

from chorister.analyst.algorithms.running import Run
from chorister.analyst.study import Study
from chorister.canonical import culprit
from chorister.console.forms import lines, number, numbers, whole
from chorister.errors import InvalidInput

__all__ = ["ALGORITHMS", "Algorithm", "Input", "plan_run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """One input of an algorithm's form."""

    name: str
    label: str
    kind: Literal["text", "lines", "number", "field", "choice"] = "text"
    types: tuple[str, ...] = ()  # for a field: which types fit
    choices: tuple[str, ...] = ()
    hint: str = ""
    required: bool = False
    value: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """An algorithm as a page offers it."""

    name: str
    title: str
    what: str
    inputs: tuple[Input, ...]
    start: Callable[[Study, Mapping[str, str]], Run[Any]]

    def fits(self, study: Study) -> bool:
        """Whether the study's analysis has fields for it."""
        types = [study.fleet.policy.fields[ref].type for ref in study.terms.fields]
        for each in self.inputs:
            if each.kind == "field" and each.required:
                fitting = next((kind for kind in types if kind in each.types), None)
                if fitting is None:
                    return False
                types.remove(fitting)
        return True


_EPSILON: Final = Input(
    name="epsilon", label="epsilon for all rounds", kind="number",
    hint="what a device that answers all of them is charged; all that is allowed if left empty",
)  # fmt: skip
_COHORTS: Final = Input(
    name="cohorts", label="who answers", kind="choice", choices=("", "everyone", "disjoint"),
    hint="everyone answers every round, or each round asks other devices; what the budgets allow "
    "if left open",
)  # fmt: skip


def plan_run(algorithm: Algorithm, study: Study, values: Mapping[str, str]) -> Run[Any]:
    """Start an algorithm with the values of its form; nothing is asked yet."""
    for each in algorithm.inputs:
        if each.required and not values.get(each.name, "").strip():
            raise InvalidInput(f"{each.label}: fill it in")
        given = values.get(each.name, "")
        if each.kind == "choice" and given not in each.choices:
            raise InvalidInput(
                f"{each.label}: choose one of {', '.join(filter(None, each.choices))}"
            )
        if each.kind == "field" and given and given not in study.terms.fields:
            raise InvalidInput(f"{each.label}: choose one of the fields that are listed")
    try:
        return algorithm.start(study, values)
    except ValidationError as error:
        field, message = culprit(error)
        raise InvalidInput(f"{field}: {message}" if field else message) from None


def _shared(values: Mapping[str, str]) -> dict[str, Any]:
    return {
        "epsilon": number(values.get("epsilon", "").strip(), "epsilon"),
        "cohorts": values.get("cohorts", "") or None,
    }


def _call(module: str, name: str) -> Callable[..., Run[Any]]:
    found: Callable[..., Run[Any]] = getattr(
        importlib.import_module(f"chorister.analyst.algorithms.{module}"), name
    )
    return found


def _ngrams(study: Study, values: Mapping[str, str]) -> Run[Any]:
    return _call("ngrams", "discover_ngrams")(
        study,
        lines(values.get("vocabulary", "")),
        max_n=whole(values.get("max_n", ""), "the longest phrase") or 3,
        field=values.get("field") or None,
        deny=lines(values.get("deny", "")),
        **_shared(values),
    )


ALGORITHMS: Final[dict[str, Algorithm]] = {
    each.name: each
    for each in (
        Algorithm(
            name="ngrams",
            title="Discover phrases",
            what="Finds the phrases that many devices hold, word by word, from a list of words.",
            inputs=(
                Input(
                    name="field", label="text", kind="field", types=("text",), required=True,
                    hint="the field whose words are looked at",
                ),
                Input(
                    name="vocabulary", label="known words", kind="lines", required=True,
                    hint="one a line; everything else counts as unknown",
                ),
                Input(name="max_n", label="longest phrase, in words", kind="number", value="3"),
                Input(
                    name="deny", label="never report", kind="lines",
                    hint="phrases that devices leave out, one a line",
                ),
                _EPSILON,
                _COHORTS,
            ),
            start=_ngrams,
        ),
    )
}  # fmt: skip
_ = numbers
