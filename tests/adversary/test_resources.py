"""A hostile analyst wastes: time, memory, disk; and makes failure depend on the data.

Each attack ends as `SandboxFailed`, the same one, by the deadline, with nothing left behind.
"""

from __future__ import annotations

import resource
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from chorister.device.sandbox import Sandbox
from chorister.errors import SandboxFailed
from tests.adversary.careless_device import NGRAMS, Victim

SOON = 0.5
PATIENCE = 15.0  # machines are slow and noisy; without a deadline these would take hours


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with Sandbox() as sandbox:
        yield Victim(tmp_path_factory.mktemp("victim"), sandbox)


def fails(victim: Victim, query: str, *, deadline: float = 20) -> None:
    start = time.monotonic()
    with pytest.raises(SandboxFailed) as caught:
        victim.choose(query, deadline=deadline)
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert time.monotonic() - start < PATIENCE
    # The next query finds a sandbox as if nothing had been.
    assert victim.choose("SELECT count(*) AS x FROM keyboard") == len(NGRAMS)


def test_recursion_without_end(victim: Victim) -> None:
    query = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT x FROM r"
    outcome = victim.attack(query)
    assert outcome.refused is not None
    assert "not authorized" in outcome.refused
    fails(victim, query)


def test_a_cross_join_of_a_billion_rows(victim: Victim) -> None:
    tables = ", ".join(f"keyboard AS t{i}" for i in range(7))  # 20^7
    fails(victim, f"SELECT count(*) AS x FROM {tables}", deadline=SOON)


def test_a_cross_join_whose_rows_all_come_back(victim: Victim) -> None:
    tables = ", ".join(f"keyboard AS t{i}" for i in range(7))
    fails(victim, f"SELECT t0.ngram AS x FROM {tables}")


def test_a_cross_join_that_is_sorted(victim: Victim) -> None:
    tables = ", ".join(f"keyboard AS t{i}" for i in range(7))
    fails(victim, f"SELECT t0.ngram AS x FROM {tables} ORDER BY random() LIMIT 1", deadline=2)


@pytest.mark.parametrize(
    "text",
    [
        "printf('%.*c', 100000000, 'x')",
        "printf('%100000000s', 'x')",
        "format('%0*d', 100000000, 1)",
        "replace(printf('%.*c', 10000, 'x'), 'x', printf('%.*c', 10000, 'y'))",
        "zeroblob(1000000000)",
        "hex(zeroblob(100000000))",
        "randomblob(1000000000)",
        "concat(" + ", ".join(["printf('%.*c', 10000000, 'x')"] * 10) + ")",
        "(SELECT group_concat(a.ngram || b.ngram || c.ngram || d.ngram || e.ngram)"
        " FROM keyboard a, keyboard b, keyboard c, keyboard d, keyboard e)",
    ],
)
def test_a_text_of_100_megabytes(text: str, victim: Victim) -> None:
    fails(victim, f"SELECT length({text}) AS x", deadline=5)


def test_many_large_texts_at_once(victim: Victim) -> None:
    """Each is allowed; a million of them are not."""
    fails(
        victim,
        "SELECT printf('%.*c', 1000000, ngram) AS x FROM keyboard a, keyboard b, keyboard c",
        deadline=5,
    )


@pytest.mark.parametrize("rows", [1, 700_000])
def test_an_answer_does_not_fill_the_device(rows: int, victim: Victim) -> None:
    """Whatever a query returns, the device's own process holds four bytes of it."""
    texts = ", ".join(f"printf('%.*c', {i}, a.ngram) AS c{i}" for i in range(20))
    tables = "keyboard a, keyboard b, keyboard c, keyboard d, keyboard e"
    query = f"SELECT {texts}, 7 AS x FROM {tables} LIMIT {rows}"
    victim.choose(query, deadline=120)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        assert victim.choose(query, deadline=120) == 7
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000  # kilobytes


