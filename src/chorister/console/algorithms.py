"""The algorithms that can be run from a page: their inputs, and how they start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import chorister as ch
from chorister.analyst.algorithms.algorithm_run import AlgorithmRun
from chorister.analyst.algorithms.crosstab import crosstab
from chorister.analyst.algorithms.distribution import distribution
from chorister.analyst.algorithms.heatmap import heatmap
from chorister.analyst.algorithms.ngrams import discover_ngrams
from chorister.analyst.algorithms.words import discover_words
from chorister.analyst.request import valid_input
from chorister.analyst.study import Study
from chorister.console.forms import lines, number, numbers, whole
from chorister.encoding import Categories, Intervals
from chorister.errors import InvalidInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """One input of an algorithm's form."""

    name: str
    label: str
    kind: Literal["text", "lines", "number", "field", "choice"] = "text"
    types: tuple[str, ...] = ()  # for a field: the types that fit
    choices: tuple[str, ...] = ()
    hint: str = ""
    required: bool = False
    value: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmForm:
    """An algorithm that a page offers, and what it needs to know."""

    name: str
    title: str  # of its form
    noun: str  # of its runs
    what: str
    inputs: tuple[Input, ...]
    start: Callable[[Study, Mapping[str, str]], AlgorithmRun[Any]]

    def fits(self, study: Study) -> bool:
        """Whether the analysis of a study has fields for it."""
        types = [study.fleet.policy.fields[ref].type for ref in study.terms.fields]
        for each in self.inputs:
            if each.kind == "field" and each.required:
                fitting = next((kind for kind in types if kind in each.types), None)
                if fitting is None:
                    return False
                types.remove(fitting)
        return True


_SHARED: Final = (
    Input(
        name="epsilon", label="epsilon for all rounds", kind="number",
        hint="the total charge of a device that answers all of them; if left empty, "
        "all that the budgets allow",
    ),
    Input(name="delta", label="delta for all rounds", kind="number"),
    Input(
        name="cohorts", label="who answers", kind="choice", choices=("", "everyone", "disjoint"),
        hint="if everyone answers every round, the budget is split between the rounds",
    ),
    Input(
        name="target", label="end each round at", kind="number",
        hint="a number of reports, or a share such as 0.9 of those that are expected; if left "
        "empty, a round ends when its window does",
    ),
)  # fmt: skip


def plan_run(
    algorithm: AlgorithmForm, study: Study, values: Mapping[str, str]
) -> AlgorithmRun[Any]:
    """Plan an algorithm with the values of its form; nothing is asked yet."""
    for each in algorithm.inputs:
        if each.required and not values.get(each.name, "").strip():
            raise InvalidInput(f"{each.label} is missing")
        given = values.get(each.name, "")
        if each.kind == "choice" and given not in each.choices:
            raise InvalidInput(
                f"{each.label}: choose one of {', '.join(filter(None, each.choices))}"
            )
        if each.kind == "field" and given and given not in study.terms.fields:
            raise InvalidInput(f"{each.label}: choose one of the listed fields")
    with valid_input():
        return algorithm.start(study, values)


def _shared(values: Mapping[str, str]) -> dict[str, Any]:
    return {
        "epsilon": number(values.get("epsilon", "").strip(), "epsilon"),
        "delta": number(values.get("delta", "").strip(), "delta"),
        "cohorts": values.get("cohorts", "") or None,
        "target": number(values.get("target", "").strip(), "the target"),
    }


def _name(ref: str) -> str:
    """The column with the values of a field."""
    return ref.partition(".")[2]


def _ngrams(study: Study, values: Mapping[str, str]) -> AlgorithmRun[Any]:
    return discover_ngrams(
        study,
        lines(values.get("vocabulary", "")),
        max_n=whole(values.get("max_n", ""), "the longest phrase") or 3,
        field=values.get("field") or None,
        deny=lines(values.get("deny", "")),
        **_shared(values),
    )


def _words(study: Study, values: Mapping[str, str]) -> AlgorithmRun[Any]:
    return discover_words(
        study,
        field=values.get("field") or None,
        rounds=whole(values.get("rounds", ""), "the number of rounds"),
        deny=lines(values.get("deny", "")),
        **_shared(values),
    )


def _heatmap(study: Study, values: Mapping[str, str]) -> AlgorithmRun[Any]:
    box = numbers(values.get("box", ""), "the box")
    if len(box) != 4:
        raise InvalidInput("the box of a map needs four numbers: x0, y0, x1, y1")
    depth = whole(values.get("depth", ""), "the finest level")
    return heatmap(
        study,
        (_name(values["x"]), _name(values["y"])),
        box,
        depth=8 if depth is None else depth,
        **_shared(values),
    )


