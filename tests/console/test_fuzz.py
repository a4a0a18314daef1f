"""Every route with whatever somebody may send: an answer, and never a failure inside."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from chorister.console import app
from tests.console.test_access import Site, csrf
from tests.console.world import NASTY
from tests.keyboard import ANALYSIS

TEXT = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["", "0", "-1", "1e999", "NaN", "9" * 5000, NASTY, "../..", "10 to 80 by 10", "on", "1",
         "0 to 1e9 by 1e-9", "intervals", "categories", "prefix_tree", "user.age", "symmetric",
         "keyboard.ngram", "ngrams", "SELECT 1", "\x00", "how\nare\nyou", "a, b", "1, 2, 3, 4"]
    ),
)  # fmt: skip
NAMES = st.one_of(
    st.sampled_from(
        ["name", "about", "analyst", "permission", "epsilon", "local_epsilon", "delta", "target",
         "min_cohort", "mechanism", "share", "hours", "group", "query", "again", "expect", "token",
         "use:user.age", "edges:user.age", "kind:user.age", "values:user.age", "use:map", "map:x",
         "map:y", "map:box", "map:level", "use:keyboard.ngram", "kind:keyboard.ngram",
         "values:keyboard.ngram", "words:keyboard.ngram", "prefixes:keyboard.ngram",
         "use:keyboard.perplexity", "edges:keyboard.perplexity", "field", "vocabulary", "max_n",
         "deny", "cohorts", "x", "y", "box", "depth", "from", "to", "rows", "rows_cells", "columns",
         "columns_cells"]
    ),
    st.text(max_size=10),
)  # fmt: skip
QUERY = st.dictionaries(
    st.sampled_from(["like", "theme", "width", "local", "cohort", "delta", "mechanism", "crowd",
                     "number"]),
    TEXT,
    max_size=4,
)  # fmt: skip
ROUTES = [(method, path) for method, path, _ in app._PAGES]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    found = Site(tmp_path_factory.mktemp("fuzz"))
    found.workspace.create("ada", "rehearsal", "mine", ANALYSIS)
    return found


@pytest.fixture(scope="module")
def ada(site: Site) -> tuple[TestClient, str]:
    """Ada, and what her forms carry."""
    client = site.signed_in("ada")
    return client, csrf(client)


def test_every_route_is_fuzzed() -> None:
    assert len(ROUTES) == len(set(ROUTES)) >= 25


@settings(max_examples=8)
@given(data=st.data())
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_fails_inside(
    site: Site, ada: tuple[TestClient, str], method: str, path: str, data: st.DataObject
) -> None:
    client, token = ada
    if path == "/sign-out":
        client = site.signed_in("ada")
        token = csrf(client)
    known = {"connection": "rehearsal", "owner": "ada", "study": "mine", "number": "1"}
    parts = {
        name: data.draw(st.one_of(st.just(value), TEXT), label=name)
        for name, value in {**known, "algorithm": "crosstab"}.items()
        if "{" + name + "}" in path
    }
    for name, value in parts.items():
        quoted = "".join(f"%{byte:02x}" for byte in value.encode("utf-8", "surrogatepass"))
        path = path.replace("{" + name + "}", quoted or "x")
    headers = data.draw(st.sampled_from([{}, {"hx-request": "true"}]))
    if method == "GET":
        query = data.draw(QUERY)
        answer = client.get(path, params=query, headers=headers)
    else:
        form = data.draw(st.dictionaries(NAMES, TEXT, max_size=8))
        pairs = [(name.encode("utf-8", "replace"), value.encode("utf-8", "replace"))
                 for name, value in form.items()]  # fmt: skip
        body = urlencode([*pairs, (b"csrf", token.encode())]).encode()
        answer = client.post(path, content=body, headers=headers)
    assert answer.status_code in {200, 204, 303, 403, 404, 413, 422}, answer.text[:2000]
    assert "<img src=x" not in answer.text or "json" in answer.headers["content-type"]


@settings(max_examples=15)
@given(body=st.binary(max_size=200), path=st.text(max_size=20))
def test_bytes_are_no_trouble_either(site: Site, body: bytes, path: str) -> None:
    stranger = site.visitor()
    assert stranger.post("/sign-in", content=body).status_code in {403, 413}
    quoted = "".join(f"%{byte:02x}" for byte in path.encode("utf-8", "surrogatepass"))
    assert stranger.get("/" + quoted).status_code in {200, 303, 404}