@pytest.mark.parametrize("operator", ["LIKE '%" + "a" * 190 + "b'", "GLOB '*" + "a" * 190 + "b'"])
def test_a_pathological_pattern(operator: str, victim: Victim) -> None:
    """One call of one C function, which only a signal ends."""
    fails(
        victim,
        f"SELECT printf('%.*c', 15000000, 'a') {operator} AS x",
        deadline=SOON,
    )


def test_an_expression_that_is_too_deep(victim: Victim) -> None:
    fails(victim, "SELECT " + "NOT " * 2000 + "1 AS x")


def test_a_query_that_is_hard_to_plan(victim: Victim) -> None:
    tables = ", ".join(f"keyboard AS t{i}" for i in range(64))
    where = " AND ".join(f"t{i}.ngram = t{i + 1}.ngram" for i in range(63))
    start = time.monotonic()
    victim.attack(f"SELECT t0.ngram AS x FROM {tables} WHERE {where}", deadline=5)
    assert time.monotonic() - start < PATIENCE + 10  # compiling has ten seconds


def test_too_many_compound_selects(victim: Victim) -> None:
    fails(victim, " UNION ALL ".join(["SELECT 1 AS x"] * 200))


def test_nothing_leaves_a_temporary_file(victim: Victim) -> None:
    """Sorting, grouping and materialising more than any cache holds, in memory or not at all."""
    folders = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/"), Path.cwd()]  # noqa: S108
    before = {path for folder in folders for path in folder.glob("*") if "etilqs" in path.name}
    four = "keyboard a, keyboard b, keyboard c, keyboard d"
    joined = "a.ngram || b.ngram || c.ngram || d.ngram"
    for query in (
        f"SELECT DISTINCT {joined} AS x FROM {four} ORDER BY 1 DESC",
        f"SELECT count(*) AS x FROM {four} GROUP BY {joined}",
        f"WITH m AS MATERIALIZED (SELECT a.ngram || d.ngram AS y FROM {four})"
        " SELECT count(*) AS x FROM m AS p, m AS q WHERE p.y = q.y LIMIT 1",
    ):
        victim.attack(query, deadline=2)
    after = {path for folder in folders for path in folder.glob("*") if "etilqs" in path.name}
    assert after == before


# --- failure, duration, memory or crash that depends on the data ----------------------------------


def outcomes(victim: Victim, condition: str, *, deadline: float = 20) -> set[str]:
    """What the outside sees where the condition holds of the data and where it does not."""
    seen = set()
    # What answers has time to, though the machine is busy.
    for guess, seconds in ((NGRAMS[3], deadline), ("never typed", 20)):
        try:
            victim.choose(condition.replace("GUESS", guess), deadline=seconds)
            seen.add("answer")
        except SandboxFailed as error:
            assert error.__cause__ is error.__context__ is None
            seen.add(repr(error))
    return seen


@pytest.mark.parametrize(
    ("expression", "deadline"),
    [
        pytest.param("abs(-9223372036854775807 - 1)", 20, id="failure"),
        pytest.param("length(printf('%.*c', 900000000, 'x'))", 20, id="memory"),
        pytest.param("(SELECT count(*) FROM ngrams('a', 0))", 20, id="failure of our own function"),
        pytest.param(
            "(SELECT count(*) FROM keyboard a, keyboard b, keyboard c, keyboard d, keyboard e,"
            " keyboard f, keyboard g)",
            1.5,
            id="duration",
        ),
        pytest.param(
            "(printf('%.*c', 15000000, 'a') LIKE '%" + "a" * 190 + "b')", 1, id="one long call"
        ),
    ],
)
def test_a_failure_that_depends_on_the_data_is_the_one_failure(
    expression: str, deadline: float, victim: Victim
) -> None:
    query = f"SELECT iif(ngram = 'GUESS', {expression}, 0) AS x FROM keyboard"
    assert outcomes(victim, query, deadline=deadline) == {"answer", repr(SandboxFailed())}
