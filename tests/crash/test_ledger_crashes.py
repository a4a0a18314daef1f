"""kill -9 between the head and the commit: real processes, real files, every step of an append.

A child opens the ledger, appends one charge and answers after the commit; it is killed at a chosen
step. Whatever the step, afterwards: a charge is never less than what could have left,
and the ledger verifies and goes on.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from chorister.device.database import transaction
from chorister.device.ledger import Ledger
from chorister.device.ledger.head_store import FileHeadStore
from chorister.device.ledger.ledger_entries import Charged
from chorister.errors import LedgerError, QueryRefused
from tests.device.ledgers import AGE, KEY, SLOW, START, Place, charge, grown, policy, spend, spent
from tests.forked_processes import ended, started

STEPS = (
    "before the head",
    "while the head is written",  # its draft is there, the old head as well
    "after the head",
    "after the insert",
    "in the commit",  # everything is written but the commit's own frame
    "after the commit",
)
HEAD_HAS_IT = STEPS[2:]


class MortalHead(FileHeadStore):
    """A head store that kills its process at a step of saving."""

    step = ""

    def save(self, entry: bytes) -> None:
        if self.step == "before the head":
            die()
        super().save(entry)
        if self.step == "after the head":
            die()

    def _write(self, sealed: bytes) -> None:
        if self.step == "while the head is written":
            (self.path.parent / f".{self.path.name}.draft").write_bytes(sealed[: len(sealed) // 2])
            die()
        super()._write(sealed)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_committing() -> bool:
    die()
    return True


def child(folder: Path, name: str, step: str) -> None:
    """Runs in a process of its own."""
    place = Place(store=folder / "store", elsewhere=folder / "elsewhere")
    head = MortalHead(place.head_file, key=KEY, store=place.store)
    connection = place.connect()
    ledger = Ledger(connection, policy(reports=3), head, clock=SLOW)
    ledger.settle(START - AGE)
    head.step = step
    with transaction(connection):
        ledger.append(charge(name), START)
        if step == "after the insert":
            die()
        if step == "in the commit":
            connection.set_commit_hook(die_committing, id="crash")
    if step == "after the commit":
        die()
    (folder / f"{name} was answered").touch()


def first_start(folder: Path) -> None:
    """A device's very first start, which dies after the head."""
    place = Place(store=folder / "store", elsewhere=folder / "elsewhere")
    head = MortalHead(place.head_file, key=KEY, store=place.store)
    head.step = "after the head"
    Ledger(place.connect(), policy(), head, clock=SLOW).settle(START)


def run(folder: Path, name: str, step: str) -> int:
    """How the child ended."""
    return ended(started(child, folder, name, step))


@pytest.mark.parametrize("step", STEPS)
def test_killed(tmp_path: Path, step: str) -> None:
    place = Place.make(tmp_path)
    grown(place, policy(reports=3))._connection.close()
    assert run(tmp_path, "asked", step) == -signal.SIGKILL
    assert not (tmp_path / "asked was answered").exists()

    ledger = place.ledger(policy(reports=3))
    recovered = ledger.settle(START)
    charged = ledger.charged(bytes.fromhex(charge("asked").recipe))
    assert charged == (step in HEAD_HAS_IT)
    if step in HEAD_HAS_IT[:-1]:
        (entry,) = recovered
        assert isinstance(entry, Charged)
        assert entry.charge == charge("asked")
    else:
        assert recovered == ()
    if charged:
        # Its recipe is never charged, and so never answered, again.
        with pytest.raises(QueryRefused):
            spend(ledger, charge("asked"))
        assert spent(ledger) == charge("asked").privacy.epsilon
    ledger.verify()
    spend(ledger, charge("next"))
    assert place.head().load() == ledger.entries()[-1].canonical()


@pytest.mark.parametrize("step", STEPS)
def test_killed_again_while_recovering(tmp_path: Path, step: str) -> None:
    """The second process finds the first one's remains, settles them, and dies at another step."""
    place = Place.make(tmp_path)
    grown(place, policy(reports=3))._connection.close()
    run(tmp_path, "first", "after the head")
    run(tmp_path, "second", step)
    ledger = place.ledger(policy(reports=3))
    ledger.settle(START)
    assert ledger.charged(bytes.fromhex(charge("first").recipe))
    assert ledger.charged(bytes.fromhex(charge("second").recipe)) == (step in HEAD_HAS_IT)
    ledger.verify()


def test_a_crash_of_another_process_is_settled_first(tmp_path: Path) -> None:
    """A process that is in step, and did not see the other one die, must not write over it."""
    place = Place.make(tmp_path)
    ledger = grown(place, policy(reports=3))
    run(tmp_path, "theirs", "after the insert")
    with pytest.raises(LedgerError, match=r"settle\(\) first"):
        spend(ledger, charge("ours"))
    ledger.settle(START)
    spend(ledger, charge("ours"))
    assert ledger.charged(bytes.fromhex(charge("theirs").recipe))


def test_a_new_ledger_survives_a_crash_at_its_first_entry(tmp_path: Path) -> None:
    place = Place.make(tmp_path)
    assert ended(started(first_start, tmp_path)) == -signal.SIGKILL
    entries = place.ledger(policy()).settle(START)
    assert [entry.kind for entry in entries] == ["created", "policy"]


def test_without_a_crash_it_is_answered(tmp_path: Path) -> None:
    grown(Place.make(tmp_path), policy(reports=3))._connection.close()
    assert run(tmp_path, "asked", "never") == 0
    assert (tmp_path / "asked was answered").exists()
