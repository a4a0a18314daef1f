"""A hostile analyst reads: every way in SQL to a field that was not declared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from chorister.device.sandbox import Sandbox
from chorister.device.verifier import permitted_functions, verify_query
from chorister.errors import QueryRefused
from tests.adversary.careless_device import NGRAMS, POLICY, Victim
from tests.keyboard import ANALYSIS, analysis_at, recipe_with

EVERY_NGRAM = Counter((ngram,) for ngram in NGRAMS)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with Sandbox() as sandbox:
        yield Victim(tmp_path_factory.mktemp("victim"), sandbox)


def refuses(victim: Victim, query: str, why: str) -> None:
    """The verifier refuses in these words, and the sandbox fails even without the verifier."""
    outcome = victim.attack(query)
    assert outcome.refused is not None
    assert why in outcome.refused
    assert outcome.rows is None


def past_the_authorizer(source: str, names: list[str]) -> str:
    """A query that returns all of a table without SQLite's authorizer being asked about it."""
    nulls = ", ".join(f'NULL AS "{name}"' for name in names)
    return f"SELECT *, 1 AS x FROM {source} NATURAL FULL JOIN (SELECT {nulls})"


def columns_of(connection: apsw.Connection, table: str) -> list[str]:
    try:
        rows = connection.execute("SELECT name FROM pragma_table_info(?)", (table,)).fetchall()
    except apsw.Error:
        return []
    return [str(row[0]) for row in rows]


def test_star_gives_the_declared_field_only(victim: Victim) -> None:
    outcome = victim.attack("SELECT *, ngram AS x FROM keyboard")
    assert outcome.refused is None
    assert Counter(outcome.rows or []) == Counter((ngram, ngram) for ngram in NGRAMS)


def test_an_undeclared_column(victim: Victim) -> None:
    refuses(victim, "SELECT perplexity AS x FROM keyboard", "no such column")


def test_an_undeclared_column_in_quotes_is_no_text(victim: Victim) -> None:
    refuses(victim, 'SELECT "perplexity" AS x FROM keyboard', "no such column")


def test_an_alias(victim: Victim) -> None:
    refuses(victim, "SELECT k.perplexity AS x FROM keyboard AS k", "no such column")


def test_an_alias_with_the_name_of_an_undeclared_stream(victim: Victim) -> None:
    refuses(victim, "SELECT user.age AS x FROM keyboard AS user", "no such column")


def test_where(victim: Victim) -> None:
    refuses(victim, "SELECT ngram AS x FROM keyboard WHERE perplexity > 1", "no such column")


def test_order_by(victim: Victim) -> None:
    refuses(victim, "SELECT ngram AS x FROM keyboard ORDER BY perplexity", "no such column")


def test_order_by_a_number_beyond_the_columns(victim: Victim) -> None:
    refuses(victim, "SELECT ngram AS x FROM keyboard ORDER BY 2", "ORDER BY")


def test_group_by_and_having(victim: Victim) -> None:
    refuses(victim, "SELECT ngram AS x FROM keyboard GROUP BY perplexity", "no such column")
    refuses(
        victim,
        "SELECT ngram AS x FROM keyboard GROUP BY 1 HAVING max(perplexity)",
        "no such column",
    )


def test_a_subquery(victim: Victim) -> None:
    refuses(victim, "SELECT (SELECT age FROM user) AS x FROM keyboard", "no such table")
    refuses(victim, "SELECT x FROM (SELECT perplexity AS x FROM keyboard)", "no such column")
    refuses(victim, "SELECT ngram AS x FROM keyboard WHERE EXISTS (SELECT 1 FROM user)", "no such")


def test_a_common_table_expression(victim: Victim) -> None:
    refuses(victim, "WITH c AS (SELECT perplexity AS x FROM keyboard) SELECT x FROM c", "no such")
    refuses(victim, "WITH c(x) AS (SELECT age FROM user) SELECT x FROM c", "no such table")


def test_a_common_table_expression_that_is_not_used(victim: Victim) -> None:
    outcome = victim.attack(
        "WITH c AS (SELECT perplexity FROM keyboard) SELECT ngram AS x FROM keyboard"
    )
    # SQLite does not even look at it; nothing was read.
    assert Counter(outcome.rows or []) == EVERY_NGRAM


