"""The sandbox: right answers, words for what does not compile, and one kind of failure."""

from __future__ import annotations

import time
import unicodedata
from pathlib import Path
from typing import Any

import apsw
import apsw.ext
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister.canonical import find_noncanonical
from chorister.clock import uptime
from chorister.device.sandbox import Sandbox
from chorister.device.sandbox.functions import PURE_FUNCTIONS, TABLE_FUNCTIONS
from chorister.device.sandbox.query import connect, explain, rows
from chorister.device.sandbox.wire import Job
from chorister.device.store import Snapshot
from chorister.encoding import Categories, Encoding
from chorister.encoding.tokenizer import split_words
from chorister.errors import InvalidInput, QueryRefused, SandboxFailed
from tests.device.asking import ALL, DATA, ENDLESS, NUMBERS, TABLES, ask, choose, snapshot


def test_a_query_is_answered_with_a_bin(sandbox: Sandbox) -> None:
    assert choose(sandbox, "SELECT b AS x FROM t WHERE b BETWEEN 7 AND 9") == 7
    assert choose(sandbox, "SELECT a AS y, b + 800 AS x FROM t WHERE a LIKE '%9'") == 809


def test_a_query_without_rows_is_answered_with_oov(sandbox: Sandbox) -> None:
    assert choose(sandbox, "SELECT b AS x FROM t", snapshot([])) == 0


def test_uniform_selection_draws_with_the_systems_randomness_in_the_sandbox(
    sandbox: Sandbox,
) -> None:
    """Sandboxes are copies of one process: a copied generator would draw the same each time.

    Each of 7 rows is missed by 60 fair draws with probability (6/7)^60 < 1e-4; that all draws are
    one of two values, as of a copied or broken generator, has probability < 7^2 (2/7)^60 < 1e-30.
    """
    query = "SELECT b AS x FROM t WHERE b BETWEEN 1 AND 7"
    drawn = [choose(sandbox, query, selection="uniform") for _ in range(60)]
    assert set(drawn) <= set(range(1, 8))
    assert len(set(drawn)) > 2


def test_of_two_columns_with_one_name_the_first_counts(sandbox: Sandbox) -> None:
    assert choose(sandbox, "SELECT 1 AS x, 2 AS x") == 1


def test_a_query_that_lacks_a_column_fails(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFailed):
        choose(sandbox, "SELECT b AS y FROM t")


def test_values_keep_their_types() -> None:
    answer = ask("SELECT 1, 1.0, 'a', NULL, x'00', 9e999, -9e999, 1 = 1, 0.1 + 0.2")
    assert answer.rows == [(1, 1.0, "a", None, b"\0", float("inf"), float("-inf"), 1, 0.1 + 0.2)]
    assert [type(value) for value in answer.rows[0][:3]] == [int, float, str]


@settings(max_examples=25)
@given(st.lists(st.tuples(st.none() | st.text(), st.none() | st.integers(-(2**63), 2**63 - 1))))
def test_what_went_in_comes_out(rows: list[tuple[str | None, int | None]]) -> None:
    assert ask("SELECT a, b FROM t ORDER BY rowid", snapshot(rows)).rows == rows


@settings(max_examples=25)
@given(st.lists(st.tuples(st.none() | st.text(), st.none() | st.integers(-5, 5)), max_size=5))
def test_a_sandbox_chooses_as_the_encoder_does(
    sandbox: Sandbox, rows: list[tuple[str | None, int | None]]
) -> None:
    texts = dict.fromkeys(text for text, _ in rows if text not in (None, "OOV"))
    values = ("nobody", *(text for text in texts if text and find_noncanonical(text) is None))
    encoding = Encoding(
        (
            Categories(column="a", values=tuple(dict.fromkeys(values))),
            Categories(column="b", values=(1, 2, 3)),
        )
    )
    columns: dict[str, list[Any]] = {"a": [row[0] for row in rows], "b": [row[1] for row in rows]}
    wanted = encoding.encoder.select(encoding.find(columns), "first")
    assert choose(sandbox, "SELECT a, b FROM t", snapshot(rows), encoding=encoding) == wanted


# --- functions ------------------------------------------------------------------------------------


def test_words_are_those_of_the_encodings() -> None:
    text = "Don't STOP — thinking about “tomorrow”, ﬁne?"
    answer = ask("SELECT word, position FROM t, words(t.a)", snapshot([(text, 0)]))
    assert answer.rows == [(word, i) for i, word in enumerate(split_words(text))]


