"""The forms before a question is asked: what they offer and warn of, and where errors are."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from chorister.console.algorithms import ALGORITHMS
from chorister.fleet.deployment_files import _suggestions
from tests.console.test_access import STUDY, Site, begin, csrf

HTMX = {"hx-request": "true"}
AGE = {"use:user.age": "on", "kind:user.age": "intervals", "edges:user.age": "10 to 80 by 10"}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture
def ada(site: Site) -> TestClient:
    client = site.signed_in("ada")
    begin(client)
    return client


def priced(client: TestClient, form: dict[str, str]) -> str:
    answer = client.post(f"{STUDY}/ask/cost", data={"csrf": csrf(client), **form}, headers=HTMX)
    assert answer.status_code == 200, answer.text
    return answer.text


def planned(client: TestClient, algorithm: str, form: dict[str, str]) -> str:
    path = f"{STUDY}/run/{algorithm}/plan"
    answer = client.post(path, data={"csrf": csrf(client), **form}, headers=HTMX)
    assert answer.status_code == 200, answer.text
    return answer.text


def ask(site: Site, client: TestClient, form: dict[str, str]) -> None:
    """Ask, and wait for the result."""
    answer = client.post(f"{STUDY}/ask", data={"csrf": csrf(client), **form})
    assert answer.status_code == 303, answer.text
    view = site.workspace.find("ada", "rehearsal", "ada", STUDY.rpartition("/")[2])
    view.study.wait(view.study.rounds[-1], bar=False)


def test_item_1_a_plan_counts_what_is_spent(site: Site, ada: TestClient) -> None:
    ask(site, ada, {**AGE, "epsilon": "5"})
    form = {"field": "user.age", "from": "0", "to": "100"}
    refused = planned(ada, "distribution", {**form, "epsilon": "3"})
    assert "6 in total, 5 is spent, and this asks for 3" in refused
    assert "Run it" not in refused
    offered = planned(ada, "distribution", form)
    assert "no device spends more than ε 1" in offered
    assert "Run it" in offered


def test_item_3_a_function_that_the_policy_does_not_list(ada: TestClient) -> None:
    form = {
        "use:keyboard.ngram": "on", "kind:keyboard.ngram": "categories",
        "values:keyboard.ngram": "HELLO", "query": "SELECT upper(ngram) AS ngram FROM keyboard",
    }  # fmt: skip
    found = priced(ada, form)
    assert "does not permit the function upper" in found
    assert "ask-button" not in found


def test_item_4_the_meter_shows_what_binds(site: Site, ada: TestClient) -> None:
    ask(site, ada, {**AGE, "epsilon": "1", "delta": "0.000009"})
    page = ada.get(STUDY).text
    assert "δ 9e-6 of 1e-5" in re.sub(r"\s+", " ", page)
    assert "delta runs out first" in page


def test_item_5_a_hopeless_question_has_no_primary_button(ada: TestClient) -> None:
    far = priced(ada, {**AGE, "target": "900000"})
    assert "The target of 900,000 reports is above" in far
    assert "ask-button" not in far
    assert "Ask it anyway" in far
    few = priced(ada, {**AGE, "share": "0.5", "min_cohort": "20000", "local_epsilon": "1"})
    assert "nothing is released below 20,000" in few
    assert "Ask it" not in few


def test_item_6_a_question_that_was_asked_links_to_its_result(site: Site, ada: TestClient) -> None:
    assert "ask-button" in priced(ada, {**AGE, "epsilon": "1"})
    ask(site, ada, {**AGE, "epsilon": "1"})
    found = priced(ada, {**AGE, "epsilon": "1"})
    assert f'href="{STUDY}/rounds/1"' in found
    assert "ask-button" not in found
    assert "ask-button" in priced(ada, {**AGE, "epsilon": "1", "again": "on"})


def test_item_13_what_the_policy_does_not_permit_is_not_offered(ada: TestClient) -> None:
    """`discover_words` calls `substr`, which this policy does not list: every run would fail."""
    assert "Discover phrases" in ada.get(STUDY).text
    assert "Discover words" not in ada.get(STUDY).text
    assert ada.get(f"{STUDY}/run/words").status_code == 404


def test_item_7_no_error_before_anything_was_typed(ada: TestClient) -> None:
    for form in (
        {"use:user.age": "on"},
        {"use:keyboard.ngram": "on"},
        {"use:keyboard.ngram": "on", "kind:keyboard.ngram": "prefix_tree"},
        {"use:map": "on", "map:x": "longitude", "map:y": "latitude"},
    ):
        found = priced(ada, form)
        assert "Still to do" in found, form
        assert 'role="alert"' not in found
    for algorithm in ("distribution", "ngrams", "heatmap", "crosstab", "words"):
        page = ada.get(f"{STUDY}/run/{algorithm}").text
        assert 'role="alert"' not in page
    assert "Still to do" in planned(ada, "distribution", {"field": "user.age"})
    # Once it is sent, what is missing is a problem, and it is at its field.
    answer = ada.post(f"{STUDY}/ask", data={"csrf": csrf(ada), "use:user.age": "on"})
    assert answer.status_code == 422
    assert 'id="problem-edges:user.age"' in answer.text


@pytest.mark.parametrize(
    ("form", "field", "words"),
    [
        ({"edges:user.age": "10"}, "edges:user.age", "give two or more"),
        ({"edges:user.age": "10, 5"}, "edges:user.age", "increase"),
        ({"edges:user.age": "ten, 20"}, "edges:user.age", "must be a number"),
        ({"epsilon": "-1"}, "epsilon", "above 0"),
        ({"epsilon": "some"}, "epsilon", "must be a number"),
        ({"target": "a few"}, "target", "whole number"),
        ({"target": "3"}, "target", "below the minimum cohort"),
        ({"share": "200"}, "share", "percentage"),
        ({"hours": "soon"}, "hours", "must be a number"),
        ({"hours": "9999d"}, "hours", "ten years"),
        ({"query": "SELECT nothing"}, "query", "names a field of this analysis"),
        ({"delta": "2"}, "delta", "at most 0.1"),
        ({"local_epsilon": "99"}, "local_epsilon", "between 0.001 and 20"),
        ({"epsilon": "49"}, "epsilon", "exceeds the 6 of the policy"),
        ({"epsilon": "0.0000001"}, "epsilon", "larger epsilon"),
        ({"share": "0.000001"}, "share", "larger share"),
    ],
)
def test_item_7_an_error_is_at_its_field_in_our_words(
    ada: TestClient, form: dict[str, str], field: str, words: str
) -> None:
    found = priced(ada, {**AGE, **form})
    assert f'data-field="{field}"' in found
    assert words in found
    assert "Tuple" not in found
    whole = ada.post(f"{STUDY}/ask", data={"csrf": csrf(ada), **AGE, **form})
    assert f'id="problem-{field}"' in whole.text
    assert 'aria-invalid="true"' in whole.text


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"hours": "0.5"}, "hours"),
        ({"query": "SELECT upper(user.age) AS age FROM user"}, "query"),
        ({"min_cohort": "5"}, "min_cohort"),
    ],
)
def test_item_7_what_devices_would_refuse_is_at_its_field_once_it_is_sent(
    ada: TestClient, form: dict[str, str], field: str
) -> None:
    assert "Devices would refuse it" in priced(ada, {**AGE, **form})
    whole = ada.post(f"{STUDY}/ask", data={"csrf": csrf(ada), **AGE, **form})
    assert f'id="problem-{field}"' in whole.text


def test_item_7_the_time_to_answer_is_text(ada: TestClient) -> None:
    for text in ("12h", "3d", "24", "0.5"):
        expected = "6 hours to 14 days" if text == "0.5" else "ask-button"
        assert expected in priced(ada, {**AGE, "hours": text}), text


def test_item_13_forms_know_the_policy(ada: TestClient) -> None:
    page = ada.get(f"{STUDY}/ask").text
    assert ">de_DE\nen_GB\nen_US\nfr_FR</textarea>" in page
    assert '<option value="longitude"' in page
    # Neither a whole number nor the only real number of another table is a coordinate.
    assert '<option value="age"' not in page
    assert '<option value="perplexity"' not in page
    crafted = {"use:map": "on", "map:x": "longitude", "map:y": "age", "map:box": "0,0,1,1"}
    assert "two different fields" in priced(ada, crafted)
    assert "user.age" not in ada.get(f"{STUDY}/run/heatmap").text
    table = {"rows": "user.locale", "columns": "user.age", "columns_cells": "0, 50, 100"}
    assert "Run it" in planned(ada, "crosstab", table)


def test_item_13_samples_ship_with_what_to_type(site: Site, ada: TestClient) -> None:
    connection = site.workspace.connections["rehearsal"]
    suggestions = {
        "user.age": "10 to 80 by 10", "keyboard.ngram": "how\nare\nyou", "map": "-5, 42, 9, 52",
        "keyboard.perplexity": "0 to 50 by 5",
    }  # fmt: skip
    site.workspace.connections["rehearsal"] = replace(connection, suggestions=suggestions)
    page = ada.get(f"{STUDY}/ask").text
    assert 'value="10 to 80 by 10"' in page
    assert 'value="-5, 42, 9, 52"' in page
    assert ">how\nare\nyou</textarea>" in page
    assert ">how\nare\nyou</textarea>" in ada.get(f"{STUDY}/run/ngrams").text
    assert 'value="-5, 42, 9, 52"' in ada.get(f"{STUDY}/run/heatmap").text
    assert 'name="to" value="50"' in ada.get(f"{STUDY}/run/distribution").text
    # What a form begins with can be run as it is.
    view = site.workspace.find("ada", "rehearsal", "ada", STUDY.rpartition("/")[2])
    for name in ("ngrams", "heatmap", "distribution", "crosstab"):
        values = ALGORITHMS[name].beginning(view.study, suggestions)
        assert "Run it" in planned(ada, name, values), name


def test_item_13_the_sample_of_up_suggests_every_field() -> None:
    suggested = tomllib.loads(_suggestions())
    assert set(suggested) == {
        "user.age", "user.score", "user.area", "user.commute", "visits.latitude",
        "visits.longitude", "keyboard.text", "map",
    }  # fmt: skip
