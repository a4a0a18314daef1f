"""Charges, crashes, restarts, clocks, policy updates, backups: the ledger against a model of it.

The model keeps a plain history of what happened and judges by the rules as the documentation words
them, in fractions, with no filter, no chain and no head; it shares no code with the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

import apsw
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from chorister.clock import SettableClock
from chorister.device.ledger import Ledger
from chorister.device.ledger.head_store import HeadStore
from chorister.device.ledger.ledger_entries import Charged, Restarted, Resumed
from chorister.errors import (
    BudgetExceeded,
    LedgerBehind,
    LedgerStale,
    LedgerYoung,
    QueryRefused,
)
from tests.device.ledgers import DAY, KEY, START, analysis, charge, policy

WEEK, MONTH = 7 * DAY, 30 * DAY
CHECKPOINT_AGE = DAY
RECIPES_CLOSE = 14 * DAY + CHECKPOINT_AGE  # the longest window first
AHEAD = 300  # what a checkpoint may be ahead of a clock


@dataclass(frozen=True)
class Rules:
    """A policy as the model sees it."""

    device: tuple[Fraction, int, int | None]  # epsilon, reports, period
    analyses: dict[str, tuple[Fraction, int, int | None]]
    age: int = 2 * DAY

    def build(self) -> Any:
        def terms(limits: tuple[Fraction, int, int | None]) -> dict[str, Any]:
            epsilon, reports, period = limits
            found: dict[str, Any] = {
                "epsilon": Decimal(epsilon.numerator) / epsilon.denominator,
                "reports": reports,
            }
            return found if period is None else {**found, "period": f"{period}s"}

        analyses = {name: analysis(**terms(its)) for name, its in self.analyses.items()}
        return policy(analyses, age=f"{self.age}s", **terms(self.device))


ONE, HALF = Fraction(1), Fraction(1, 2)
POLICIES = (
    Rules((ONE, 6, MONTH), {"a": (HALF, 3, MONTH), "b": (ONE, 9, MONTH)}),
    Rules((ONE, 6, WEEK), {"a": (HALF, 3, WEEK), "b": (HALF, 9, WEEK)}),  # shorter
    Rules((ONE, 6, MONTH), {"b": (ONE, 9, MONTH), "c": (HALF, 3, WEEK)}),  # a is called c
    Rules((2 * ONE, 9, MONTH), {"a": (HALF, 3, None), "b": (ONE, 9, MONTH)}),  # never renews
    Rules((HALF, 2, MONTH), {"a": (HALF, 3, MONTH), "b": (ONE, 9, MONTH)}),  # lowered
)


@dataclass
class Past:
    """One charge of the model's history."""

    name: int
    analysis: str
    epsilon: Fraction
    time: int


@dataclass
class LedgerHistory:
    """What happened, in order: numbers are policies, the rest are charges."""

    offset: int
    history: list[int | Past] = field(default_factory=list)
    born: int = 0
    last: int = 0  # the time of the newest entry

    def end(self, time: int, period: int | None) -> float:
        if period is None:
            return float("inf")
        return (time + self.offset) // period * period + period - self.offset

    def since(self, at: int) -> list[Rules]:
        """The policy under which entry `at` was made, and all later ones."""
        before = [each for each in self.history[:at] if isinstance(each, int)]
        after = [each for each in self.history[at:] if isinstance(each, int)]
        return [POLICIES[i] for i in [*before[-1:], *after]]

    def judged(self) -> list[tuple[Past, float, float, set[str]]]:
        """Each charge: until when it counts device-wide and in its analyses, and in which."""
        found = []
        for at, past in enumerate(self.history):
            if isinstance(past, int):
                continue
            owners, until, device = {past.analysis}, 0.0, 0.0
            for rules in self.since(at):
                device = max(device, self.end(past.time, rules.device[2]))
                if not owners & set(rules.analyses):
                    owners = owners | set(rules.analyses)  # all of them read the one field
                for name in owners & set(rules.analyses):
                    until = max(until, self.end(past.time, rules.analyses[name][2]))
            found.append((past, device, until, owners))
        return found

    @property
    def clear(self) -> float:
        return max((max(d, a) for _, d, a, _ in self.judged()), default=0.0)

    def verdict(self, new: Past, rules: Rules, now: int) -> str | None:
        """The limit that refuses, or None."""
        if now < self.born + rules.age:
            return "young"
        if any(isinstance(each, Past) and each.name == new.name for each in self.history):
            return "once"
        if new.analysis not in rules.analyses:
            return "analysis"
        judged = self.judged()
        device = [past for past, until, _, _ in judged if now < until]
        own = [past for past, _, until, owners in judged if now < until and new.analysis in owners]
        for name, counted, limits in (
            ("device", device, rules.device),
            (f"analyses.{new.analysis}.budget", own, rules.analyses[new.analysis]),
        ):
            if sum(past.epsilon for past in counted) + new.epsilon > limits[0]:
                return f"{name}.epsilon"
            if len(counted) + 1 > limits[1]:
                return f"{name}.reports"
        return None


