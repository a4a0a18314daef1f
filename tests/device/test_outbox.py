"""The outbox and the decisions: states move forward, bytes never change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import apsw
import pytest

from chorister.clock import SECOND
from chorister.device.audit import RecipeSummary
from chorister.device.database import open_database, transaction
from chorister.device.keys import SecretKey
from chorister.device.outbox import Outbox, QueuedReport
from chorister.device.records import Attempt, Attempts, AttemptState, PolledFiles, Refusals
from chorister.errors import InternalError, StoreError
from chorister.recipe import SignedRecipe
from tests.device.world import NOW, a_policy, a_recipe, an_entry
from tests.logworld import body_of

SIGNED = SignedRecipe.parse(body_of(an_entry(a_recipe("one", {"arms": []}))).jws)
QUESTION = RecipeSummary.of(SIGNED, a_policy())
ATTEMPT = Attempt(
    recipe=SIGNED.digest,
    question=QUESTION,
    jws=SIGNED.jws,
    upload_at=(NOW + 60) * SECOND,
    arm=None,
    groups={"user.locale": "de_DE"},
    report_id=bytes(16),
    configuration=b"task",
    leader_config=b"leader",
    helper_config=b"helper",
    signers=bytes(64),
)
QUEUED = QueuedReport(
    recipe=SIGNED.digest,
    report_id=bytes(16),
    configuration=b"task",
    report=b"sealed",
    closes=NOW + 1000,
    next_try=(NOW + 60) * SECOND,
)


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[apsw.Connection]:
    opened = open_database(tmp_path / "ledger.db", SecretKey(bytes(32)))
    yield opened
    opened.close()


def test_reports_that_wait_are_not_read(connection: apsw.Connection) -> None:
    outbox = Outbox(connection)
    with transaction(connection):
        for number in range(50):
            each = replace(QUEUED, recipe=number.to_bytes(32), report=bytes(100_000))
            outbox.put(each)

    def pages() -> int:
        kinds = (apsw.SQLITE_DBSTATUS_CACHE_HIT, apsw.SQLITE_DBSTATUS_CACHE_MISS)
        return sum(connection.status(kind)[0] for kind in kinds)

    before = pages()
    assert outbox.due(NOW * SECOND) == outbox.expired(NOW * SECOND) == []
    assert pages() - before < 50


def test_a_report_waits_for_its_time_and_for_no_longer_than_its_window(
    connection: apsw.Connection,
) -> None:
    outbox = Outbox(connection)
    assert outbox.next_time() is None
    outbox.put(QUEUED)
    assert outbox.next_time() == (NOW + 60) * SECOND
    assert outbox.due((NOW + 59) * SECOND) == []
    assert outbox.due((NOW + 60) * SECOND) == outbox.all() == [QUEUED]
    assert outbox.expired((NOW + 999) * SECOND) == []
    assert outbox.expired((NOW + 1000) * SECOND) == [QUEUED]
    assert outbox.due((NOW + 1000) * SECOND) == []
    outbox.postpone(QUEUED, until=(NOW + 500) * SECOND)
    (later,) = outbox.due((NOW + 500) * SECOND)
    assert (later.tries, later.report) == (1, QUEUED.report)
    outbox.remove(QUEUED.recipe)
    assert outbox.all() == []


def test_there_is_one_report_a_recipe(connection: apsw.Connection) -> None:
    outbox = Outbox(connection)
    outbox.put(QUEUED)
    with pytest.raises(StoreError), transaction(connection):
        outbox.put(QUEUED)
    assert outbox.all() == [QUEUED]


def test_there_is_one_attempt_a_recipe_and_it_moves_forward(connection: apsw.Connection) -> None:
    attempts = Attempts(connection)
    attempts.begin(SIGNED.recipe, ATTEMPT, now=NOW)
    assert attempts.unfinished() == [ATTEMPT]
    with pytest.raises(StoreError), transaction(connection):
        attempts.begin(SIGNED.recipe, ATTEMPT, now=NOW)
    with pytest.raises(InternalError, match="no longer queued"):
        attempts.move(SIGNED.digest, AttemptState.QUEUED, AttemptState.SENT)
    attempts.move(SIGNED.digest, AttemptState.CHARGED, AttemptState.QUEUED)
    assert attempts.unfinished() == []
    with pytest.raises(InternalError, match="no longer charged"):
        attempts.move(SIGNED.digest, AttemptState.CHARGED, AttemptState.QUEUED)
    attempts.move(SIGNED.digest, AttemptState.QUEUED, AttemptState.SENT)
    assert attempts.state(SIGNED.digest) is AttemptState.SENT
    assert attempts.question(SIGNED.digest) == QUESTION
    # What the report was made from is gone, keys and group included.
    row = connection.execute(
        "SELECT jws, leader_config, helper_config, groups, configuration FROM attempts"
    ).fetchone()
    assert row == (None,) * 5


def test_coins_are_forgotten_with_their_windows_and_charges_never(
    connection: apsw.Connection,
) -> None:
    attempts = Attempts(connection)
    attempts.begin(SIGNED.recipe, ATTEMPT, now=NOW)
    other = a_recipe("two")
    attempts.decline(other, QUESTION, now=NOW)
    attempts.forget(before=other.window.closes)
    assert attempts.state(other.digest) is AttemptState.DECLINED
    attempts.forget(before=other.window.closes + 1)
    assert attempts.state(other.digest) is None
    assert attempts.counts() == {AttemptState.CHARGED: 1}


def test_nobody_asks_about_what_was_never_decided(connection: apsw.Connection) -> None:
    with pytest.raises(InternalError, match="nothing was decided"):
        Attempts(connection).question(bytes(32))


def test_files_of_the_log_are_kept_while_they_are_listed(connection: apsw.Connection) -> None:
    Attempts(connection)  # makes the tables
    files = PolledFiles(connection)
    files.replace({"entry/1": b"one", "entry/2": b"two"})
    files.replace({"entry/2": b"two", "entry/3": b"three"})
    assert sorted(files.all()) == [b"three", b"two"]
    files.delete()
    assert files.all() == []


def test_refusals_are_news_once(connection: apsw.Connection) -> None:
    Attempts(connection)  # makes the tables
    refusals = Refusals(connection)
    assert refusals.record(b"r", "cohort", "too small")
    assert not refusals.record(b"r", "cohort", "too small")
    assert refusals.record(b"r", "budget", "spent")
    refusals.keep_only([b"other"])
    assert refusals.record(b"r", "budget", "spent")
