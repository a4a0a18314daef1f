"""What a browser sends: read with limits, and turned into a question."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Final
from urllib.parse import parse_qsl

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

import chorister as ch
from chorister.analyst.question import Question
from chorister.analyst.study import Study
from chorister.canonical import culprit
from chorister.console.errors import TooLarge
from chorister.encoding import AnyFeature
from chorister.errors import InvalidInput

__all__ = ["Form", "asked_question", "field_kinds", "lines", "numbers", "read_form", "whole"]

MAX_BYTES: Final = 2_000_000  # a vocabulary of 100,000 words
_MAX_FIELDS: Final = 2_000
_MAX_EDGES: Final = 100_000
_RANGE: Final = re.compile(r"(\S+)\s+to\s+(\S+)\s+(?:by|step)\s+(\S+)", re.IGNORECASE)


class Form:
    """Fields of a form, each with its values in order."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            self._values.setdefault(name, []).append(value)

    def get(self, name: str) -> str:
        """The first value, without white space around it; empty if there is none."""
        return self._values.get(name, [""])[0].strip()

    def all(self, name: str) -> list[str]:
        """Every value."""
        return [value.strip() for value in self._values.get(name, []) if value.strip()]

    def chosen(self, prefix: str) -> list[str]:
        """The fields with this prefix that have a value, without the prefix."""
        found = [name for name in self._values if name.startswith(prefix) and name in self]
        return [name.removeprefix(prefix) for name in found]

    def __contains__(self, name: str) -> bool:
        return bool(self.get(name))

    def plain(self) -> dict[str, str]:
        """The first value of every field."""
        return {name: values[0] for name, values in self._values.items()}


async def read_form(request: Request) -> Form:
    """The body of a request, as a URL-encoded form."""
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > MAX_BYTES:
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
    """One item a line; empty lines are left out."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def number(text: str, what: str) -> Decimal | None:
    """A decimal, or None where nothing was entered."""
    if not text:
        return None
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise InvalidInput(f"{what} is a number, not {text[:40]!r}") from None
    if not value.is_finite():
        raise InvalidInput(f"{what} is a number, not {text[:40]!r}")
    return value


def whole(text: str, what: str) -> int | None:
    """A whole number, or None where nothing was entered."""
    cleaned = text.replace(",", "").replace("_", "").replace(" ", "")
    if not cleaned:
        return None
    if not re.fullmatch(r"[0-9]{1,15}", cleaned):
        raise InvalidInput(f"{what} is a whole number, not {text[:40]!r}")
    return int(cleaned)


def numbers(text: str, what: str) -> list[Decimal]:
    """Numbers with commas or spaces between them, or "10 to 80 by 10"."""
    if found := _RANGE.fullmatch(text.strip()):
        first, last, step = (number(part, what) for part in found.groups())
        if first is None or last is None or step is None or step <= 0 or last <= first:
            raise InvalidInput(f'{what}: "10 to 80 by 10" goes up, by a step above 0')
        count = math.floor((last - first) / step)
        if count > _MAX_EDGES:
            raise InvalidInput(f"{what}: that would be {count:,} steps; take fewer")
        return [first + step * i for i in range(count + 1)]
    parts = re.split(r"[\s,;]+", text.strip())
    found_numbers = [number(part, what) for part in parts if part]
    return [value for value in found_numbers if value is not None]


# --- A question ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FieldKind:
    """A field of an analysis, and how it can be put into bins."""

    ref: str
    name: str
    type: str
    kinds: tuple[str, ...]
    twin: str | None  # another field has the same name: a query has to tell them apart


def field_kinds(study: Study) -> list[FieldKind]:
    """The fields that a study may ask about."""
    policy = study.fleet.policy
    names = [ref.partition(".")[2] for ref in study.terms.fields]
    found = []
    for ref in study.terms.fields:
        kind = policy.fields[ref].type
        choices = {
            "text": ("categories", "prefix_tree"),
            "integer": ("intervals", "categories"),
            "real": ("intervals",),
        }[kind]
        name = ref.partition(".")[2]
        twin = name if names.count(name) > 1 else None
        found.append(FieldKind(ref, name, kind, choices, twin))
    return found


def asked_question(study: Study, form: Form) -> tuple[Question, int | None]:
    """The question that a form describes, and the target at which to collect."""
    try:
        features = tuple(_features(study, form))
        if not features:
            raise InvalidInput("choose at least one field to ask about")
        question = study.histogram(features, **_options(study, form))
    except ValidationError as error:
        field, message = culprit(error)
        raise InvalidInput(f"{field}: {message}" if field else message) from None
    if "again" in form:
        asked = {round_.digest for round_ in study.rounds}
        while question.digest in asked:
            question = question.again()
    return question, whole(form.get("target"), "the target")


def _features(study: Study, form: Form) -> Iterator[AnyFeature]:
    for field in field_kinds(study):
        if f"use:{field.ref}" not in form:
            continue
        kind = form.get(f"kind:{field.ref}") or field.kinds[0]
        if kind not in field.kinds:
            raise InvalidInput(f"{field.ref} can't be asked about as {kind[:40]!r}")
        if kind == "intervals":
            yield ch.intervals(field.name, numbers(form.get(f"edges:{field.ref}"), field.ref))
        elif kind == "prefix_tree":
            yield ch.prefix_tree(
                field.name,
                lines(form.get(f"words:{field.ref}")),
                lines(form.get(f"prefixes:{field.ref}")) or ("",),
            )
        else:
            yield ch.categories(field.name, _values(field, form))
    if "use:map" in form:
        yield _grid(study, form)


def _values(field: FieldKind, form: Form) -> list[str | int]:
    given = lines(form.get(f"values:{field.ref}"))
    if not given:
        raise InvalidInput(f"list the values of {field.ref} to count, one a line")
    if field.type == "text":
        return list(given)
    return [int(value) for value in numbers(" ".join(given), field.ref)]


def _grid(study: Study, form: Form) -> AnyFeature:
    columns = [form.get("map:x"), form.get("map:y")]
    known = {field.name for field in field_kinds(study) if field.type != "text"}
    if not set(columns) <= known or columns[0] == columns[1]:
        raise InvalidInput("a map has two different number fields, x and y")
    box = numbers(form.get("map:box"), "the box")
    level = whole(form.get("map:level"), "the level")
    if len(box) != 4:
        raise InvalidInput("the box of a map is four numbers: x0, y0, x1, y1")
    return ch.grid(columns, box, level=5 if level is None else level)


def _options(study: Study, form: Form) -> dict[str, Any]:
    options: dict[str, Any] = {
        "epsilon": number(form.get("epsilon"), "epsilon"),
        "local_epsilon": number(form.get("local_epsilon"), "the local epsilon"),
        "delta": number(form.get("delta"), "delta"),
        "min_cohort": whole(form.get("min_cohort"), "the minimum cohort"),
        "mechanism": form.get("mechanism") or None,
        "query": form.get("query") or None,
        "group_by": tuple(ref for ref in form.all("group") if ref in study.terms.group_by),
    }
    share = number(form.get("share"), "the share of devices")
    if share is not None:
        options["participation"] = share / 100
    hours = number(form.get("hours"), "the hours")
    if hours is not None:
        if not 0 < hours <= 100_000:
            raise InvalidInput("say for how many hours devices may answer")
        options["window"] = int(hours * 3600)
    return options
