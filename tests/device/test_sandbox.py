"""The sandbox: right answers, words for what does not compile, and one kind of failure."""

from __future__ import annotations

import time
from pathlib import Path

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister.device.sandbox import Sandbox, words
from chorister.device.sandbox.functions import PURE_FUNCTIONS, TABLE_FUNCTIONS
from chorister.device.store import Snapshot
from chorister.encoding.words import split_words
from chorister.errors import InvalidInput, QueryRefused, SandboxFailed
from tests.device.asking import ALL, DATA, ENDLESS, TABLES, ask, snapshot


def test_a_query_is_answered(sandbox: Sandbox) -> None:
    answer = ask(sandbox, "SELECT b AS number, a FROM t ORDER BY b LIMIT 2")
    assert answer.names == ("number", "a")
    assert answer.rows == [(0, "how are you 0"), (1, "how are you 1")]
    assert answer.columns == {"number": [0, 1], "a": ["how are you 0", "how are you 1"]}


def test_a_query_without_rows_is_answered(sandbox: Sandbox) -> None:
    answer = ask(sandbox, "SELECT a, b FROM t", snapshot([]))
    assert (answer.names, answer.rows) == (("a", "b"), [])


def test_of_two_columns_with_one_name_the_first_counts(sandbox: Sandbox) -> None:
    assert ask(sandbox, "SELECT 1 AS x, 2 AS x").columns == {"x": [1]}


def test_values_keep_their_types(sandbox: Sandbox) -> None:
    answer = ask(sandbox, "SELECT 1, 1.0, 'a', NULL, x'00', 9e999, -9e999, 1 = 1, 0.1 + 0.2")
    assert answer.rows == [(1, 1.0, "a", None, None, float("inf"), float("-inf"), 1, 0.1 + 0.2)]
    assert [type(value) for value in answer.rows[0][:3]] == [int, float, str]


@settings(max_examples=25)
@given(st.lists(st.tuples(st.none() | st.text(), st.none() | st.integers(-(2**63), 2**63 - 1))))
def test_what_went_in_comes_out(
    sandbox: Sandbox, rows: list[tuple[str | None, int | None]]
) -> None:
    assert ask(sandbox, "SELECT a, b FROM t ORDER BY rowid", snapshot(rows)).rows == rows


# --- functions ------------------------------------------------------------------------------------


def test_words_are_those_of_the_encodings(sandbox: Sandbox) -> None:
    text = "Don't STOP — thinking about “tomorrow”, ﬁne?"
    answer = ask(sandbox, "SELECT word, position FROM t, words(t.a)", snapshot([(text, 0)]))
    assert answer.rows == [(word, i) for i, word in enumerate(split_words(text))]


typed = st.text(st.sampled_from("aB1 '’.\0ﬁßİ\u0301é٣½_-")) | st.text(
    st.characters(exclude_categories=["Cs"])
)


@settings(max_examples=1000)
@given(typed)
def test_the_sandbox_cuts_any_text_as_the_encodings_do(text: str) -> None:
    assert words.split_words(text) == split_words(text)


def test_ngrams_slide_over_the_words(sandbox: Sandbox) -> None:
    data = snapshot([("One two, three four", 1), ("five", 2), ("", 3), (None, 4)])
    query = "SELECT b, g.ngram, g.position FROM t, ngrams(t.a, 3) AS g"
    assert ask(sandbox, query, data).rows == [(1, "one two three", 0), (1, "two three four", 1)]
    assert ask(sandbox, "SELECT count(*) FROM t, ngrams(t.a, t.b)", data).rows == [(4,)]


@pytest.mark.parametrize("n", ["0", "17", "-1", "NULL", "'2'", "2.0"])
def test_ngrams_of_no_length_fail(n: str, sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFailed):
        ask(sandbox, "SELECT ngram FROM t, ngrams(t.a, n)".replace("n)", f"{n})"))


@pytest.mark.parametrize("query", ["SELECT * FROM ngrams", "SELECT * FROM ngrams('a b')"])
def test_ngrams_without_arguments_do_not_compile(query: str, sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFailed):
        ask(sandbox, query)


def test_every_pure_function_is_known_to_sqlite() -> None:
    found = apsw.Connection(":memory:").execute("SELECT DISTINCT name FROM pragma_function_list")
    assert {name for (name,) in found} >= PURE_FUNCTIONS


def test_no_function_knows_time_version_or_files() -> None:
    for stem in ("time", "date", "julian", "sqlite", "load", "fts", "token", "file", "match",
                 "rtree", "geopoly", "changes", "rowid", "zeroblob", "carray"):  # fmt: skip
        assert not [name for name in ALL if stem in name], stem


def test_functions_that_are_not_listed_are_refused(sandbox: Sandbox) -> None:
    for function, query in {
        "lower": "SELECT lower(a) FROM t",
        "like": "SELECT a FROM t WHERE a LIKE 'h%'",
        "count": "SELECT count(*) FROM t",
        "ngrams": "SELECT ngram FROM t, ngrams(t.a, 2)",
        "->>": "SELECT '[1]' ->> 0",
    }.items():
        assert sandbox.run(query, DATA, functions=[function], deadline=20).rows is not None
        with pytest.raises(SandboxFailed):
            sandbox.run(query, DATA, functions=ALL - {function}, deadline=20)
        with pytest.raises(QueryRefused, match=r"not authorized|no such table|prohibited"):
            sandbox.compile(query, Snapshot.empty(TABLES), functions=ALL - {function})


def test_a_function_that_the_device_lacks_is_a_callers_mistake(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidInput, match="no function load_extension"):
        sandbox.run("SELECT 1", DATA, functions=["load_extension"], deadline=1)