@pytest.mark.parametrize("kind", ["", "TEMP "])
def test_a_view(kind: str, victim: Victim) -> None:
    refuses(victim, f"CREATE {kind}VIEW v AS SELECT * FROM keyboard", "not authorized")


def test_a_trigger_an_index_a_virtual_table(victim: Victim) -> None:
    refuses(victim, "CREATE INDEX i ON keyboard (ngram)", "not authorized")
    refuses(
        victim,
        "CREATE TEMP TRIGGER g AFTER INSERT ON keyboard BEGIN SELECT 1; END",
        "not authorized",
    )
    refuses(victim, "CREATE VIRTUAL TABLE f USING fts5(a)", "not authorized")
    refuses(victim, "CREATE VIRTUAL TABLE f USING ngrams", "not authorized")


def test_json_functions(victim: Victim) -> None:
    refuses(victim, "SELECT json_extract(perplexity, '$') AS x FROM keyboard", "no such column")
    refuses(victim, "SELECT value AS x FROM keyboard, json_each(keyboard.ngram)", "prohibited")
    refuses(victim, "SELECT value AS x FROM json_tree('[1]')", "prohibited")
    refuses(victim, "SELECT json_group_array(ngram) AS x FROM keyboard", "does not permit")


@pytest.mark.parametrize("name", ["rowid", "_rowid_", "oid"])
def test_rowid_is_a_place_in_a_random_order(name: str, victim: Victim) -> None:
    order = [victim.attack(f"SELECT ngram AS x FROM keyboard ORDER BY {name}").rows for _ in "ab"]
    assert order[0] != order[1]  # equal with probability 1/20!, below 1e-18
    assert Counter(order[0] or []) == EVERY_NGRAM


def test_order_of_rows_tells_nothing_about_the_order_of_events(victim: Victim) -> None:
    orders = [victim.attack("SELECT ngram AS x FROM keyboard").rows for _ in range(3)]
    as_donated = [(ngram,) for ngram in NGRAMS]
    assert as_donated not in orders
    assert orders[0] != orders[1] != orders[2]


def test_window_functions(victim: Victim) -> None:
    refuses(
        victim,
        "SELECT first_value(ngram) OVER (ORDER BY perplexity) AS x FROM keyboard",
        "no such column",
    )
    refuses(victim, "SELECT lag(age) OVER () AS x FROM user", "no such table")


def test_count_of_an_undeclared_stream(victim: Victim) -> None:
    refuses(victim, "SELECT count(*) AS x FROM user", "no such table")
    refuses(victim, "SELECT ngram AS x FROM keyboard LEFT JOIN user", "no such table")


def test_a_natural_full_join_walks_past_the_authorizer_to_nothing(victim: Victim) -> None:
    outcome = victim.attack(
        "SELECT *, ngram AS x FROM keyboard NATURAL FULL JOIN"
        " (SELECT NULL AS ngram, NULL AS perplexity, NULL AS id, NULL AS donated)"
    )
    # The undeclared names come from the analyst's own subquery, and are NULL.
    assert outcome.rows is not None
    assert all(set(row[1:-1]) == {None} for row in outcome.rows)


def test_a_natural_full_join_with_an_undeclared_stream(victim: Victim) -> None:
    for table in ("user", "stream_keyboard", "profile_user", "consent", "schema_version"):
        refuses(
            victim,
            f"SELECT * FROM {table} NATURAL FULL JOIN (SELECT NULL AS age, NULL AS x)",
            "no such table",
        )


@pytest.mark.parametrize("kind", ["", "LEFT ", "RIGHT ", "FULL "])
def test_a_join_using_an_undeclared_column(kind: str, victim: Victim) -> None:
    refuses(
        victim,
        f"SELECT 1 AS x FROM keyboard {kind}JOIN (SELECT 1 AS perplexity) USING (perplexity)",
        "cannot join",
    )


@pytest.mark.parametrize("kind", ["LEFT", "RIGHT", "FULL", "INNER"])
def test_a_natural_join_of_the_stream_with_itself(kind: str, victim: Victim) -> None:
    outcome = victim.attack(
        f"SELECT b.*, a.ngram AS x FROM keyboard AS a NATURAL {kind} JOIN keyboard AS b"
    )
    assert outcome.rows is not None
    assert all(len(row) == 2 for row in outcome.rows)


