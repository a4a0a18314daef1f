"""A hostile analyst, a wrong clock, a restored backup: never more than the policy allows.

Each test is one attempt at more than the budget. Real processes and real encrypted files.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import apsw
import pytest

from chorister.clock import SettableClock
from chorister.device.database import transaction
from chorister.device.device_clock import DeviceClock
from chorister.device.ledger import Ledger
from chorister.errors import (
    BudgetExceeded,
    InvalidInput,
    LedgerBehind,
    LedgerError,
    LedgerStale,
    LedgerYoung,
    QueryRefused,
)
from tests.device.ledgers import (
    AGE,
    AGE_FIELD,
    DAY,
    NGRAM,
    START,
    Place,
    analysis,
    charge,
    grown,
    policy,
    spend,
    spent,
)
from tests.forked_processes import FORKS, ended, started


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.make(tmp_path)


def monthly(**device: Any) -> Any:
    return policy({"a": analysis(period="30d")}, **{"period": "30d", "epsilon": 1, **device})


# --- budgets -------------------------------------------------------------------------------------


def test_many_analyses_that_together_exceed_the_device_wide_budget(place: Place) -> None:
    """Ten purposes, each well within its own budget, and all about one person."""
    names = [f"purpose{i}" for i in range(10)]
    its = policy({name: analysis(epsilon=1) for name in names}, epsilon=Decimal("0.5"))
    ledger = grown(place, its)
    allowed = 0
    for name in names:
        try:
            spend(ledger, charge(name, to=name, epsilon="0.2"))
            allowed += 1
        except BudgetExceeded as error:
            assert error.field == "device.epsilon"
    assert allowed == 2
    assert spent(ledger) == Decimal("0.4")


def test_the_same_recipe_twice(place: Place) -> None:
    ledger = grown(place, policy())
    spend(ledger, charge("question"))
    for now in (START, START + 3650 * DAY):
        with pytest.raises(QueryRefused, match="charged before"):
            spend(ledger, charge("question"), now)


def test_the_same_recipe_again_in_the_next_period(place: Place) -> None:
    """The budget renews; the memory of what was answered does not."""
    ledger = grown(place, monthly())
    spend(ledger, charge("question"))
    later = START + 40 * DAY
    assert spent(ledger, "device", later) == 0
    with pytest.raises(QueryRefused, match="charged before"):
        spend(ledger, charge("question"), later)


def test_symmetric_where_only_the_asymmetrics_local_budget_suffices(place: Place) -> None:
    """eps0 = 2 protects a replaced value to 2 if asymmetric, but only to 4 if symmetric."""
    fields = {NGRAM: {}, AGE_FIELD: {"local_epsilon": 2}}
    ledger = grown(place, policy({"a": analysis(fields=fields, local_epsilon=3)}))
    both: dict[str, Any] = {"local_epsilon": "2", "fields": (AGE_FIELD,)}
    spend(ledger, charge(1, mechanism="asymmetric", **both))
    with pytest.raises(BudgetExceeded) as caught:
        spend(ledger, charge(2, mechanism="symmetric", **both))
    assert caught.value.field == "analyses.a.budget.local_epsilon"
    assert (caught.value.asked, caught.value.allowed) == (Decimal(4), Decimal(3))
    with pytest.raises(BudgetExceeded) as caught:
        spend(ledger, charge(3, mechanism="symmetric", local_epsilon="1.5", fields=(AGE_FIELD,)))
    assert caught.value.field == f"analyses.a.fields.{AGE_FIELD}.local_epsilon"
    assert (caught.value.asked, caught.value.allowed) == (Decimal(3), Decimal(2))
    spend(ledger, charge(4, mechanism="symmetric", local_epsilon="1", fields=(AGE_FIELD,)))


def test_many_tiny_questions(place: Place) -> None:
    """Neither rounding nor the number of questions makes a sum smaller."""
    ledger = grown(place, policy(epsilon=Decimal("0.01")))
    for i in range(30):
        spend(ledger, charge(i, epsilon="0.0003333333333333333333333333"))
    with pytest.raises(BudgetExceeded):
        spend(ledger, charge("one more", epsilon="0.0003333333333333333333333333"))
    assert spent(ledger) == 30 * Decimal("0.0003333333333333333333333333")


def test_delta_is_spent_too(place: Place) -> None:
    ledger = grown(place, policy(delta=Decimal("1e-6")))
    spend(ledger, charge(1, epsilon="0.01", delta="0.000001"))
    with pytest.raises(BudgetExceeded, match="the whole device delta 1e-6"):
        spend(ledger, charge(2, epsilon="0.01", delta="0.000000000002"))


# --- two processes -------------------------------------------------------------------------------


def race(folder: Path, me: str, ready: Any, go: Any, results: Any) -> None:
    """Asks for all seven reports that the policy allows, in a process of its own."""
    place = Place(store=folder / "store", elsewhere=folder / "elsewhere")
    ledger = place.ledger(policy(reports=7))
    ready.release()
    go.wait()
    for i in range(7):
        try:
            spend(ledger, charge(f"{me} {i}"))
        except BudgetExceeded as error:
            results.put(error.field)
        else:
            results.put("answered")


def test_two_recipes_at_once_from_two_processes(place: Place, tmp_path: Path) -> None:
    """Both check the same remainder at the same time; the file's lock lets one after the other."""
    grown(place, policy(reports=7))._connection.close()
    ready, go, results = FORKS.Semaphore(0), FORKS.Event(), FORKS.Queue()
    racers = [started(race, tmp_path, name, ready, go, results) for name in ("one", "two")]
    for _ in racers:
        assert ready.acquire(timeout=60)
    go.set()
    found = [results.get(timeout=60) for _ in range(14)]
    assert [ended(racer) for racer in racers] == [0, 0]
    assert (found.count("answered"), found.count("device.reports")) == (7, 7)
    ledger = place.ledger(policy(reports=7))
    assert ledger.settle(START) == ()
    ledger.verify()
    assert spent(ledger) == Decimal("0.7")


