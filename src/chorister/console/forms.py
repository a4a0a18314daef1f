"""Forms: read with limits, turned into a question, and filled in from an earlier one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Final
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect, Request

import chorister as ch
from chorister.analyst.arguments import valid_input
from chorister.analyst.question import Question
from chorister.analyst.request import simple_query
from chorister.analyst.study import Study
from chorister.canonical import decimal_text, parse_decimal
from chorister.console.access import TooLarge
from chorister.encoding import AnyFeature, Categories, Grid, Intervals, PrefixTree
from chorister.errors import InvalidInput, MissingInput
from chorister.policy.values import parse_duration
from chorister.recipe import Recipe

MAX_BYTES: Final = 2_000_000  # enough for a vocabulary of 100,000 words
_MAX_FIELDS: Final = 2_000
_MAX_EDGES: Final = 100_000
_MAX_NUMBER_CHARACTERS: Final = 100  # with an exponent, zeros and a sign
_RANGE: Final = re.compile(r"(\S+)\s+to\s+(\S+)\s+(?:by|step)\s+(\S+)", re.IGNORECASE)


@contextmanager
def at_field(name: str) -> Iterator[None]:
    """Say which field of the form an error is about."""
    try:
        yield
    except InvalidInput as error:
        error.field = name
        raise


class Form:
    """The fields of a form, each with its values in order."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            self._values.setdefault(name, []).append(value)

    def get(self, name: str) -> str:
        """The first value, stripped; empty if there is none."""
        return self._values.get(name, [""])[0].strip()

    def all(self, name: str) -> list[str]:
        return [value.strip() for value in self._values.get(name, []) if value.strip()]

    def chosen(self, prefix: str) -> list[str]:
        """The fields with this prefix that have a value, without the prefix."""
        found = [name for name in self._values if name.startswith(prefix) and name in self]
        return [name.removeprefix(prefix) for name in found]

    def __contains__(self, name: str) -> bool:
        return bool(self.get(name))


async def read_form(request: Request, *, limit: int = MAX_BYTES) -> Form:
    """Read the body of a request as a URL-encoded form of at most `limit` bytes."""
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > limit:
                raise TooLarge
    except ClientDisconnect:
        return Form([])
    try:
        pairs = parse_qsl(
            data.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=_MAX_FIELDS
        )
    except ValueError:
        raise TooLarge from None
    return Form(pairs)


