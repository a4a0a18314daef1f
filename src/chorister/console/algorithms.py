"""The algorithms that can be run from a page: their inputs, and how they start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, Literal

import chorister as ch
from chorister.analyst.algorithms.algorithm_run import AlgorithmRun
from chorister.analyst.algorithms.character_model import CharacterModel
from chorister.analyst.algorithms.crosstab import crosstab
from chorister.analyst.algorithms.distribution import distribution
from chorister.analyst.algorithms.heatmap import heatmap
from chorister.analyst.algorithms.ngrams import discover_ngrams
from chorister.analyst.algorithms.word_rules import MAX_ROUNDS
from chorister.analyst.algorithms.words import discover_words
from chorister.analyst.arguments import valid_input
from chorister.analyst.study import Study
from chorister.console.forms import (
    FieldChoice,
    at_field,
    field_choices,
    lines,
    map_fields,
    number,
    numbers,
    whole,
)
from chorister.encoding import Categories, Intervals
from chorister.errors import InvalidInput, MissingInput


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
    of_a_map: bool = False  # whether its fields are coordinates
    functions: tuple[frozenset[str], ...] = ()  # of each, its query calls one

    def choices(self, study: Study, given: Input) -> list[FieldChoice]:
        """The fields that fit an input."""
        fields = map_fields(study) if self.of_a_map else field_choices(study)
        return [field for field in fields if field.type in given.types]

    def beginning(self, study: Study, suggestions: Mapping[str, str]) -> dict[str, str]:
        """What the form begins with: defaults, and what the fleet suggests for its first fields."""
        values = {each.name: each.value for each in self.inputs}
        for each in self.inputs:
            fields = self.choices(study, each) if each.kind == "field" else []
            if not fields:
                continue
            # As the page selects them: y and columns are the second field.
            place = min(int(each.name in ("y", "columns")), len(fields) - 1)
            values[each.name] = fields[place].ref
            given = suggestions.get(fields[place].ref, "")
            if "vocabulary" in values:
                values["vocabulary"] = given
            if f"{each.name}_cells" in values:
                values[f"{each.name}_cells"] = given or "\n".join(fields[place].values)
            if given and "from" in values:
                with suppress(InvalidInput, IndexError):
                    ends = numbers(given, each.name)
                    values["from"], values["to"] = str(ends[0]), str(ends[-1])
        if "box" in values:
            values["box"] = suggestions.get("map", "")
        return values

    def fits(self, study: Study) -> bool:
        """Whether the analysis of a study has fields for it, and permits what its queries call."""
        if any(not one & set(study.terms.functions) for one in self.functions):
            return False
        if self.of_a_map:
            return len(map_fields(study)) > 1
        types = [study.fleet.policy.fields[ref].type for ref in study.terms.fields]
        for each in self.inputs:
            if each.kind == "field" and each.required:
                fitting = next((kind for kind in types if kind in each.types), None)
                if fitting is None:
                    return False
                types.remove(fitting)
        return True


_VALUES: Final = "whole values"
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
        given = values.get(each.name, each.value if each.kind == "choice" else "")
        if each.kind == "choice" and given not in each.choices:
            raise InvalidInput(
                f"choose one of {', '.join(filter(None, each.choices))}", field=each.name
            )
        fitting = {field.ref for field in algorithm.choices(study, each)}
        if each.kind == "field" and given and given not in fitting:
            raise InvalidInput("choose one of the listed fields", field=each.name)
        if each.required and not given.strip():
            raise MissingInput(f"fill in: {each.label}", field=each.name)
    with valid_input():
        return algorithm.start(study, values)


def _shared(values: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"cohorts": values.get("cohorts", "") or None}
    for name in ("epsilon", "delta"):
        with at_field(name):
            found[name] = number(values.get(name, "").strip(), name)
            if found[name] is not None and found[name] <= 0:
                raise InvalidInput(f"{name} must be above 0")
    with at_field("target"):
        found["target"] = number(values.get("target", "").strip(), "the target")
    return found


def _whole(values: Mapping[str, str], name: str, what: str) -> int | None:
    with at_field(name):
        return whole(values.get(name, ""), what)


def _name(ref: str) -> str:
    """The column with the values of a field."""
    return ref.partition(".")[2]


def _ngrams(study: Study, values: Mapping[str, str]) -> AlgorithmRun[Any]:
    return discover_ngrams(
        study,
        lines(values.get("vocabulary", "")),
        max_n=_whole(values, "max_n", "the longest phrase") or 3,
        field=values.get("field") or None,
        deny=lines(values.get("deny", "")),
        **_shared(values),
    )


def _words(study: Study, values: Mapping[str, str]) -> AlgorithmRun[Any]:
    language = values.get("language", "").strip()
    with at_field("language"):
        model = CharacterModel.shipped(language) if language not in ("", "en") else None
    return discover_words(
        study,
        field=values.get("field") or None,
        values=values.get("find") == _VALUES,
        model=model,
        rounds=_whole(values, "rounds", "the number of rounds"),
        deny=lines(values.get("deny", "")),
        **_shared(values),
    )


def _heatmap(study: Study, values: Mapping[str, str]) -> AlgorithmRun[Any]:
    with at_field("box"):
        box = numbers(values.get("box", ""), "the box")
        if len(box) != 4:
            raise InvalidInput("the box of a map needs four numbers: x0, y0, x1, y1")
    depth = _whole(values, "depth", "the finest level")
    return heatmap(
        study,
        (_name(values["x"]), _name(values["y"])),
        box,
        depth=8 if depth is None else depth,
        **_shared(values),
    )


def _distribution(study: Study, values: Mapping[str, str]) -> AlgorithmRun[Any]:
    ends: dict[str, Decimal] = {}
    for name, what in (("from", "the smallest value"), ("to", "the largest value")):
        with at_field(name):
            found = number(values.get(name, "").strip(), what)
            if found is None:
                raise MissingInput(f"give {what}")
            ends[name] = found
    low, high = ends["from"], ends["to"]
    if not low < high:
        raise InvalidInput("the largest value must be above the smallest", field="to")
    return distribution(study, _name(values["field"]), low, high, **_shared(values))


def _crosstab(study: Study, values: Mapping[str, str]) -> AlgorithmRun[Any]:
    axes = [_axis(study, values, side) for side in ("rows", "columns")]
    return crosstab(study, axes[0], axes[1], **_shared(values))


def _axis(study: Study, values: Mapping[str, str], side: str) -> Intervals | Categories:
    ref, given = values[side], values.get(f"{side}_cells", "")
    field = study.fleet.policy.fields[ref]
    with at_field(f"{side}_cells"):
        if field.type == "text":
            listed = lines(given) or field.group_values
            if not listed:
                raise MissingInput(f"list the values of {ref}, one per line")
            return ch.categories(_name(ref), listed)
        edges = numbers(" ".join(given.split()), f"an edge of {ref}")
        if not edges:
            raise MissingInput(f"give the edges of {ref}")
        return ch.intervals(_name(ref), edges)


_NUMBERS: Final = ("integer", "real")
_CELLS: Final = (
    "for numbers: edges, such as “0 to 100 by 5”; for texts: values, one per line, or empty for "
    "those that the policy declares"
)

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
            what="Finds words that many devices hold and that are on no list, a few characters "
            "more in every round.",
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
                    name="find", label="find", kind="choice", choices=("words", _VALUES),
                    value="words", hint="whole values are found as they are written",
                ),
                Input(
                    name="language", label="language", value="en",
                    hint="such as de or fr; it decides which beginnings are asked about",
                ),
                Input(
                    name="rounds", label="rounds", kind="number",
                    hint=f"1 to {MAX_ROUNDS}; if left empty, as many as pay off",
                ),
                *_SHARED,
            ),
            start=_words,
            functions=(frozenset({"substr"}), frozenset({"words", "ngrams"})),
        ),
        AlgorithmForm(
            name="heatmap",
            title="Draw a map",
            noun="Heat map",
            what="Maps where devices are. Cells are split where people are, round by round.",
            inputs=(
                Input(name="x", label="x", kind="field", types=("real",), required=True),
                Input(name="y", label="y", kind="field", types=("real",), required=True),
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
            of_a_map=True,
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
                    name="rows_cells", label="cells of the rows", kind="lines",
                    hint=_CELLS,
                ),
                Input(
                    name="columns", label="columns", kind="field", types=(*_NUMBERS, "text"),
                    required=True,
                ),
                Input(
                    name="columns_cells", label="cells of the columns", kind="lines",
                    hint=_CELLS,
                ),
                *_SHARED,
            ),
            start=_crosstab,
        ),
    )
}  # fmt: skip