@pytest.mark.parametrize(
    "source",
    [
        "pragma_table_info('keyboard')",
        "pragma_table_xinfo('user')",
        "pragma_table_list",
        "pragma_database_list",
        "pragma_function_list",
        "pragma_compile_options",
        "pragma_index_list('keyboard')",
        "pragma_module_list",
    ],
)
def test_table_valued_pragma_functions(source: str, victim: Victim) -> None:
    refuses(victim, f"SELECT 1 AS x FROM {source}", "prohibited")
    refuses(victim, f"SELECT *, 1 AS x FROM {source.upper()}", "prohibited")
    # The same behind a join that SQLite's authorizer is not asked about.
    refuses(victim, past_the_authorizer(source, ["name", "cid"]), "prohibited")


def test_every_pragma_that_is_a_table_with_all_its_columns(victim: Victim) -> None:
    plain = apsw.Connection(":memory:")
    for (pragma,) in plain.execute("PRAGMA pragma_list").fetchall():
        names = columns_of(plain, f"pragma_{pragma}")
        if names:
            refuses(victim, past_the_authorizer(f"pragma_{pragma}", names), "prohibited")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("json_each", "('[1, 2]')"),
        ("json_tree", "('{\"a\": [1]}')"),
        ("jsonb_each", "('[1, 2]')"),
        ("jsonb_tree", "('[1, 2]')"),
        ("carray", "(1, 2)"),
    ],
)
def test_what_sqlite_adds_when_it_is_named(name: str, arguments: str, victim: Victim) -> None:
    names = columns_of(apsw.Connection(":memory:"), name) or ["x"]
    for source in (name, name.upper(), f"main.{name}"):
        refuses(victim, past_the_authorizer(f"{source}{arguments}", names), "prohibited")
        refuses(victim, f"SELECT 1 AS x FROM keyboard, {source}{arguments}", "prohibited")
    # A join of its hidden columns too.
    refuses(victim, past_the_authorizer(name, [*names, "json", "root"]), "prohibited")


@pytest.mark.parametrize(
    "table", ["sqlite_schema", "sqlite_master", "sqlite_temp_schema", "sqlite_temp_master"]
)
def test_sqlite_schema(table: str, victim: Victim) -> None:
    refuses(victim, f"SELECT sql AS x FROM {table}", "prohibited")
    names = ["type", "name", "tbl_name", "rootpage", "sql"]
    for source in (table, f"keyboard, {table}", f"(SELECT * FROM {table})"):
        refuses(victim, past_the_authorizer(source, names), "prohibited")
    refuses(victim, f"SELECT 1 AS x WHERE EXISTS ({past_the_authorizer(table, names)})", "prohib")


@pytest.mark.parametrize(
    "table", ["dbstat", "sqlite_dbpage", "sqlite_stmt", "bytecode", "fts5vocab"]
)
def test_dbstat_and_other_tables_of_sqlite(table: str, victim: Victim) -> None:
    refuses(victim, f"SELECT 1 AS x FROM {table}", "no such table")
    refuses(victim, f"SELECT * FROM {table} NATURAL FULL JOIN (SELECT NULL AS x)", "no such table")


def test_attach(victim: Victim, tmp_path: Path) -> None:
    refuses(victim, f"ATTACH DATABASE '{tmp_path}/stolen.db' AS s", "not authorized")
    refuses(victim, "ATTACH DATABASE 'file:/etc/passwd?mode=ro' AS s", "not authorized")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "pragma",
    ["writable_schema = 1", "query_only = 0", "temp_store_directory = '/tmp'", "key = 'x'"],
)
def test_pragma(pragma: str, victim: Victim) -> None:
    outcome = victim.attack(f"PRAGMA {pragma}")
    assert outcome.refused is not None
    assert outcome.rows is None


@pytest.mark.parametrize(
    "call",
    [
        "load_extension('/tmp/x.so')",
        "fts3_tokenizer('simple')",
        "sqlite_version()",
        "sqlite_source_id()",
        "sqlite_compileoption_get(1)",
        "changes()",
        "last_insert_rowid()",
        "readfile('/etc/passwd')",
        "writefile('/tmp/x', 'y')",
        "edit('x')",
        "zeroblob(10)",
        "randomblob(10)",
    ],
)
def test_functions_beyond_the_list(call: str, victim: Victim) -> None:
    outcome = victim.attack(f"SELECT {call} AS x")
    assert outcome.refused is not None
    assert "does not permit the function" in outcome.refused
    assert outcome.rows is None


