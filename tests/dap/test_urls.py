"""URLs: where a credential may go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.dap.urls import check_url, created_resource
from chorister.errors import InvalidInput, Unreachable

CREATION = "https://helper.example.com/dap/tasks/AAA/aggregation_jobs"


@pytest.mark.parametrize(
    "location",
    [
        "/dap/tasks/AAA/aggregation_jobs/lc7a_-K?step=0",
        "https://helper.example.com/dap/tasks/AAA/aggregation_jobs/lc7a_-K?step=0",
        "/tasks/AAA/aggregation_jobs/lc7a_-K?step=0",  # it does not know what its proxy adds
        "tasks/AAA/aggregation_jobs/lc7a_-K?step=0",
        "https://evil.example.com/tasks/AAA/aggregation_jobs/lc7a_-K?step=0",
    ],
)
def test_a_location_gives_a_name_and_never_a_place(location: str) -> None:
    assert created_resource(CREATION, location) == f"{CREATION}/lc7a_-K?step=0"


@pytest.mark.parametrize(
    "location",
    [
        "",
        "/",
        "lc7a",
        "/dap/tasks/BBB/aggregation_jobs/lc7a",
        "/dap/tasks/AAA/collection_jobs/lc7a",
        "/dap/tasks/AAA/aggregation_jobs/",
        "/dap/tasks/AAA/aggregation_jobs/..",
        "/dap/tasks/AAA/aggregation_jobs/a/b",
        "/dap/tasks/AAA/aggregation_jobs/a#b",
        "/dap/tasks/AAA/aggregation_jobs/a?b c",
        "/dap/tasks/AAA/aggregation_jobs/a?b#c",
        "/dap/tasks/AAA/aggregation_jobs/a\r\nX: y",
        "/dap/tasks/AAA/aggregation_jobs/a\n",
        "https://evil.example.com/",
        "/dap/Xtasks/AAA/aggregation_jobs/a",
        "/dap/tasks/AAA/aggregation_jobs/" + "a" * 201,
    ],
)
def test_a_location_of_something_else(location: str) -> None:
    with pytest.raises(Unreachable, match="location"):
        created_resource(CREATION, location)


@given(st.one_of(st.text(), st.text().map(lambda text: f"/tasks/AAA/aggregation_jobs/{text}")))
def test_any_location(location: str) -> None:
    try:
        url = created_resource(CREATION, location)
    except Unreachable:
        return
    assert url.startswith(f"{CREATION}/")
    assert url.isascii()
    assert url.isprintable()
    assert " " not in url


@pytest.mark.parametrize("url", ["http://example.com/", "ftp://localhost/", "https://", "x", ""])
def test_only_https_leaves_the_machine(url: str) -> None:
    with pytest.raises(InvalidInput):
        check_url(url)