def _distribution(study: Study, values: Mapping[str, str]) -> AlgorithmRun[Any]:
    low, high = (number(values.get(name, "").strip(), name) for name in ("from", "to"))
    if low is None or high is None:
        raise InvalidInput("give the smallest and the largest value")
    return distribution(study, _name(values["field"]), low, high, **_shared(values))


def _crosstab(study: Study, values: Mapping[str, str]) -> AlgorithmRun[Any]:
    axes = [_axis(study, values, side) for side in ("rows", "columns")]
    return crosstab(study, axes[0], axes[1], **_shared(values))


def _axis(study: Study, values: Mapping[str, str], side: str) -> Intervals | Categories:
    ref, given = values[side], values.get(f"{side}_cells", "")
    if study.fleet.policy.fields[ref].type == "text":
        return ch.categories(_name(ref), lines(given))
    return ch.intervals(_name(ref), numbers(" ".join(given.split()), ref))


_NUMBERS: Final = ("integer", "real")
_CELLS: Final = "for numbers: edges, such as “0 to 100 by 5”; for texts: values, one per line"

ALGORITHMS: Final[dict[str, AlgorithmForm]] = {
    each.name: each
    for each in (
        AlgorithmForm(
            name="ngrams",
            title="Discover phrases",
            noun="Phrases",
            what="Finds phrases that many devices hold, word by word, from a list of known words.",
            inputs=(
                Input(
                    name="field", label="text", kind="field", types=("text",), required=True,
                    hint="the field with the text",
                ),
                Input(
                    name="vocabulary", label="known words", kind="lines", required=True,
                    hint="one per line; all other words count as unknown",
                ),
                Input(name="max_n", label="longest phrase, in words", kind="number", value="3"),
                Input(
                    name="deny", label="never report", kind="lines",
                    hint="phrases that devices skip, one per line",
                ),
                *_SHARED,
            ),
            start=_ngrams,
        ),
        AlgorithmForm(
            name="words",
            title="Discover words",
            noun="Words",
            what="Finds words that many devices hold although they are on no list, by their "
            "beginnings.",
            inputs=(
                Input(
                    name="field", label="text", kind="field", types=("text",), required=True,
                    hint="the field with the text",
                ),
                Input(
                    name="deny", label="known words", kind="lines",
                    hint="words that devices skip, one per line",
                ),
                Input(
                    name="rounds", label="rounds", kind="number",
                    hint="1 to 6; empty: 3 to 5, as the budgets allow",
                ),
                *_SHARED,
            ),
            start=_words,
        ),
        AlgorithmForm(
            name="heatmap",
            title="Draw a map",
            noun="Heat map",
            what="Maps where devices are. Cells are split where people are, round by round.",
            inputs=(
                Input(name="x", label="x", kind="field", types=_NUMBERS, required=True),
                Input(name="y", label="y", kind="field", types=_NUMBERS, required=True),
                Input(
                    name="box", label="box", required=True,
                    hint="four numbers: x0, y0, x1, y1",
                ),
                Input(
                    name="depth", label="finest level", kind="number", value="8",
                    hint="each level halves the cells in both directions",
                ),
                *_SHARED,
            ),
            start=_heatmap,
        ),
        AlgorithmForm(
            name="distribution",
            title="Learn a distribution",
            noun="Distribution",
            what="Learns how a number is distributed, with intervals that adapt to the data.",
            inputs=(
                Input(name="field", label="number", kind="field", types=_NUMBERS, required=True),
                Input(name="from", label="from", kind="number", required=True),
                Input(name="to", label="to", kind="number", required=True),
                *_SHARED,
            ),
            start=_distribution,
        ),
        AlgorithmForm(
            name="crosstab",
            title="Cross two fields",
            noun="Cross table",
            what="Counts combinations of two fields: first each alone, then a grid that fits both.",
            inputs=(
                Input(
                    name="rows", label="rows", kind="field", types=(*_NUMBERS, "text"),
                    required=True,
                ),
                Input(
                    name="rows_cells", label="cells of the rows", kind="lines", required=True,
                    hint=_CELLS,
                ),
                Input(
                    name="columns", label="columns", kind="field", types=(*_NUMBERS, "text"),
                    required=True,
                ),
                Input(
                    name="columns_cells", label="cells of the columns", kind="lines",
                    required=True, hint=_CELLS,
                ),
                *_SHARED,
            ),
            start=_crosstab,
        ),
    )
}  # fmt: skip
