"""The ledger and its head: every way in which they can differ, and what is then done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister.canonical import dumps, loads
from chorister.device.database import transaction
from chorister.device.ledger import Ledger
from chorister.device.ledger.budget import Charge
from chorister.device.ledger.head_store import FileHeadStore
from chorister.device.ledger.ledger_entries import (
    Charged,
    Created,
    PolicyTaken,
    Restarted,
    Resumed,
    decode,
)
from chorister.errors import (
    DecodeError,
    HeadUnavailable,
    InvalidInput,
    LedgerBehind,
    LedgerError,
    LedgerTampered,
    LedgerYoung,
    QueryRefused,
)
from tests.device.ledgers import (
    AGE,
    DAY,
    KEY,
    SLOW,
    START,
    Place,
    analysis,
    charge,
    grown,
    policy,
    spend,
    spent,
)

MONTHLY: dict[str, Any] = {"period": "30d"}


def monthly(**device: Any) -> Any:
    return policy({"a": analysis(**MONTHLY)}, **MONTHLY, **device)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.make(tmp_path)


def kinds(ledger: Ledger) -> list[type]:
    return [type(entry) for entry in ledger.entries()]


def test_a_new_ledger(place: Place) -> None:
    ledger = place.ledger(policy(), offset=12345)
    with pytest.raises(LedgerError, match=r"settle\(\) first"):
        ledger.check(charge(1), START)
    created, taken = ledger.settle(START)
    assert isinstance(created, Created)
    assert created.offset == 12345
    assert isinstance(taken, PolicyTaken)
    assert taken.terms.digest == policy().digest.hex()
    assert ledger.settle(START) == ()
    assert place.head().load() == taken.canonical()


def test_a_new_ledger_is_silent(place: Place) -> None:
    ledger = place.ledger(policy(age="7d"))
    ledger.settle(START)
    with pytest.raises(LedgerYoung) as caught:
        spend(ledger, charge(1), START + AGE - 1)
    assert caught.value.until == ledger.silent_until() == START + AGE
    spend(ledger, charge(1), START + AGE)


def test_the_whole_next_entry_is_in_the_head_before_the_commit(place: Place) -> None:
    ledger = grown(place, policy())
    with transaction(ledger._connection):
        entry = ledger.append(charge(1), START)
        assert place.head().load() == entry.canonical()


def test_a_recipe_is_charged_once(place: Place) -> None:
    ledger = grown(place, policy())
    spend(ledger, charge(1))
    digest = bytes.fromhex(charge(1).recipe)
    assert ledger.charged(digest)
    assert ledger.charged_study("a", "study")
    assert not ledger.charged(bytes(32))
    assert not ledger.charged_study("a", "another")
    assert not ledger.charged_study("b", "study")
    with pytest.raises(QueryRefused) as caught:
        spend(ledger, charge(1))
    assert caught.value.check == "once"


def test_a_charged_study_is_what_a_scan_of_all_entries_finds(place: Place) -> None:
    """Whoever charged it, in whichever process, and through a crash; never what was rolled back."""

    def agree(ledger: Ledger, expected: set[tuple[str, str]]) -> None:
        scanned = {
            (entry.charge.analysis, entry.charge.study)
            for entry in ledger.entries()
            if isinstance(entry, Charged)
        }
        asked = {(to, f"study-{i}") for to in ("a", "b") for i in range(5)}
        assert {each for each in asked if ledger.charged_study(*each)} == scanned == expected

    def of(study: int, to: str = "a") -> Charge:
        return charge((study, to), to=to).model_copy(update={"study": f"study-{study}"})

    both = policy({"a": analysis(), "b": analysis()})
    ledger, other = grown(place, both), place.ledger(both)
    agree(ledger, set())
    spend(ledger, of(1))
    agree(ledger, {("a", "study-1")})
    agree(other, {("a", "study-1")})
    spend(other, of(1, "b"))
    agree(ledger, {("a", "study-1"), ("b", "study-1")})
    connection = ledger._connection
    connection.execute("BEGIN IMMEDIATE")
    ledger.append(of(2), START)
    assert ledger.charged_study("a", "study-2")
    connection.execute("ROLLBACK")
    assert not ledger.charged_study("a", "study-2")
    # What was rolled back is still the head: it counts as a crash's, and is charged.
    ledger.settle(START)
    agree(ledger, {("a", "study-1"), ("b", "study-1"), ("a", "study-2")})
    # Nor does a policy without the analysis forget.
    without = place.ledger(policy({"b": analysis()}))
    without.settle(START)
    agree(without, {("a", "study-1"), ("b", "study-1"), ("a", "study-2")})


def test_one_entry_a_transaction(place: Place) -> None:
    """With two, a crash before the commit would look like a restored backup."""
    ledger = grown(place, policy())
    ledger._connection.execute("BEGIN IMMEDIATE")
    ledger.append(charge(1), START)
    with pytest.raises(InvalidInput, match="one transaction appends one charge"):
        ledger.append(charge(2), START)
    ledger._connection.execute("ROLLBACK")
    # Rolled back, but the head has it: it counts.
    with pytest.raises(LedgerError, match=r"settle\(\) first"):
        spend(ledger, charge(3))
    (recovered,) = ledger.settle(START)
    assert isinstance(recovered, Charged)
    assert recovered.charge == charge(1)
    spend(ledger, charge(3))


def test_entries_are_never_dated_back(place: Place) -> None:
    ledger = grown(place, policy())
    spend(ledger, charge(1), START + 100)
    assert spend(ledger, charge(2), START).time == START + 100


def test_two_ledgers_on_one_file_see_each_other(place: Place) -> None:
    one, two = grown(place, policy(reports=2)), place.ledger(policy(reports=2))
    spend(one, charge(1))
    spend(two, charge(2))
    assert spent(one) == spent(two)
    assert [entry.sequence for entry in one.entries()] == [0, 1, 2, 3]


def test_another_policy_must_be_settled(place: Place) -> None:
    grown(place, policy())
    ledger = place.ledger(policy(epsilon=3))
    with pytest.raises(LedgerError, match=r"settle\(\) first"):
        spend(ledger, charge(1))
    (taken,) = ledger.settle(START)
    assert isinstance(taken, PolicyTaken)
    spend(ledger, charge(1))


# --- ledger and head differ ----------------------------------------------------------------------


def behind(place: Place, its: Any, entries: int, now: int = START) -> Ledger:
    """A ledger that lost its last so many charges, and a head that did not."""
    ledger = grown(place, its)
    spend(ledger, charge("kept"))
    ledger._connection.close()
    backup = place.copy_database()
    ledger = place.ledger(its)
    for i in range(entries):
        spend(ledger, charge(f"lost {i}"), now)
    ledger._connection.close()
    place.restore_database(backup)
    return place.ledger(its)


def test_one_behind_is_appended(place: Place) -> None:
    ledger = behind(place, policy(), 1)
    (recovered,) = ledger.settle(START)
    assert isinstance(recovered, Charged)
    assert recovered.charge == charge("lost 0")
    assert ledger.charged(bytes.fromhex(charge("lost 0").recipe))
    assert ledger.settle(START) == ()


def test_further_behind_is_refused_for_ever_if_budgets_do_not_renew(place: Place) -> None:
    ledger = behind(place, policy(), 2)
    for now in (START, START + 3650 * DAY):
        with pytest.raises(LedgerBehind) as caught:
            ledger.settle(now)
        assert caught.value.until is None
    with pytest.raises(LedgerError):
        spend(ledger, charge("more"))


def test_further_behind_is_refused_until_the_longest_period_has_passed(place: Place) -> None:
    ledger = behind(place, monthly(), 2)
    until = START + 30 * DAY
    with pytest.raises(LedgerBehind) as caught:
        ledger.settle(until - 1)
    assert caught.value.until == until
    (resumed,) = ledger.settle(until)
    assert isinstance(resumed, Resumed)
    assert resumed.lost == 4
    spend(ledger, charge("at last"), until)


def test_a_deleted_ledger_waits_as_long(place: Place) -> None:
    spend(grown(place, monthly()), charge(1))
    place.restore_database({})
    ledger = place.ledger(monthly())
    with pytest.raises(LedgerBehind):
        ledger.settle(START + 30 * DAY - 1)
    ledger.settle(START + 30 * DAY)
    assert kinds(ledger) == [Created, PolicyTaken]
    with pytest.raises(LedgerYoung):
        spend(ledger, charge(2), START + 30 * DAY)


def test_a_shorter_period_does_not_shorten_the_wait(place: Place) -> None:
    """What was lost counts as long as the policy said under which it was charged."""
    ledger = behind(place, monthly(), 2)
    (until,) = {entry.clear for entry in [decode(place.head().load() or b"")]}
    assert isinstance(until, int)
    daily = place.ledger(policy({"a": analysis(period="1d")}, period="1d"))
    with pytest.raises(LedgerBehind) as caught:
        daily.settle(until - 1)
    assert caught.value.until == until > START + DAY
    ledger._connection.close()


def test_another_devices_ledger(place: Place, tmp_path: Path) -> None:
    spend(grown(place, policy()), charge(1))
    (tmp_path / "other").mkdir()
    other = Place.make(tmp_path / "other")
    foreign = grown(other, policy(), offset=77)
    for i in range(3):
        spend(foreign, charge(i))
    foreign._connection.close()
    place.restore_database(other.copy_database())
    with pytest.raises(LedgerBehind):
        place.ledger(policy()).settle(START)


@pytest.mark.parametrize("how", ["missing", "old"])
def test_a_head_that_was_lost_makes_the_ledger_new(place: Place, how: str) -> None:
    ledger = grown(place, policy())
    old = place.head_file.read_bytes()
    spend(ledger, charge(1))
    spend(ledger, charge(2))
    if how == "missing":
        place.head_file.unlink()
    else:
        place.head_file.write_bytes(old)
    with pytest.raises(LedgerError):
        spend(ledger, charge(3))
    (restarted,) = ledger.settle(START)
    assert isinstance(restarted, Restarted)
    with pytest.raises(LedgerYoung):
        spend(ledger, charge(3), START + AGE - 1)
    assert spent(ledger) == 2 * charge(1).privacy.epsilon
    spend(ledger, charge(3), START + AGE)


def test_an_unreadable_head_is_silence(place: Place) -> None:
    ledger = grown(place, policy())
    place.head_file.write_bytes(b"junk")
    with pytest.raises(HeadUnavailable):
        spend(ledger, charge(1))
    with pytest.raises(HeadUnavailable):
        ledger.settle(START)


def test_a_head_that_is_no_entry_is_silence(place: Place) -> None:
    ledger = grown(place, policy())
    for junk in (b"", b"{}", b'{"kind":"charge"}', b"\xff"):
        place.head().save(junk)
        with pytest.raises(HeadUnavailable, match="not an entry"):
            ledger.settle(START)


def test_without_a_head_store(place: Place) -> None:
    ledger = Ledger(place.connect(), policy(), None, clock=SLOW)
    ledger.settle(START - AGE)
    spend(ledger, charge(1))
    # One that is added later knows nothing of before.
    later = place.ledger(policy())
    with pytest.raises(LedgerError):
        spend(later, charge(2))
    (restarted,) = later.settle(START)
    assert isinstance(restarted, Restarted)


# --- what is stored ------------------------------------------------------------------------------


def test_rows_are_neither_changed_nor_removed(place: Place) -> None:
    ledger = grown(place, policy())
    for statement in ("UPDATE ledger SET entry = x'00'", "DELETE FROM ledger"):
        with pytest.raises(apsw.ConstraintError, match="append-only"):
            ledger._connection.execute(statement)
    ledger.verify()


def rewrite(connection: apsw.Connection, statement: str, values: tuple[Any, ...] = ()) -> None:
    """What somebody with the key can do to the rows."""
    connection.execute("DROP TRIGGER IF EXISTS ledger_is_never_changed")
    connection.execute("DROP TRIGGER IF EXISTS ledger_is_never_shortened")
    connection.execute(statement, values)


@pytest.mark.parametrize("sequence", range(5))
def test_any_changed_or_missing_row_is_noticed(place: Place, sequence: int) -> None:
    ledger = grown(place, policy())
    for i in range(3):
        spend(ledger, charge(i))
    row = ledger._row(sequence)
    assert isinstance(row, bytes)
    value = loads(row, max_bytes=10_000)
    value["time"] += 1
    change = "UPDATE ledger SET entry = ? WHERE sequence = ?"
    rewrite(ledger._connection, change, (dumps(value), sequence))
    if sequence < 4:
        with pytest.raises(LedgerTampered):
            ledger.verify()
    else:  # a chain has no last link: the head has
        ledger.verify()
        with pytest.raises(LedgerBehind):
            ledger.settle(START)
    rewrite(ledger._connection, "DELETE FROM ledger WHERE sequence = ?", (sequence,))
    if sequence < 4:
        with pytest.raises(LedgerTampered) as caught:
            ledger.verify()
        assert caught.value.sequence == sequence


@settings(max_examples=60)
@given(data=st.data())
def test_no_mutation_of_an_entry_decodes_to_another_spelling(
    data: st.DataObject,
) -> None:
    connection = apsw.Connection(":memory:")
    ledger = Ledger(connection, policy(), None, clock=SLOW, randbelow=lambda _: 7)
    ledger.settle(START - AGE)
    spend(ledger, charge(1))
    original = data.draw(st.sampled_from([e.canonical() for e in ledger.entries()]))
    changed = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        entry = decode(bytes(changed))
    except DecodeError:
        return
    assert entry.canonical() == bytes(changed)


@given(st.binary(max_size=200))
def test_junk_is_no_entry(junk: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(junk)


def test_a_charge_to_nothing_is_no_chain(place: Place) -> None:
    """Rows that decode, but that no ledger would have written."""
    ledger = Ledger(place.connect(), policy(), None, clock=SLOW)
    ledger.settle(START)
    chain = ledger._chain
    strange = Charged(**chain.place(START), charge=charge(1, to="nobody"))
    rewrite(ledger._connection, "INSERT INTO ledger VALUES (?, ?)", (2, strange.canonical()))
    with pytest.raises(LedgerTampered, match="nobody"):
        ledger.entries()


def test_a_full_disk_for_the_head_charges_nothing(place: Place) -> None:
    class Full(FileHeadStore):
        def save(self, entry: bytes) -> None:
            raise HeadUnavailable(f"no space for {len(entry)} bytes")

    grown(place, policy())
    ledger = place.ledger(policy(), Full(place.head_file, key=KEY, store=place.store))
    with pytest.raises(HeadUnavailable):
        spend(ledger, charge(1))
    assert kinds(ledger) == [Created, PolicyTaken]
    assert ledger.settle(START) == ()