def lines(text: str) -> list[str]:
    """Split into one item per line, without empty lines."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def number(text: str, what: str) -> Decimal | None:
    """Read a decimal that a recipe can hold, or None if nothing was entered.

    Its digits are limited before anything is computed with it.
    """
    if not text:
        return None
    try:
        if len(text) <= _MAX_NUMBER_CHARACTERS:
            # `Decimal` would read the digits of every script.
            return parse_decimal(decimal_text(Decimal(text if text.isascii() else "?")))
    except InvalidOperation:
        raise InvalidInput(f"{what} must be a number, not {text[:40]!r}") from None
    except InvalidInput:
        pass
    raise InvalidInput(
        f"{what}: {text[:40]!r} is too large or too precise; a number can have at most 20 digits "
        "before the point and 30 after it"
    )


def whole(text: str, what: str) -> int | None:
    """Read a whole number, or None if nothing was entered."""
    cleaned = text.replace(",", "").replace("_", "").replace(" ", "")
    if not cleaned:
        return None
    if not re.fullmatch(r"[0-9]{1,15}", cleaned):
        raise InvalidInput(f"{what} must be a whole number, not {text[:40]!r}")
    return int(cleaned)


def numbers(text: str, what: str) -> list[Decimal]:
    """Read numbers separated by commas or spaces, or "10 to 80 by 10"."""
    if found := _RANGE.fullmatch(text.strip()):
        first, last, step = (number(part, what) for part in found.groups())
        if first is None or last is None or step is None or step <= 0 or last <= first:
            raise InvalidInput(f'{what}: "10 to 80 by 10" has to go up, with a step above 0')
        count = math.floor((last - first) / step)
        if count > _MAX_EDGES:
            raise InvalidInput(f"{what}: that would be {count:,} steps; use fewer")
        return [first + step * i for i in range(count + 1)]
    parts = re.split(r"[\s,;]+", text.strip(), maxsplit=_MAX_EDGES)
    if "to" in parts:
        raise InvalidInput(f'{what}: write a range with its step, such as "10 to 80 by 10"')
    if len(parts) > _MAX_EDGES:
        raise InvalidInput(f"{what}: give at most {_MAX_EDGES:,} numbers")
    found_numbers = [number(part, what) for part in parts if part]
    return [value for value in found_numbers if value is not None]


# --- A question ----------------------------------------------------------------------------------


_KINDS: Final[dict[str, tuple[str, ...]]] = {
    "text": ("categories", "prefix_tree"),
    "integer": ("intervals", "categories"),
    "real": ("intervals",),
}


@dataclass(frozen=True, slots=True)
class FieldChoice:
    """A field of an analysis, and how it can be divided into bins."""

    ref: str
    name: str
    type: str
    kinds: tuple[str, ...]
    values: tuple[str, ...] = ()  # that the policy declares, if it does


def field_choices(study: Study) -> list[FieldChoice]:
    """List the fields that a study may ask about."""
    fields = {ref: study.fleet.policy.fields[ref] for ref in study.terms.fields}
    return [
        FieldChoice(
            ref, ref.partition(".")[2], field.type, _KINDS[field.type], field.group_values or ()
        )
        for ref, field in fields.items()
    ]


def map_fields(study: Study) -> list[FieldChoice]:
    """List the fields that a map can be drawn of: two or more real numbers of one table.

    A whole number, or one from another table, is not a coordinate of the same place.
    """
    real = [field for field in field_choices(study) if field.type == "real"]
    tables = [field.ref.partition(".")[0] for field in real]
    found = [field for field, table in zip(real, tables, strict=True) if tables.count(table) > 1]
    # In the order of a map: x, then y.
    return sorted(found, key=lambda field: field.name.startswith(("lat", "north", "y")))


def suggested_form(study: Study, suggestions: Mapping[str, str]) -> Form:
    """The form to begin with: the values that the policy declares, and what the fleet suggests."""
    pairs: list[tuple[str, str]] = []
    for each in field_choices(study):
        given = suggestions.get(each.ref) or "\n".join(each.values)
        if given:
            names = ("edges",) if each.type != "text" else ("values", "words")
            pairs.extend((f"{name}:{each.ref}", given) for name in names)
    pairs.extend((("map:box", suggestions["map"]),) if "map" in suggestions else ())
    return Form(pairs)


def asked_question(study: Study, form: Form) -> tuple[Question, int | None]:
    """Return the question that a form describes, and the target at which to collect."""
    with valid_input():
        features = tuple(_features(study, form))
        if not features:
            raise MissingInput("choose at least one field to ask about")
        question = study.histogram(features, **_options(study, form))
    if "again" in form:
        asked = {round_.digest for round_ in study.rounds}
        while question.digest in asked:
            question = question.again()
    with at_field("target"):
        return question, whole(form.get("target"), "the target")


def _features(study: Study, form: Form) -> Iterator[AnyFeature]:
    for field in field_choices(study):
        if f"use:{field.ref}" in form:
            yield _feature_of(field, form)
    if "use:map" in form:
        yield _grid(study, form)


def _feature_of(field: FieldChoice, form: Form) -> AnyFeature:
    kind = form.get(f"kind:{field.ref}") or field.kinds[0]
    if kind not in field.kinds:
        raise InvalidInput(
            f"{field.ref} can't be counted as {kind[:40]!r}", field=f"kind:{field.ref}"
        )
    if kind == "intervals":
        with at_field(f"edges:{field.ref}"):
            edges = numbers(form.get(f"edges:{field.ref}"), f"an edge of {field.ref}")
            if not edges:
                raise MissingInput(f"give the edges of the intervals of {field.ref}")
            if len(edges) == 1:
                raise InvalidInput("one edge is not an interval yet: give two or more")
            return ch.intervals(field.name, edges)
    if kind == "prefix_tree":
        with at_field(f"words:{field.ref}"):
            words = lines(form.get(f"words:{field.ref}"))
            if not words:
                raise MissingInput(f"list the known words of {field.ref}, one per line")
            prefixes = lines(form.get(f"prefixes:{field.ref}")) or ("",)
            return ch.prefix_tree(field.name, words, prefixes)
    with at_field(f"values:{field.ref}"):
        return ch.categories(field.name, _values(field, form))


def _values(field: FieldChoice, form: Form) -> list[str | int]:
    given = lines(form.get(f"values:{field.ref}"))
    if not given:
        raise MissingInput(f"list the values of {field.ref} to count, one per line")
    if field.type == "text":
        return list(given)
    found = numbers(" ".join(given), field.ref)
    if broken := [value for value in found if value != value.to_integral_value()]:
        raise InvalidInput(f"{field.ref} has whole numbers as values, not {broken[0]}")
    return [int(value) for value in found]


def _grid(study: Study, form: Form) -> AnyFeature:
    columns = [form.get("map:x"), form.get("map:y")]
    known = {field.name for field in map_fields(study)}
    if not set(columns) <= known or columns[0] == columns[1]:
        why = "a map needs two different fields, one for x and one for y"
        raise InvalidInput(why, field="map:y")
    with at_field("map:box"):
        box = numbers(form.get("map:box"), "the box")
        if not box:
            raise MissingInput("give the box of the map: x0, y0, x1, y1")
        if len(box) != 4:
            raise InvalidInput("the box of a map needs four numbers: x0, y0, x1, y1")
    with at_field("map:level"):
        level = whole(form.get("map:level"), "the level")
        return ch.grid(columns, box, level=5 if level is None else level)


def _options(study: Study, form: Form) -> dict[str, Any]:
    options: dict[str, Any] = {
        "mechanism": form.get("mechanism") or None,
        "query": form.get("query") or None,
        "group_by": tuple(ref for ref in form.all("group") if ref in study.terms.group_by),
    }
    for name, what in (
        ("epsilon", "epsilon"), ("local_epsilon", "the local epsilon"), ("delta", "delta"),
    ):  # fmt: skip
        with at_field(name):
            options[name] = number(form.get(name), what)
            if options[name] is not None and options[name] <= 0:
                raise InvalidInput(f"{what} must be above 0")
    with at_field("min_cohort"):
        options["min_cohort"] = whole(form.get("min_cohort"), "the minimum cohort")
    with at_field("share"):
        share = number(form.get("share"), "the share of devices")
        if share is not None:
            if not 0 < share <= 100:
                raise InvalidInput("the share of devices is a percentage, above 0 and up to 100")
            options["participation"] = share / 100
    with at_field("hours"):
        if "hours" in form:
            options["window"] = answer_seconds(form.get("hours"))
    return options


def answer_seconds(text: str) -> int:
    """Read how long devices answer: a number of hours, or text such as "3d"."""
    with suppress(ValueError):
        return parse_duration(text)
    hours = number(text, "the time to answer, in hours or with a unit (90m, 12h, 3d),")
    if hours is None or not 0 < hours <= 100_000:
        raise InvalidInput("devices need some time to answer: hours above 0, or text such as 3d")
    return int(hours * 3600)


def form_of(recipe: Recipe, study: Study) -> Form:
    """Fill in a form that asks the question of a recipe again."""
    pairs: list[tuple[str, str]] = []
    fields = {field.name: field for field in field_choices(study)}
    for feature in recipe.features:
        pairs.extend(_feature(feature, fields))
    pairs.extend(("group", ref) for ref in recipe.group_by)
    privacy = recipe.privacy
    pairs.append(("epsilon", decimal_text(privacy.epsilon)))
    pairs.append(("mechanism", privacy.mechanism.value))
    try:
        plain = simple_query(study.fleet.policy, study.terms, recipe.features, recipe.deny)
    except InvalidInput:
        plain = ""
    if recipe.query != plain:
        pairs.append(("query", recipe.query))
    return Form(pairs)


def _feature(feature: AnyFeature, fields: dict[str, FieldChoice]) -> Iterator[tuple[str, str]]:
    if isinstance(feature, Grid):
        yield "use:map", "on"
        yield "map:x", feature.columns[0]
        yield "map:y", feature.columns[1]
        yield "map:box", ", ".join(decimal_text(edge) for edge in feature.box)
        yield "map:level", str(feature.level or "")
        return
    field = fields.get(feature.columns_read[0])
    if field is None:
        return  # a column that only the query defines
    yield f"use:{field.ref}", "on"
    if isinstance(feature, Intervals):
        yield f"kind:{field.ref}", "intervals"
        yield f"edges:{field.ref}", ", ".join(decimal_text(edge) for edge in feature.edges)
    elif isinstance(feature, Categories):
        yield f"kind:{field.ref}", "categories"
        yield f"values:{field.ref}", "\n".join(str(value) for value in feature.values)
    elif isinstance(feature, PrefixTree):
        yield f"kind:{field.ref}", "prefix_tree"
        yield f"words:{field.ref}", "\n".join(feature.vocabulary)
        yield f"prefixes:{field.ref}", "\n".join(feature.prefixes or ())