@pytest.mark.parametrize("deadline", [0, -1, 3601, float("nan")])
def test_a_deadline_has_bounds(deadline: float, sandbox: Sandbox) -> None:
    with pytest.raises(InvalidInput, match="deadline"):
        ask(sandbox, "SELECT 1", deadline=deadline)


def test_table_functions_are_documented_where_they_are_listed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "device.md").read_text()
    for name in TABLE_FUNCTIONS:
        assert f"`{name}(" in page


# --- compiling ------------------------------------------------------------------------------------


def test_compiling_names_the_columns(sandbox: Sandbox) -> None:
    query = "SELECT g.ngram, b AS number FROM t, ngrams(a, 2) AS g;  "
    assert sandbox.compile(query, Snapshot.empty(TABLES), functions=ALL) == ("ngram", "number")


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("SELECT c FROM t", "no such column: c"),
        ('SELECT "c" FROM t', "no such column"),
        ("SELECT a FROM u", "no such table: u"),
        ("SELEC a", "syntax error"),
        ("SELECT 1; SELECT 2", "more than one statement"),
        ("SELECT 1; -- and", "more than one statement"),
        ("EXPLAIN SELECT 1", "not a SELECT"),
        ("EXPLAIN QUERY PLAN SELECT 1", "not a SELECT"),
        ("-- nothing", "not a SELECT"),
        (";", "not a SELECT"),
        ("SELECT ?", "variable"),
        ("SELECT 1 \0 2", "NUL"),
    ],
)
def test_what_does_not_compile_is_refused_in_words(query: str, why: str, sandbox: Sandbox) -> None:
    with pytest.raises(QueryRefused, match=why) as caught:
        sandbox.compile(query, Snapshot.empty(TABLES), functions=ALL)
    assert (caught.value.check, caught.value.field) == ("query", "query")
    with pytest.raises(SandboxFailed):
        ask(sandbox, query)


@settings(max_examples=25)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_is_a_query_or_refused(sandbox: Sandbox, query: str) -> None:
    try:
        names = sandbox.compile(query, Snapshot.empty(TABLES), functions=ALL)
    except QueryRefused:
        return
    assert names


# --- failures -------------------------------------------------------------------------------------


def test_every_failure_looks_the_same(sandbox: Sandbox) -> None:
    failures = []
    for query, deadline in {
        "SELECT c FROM t": 20.0,  # does not compile
        "SELECT abs(-9223372036854775807 - 1)": 20.0,  # fails while it runs
        "SELECT printf('%.*c', 100000000, 'x')": 20.0,  # too large
        ENDLESS: 0.2,  # too slow
    }.items():
        with pytest.raises(SandboxFailed) as caught:
            ask(sandbox, query, deadline=deadline)
        error = caught.value
        failures.append((str(error), error.args, error.__cause__, error.__context__))
    assert len(set(map(str, failures))) == 1
    assert failures[0][2:] == (None, None)


def test_a_query_ends_at_its_deadline(sandbox: Sandbox) -> None:
    start = time.monotonic()
    with pytest.raises(SandboxFailed):
        ask(sandbox, ENDLESS, deadline=0.3)
    assert time.monotonic() - start < 5


def test_only_the_named_columns_come_back(sandbox: Sandbox) -> None:
    query = "SELECT b, a, a || a AS c, b + 1 AS a FROM t ORDER BY b LIMIT 2"
    answer = sandbox.run(query, DATA, functions=(), deadline=20, columns=["c", "a"])
    assert answer.names == ("c", "a")
    texts = ["how are you 0", "how are you 1"]
    assert answer.columns == {"c": [text * 2 for text in texts], "a": texts}
    with pytest.raises(SandboxFailed):
        sandbox.run(query, DATA, functions=(), deadline=20, columns=["d"])
    with pytest.raises(InvalidInput, match="columns"):
        sandbox.run(query, DATA, functions=(), deadline=20, columns=[])


def test_columns_that_nobody_asked_for_take_no_room(sandbox: Sandbox) -> None:
    """Two hundred columns beside the one that is encoded: none of them is sent or counted."""
    wide = ", ".join(f"a || a || a AS c{i}" for i in range(200))
    query = f"SELECT {wide}, t.b FROM t, (SELECT b FROM t LIMIT 100)"  # noqa: S608
    with pytest.raises(SandboxFailed):
        ask(sandbox, query)
    answer = sandbox.run(query, DATA, functions=(), deadline=20, columns=["b"])
    assert len(answer.rows) == 20_000


def test_a_query_that_compiled_is_remembered_with_all_that_it_depends_on(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, empty = "SELECT abs(b) AS c FROM t", Snapshot.empty(TABLES)
    assert sandbox.compile(query, empty, functions=["abs"]) == ("c",)
    with monkeypatch.context() as patch:
        patch.setattr(Sandbox, "_process", None)
        assert sandbox.compile(query, Snapshot.empty(TABLES), functions=["abs"]) == ("c",)
    with pytest.raises(QueryRefused):
        sandbox.compile(query, empty, functions=[])
    with pytest.raises(QueryRefused):
        sandbox.compile(query, Snapshot.empty({"t": {"a": "text"}}), functions=["abs"])


def test_few_compiled_queries_are_remembered(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chorister.device.sandbox.sandbox._MAX_COMPILED", 2)
    for column in ("a", "b", "a || b", "b || a"):
        query = f"SELECT {column} AS c FROM t"  # noqa: S608
        sandbox.compile(query, Snapshot.empty(TABLES), functions=())
    assert len(sandbox._compiled) <= 2