# --- clocks --------------------------------------------------------------------------------------


class Timed:
    """A ledger under a system clock that anybody may set, and checkpoints that nobody can forge."""

    def __init__(self, place: Place) -> None:
        self.age = monthly().checkpoint_max_age
        self.system = SettableClock(START - AGE)
        self.connection = place.connect()
        self.clock = DeviceClock(self.connection, self.system)
        self.ledger = Ledger(
            self.connection, monthly(), place.head(), clock=self.clock, randbelow=lambda _: 0
        )
        self.checkpoint(START - AGE)
        self.ledger.settle(self.clock.decision_time())
        self.system.set(START)
        self.checkpoint(START)

    def checkpoint(self, time: int) -> None:
        with transaction(self.connection):
            self.clock.accept_checkpoint(time)

    def ask(self, name: str, epsilon: str = "1") -> None:
        spend(self.ledger, charge(name, epsilon=epsilon), self.clock.decision_time())


@pytest.mark.parametrize("move", [-3650 * DAY, -DAY, DAY, 31 * DAY, 3650 * DAY])
def test_a_clock_set_back_forward_or_jumping_a_period(place: Place, move: int) -> None:
    timed = Timed(place)
    timed.ask("first")
    timed.system.set(START + move)
    # Far ahead, the newest checkpoint is too old to date anything by.
    refused = LedgerStale if move > timed.age else BudgetExceeded
    with pytest.raises(refused):
        timed.ask("second")
    timed.system.set(START)
    with pytest.raises(BudgetExceeded, match="the whole device epsilon 1"):
        timed.ask("second")
    # Only time that both aggregators signed renews a budget.
    timed.system.set(START + 40 * DAY)
    timed.checkpoint(START + 40 * DAY)
    timed.ask("third")


def test_a_clock_set_back_does_not_return_to_an_unspent_period(place: Place) -> None:
    timed = Timed(place)
    timed.checkpoint(START + 40 * DAY)
    timed.ask("now")
    timed.system.set(START)
    with pytest.raises(InvalidInput, match="rewound"):
        timed.checkpoint(START)
    with pytest.raises(LedgerStale):  # the device's time does not go back either
        spend(timed.ledger, charge("then", epsilon="1"), START)
    with pytest.raises(BudgetExceeded):  # and if it did, what was charged since would count
        spend(place.ledger(monthly()), charge("then", epsilon="1"), START)


def test_a_clock_set_forward_does_not_age_a_new_ledger(place: Place) -> None:
    connection = place.connect()
    system = SettableClock(START)
    clock = DeviceClock(connection, system)
    ledger = Ledger(connection, monthly(), place.head(), clock=clock)
    with pytest.raises(LedgerError, match="vouches"):
        clock.decision_time()
    with transaction(connection):
        clock.accept_checkpoint(START)
    ledger.settle(clock.decision_time())
    system.set(START + 365 * DAY)
    with pytest.raises(LedgerStale):
        spend(ledger, charge(1), clock.decision_time())
    system.set(START + monthly().checkpoint_max_age)
    with pytest.raises(LedgerYoung):
        spend(ledger, charge(1), clock.decision_time())


