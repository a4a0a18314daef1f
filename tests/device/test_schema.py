"""Events are checked field by field; the two ways to check agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.device.schema import MAX_TEXT_BYTES, Schema, TableSchema, quoted
from chorister.errors import EventRefused
from tests.keyboard import POLICY

TABLE = TableSchema(
    name="s", fields={"i": "integer", "r": "real", "t": "text"}, retention=1, is_profile=False
)
GOOD: dict[str, Any] = {"i": 1, "r": 0.5, "t": "words"}


def both_ways(event: Any) -> tuple[object, object]:
    """What one event and a batch of it come to: a row, or the field that is refused."""

    def outcome(check: Callable[[], object]) -> object:
        try:
            return check()
        except EventRefused as error:
            return error.field, str(error)

    return outcome(lambda: TABLE.row(event)), outcome(lambda: TABLE.rows([event])[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("i", True),
        ("i", 1.0),
        ("i", "1"),
        ("i", 2**63),
        ("i", -(2**63)),
        ("i", b"1"),
        ("r", True),
        ("r", math.nan),
        ("r", math.inf),
        ("r", -math.inf),
        ("r", "0.5"),
        ("r", 2**53 + 1),
        ("r", 1j),
        ("t", 1),
        ("t", b"words"),
        ("t", "a\0b"),
        ("t", "\ud800"),
        ("t", "x" * (MAX_TEXT_BYTES + 1)),
        ("t", "é" * (MAX_TEXT_BYTES // 2 + 1)),
        ("t", ["words"]),
    ],
)
def test_a_wrong_value_is_refused_with_its_field(field: str, value: object) -> None:
    event = GOOD | {field: value}
    one, batch = both_ways(event)
    assert one == batch
    assert isinstance(one, tuple)
    assert one[0] == f"s.{field}"
    with pytest.raises(EventRefused):
        TABLE.rows([GOOD, GOOD, event, GOOD])


@pytest.mark.parametrize(
    ("event", "field"),
    [
        ({"i": 1, "r": 0.5}, "s.t"),
        ({}, "s.i"),
        (GOOD | {"u": 1}, "s.u"),
        (GOOD | {1: 1}, "s.1"),
        ({"i": 1, "r": 0.5, "T": "x"}, "s.t"),
        ([1, 0.5, "x"], "s"),
        (None, "s"),
        ("irt", "s"),
    ],
)
def test_a_misshapen_event_is_refused_with_its_field(event: object, field: str) -> None:
    one, batch = both_ways(event)
    assert one == batch
    assert isinstance(one, tuple)
    assert one[0] == field


@pytest.mark.parametrize(
    ("event", "row"),
    [
        (GOOD, (1, 0.5, "words")),
        ({"t": "x", "r": 1.5, "i": -3}, (-3, 1.5, "x")),
        (GOOD | {"r": 2}, (1, 2.0, "words")),
        (GOOD | {"i": None, "r": None, "t": None}, (None, None, None)),
        (GOOD | {"i": 2**63 - 1}, (2**63 - 1, 0.5, "words")),
        (GOOD | {"t": "é" * (MAX_TEXT_BYTES // 2)}, (1, 0.5, "é" * (MAX_TEXT_BYTES // 2))),
        (GOOD | {"t": "x" * MAX_TEXT_BYTES}, (1, 0.5, "x" * MAX_TEXT_BYTES)),
    ],
)
def test_a_right_event_is_a_row(event: dict[str, object], row: tuple[object, ...]) -> None:
    assert both_ways(event) == (row, row)
    assert all(type(a) is type(b) for a, b in zip(TABLE.row(event), row, strict=True))


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**64), max_value=2**64),
    st.floats(),
    st.text(),
    st.text(st.characters(exclude_categories=[])),
    st.binary(),
)


@given(
    st.one_of(
        st.fixed_dictionaries({"i": values, "r": values, "t": values}),
        st.fixed_dictionaries({"i": st.integers(), "r": st.floats(), "t": st.text()}),
        st.dictionaries(st.sampled_from(["i", "r", "t", "u"]), values),
        values,
    )
)
def test_one_by_one_and_in_batches_events_are_judged_alike(event: object) -> None:
    one, batch = both_ways(event)
    assert one == batch


@given(st.lists(st.fixed_dictionaries({"i": st.integers(), "r": st.floats(), "t": st.text()})))
def test_a_batch_is_the_rows_of_its_events_or_refused(events: list[dict[str, Any]]) -> None:
    try:
        rows = [TABLE.row(event) for event in events]
    except EventRefused:
        with pytest.raises(EventRefused):
            TABLE.rows(events)
    else:
        assert TABLE.rows(events) == rows


def test_the_example_policy_has_its_tables() -> None:
    tables = Schema.of(POLICY).tables
    assert {name: table.is_profile for name, table in tables.items()} == {
        "keyboard": False,
        "user": True,
    }
    assert tables["keyboard"].fields == {"ngram": "text", "perplexity": "real"}


def test_an_unknown_table_is_refused_by_name() -> None:
    schema = Schema.of(POLICY)
    for name, is_profile in (("nothing", None), ("user", False), ("keyboard", True)):
        with pytest.raises(EventRefused, match="no such"):
            schema.table(name, is_profile=is_profile)


def test_names_are_quoted() -> None:
    assert quoted('a"; DROP') == '"a""; DROP"'
