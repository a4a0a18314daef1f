"""Numbers that a browser may send: however large or small, they are refused or answered at once."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest
from starlette.testclient import TestClient

from chorister.console.forms import number, numbers, whole
from chorister.errors import InvalidInput
from tests.console.test_access import STUDY, Site, begin, csrf

HUGE = [
    "1e300000",
    "-1e300000",
    "1e-300000",
    "9" * 5_000,
    "0." + "0" * 5_000 + "1",
    "1e21",
    "1e-31",
]
EXTREME = [*HUGE, "0e999999", "1e19", "-1e19", "1e-30", "999999999999999", "0", "-0", "NaN", "inf"]


@pytest.mark.parametrize(
    "text", [*HUGE, "NaN", "sNaN", "-inf", "1e99999999999999999999", "x", "--1", "１２", "٣"]
)
def test_what_no_recipe_can_hold_is_no_number(text: str) -> None:
    with pytest.raises(InvalidInput, match="the share") as caught:
        number(text, "the share")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e3", "1000"), ("-0.50", "-0.5"), ("0e999999", "0"), ("-0", "0"), ("1_0", "10"), ("", None)],
)
def test_numbers_are_spelled_as_people_do(text: str, value: str | None) -> None:
    found = number(text, "x")
    assert found == (None if value is None else Decimal(value))
    assert len(f"{found:f}" if found is not None else "") < 60


@pytest.mark.parametrize(
    "text",
    [
        "0 to 1e300000 by 1",
        "0 to 1 by 1e-300000",
        "-1e300000 to 0 by 1",
        "0 to 1e19 by 1e-30",
        "0 to 1 by 1e-6",
        f"0 to {'9' * 5_000} by 1",
    ],
)
def test_a_range_is_bounded_before_it_is_computed(text: str) -> None:
    begun = time.process_time()
    with pytest.raises(InvalidInput, match="edges"):
        numbers(text, "the edges")
    assert time.process_time() - begun < 1


def test_a_list_is_bounded_before_it_is_read() -> None:
    """As long as a form may be: a million numbers."""
    begun = time.process_time()
    with pytest.raises(InvalidInput, match="at most 100,000 numbers"):
        numbers("1 " * 1_000_000, "the edges")
    assert time.process_time() - begun < 2
    assert len(numbers("1 " * 100_000, "the edges")) == 100_000


def test_ranges() -> None:
    assert numbers("10 to 80 by 10", "x") == [Decimal(10 * i) for i in range(1, 9)]
    assert numbers("0 to 1 step 0.1", "x")[3] == Decimal("0.3")
    with pytest.raises(InvalidInput, match="15"):
        whole("9" * 16, "x, of 15 digits")


@pytest.fixture(scope="module")
def ada(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    client = Site(tmp_path_factory.mktemp("numbers")).signed_in("ada")
    begin(client)
    return client


def quickly(client: TestClient, path: str, form: dict[str, str]) -> str:
    begun = time.process_time()
    answer = client.post(path, data={"csrf": csrf(client), **form})
    assert answer.status_code in {200, 303, 422}, answer.text
    assert time.process_time() - begun < 20, form
    return answer.text


AGE = {"use:user.age": "on", "kind:user.age": "intervals", "edges:user.age": "10, 20, 30"}
MAP = {
    "use:map": "on",
    "map:x": "longitude",
    "map:y": "latitude",
    "map:box": "0, 0, 1, 1",
    "map:level": "3",
}


@pytest.mark.parametrize("extreme", EXTREME)
@pytest.mark.parametrize(
    ("form", "name"),
    [
        *((AGE, name) for name in ("epsilon", "local_epsilon", "delta", "min_cohort", "target")),
        *((AGE, name) for name in ("share", "hours", "expect", "edges:user.age")),
        ({**AGE, "kind:user.age": "categories"}, "values:user.age"),
        (MAP, "map:level"),
    ],
)
def test_a_question_with_an_extreme_number(
    ada: TestClient, form: dict[str, str], name: str, extreme: str
) -> None:
    quickly(ada, f"{STUDY}/ask/cost", {**form, name: extreme})


@pytest.mark.parametrize("extreme", EXTREME)
def test_a_question_with_extreme_edges(ada: TestClient, extreme: str) -> None:
    for edges in (f"0 to {extreme} by 1", f"0 to 1 by {extreme}", f"{extreme} to 1 by 1"):
        quickly(ada, f"{STUDY}/ask/cost", {**AGE, "edges:user.age": edges})
    quickly(ada, f"{STUDY}/ask/cost", {**MAP, "map:box": f"0, 0, {extreme}, 1"})


def test_a_fraction_is_not_cut_to_a_whole_value(ada: TestClient) -> None:
    form = {**AGE, "kind:user.age": "categories", "values:user.age": "1.5\n2"}
    assert "1.5" in quickly(ada, f"{STUDY}/ask/cost", form)


RUNS = {
    "ngrams": {"field": "keyboard.ngram", "vocabulary": "how\nare\nyou", "max_n": "2"},
    "heatmap": {"x": "visits.longitude", "y": "visits.latitude", "box": "0, 0, 1, 1", "depth": "3"},
    "distribution": {"field": "user.age", "from": "0", "to": "100"},
    "crosstab": {
        "rows": "user.age",
        "rows_cells": "0 to 100 by 20",
        "columns": "keyboard.perplexity",
        "columns_cells": "0, 10, 20",
    },
}


@pytest.mark.parametrize("extreme", EXTREME)
@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        *((algorithm, name) for algorithm in RUNS for name in ("epsilon", "delta")),
        ("ngrams", "max_n"),
        ("heatmap", "depth"),
        ("heatmap", "box"),
        ("distribution", "from"),
        ("distribution", "to"),
        ("crosstab", "rows_cells"),
    ],
)
def test_a_run_with_an_extreme_number(
    ada: TestClient, algorithm: str, name: str, extreme: str
) -> None:
    value = f"0, 0, {extreme}, 1" if name == "box" else extreme
    value = f"0 to {extreme} by 1" if name == "rows_cells" else value
    quickly(ada, f"{STUDY}/run/{algorithm}/plan", {**RUNS[algorithm], name: value})


def test_the_forms_are_good_but_for_the_number(ada: TestClient) -> None:
    """Or the tests above would test nothing."""
    for algorithm, form in RUNS.items():
        answer = quickly(ada, f"{STUDY}/run/{algorithm}/plan", form)
        assert "Run it" in answer, answer
    for form in (AGE, MAP):
        assert "Charged to each device" in quickly(ada, f"{STUDY}/ask/cost", form), form