# --- backups -------------------------------------------------------------------------------------


def spend_all(place: Place, its: Any) -> None:
    ledger = place.ledger(its)
    for i in range(2):
        spend(ledger, charge(f"since {i}", epsilon="0.5"))
    ledger._connection.close()


def test_a_restored_backup(place: Place) -> None:
    grown(place, monthly())._connection.close()
    backup = place.copy_database()
    spend_all(place, monthly())
    place.restore_database(backup)
    ledger = place.ledger(monthly())
    with pytest.raises(LedgerBehind):
        ledger.settle(START)
    with pytest.raises(LedgerError):  # nor for who does not settle
        spend(ledger, charge("again", epsilon="1"))


def test_a_deleted_ledger(place: Place) -> None:
    grown(place, monthly())._connection.close()
    spend_all(place, monthly())
    place.restore_database({})
    with pytest.raises(LedgerBehind):
        place.ledger(monthly()).settle(START)


def test_a_deleted_ledger_and_head(place: Place) -> None:
    """A new device, as far as anybody can tell: silent for `min_ledger_age`."""
    grown(place, monthly())._connection.close()
    spend_all(place, monthly())
    place.restore_database({})
    place.head_file.unlink()
    ledger = place.ledger(monthly())
    ledger.settle(START)
    with pytest.raises(LedgerYoung):
        spend(ledger, charge("again"), START + AGE - 1)


def test_a_head_of_before_beside_a_ledger_of_before(place: Place) -> None:
    """What can't be noticed, as the documentation says: both were restored together."""
    grown(place, monthly())._connection.close()
    backup, head = place.copy_database(), place.head_file.read_bytes()
    spend_all(place, monthly())
    place.restore_database(backup)
    place.head_file.write_bytes(head)
    ledger = place.ledger(monthly())
    assert ledger.settle(START) == ()
    assert spent(ledger) == 0


def test_rows_deleted_from_the_ledger(place: Place) -> None:
    ledger = grown(place, monthly())
    spend(ledger, charge(1, epsilon="1"))
    connection = ledger._connection
    with pytest.raises(apsw.ConstraintError):
        connection.execute("DELETE FROM ledger WHERE sequence = 2")
    connection.execute("DROP TRIGGER ledger_is_never_shortened")
    connection.execute("DELETE FROM ledger WHERE sequence = 2")
    (recovered,) = ledger.settle(START)
    assert recovered.sequence == 2
    with pytest.raises(BudgetExceeded):
        spend(ledger, charge(2))


# --- policy updates ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "to"),
    [
        (policy({"a": analysis(period="1d")}, period="1d", epsilon=1), "a"),  # renews sooner
        (policy({"b": analysis(period="30d", epsilon=1)}, period="30d", epsilon=1), "b"),  # renamed
        (monthly(composition={"renyi": 32}, delta=Decimal("1e-6")), "a"),  # adds up otherwise
        (monthly(reports=5), "a"),  # merely another
    ],
    ids=["period", "name", "composition", "digest"],
)
def test_a_policy_update_that_would_refund(place: Place, update: Any, to: str) -> None:
    ledger = grown(place, monthly(delta=Decimal("1e-6")), offset=-START % (30 * DAY))
    spend(ledger, charge(1, epsilon="1"))
    ledger = place.ledger(update)
    ledger.settle(START + 2 * DAY)
    with pytest.raises(BudgetExceeded) as caught:
        spend(ledger, charge(2, to=to), START + 2 * DAY)
    assert caught.value.field == "device.epsilon"
    assert spent(ledger, "device", START + 2 * DAY) == 1


def test_back_and_forth_between_policies(place: Place) -> None:
    """Each update alone would be harmless; all together still refund nothing."""
    others = [
        policy({"a": analysis(period="1d")}, period="1d", epsilon=1),
        policy({"b": analysis(period="1d")}, period="1d", epsilon=1),
        monthly(),
    ]
    spend(grown(place, monthly(), offset=-START % (30 * DAY)), charge(1, epsilon="1"))
    for i in range(6):
        ledger = place.ledger(others[i % 3])
        ledger.settle(START + i * DAY)
        assert spent(ledger, "device", START + i * DAY) == 1