class MemoryHead(HeadStore):
    """A head in memory, which outlives the ledger."""

    kind = "memory"

    def __init__(self) -> None:
        super().__init__(KEY)
        self.kept: bytes | None = None

    def _read(self) -> bytes | None:
        return self.kept

    def _write(self, sealed: bytes) -> None:
        self.kept = sealed


NAMES = st.integers(0, 60)
EPSILONS = st.sampled_from([Fraction(1, 10), Fraction(1, 5), Fraction(3, 10), HALF])
ANALYSES = st.sampled_from(["a", "b", "c"])


class LedgerMachine(RuleBasedStateMachine):
    """Drives a real ledger on a database that can be copied, cut off and put back."""

    @initialize(offset=st.integers(0, 2**52 - 1))
    def create(self, offset: int) -> None:
        self.head = MemoryHead()
        self.now = START  # the newest checkpoint's time
        self.error = 0  # the device's clock, less that time
        self.clock = SettableClock(START)
        self.current = 0
        self.model = LedgerHistory(offset=offset, history=[0], born=START, last=START)
        self.database = b""
        self.backup: tuple[bytes, int] | None = None  # with the length of the model's history
        self.lost: tuple[bytes, int] | None = None  # the true database while a backup is in place
        self.open(self.database)
        self.ledger.settle(self.now)
        self.now += POLICIES[0].age

    def open(self, image: bytes) -> None:
        """A restart on what is on disk."""
        self.connection = apsw.Connection(":memory:")
        if image:
            self.connection.deserialize("main", image)
        self.ledger = Ledger(
            self.connection,
            POLICIES[self.current].build(),
            self.head,
            clock=self.clock,
            randbelow=lambda _: self.model.offset,
        )

    def disk(self) -> bytes:
        return self.connection.serialize("main")

    @property
    def behind(self) -> bool:
        return self.lost is not None

    @property
    def stale(self) -> bool:
        return self.error > CHECKPOINT_AGE

    def note(self, entry: int | Past, time: int) -> None:
        self.model.history.append(entry)
        self.model.last = max(self.model.last, time)

    # --- what a device does ----------------------------------------------------------------------

    def attempt(self, name: int, to: str, epsilon: Fraction) -> bool:
        """Append inside an open transaction, and compare the decision with the model's."""
        self.clock.set(self.now + self.error)
        date = max(self.now, self.clock.now() + AHEAD, self.model.last)
        new = Past(name=name, analysis=to, epsilon=epsilon, time=date)
        verdict = self.model.verdict(new, POLICIES[self.current], self.now)
        if self.stale:
            verdict = "stale"
        asked = charge(name, to=to, epsilon=str(Decimal(epsilon.numerator) / epsilon.denominator))
        try:
            self.ledger.append(asked, self.now)
        except LedgerStale:
            assert verdict == "stale"
        except LedgerYoung:
            assert verdict == "young"
        except QueryRefused as error:
            assert verdict == error.check
        except BudgetExceeded as error:
            assert verdict == error.field
        else:
            assert verdict is None
            self.note(new, date)
            return True
        return False

    @precondition(lambda self: not self.behind)
    @rule(asked=st.lists(st.tuples(NAMES, ANALYSES, EPSILONS), min_size=1, max_size=4))
    def ask(self, asked: list[tuple[int, str, Fraction]]) -> None:
        for name, to, epsilon in asked:
            self.connection.execute("BEGIN IMMEDIATE")
            self.attempt(name, to, epsilon)
            self.connection.execute("COMMIT")

    @precondition(lambda self: not self.behind)
    @rule(name=NAMES, to=ANALYSES, epsilon=EPSILONS)
    def crash_between_head_and_commit(self, name: int, to: str, epsilon: Fraction) -> None:
        before = self.disk()
        self.connection.execute("BEGIN IMMEDIATE")
        charged = self.attempt(name, to, epsilon)
        self.open(before)
        recovered = self.ledger.settle(self.now)
        assert [type(entry) for entry in recovered] == ([Charged] if charged else [])

    @precondition(lambda self: not self.behind)
    @rule()
    def restart(self) -> None:
        self.open(self.disk())
        assert self.ledger.settle(self.now) == ()

    @rule(seconds=st.sampled_from([1, DAY, WEEK, 9 * DAY, MONTH]))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule(seconds=st.sampled_from([1, DAY, MONTH]))
    def time_is_set_back(self, seconds: int) -> None:
        self.now -= seconds

    @rule(error=st.sampled_from([-MONTH, -AHEAD, -1, 0, AHEAD, DAY, DAY + 1]))
    def the_clock_is_wrong(self, error: int) -> None:
        self.error = error

    @precondition(lambda self: not self.behind)
    @rule(number=st.integers(0, len(POLICIES) - 1))
    def update_policy(self, number: int) -> None:
        changed, self.current = number != self.current, number
        self.open(self.disk())
        assert len(self.ledger.settle(self.now)) == changed
        if changed:
            self.note(number, self.now)

    # --- what happens to a device ----------------------------------------------------------------

    @precondition(lambda self: not self.behind)
    @rule()
    def back_up(self) -> None:
        self.backup = (self.disk(), len(self.model.history))

    @precondition(lambda self: not self.behind and self.backup is not None)
    @rule()
    def restore_backup(self) -> None:
        assert self.backup is not None
        true = self.disk()
        image, known = self.backup
        missing = len(self.ledger.entries())
        self.open(image)
        missing -= len(self.ledger.entries())
        if missing <= 1:
            added = self.ledger.settle(self.now)
            assert len(added) == missing  # the head gave it back, whatever it was
        else:
            self.lost = (true, known)

    @precondition(lambda self: self.behind)
    @rule()
    def settle_behind(self) -> None:
        """Refused until all that was lost has renewed; then it is rightly forgotten."""
        assert self.lost is not None
        rules = POLICIES[self.current]
        periods = [rules.device[2], *(its[2] for its in rules.analyses.values())]
        until = max(self.model.clear, self.model.last + RECIPES_CLOSE)
        for period in periods:
            until = max(until, float("inf") if period is None else self.model.last + period)
        if self.now < until:
            with pytest.raises(LedgerBehind) as caught:
                self.ledger.settle(self.now)
            assert caught.value.until == (None if until == float("inf") else until)
            return
        first, *rest = self.ledger.settle(self.now)
        assert isinstance(first, Resumed)
        del self.model.history[self.lost[1] :]
        if rest:  # the backup knows another policy
            self.model.history.append(self.current)
        self.model.last = self.ledger.entries()[-1].time
        self.backup = self.lost = None

    @precondition(lambda self: self.behind)
    @rule()
    def put_the_newest_ledger_back(self) -> None:
        assert self.lost is not None
        self.open(self.lost[0])
        assert self.ledger.settle(self.now) == ()
        self.lost = None

    @precondition(lambda self: not self.behind)
    @rule()
    def lose_the_head(self) -> None:
        self.head.kept = None
        self.clock.set(self.now + self.error)
        if self.stale:  # nothing to date it by: it stays unsettled until there is
            with pytest.raises(LedgerStale):
                self.ledger.settle(self.now)
            self.error = 0
            self.clock.set(self.now)
        (entry,) = self.ledger.settle(self.now)
        assert isinstance(entry, Restarted)
        self.model.last = max(self.model.last, self.now, self.clock.now())
        self.model.born = self.model.last
        self.backup = None  # with it, the ledger could not tell what is missing

    # --- what always holds -----------------------------------------------------------------------

    @invariant()
    def spent_is_what_the_model_says(self) -> None:
        if not hasattr(self, "model") or self.behind:
            return
        now = self.now
        judged = self.model.judged()
        for standing in self.ledger.remaining(now):
            if standing.limit == "device":
                counted = [past for past, until, _, _ in judged if now < until]
            else:
                name = standing.limit.split(".")[1]
                counted = [
                    past for past, _, until, owners in judged if now < until and name in owners
                ]
            assert Fraction(standing.spent.epsilon) == sum(past.epsilon for past in counted)
            assert standing.reports == len(counted)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.verify()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=50, stateful_step_count=30)