def test_words_of_a_query_do_not_depend_on_the_tables_of_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if this Python were newer, and knew U+1C89 (of Unicode 16.0) for a letter."""
    real = unicodedata.category
    monkeypatch.setattr(unicodedata, "category", lambda c: "Lu" if c == "\u1c89" else real(c))
    text = "one\u1c89two \u1c89 three"
    words = [word for word, _ in TABLE_FUNCTIONS["words"].rows(text)]
    assert words == split_words(text) == ["one", "two", "three"]
    assert [gram for gram, _ in TABLE_FUNCTIONS["ngrams"].rows(text, 2)] == ["one two", "two three"]


def test_ngrams_slide_over_the_words() -> None:
    data = snapshot([("One two, three four", 1), ("five", 2), ("", 3), (None, 4)])
    query = "SELECT b, g.ngram, g.position FROM t, ngrams(t.a, 3) AS g"
    assert ask(query, data).rows == [(1, "one two three", 0), (1, "two three four", 1)]
    assert ask("SELECT count(*) FROM t, ngrams(t.a, t.b)", data).rows == [(4,)]


@pytest.mark.parametrize("n", ["0", "17", "-1", "NULL", "'2'", "2.0"])
def test_ngrams_of_no_length_fail(n: str, sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFailed):
        choose(sandbox, "SELECT ngram AS x FROM t, ngrams(t.a, n)".replace("n)", f"{n})"))


@pytest.mark.parametrize("query", ["SELECT * FROM ngrams", "SELECT * FROM ngrams('a b')"])
def test_ngrams_without_arguments_do_not_compile(query: str) -> None:
    with pytest.raises(SandboxFailed):
        ask(query)


def test_every_pure_function_is_known_to_sqlite() -> None:
    found = apsw.Connection(":memory:").execute("SELECT DISTINCT name FROM pragma_function_list")
    assert {name for (name,) in found} >= PURE_FUNCTIONS


def test_no_function_knows_time_version_or_files() -> None:
    for stem in ("time", "date", "julian", "sqlite", "load", "fts", "token", "file", "match",
                 "rtree", "geopoly", "changes", "rowid", "zeroblob", "carray"):  # fmt: skip
        assert not [name for name in ALL if stem in name], stem


def test_functions_that_are_not_listed_are_refused(sandbox: Sandbox) -> None:
    for function, query in {
        "lower": "SELECT lower(a) AS x FROM t",
        "like": "SELECT a AS x FROM t WHERE a LIKE 'h%'",
        "count": "SELECT count(*) AS x FROM t",
        "ngrams": "SELECT ngram AS x FROM t, ngrams(t.a, 2)",
        "->>": "SELECT '[1]' ->> 0 AS x",
    }.items():
        choose(sandbox, query, functions=[function])
        with pytest.raises(SandboxFailed):
            choose(sandbox, query, functions=ALL - {function})
        with pytest.raises(QueryRefused, match=r"not authorized|no such table|prohibited"):
            sandbox.compile(query, Snapshot.empty(TABLES), functions=ALL - {function})


def test_a_function_that_the_device_lacks_is_a_callers_mistake(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidInput, match="no function load_extension"):
        choose(sandbox, "SELECT 1 AS x", functions=["load_extension"])


@pytest.mark.parametrize("deadline", [3700, float("nan"), float("inf")])
def test_a_deadline_is_soon(deadline: float, sandbox: Sandbox) -> None:
    with pytest.raises(InvalidInput, match="deadline"):
        choose(sandbox, "SELECT 1 AS x", deadline=deadline)


def test_table_functions_are_documented_where_they_are_listed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "device.md").read_text()
    for name in TABLE_FUNCTIONS:
        assert f"`{name}(" in page


# --- compiling ------------------------------------------------------------------------------------


def test_compiling_names_the_columns(sandbox: Sandbox) -> None:
    query = "SELECT g.ngram, b AS number FROM t, ngrams(a, 2) AS g;  "
    assert sandbox.compile(query, Snapshot.empty(TABLES), functions=ALL) == ("ngram", "number")


def test_a_query_is_compiled_while_another_runs(sandbox: Sandbox) -> None:
    empty = Snapshot.empty(TABLES)
    with sandbox.compiling("SELECT a, 7 AS n FROM t", empty, functions=()) as columns:
        assert choose(sandbox, "SELECT 1 AS x") == 1
        assert columns() == (("a", "text"), ("n", None))
    with sandbox.compiling("SELECT a, 8 AS n FROM t", empty, functions=()):
        pass  # nobody wants to know any more
    with (
        sandbox.compiling("SELECT c FROM t", empty, functions=()) as columns,
        pytest.raises(QueryRefused, match="no such column"),
    ):
        columns()


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
        choose(sandbox, query)


@pytest.mark.parametrize(
    "query",
    [
        *("{};", "{} ;  ", "{};\n", "{}\r\n\t", "{};;", "{}; ;\n"),
        *("{} -- why", "{} -- why\n", "{} /* why */", "{} /* why", "-- why\n{}", "/* why */ {};"),
        *("  {}", ";{}", "\ufeff{}", "{} /* é */;\n"),
    ],
)
def test_what_stands_around_a_query_does_not_matter(query: str, sandbox: Sandbox) -> None:
    query = query.format("SELECT 'é;' AS y, b AS x FROM t WHERE b = 7")
    assert sandbox.compile(query, Snapshot.empty(TABLES), functions=ALL) == ("y", "x")
    assert choose(sandbox, query) == 7


@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from(
            ["SELECT 1 AS x", "SELECT 2 AS x", ";", " ", "\n", "\f", "\xa0", "-- c", "/* c */", "é"]
        ),
        max_size=6,
    )
)
def test_whether_there_is_a_second_statement_is_as_apsw_s_own_tool_finds(parts: list[str]) -> None:
    """And whatever compiles, runs: nothing is charged that could only fail."""
    query = " ".join(parts)
    job = Job(query=query, tables=("t",), functions=(), seconds=1.0, selection=None)
    try:
        outcome = explain(connect(), job, DATA.image)
        details = apsw.ext.query_info(apsw.Connection(":memory:"), query)
        one = details.has_vdbe and details.query_remaining is None
        assert isinstance(outcome, tuple) == one, outcome
        if one:
            names, found = rows(connect(), job, DATA.image)
            assert (names, len(list(found))) == (["x"], 1)
    except apsw.SQLError:
        assert isinstance(outcome, str)
    finally:
        apsw.hard_heap_limit(0)  # a sandbox's: it applies to the whole process


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
        "SELECT c AS x FROM t": 20.0,  # does not compile
        "SELECT abs(-9223372036854775807 - 1) AS x": 20.0,  # fails while it runs
        "SELECT printf('%.*c', 100000000, 'x') AS x": 20.0,  # too large
        "SELECT 1 AS y": 20.0,  # lacks a column
        "SELECT 2 AS x": -1.0,  # too late
        ENDLESS: 0.2,  # too slow
    }.items():
        with pytest.raises(SandboxFailed) as caught:
            choose(sandbox, query, deadline=deadline)
        error = caught.value
        failures.append((str(error), error.args, error.__cause__, error.__context__))
    assert len(set(map(str, failures))) == 1
    assert failures[0][2:] == (None, None)


def test_a_query_ends_at_its_deadline(sandbox: Sandbox) -> None:
    start = time.monotonic()
    with pytest.raises(SandboxFailed):
        choose(sandbox, ENDLESS, deadline=0.3)
    assert time.monotonic() - start < 30  # on a busy machine; to its end it would take hours


@pytest.mark.parametrize("late", [0.0, 1e-9, 1000.0])
def test_a_deadline_in_the_past_fails_at_once(late: float, sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFailed):
        sandbox.choose(
            "SELECT 1 AS x",
            DATA,
            functions=(),
            encoding=NUMBERS,
            selection="first",
            until=uptime() - late,
        )


def test_columns_that_nobody_asked_for_take_no_room(sandbox: Sandbox) -> None:
    """Two hundred columns beside the one that is encoded: none of them is counted."""
    wide = ", ".join(f"a || a || a AS c{i}" for i in range(200))
    query = f"SELECT {wide}, b AS x FROM (SELECT t.a, t.b FROM t, (SELECT 1 FROM t LIMIT 100))"  # noqa: S608
    assert choose(sandbox, query) == 1


def test_an_answer_has_a_most_of_rows_and_work(sandbox: Sandbox) -> None:
    rows = "SELECT b AS x FROM t, (SELECT b AS c FROM t), (SELECT b AS d FROM t) LIMIT {}"
    assert choose(sandbox, rows.format(500_000)) == 1
    with pytest.raises(SandboxFailed):
        choose(sandbox, rows.format(1_000_001))
    texts = "SELECT printf('%.*c', 100000, 'y') AS x FROM t LIMIT {}"
    assert choose(sandbox, texts.format(50)) == 0
    with pytest.raises(SandboxFailed):
        choose(sandbox, texts.format(150))


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
