"""The ledger: append-only and hash-chained; a device notices if an older copy was restored.

Only entries are stored, and `chorister.device.ledger.counting` computes from them what is spent.
They are in the caller's encrypted database, so that a charge commits together with whatever else
belongs to it.

**The head.** Before an entry is committed, it is saved in the `HeadStore`, under the database's
write lock. So ledger and head can differ only in these ways:

==================== ============================================================================
head                 what happened, and what is done
==================== ============================================================================
the newest entry     nothing: in step
the very next entry  a crash between head and commit: the entry is appended. If it is a charge, it
                     counts, and its recipe is never answered
further ahead, or    a restored backup, a deleted ledger, another device's: `LedgerBehind` until
of another chain     everything lost has renewed under all policies it was charged under and
                     today's (never, if a budget does not renew), and its recipes have closed
an older entry       the head was restored, and perhaps the ledger too: the ledger's age begins
                     again (`min_ledger_age` of silence), and what is known stays charged
missing              the same; or, with an empty ledger, a new device
unreadable           `HeadUnavailable`: silence
==================== ============================================================================

One transaction appends at most one entry: with two, a crash would look like a restored backup.

**Two times.** `now`, the time of the newest accepted checkpoint, decides what has renewed and how
old the ledger is. A registry may serve one that is as old as the policy permits. So an entry is
*dated* by the device's clock if that is later: a charge five minutes ahead of it, as a checkpoint
may be. So unless the clock is slow, no budget renews before the date of a charge made by then, and
no more is charged in any stretch of time than docs/concepts/budget.md proves. A fast clock only
makes charges count longer. No entry is dated before the last one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Final, TypeVar

import apsw

from chorister.clock import Clock
from chorister.device.database import transaction, upgrade
from chorister.device.ledger.budget import Charge, Standing
from chorister.device.ledger.counting import Counts, PolicyTerms, later
from chorister.device.ledger.head_store import HeadStore
from chorister.device.ledger.ledger_entries import (
    MAX_OFFSET,
    Chain,
    Charged,
    Created,
    Entry,
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
    LedgerStale,
    LedgerYoung,
    QueryRefused,
)
from chorister.policy import Policy
from chorister.transparency.checkpoint import MAX_SKEW

_E = TypeVar("_E", Created, Restarted, Resumed, PolicyTaken, Charged)

_SCHEMA: Final = (
    """
    CREATE TABLE ledger (sequence INTEGER PRIMARY KEY, entry BLOB NOT NULL) STRICT;
    CREATE TRIGGER ledger_is_never_changed BEFORE UPDATE ON ledger
        BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
    CREATE TRIGGER ledger_is_never_shortened BEFORE DELETE ON ledger
        BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
    """,
)


class Ledger:
    """The budget of one device under its policy.

    Call `settle` once before deciding; then, inside one `transaction`, `append` a charge.
    """

    def __init__(
        self,
        connection: apsw.Connection,
        policy: Policy,
        head_store: HeadStore | None,
        *,
        clock: Clock,
        randbelow: Callable[[int], int] = secrets.randbelow,
    ) -> None:
        """`clock` is the device's: it dates entries, but decides no renewal."""
        self._connection = connection
        self._policy = policy
        self._terms = PolicyTerms.of(policy)
        self._head_store = head_store
        self._clock = clock
        self._randbelow = randbelow
        self._chain = Chain()
        self._appended = False  # in the transaction that is now open
        # What the limits allowed last: a charge, the time, and the counts, all of which are frozen.
        self._allowed: tuple[Charge, int, Counts] | None = None
        upgrade(connection, "ledger", _SCHEMA)
        connection.set_commit_hook(self._committing, id=self)
        connection.set_rollback_hook(self._transaction_ended, id=self)

    # --- before deciding -------------------------------------------------------------------------

    def settle(
        self, now: int, on_entry: Callable[[Entry], None] = lambda _: None
    ) -> tuple[Entry, ...]:
        """Bring ledger, head and policy into step; return the entries that were added.

        Each entry has its own transaction, in which `on_entry` is called. A `Charged` entry among
        them was recovered after a crash: its recipe must never be answered. Raises `LedgerBehind`,
        `LedgerTampered`, `HeadUnavailable`, or `LedgerStale` if the ledger's age would begin at a
        time that nobody vouches for.
        """
        added: list[Entry] = []
        while True:
            with transaction(self._connection):
                entry = self._step(now)
                if entry is not None:
                    on_entry(entry)
            if entry is None:
                return tuple(added)
            added.append(entry)

    def _step(self, now: int) -> Entry | None:
        chain, saved = self._read(), self._saved_head()
        if self._head_store is not None and saved is None and chain.entries:
            return self._add(Restarted(**self._beginning(now), why="head-missing"))
        if saved is not None and saved != chain.data:
            head = self._decoded(saved)
            if chain.continues_with(head):
                self._insert(head, saved)
                return head
            if chain.has(head):
                return self._add(Restarted(**self._beginning(now), why="head-behind"))
            self._refuse_until_clear(head, now)
            if chain.entries:
                return self._add(Resumed(**chain.place(now), lost=head.sequence))
        if not chain.entries:
            offset = self._randbelow(MAX_OFFSET)
            return self._add(Created(**self._beginning(now), offset=offset))
        if chain.counts.terms != self._terms:
            return self._add(PolicyTaken(**chain.place(now), terms=self._terms))
        return None

    def _beginning(self, now: int) -> dict[str, Any]:
        """Return the place of an entry with which the ledger's age begins."""
        return self._chain.place(max(now, self._device_time(now)))

    def _refuse_until_clear(self, head: Entry, now: int) -> None:
        """Raise `LedgerBehind` until nothing that was lost matters any more.

        What was lost is dated at the head's time at the latest. It must have renewed, and its
        recipes, which look like new ones now, must have closed. They were open at a time that a
        slow clock may have dated too early, by a checkpoint's age.
        """
        until = None if head.clear == "never" else head.clear
        analyses = self._policy.analyses.values()
        for budget in (self._policy.device, *(analysis.budget for analysis in analyses)):
            until = later(until, None if budget.period is None else head.time + budget.period)
        longest = max(analysis.longest_open for analysis in analyses)
        until = later(until, head.time + self._policy.checkpoint_max_age + longest)
        if until is None or now < until:
            missing = f"the ledger's head is entry {head.sequence}, which the ledger does not have"
            raise LedgerBehind(missing=missing, until=until)

    # --- deciding --------------------------------------------------------------------------------

    def check(self, charge: Charge, now: int) -> None:
        """Raise if this charge is not allowed at `now`; change nothing.

        Raises `LedgerStale`, `LedgerYoung`, `QueryRefused` (`once`: charged before) or
        `BudgetExceeded`, which names the limit: device-wide first, then the analysis', then each
        field's.
        """
        chain = self._settled()
        self._device_time(now)
        silent_until = chain.born + self._policy.device.min_ledger_age
        if now < silent_until:
            raise LedgerYoung(until=silent_until)
        if (why := chain.answered(charge)) is not None:
            raise QueryRefused(check="once", why=why, field="id")
        if self._allowed is not None:
            same, then, counts = self._allowed
            if same is charge and then == now and counts is chain.counts:
                return
        chain.counts.check(charge, self._policy, now)
        self._allowed = (charge, now, chain.counts)

    def append(self, charge: Charge, now: int) -> Charged:
        """Check the charge, then write it, inside the caller's open `transaction`.

        Nothing may be answered before that transaction has been committed.
        """
        if self._connection.txn_state("main") != apsw.SQLITE_TXN_WRITE:
            raise InvalidInput("append() belongs inside transaction(): commit what goes with it")
        if self._appended:
            raise InvalidInput("one transaction appends one charge: commit first")
        self.check(charge, now)
        if self._head_store is not None and self._saved_head() != self._chain.data:
            raise LedgerError("ledger and head are not in step: call settle() first")
        date = max(now, self._device_time(now) + MAX_SKEW)
        return self._add(Charged(**self._chain.place(date), charge=charge))

    def _device_time(self, now: int) -> int:
        """Return the device's time; raise `LedgerStale` if the newest checkpoint is too old by it.

        A clock that runs far ahead would date an entry, and all that follow it, in the future.
        """
        clock = self._clock.now()
        if clock > now + self._policy.checkpoint_max_age:
            raise LedgerStale(checkpoint=now, now=clock)
        return clock

    # --- looking ---------------------------------------------------------------------------------

    def remaining(self, now: int) -> tuple[Standing, ...]:
        """Return what is spent and left of every limit at `now`, device-wide first."""
        limits = self._settled().counts.limits(self._policy, now)
        return tuple(limit.standing() for limit in limits)

    def silent_until(self) -> int:
        """Return when the ledger is old enough to answer."""
        return self._settled().born + self._policy.device.min_ledger_age

    def charged(self, recipe: bytes) -> bool:
        """Return whether the recipe with this digest was ever charged."""
        return recipe.hex() in self._read().recipes

    def charged_study(self, analysis: str, study: str, *, but: bytes = b"") -> bool:
        """Return whether any recipe of a study, `but` the one given, was ever charged."""
        return bool(self._read().studies.get((analysis, study), set()) - {but.hex()})

    def entries(self) -> tuple[Entry, ...]:
        """Return all entries, oldest first."""
        return tuple(self._read().entries)

    def verify(self) -> None:
        """Read everything again; `LedgerTampered` names the first entry that was changed."""
        self._extend(Chain())

    # --- storage ---------------------------------------------------------------------------------

    def _settled(self) -> Chain:
        chain = self._read()
        if not chain.entries or chain.counts.terms != self._terms:
            raise LedgerError("the ledger does not know this policy yet: call settle() first")
        return chain

    def _read(self) -> Chain:
        """Return the chain as the database has it now; other processes may have added to it."""
        chain = self._chain
        if chain.entries:
            row = self._row(chain.entries[-1].sequence)
            if row != chain.data:  # what was appended has been rolled back
                chain = self._chain = Chain()
        self._extend(chain)
        return chain

    def _extend(self, chain: Chain) -> None:
        rows = self._connection.execute(
            "SELECT sequence, entry FROM ledger WHERE sequence >= ? ORDER BY sequence",
            (len(chain.entries),),
        )
        for sequence, data in rows:
            chain.extend(sequence, data)

    def _row(self, sequence: int) -> object:
        row = self._connection.execute(
            "SELECT entry FROM ledger WHERE sequence = ?", (sequence,)
        ).fetchone()
        return None if row is None else row[0]

    def _saved_head(self) -> bytes | None:
        return None if self._head_store is None else self._head_store.load()

    def _decoded(self, head: bytes) -> Entry:
        try:
            return decode(head)
        except DecodeError as error:
            raise HeadUnavailable(
                f"the ledger's head in {self._head_store} is not an entry ({error}): restore it, "
                "or remove it and wait as for a new ledger"
            ) from None

    def _add(self, entry: _E) -> _E:
        entry = self._chain.dated(entry)
        data = entry.canonical()
        if self._head_store is not None:
            self._head_store.save(data)
        self._insert(entry, data)
        return entry

    def _insert(self, entry: Entry, data: bytes) -> None:
        self._connection.execute("INSERT INTO ledger VALUES (?, ?)", (entry.sequence, data))
        self._appended = True
        self._chain.append(entry, data)

    def _committing(self) -> bool:
        self._transaction_ended()
        return False  # commit

    def _transaction_ended(self) -> None:
        self._appended = False
