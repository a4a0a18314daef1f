"""The event store: what is kept, for how long, with whose consent, and what a query gets of it."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import apsw
import pytest

from chorister.clock import SettableClock
from chorister.device.database import transaction
from chorister.device.keys import SecretKey
from chorister.device.schema import FieldType
from chorister.device.store import EventStore, Snapshot
from chorister.errors import EventRefused, InvalidInput, StoreError
from tests.device.conftest import KEY, NOW
from tests.keyboard import POLICY, policy_at

TYPED = "zebra crossing ahead"
DAY = 86_400


def event(ngram: str = TYPED, perplexity: float = 1.5) -> dict[str, object]:
    return {"ngram": ngram, "perplexity": perplexity}


def rows(snapshot: Snapshot, table: str) -> list[tuple[Any, ...]]:
    connection = apsw.Connection(":memory:")
    connection.deserialize("main", snapshot.image)
    return connection.execute(f'SELECT * FROM "{table}"').fetchall()  # noqa: S608


def kept(store: EventStore) -> list[Any]:
    return [row[0] for row in rows(store.snapshot({"keyboard": ["ngram"]}), "keyboard")]


def folder(store_path: Path) -> bytes:
    return b"".join(path.read_bytes() for path in store_path.iterdir())


def test_what_is_donated_comes_back(store: EventStore) -> None:
    assert store.donate("keyboard", event("one", 2))
    assert store.donate_many("keyboard", [event("two"), event("three")])
    assert store.set_profile("user", {"age": 33, "locale": "de_DE"})
    snapshot = store.snapshot({"keyboard": ["ngram", "perplexity"], "user": ["age"]})
    assert sorted(rows(snapshot, "keyboard")) == [("one", 2.0), ("three", 1.5), ("two", 1.5)]
    assert rows(snapshot, "user") == [(33,)]


def test_nothing_that_was_donated_is_on_disk_in_clear(store: EventStore, tmp_path: Path) -> None:
    for _ in range(50):
        store.donate("keyboard", event())
    store.donate_many("keyboard", [event()] * 1000)
    store.set_profile("user", {"age": 33, "locale": TYPED})
    assert (tmp_path / "store" / "events.db-wal").stat().st_size > 0
    store.snapshot({"keyboard": ["ngram"]})
    assert TYPED.encode() not in folder(tmp_path / "store")
    store.close()
    assert TYPED.encode() not in folder(tmp_path / "store")
    assert b"keyboard" not in folder(tmp_path / "store")


def test_another_key_does_not_open_the_store(
    store: EventStore, tmp_path: Path, clock: SettableClock
) -> None:
    store.donate("keyboard", event())
    with pytest.raises(StoreError, match="does not open"):
        EventStore(tmp_path / "store" / "events.db", SecretKey(bytes(32)), POLICY, clock)


def test_a_batch_with_a_wrong_event_is_refused_whole(store: EventStore) -> None:
    with pytest.raises(EventRefused) as caught:
        store.donate_many("keyboard", [event(), event(), {"ngram": 1, "perplexity": 1.0}])
    assert caught.value.field == "keyboard.ngram"
    assert kept(store) == []


@pytest.mark.parametrize("stream", ["user", "nothing", "keyboard; DROP TABLE consent", ""])
def test_only_streams_take_events(stream: str, store: EventStore) -> None:
    with pytest.raises(EventRefused, match="no such stream"):
        store.donate(stream, event())
    with pytest.raises(EventRefused, match="no such stream"):
        store.donate_many(stream, [])


def test_a_profile_is_one_row_that_is_replaced(store: EventStore) -> None:
    assert store.profile("user.locale") is None
    store.set_profile("user", {"age": 33, "locale": "de_DE"})
    store.set_profile("user", {"age": None, "locale": "fr_FR"})
    assert store.profile("user.locale") == "fr_FR"
    assert store.profile("user.age") is None
    assert len(rows(store.snapshot({"user": ["age"]}), "user")) == 1


@pytest.mark.parametrize("ref", ["user.height", "keyboard.ngram", "user", "", "user.age.x"])
def test_only_profile_fields_have_values(ref: str, store: EventStore) -> None:
    with pytest.raises(EventRefused):
        store.profile(ref)


# --- consent --------------------------------------------------------------------------------------


def test_a_new_store_is_opted_out_and_keeps_nothing(tmp_path: Path, clock: SettableClock) -> None:
    with EventStore(tmp_path / "events.db", KEY, POLICY, clock) as store:
        assert not store.consent.opted_in
        assert not store.donate("keyboard", event())
        assert not store.donate_many("keyboard", [event()])
        assert not store.set_profile("user", {"age": 1, "locale": "de_DE"})
        store.opt_in()
        assert (store.consent.opted_in, store.consent.since) == (True, NOW)
        assert kept(store) == []
        assert store.profile("user.age") is None


def test_a_wrong_event_is_refused_with_or_without_consent(store: EventStore) -> None:
    store.opt_out(purge=False)
    with pytest.raises(EventRefused):
        store.donate("keyboard", {})


def test_opting_out_keeps_or_purges(store: EventStore, clock: SettableClock) -> None:
    store.donate("keyboard", event())
    store.set_profile("user", {"age": 1, "locale": "de_DE"})
    clock.advance(5)
    store.opt_out(purge=False)
    assert (store.consent.opted_in, store.consent.since) == (False, NOW + 5)
    assert not store.donate("keyboard", event())
    assert kept(store) == [TYPED]
    store.opt_out(purge=True)
    assert kept(store) == []
    assert store.profile("user.locale") is None


def test_consent_outlives_the_process(
    store: EventStore, tmp_path: Path, clock: SettableClock
) -> None:
    with EventStore(tmp_path / "store" / "events.db", KEY, POLICY, clock) as other:
        assert other.consent.opted_in
        other.opt_out(purge=False)
        # The first handle learns it with its next donation: consent is read in the same statement.
        assert not store.donate("keyboard", event())


# --- deletion -------------------------------------------------------------------------------------


def test_what_is_purged_is_overwritten(store: EventStore) -> None:
    store.donate_many("keyboard", [event()] * 500)
    store.purge()
    assert TYPED.encode() not in store._connection.serialize("main")


def test_retention_is_kept_to_the_second(store: EventStore, clock: SettableClock) -> None:
    store.donate("keyboard", event("old"))
    store.set_profile("user", {"age": 1, "locale": "de_DE"})
    clock.advance(30 * DAY - 1)
    store.donate("keyboard", event("new"))
    assert sorted(kept(store)) == ["new", "old"]
    clock.advance(1)
    assert kept(store) == ["new"]
    assert store.profile("user.age") == 1
    clock.advance(370 * DAY)
    assert store.profile("user.age") is None
    assert kept(store) == []
    assert store.expire(60) == 3
    assert store.expire(60) == 0


def test_much_that_expired_is_deleted_bit_by_bit_and_never_seen(
    store: EventStore, clock: SettableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chorister.device.retention._MAX_ROWS", 10)
    store.donate_many("keyboard", [event("old")] * 25)
    clock.advance(30 * DAY)
    assert store.expire(0) == 0
    assert kept(store) == []
    assert store.expire(60) == 25


def test_a_snapshot_deletes_nothing(store: EventStore, clock: SettableClock) -> None:
    """How long that takes depends on data, and a snapshot follows a charge."""
    store.donate("keyboard", event("old"))
    clock.advance(30 * DAY)
    changes = store._connection.total_changes()
    assert kept(store) == []
    assert store._connection.total_changes() == changes


def test_a_query_does_not_wait_for_a_writer(
    store: EventStore, tmp_path: Path, clock: SettableClock
) -> None:
    store.donate("keyboard", event())
    with (
        EventStore(tmp_path / "store" / "events.db", KEY, POLICY, clock) as other,
        transaction(other._connection),
    ):
        assert kept(store) == [TYPED]


def test_an_event_of_a_wrong_future_is_not_kept_for_longer(
    store: EventStore, clock: SettableClock
) -> None:
    clock.set(NOW + 3000 * DAY)
    store.donate("keyboard", event())
    clock.set(NOW)
    assert store.expire(60) == 0
    assert kept(store) == [TYPED]
    clock.advance(30 * DAY)
    assert kept(store) == []


# --- snapshots ------------------------------------------------------------------------------------


def test_a_snapshot_holds_the_named_fields_and_no_trace_of_others(store: EventStore) -> None:
    store.donate_many("keyboard", [event(f"secret {i}", 0.25 * i) for i in range(2000)])
    store.set_profile("user", {"age": 33, "locale": "secret"})
    snapshot = store.snapshot({"keyboard": ["perplexity"]})
    assert snapshot.tables == {"keyboard": {"perplexity": "real"}}
    assert b"secret" not in snapshot.image
    for hidden in (b"ngram", b"user", b"locale", b"donated", b"consent"):
        assert hidden not in snapshot.image
    assert len(rows(snapshot, "keyboard")) == 2000
    assert "secret" not in repr(store.snapshot({"keyboard": ["ngram"]}))


@pytest.mark.parametrize(
    "fields",
    [
        {"nothing": ["a"]},
        {"keyboard": ["age"]},
        {"keyboard": []},
        {"keyboard": ["ngram", "ngram"]},
        {"keyboard": ["field_ngram"]},
        {"keyboard": ["id"]},
        {"keyboard": ["donated"]},
        {"consent": ["opted_in"]},
        {"stream_keyboard": ["ngram"]},
        {'keyboard" AS x; --': ["ngram"]},
    ],
)
def test_a_snapshot_of_anything_else_is_refused(
    fields: dict[str, list[str]], store: EventStore
) -> None:
    with pytest.raises(InvalidInput, match="name the fields"):
        store.snapshot(fields)


@pytest.mark.parametrize(
    ("limit", "value", "why"),
    [
        ("MAX_SNAPSHOT_ROWS", 99, "at most 99 events"),
        ("MAX_SNAPSHOT_BYTES", 100_000, "at most 100000 bytes"),
        ("SNAPSHOT_SECONDS", -1.0, "interrupted"),
    ],
)
def test_a_snapshot_has_a_most_beyond_which_none_is_made(
    limit: str, value: float, why: str, store: EventStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.donate_many("keyboard", [event("x" * 1000)] * 100)
    wanted = len(rows(store.snapshot({"keyboard": ["ngram"]}), "keyboard"))
    with monkeypatch.context() as patch:
        patch.setattr("chorister.device.store._STEPS_PER_CHECK", 1)
        patch.setattr(f"chorister.device.store.{limit}", value)
        tracemalloc.start()
        try:
            with pytest.raises(StoreError, match=why):
                store.snapshot({"keyboard": ["ngram"]})
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()
    # The store is as it was: no handler, no attached database.
    assert len(rows(store.snapshot({"keyboard": ["ngram"]}), "keyboard")) == wanted == 100
    assert store.donate("keyboard", event())


def test_a_snapshot_is_not_larger_than_its_most(
    store: EventStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.donate_many("keyboard", [event("ä" * 50)] * 2000)
    image = store.snapshot({"keyboard": ["ngram", "perplexity"]}).image
    monkeypatch.setattr("chorister.device.store.MAX_SNAPSHOT_BYTES", int(len(image) * 0.9))
    with pytest.raises(StoreError, match="bytes"):
        store.snapshot({"keyboard": ["ngram", "perplexity"]})


def test_a_snapshot_creates_nothing(store: EventStore) -> None:
    store.donate("keyboard", event())
    before = store._connection.total_changes()
    store.snapshot({"user": ["age"]})
    assert store.profile("user.locale") is None
    assert store._connection.total_changes() == before
    assert [name for name in store._connection.db_names() if name not in ("main", "temp")] == []


def test_rows_come_in_an_order_drawn_anew_each_time(store: EventStore) -> None:
    """Where the first and last event land: uniform, by a chi-square of 7 degrees of freedom.

    P(chi2_7 > 43.8) < 2.4e-7 for each of the two: false alarms below 1e-6.
    """
    store.donate_many("keyboard", [event(str(i)) for i in range(8)])
    orders = [kept(store) for _ in range(800)]
    assert len({tuple(order) for order in orders}) > 700
    for who in ("0", "7"):
        places = Counter(order.index(who) for order in orders)
        assert sum((places[place] - 100) ** 2 / 100 for place in range(8)) < 43.8


def test_order_is_random_with_gaps_between_rows(store: EventStore, clock: SettableClock) -> None:
    store.donate_many("keyboard", [event("old")] * 100)
    clock.advance(15 * DAY)
    store.donate_many("keyboard", [event(str(i)) for i in range(50)])
    clock.advance(15 * DAY)
    order = kept(store)
    assert sorted(order) == sorted(str(i) for i in range(50))
    assert order != [str(i) for i in range(50)]


# --- policies change ------------------------------------------------------------------------------


def reopened(store: EventStore, tmp_path: Path, clock: SettableClock, **changes: Any) -> EventStore:
    store.close()
    policy = policy_at({path.replace("__", "/"): value for path, value in changes.items()})
    return EventStore(tmp_path / "store" / "events.db", KEY, policy, clock)


def test_a_policy_may_add_streams_and_fields(
    store: EventStore, tmp_path: Path, clock: SettableClock
) -> None:
    store.donate("keyboard", event())
    with reopened(
        store,
        tmp_path,
        clock,
        streams__keyboard__fields__app={"type": "text"},
        streams__search={"retention": "1d", "fields": {"words": {"type": "text"}}},
    ) as other:
        assert other.consent.opted_in
        assert other.donate("search", {"words": "x"})
        assert other.donate("keyboard", event() | {"app": "mail"})
        apps = rows(other.snapshot({"keyboard": ["app"]}), "keyboard")
        assert Counter(apps) == Counter([(None,), ("mail",)])


def test_what_a_policy_no_longer_knows_is_deleted(
    store: EventStore, tmp_path: Path, clock: SettableClock
) -> None:
    store.donate("keyboard", event())
    store.set_profile("user", {"age": 33, "locale": "de_DE"})
    old = reopened(store, tmp_path, clock, profiles__user__fields__age={"type": "text"})
    assert old.profile("user.age") is None
    assert old.profile("user.locale") == "de_DE"
    old.close()
    with EventStore(tmp_path / "store" / "events.db", KEY, POLICY, clock) as other:
        assert kept(other) == [TYPED]
        assert other.profile("user.locale") == "de_DE"


def test_a_removed_field_is_overwritten(
    store: EventStore, tmp_path: Path, clock: SettableClock
) -> None:
    wide = reopened(store, tmp_path, clock, streams__keyboard__fields__app={"type": "text"})
    wide.donate_many("keyboard", [event() | {"app": "unmistakable"}] * 200)
    wide.close()
    with EventStore(tmp_path / "store" / "events.db", KEY, POLICY, clock) as narrow:
        assert b"unmistakable" not in narrow._connection.serialize("main")
        assert len(kept(narrow)) == 200


# --- many at once ---------------------------------------------------------------------------------


def test_threads_share_a_store(store: EventStore) -> None:
    def work(number: int) -> None:
        for i in range(20):
            store.donate("keyboard", event(f"{number} {i}"))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(kept(store))) == 80


def test_a_snapshot_while_another_handle_writes_sees_whole_batches(
    store: EventStore, tmp_path: Path, clock: SettableClock
) -> None:
    with EventStore(tmp_path / "store" / "events.db", KEY, POLICY, clock) as other:
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                other.donate_many("keyboard", [event()] * 10)
                time.sleep(0.001)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            counts = [len(kept(store)) for _ in range(20)]
        finally:
            stop.set()
            thread.join()
    assert all(count % 10 == 0 for count in counts)
    assert counts == sorted(counts)


def test_empty_tables_are_as_the_last_caller_asked_for_them() -> None:
    wanted: list[dict[str, dict[str, FieldType]]] = [
        {"t": {"a": "text"}},
        {"t": {"a": "real"}},
        {"t": {"a": "text", "b": "integer"}},
        {"t": {"b": "integer", "a": "text"}},
        {"u": {"a": "text"}},
    ]
    for _ in range(2):
        for tables in wanted:
            connection = apsw.Connection(":memory:")
            connection.deserialize("main", Snapshot.empty(tables).image)
            ((name, *_),) = connection.execute("SELECT name FROM sqlite_schema").fetchall()
            columns = connection.execute("SELECT name, type FROM pragma_table_info(?)", (name,))
            assert {name: {column: kind.lower() for column, kind in columns}} == tables
            connection.close()