@pytest.mark.parametrize(
    "call",
    [
        "current_timestamp",
        "current_date",
        "datetime('now', 'localtime')",
        "strftime('%s')",
        "unixepoch()",
        "julianday('now')",
        "timediff('now', '2000-01-01')",
    ],
)
def test_the_time_and_its_zone(call: str, victim: Victim) -> None:
    refuses(victim, f"SELECT {call} AS x", "does not permit")


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO keyboard VALUES ('x')",
        "UPDATE keyboard SET ngram = 'x'",
        "DELETE FROM keyboard",
        "REPLACE INTO keyboard VALUES ('x')",
        "INSERT INTO keyboard VALUES ('x') RETURNING ngram AS x",
        "CREATE TABLE x (a)",
        "CREATE TEMP TABLE x AS SELECT * FROM keyboard",
        "DROP TABLE keyboard",
        "ALTER TABLE keyboard ADD COLUMN x",
        "VACUUM INTO '/tmp/stolen.db'",
        "REINDEX",
        "ANALYZE",
        "BEGIN",
        "SAVEPOINT x",
        "DETACH main",
    ],
)
def test_writing(statement: str, victim: Victim) -> None:
    outcome = victim.attack(statement)
    assert outcome.refused is not None
    assert outcome.rows is None
    assert not Path("/tmp/stolen.db").exists()  # noqa: S108


def test_a_second_statement(victim: Victim) -> None:
    refuses(victim, "SELECT ngram AS x FROM keyboard; SELECT 1", "more than one statement")
    refuses(victim, "SELECT 1 AS x; ATTACH '/tmp/x' AS y", "more than one statement")


def test_explain_shows_no_program(victim: Victim) -> None:
    refuses(victim, "EXPLAIN SELECT ngram AS x FROM keyboard", "not a SELECT")


# --- what is declared must be allowed -------------------------------------------------------------


def test_a_declared_field_that_is_not_open_to_the_analysis(victim: Victim) -> None:
    recipe = recipe_with(query="SELECT locale AS age FROM user", reads={"user": ["locale"]})
    with pytest.raises(QueryRefused, match=r"user\.locale is not open to this analysis"):
        verify_query(POLICY, recipe)


@pytest.mark.parametrize(
    "reads", [{"nothing": ["a"]}, {"keyboard": ["height"]}, {"user": ["ngram"]}]
)
def test_a_declared_field_that_does_not_exist(reads: dict[str, list[str]]) -> None:
    with pytest.raises(QueryRefused, match="does not exist"):
        verify_query(POLICY, recipe_with(reads=reads))


def test_an_analysis_that_does_not_exist() -> None:
    with pytest.raises(QueryRefused, match="no analysis"):
        verify_query(POLICY, recipe_with(analysis="another"))


@pytest.mark.parametrize("extra", [" ", "\n", "--", ";"])
def test_an_exact_query_is_listed_to_the_letter(extra: str, victim: Victim) -> None:
    listed = "SELECT ngram AS age, ngram FROM keyboard"
    policy = analysis_at({"query_class": "exact", "queries": [listed], "functions": []})
    recipe = recipe_with(query=listed, reads={"keyboard": ["ngram"]})
    verify_query(policy, recipe, victim.sandbox)
    with pytest.raises(QueryRefused, match="not one of the queries"):
        verify_query(policy, recipe_with(query=listed + extra, reads={"keyboard": ["ngram"]}))


def test_an_exact_query_reads_the_declared_fields_only(victim: Victim) -> None:
    listed = "SELECT perplexity AS age, ngram FROM keyboard"
    policy = analysis_at({"query_class": "exact", "queries": [listed], "functions": []})
    with pytest.raises(QueryRefused, match="no such column"):
        verify_query(
            policy, recipe_with(query=listed, reads={"keyboard": ["ngram"]}), victim.sandbox
        )


def test_a_policy_that_lists_a_dangerous_function_gets_none(victim: Victim) -> None:
    policy = analysis_at({"functions": ["load_extension", "fts3_tokenizer", "lower"]})
    assert permitted_functions(policy.analyses[ANALYSIS]) == {"lower"}


def test_a_query_that_lacks_an_encoded_column_is_refused_before_the_charge(victim: Victim) -> None:
    recipe = recipe_with(query="SELECT ngram FROM keyboard", reads={"keyboard": ["ngram"]})
    with pytest.raises(QueryRefused, match="features read the column age"):
        verify_query(POLICY, recipe, victim.sandbox)
