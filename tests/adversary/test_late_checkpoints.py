"""How many budgets a device can be charged in a stretch of time, whatever a registry shows it.

A registry may withhold checkpoints, and show them as late as a policy permits, or five minutes
early; the analyst asks whenever there is room. A device's clock may be slow. What is tested here is
proven in docs/concepts/budget.md: in any stretch of length L, with a period P and a clock that is
slow by at most S, at most ceil((L + S) / P) + 1 budgets are charged; and that many can be. If both
aggregators lie about the time, S grows by the policy's age and by no more.

What decides is real: the reader's rules, the device's clock, the ledger. Time and the registry are
simulated; schedules are drawn from a fixed seed.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import apsw
import pytest
from pydantic import ValidationError

from chorister.clock import SettableClock
from chorister.device.database import transaction
from chorister.device.device_clock import DeviceClock
from chorister.device.ledger import Ledger
from chorister.device.ledger.counting import period_end
from chorister.errors import BudgetExceeded, LedgerYoung, LogError
from chorister.policy import Policy
from chorister.transparency.checkpoint import MAX_SKEW, Checkpoint
from chorister.transparency.note import key_name
from chorister.transparency.reader import LastAccepted, _check_recent
from chorister.transparency.trust import CosignerKeys, Trust
from tests.device.ledgers import DAY, START, analysis, charge, policy
from tests.logworld import HELPER, LEADER, ORIGIN, key, public

AGE = DAY  # the policies' checkpoint_max_age
SILENCE = 3 * DAY


def a_policy(period: int) -> Policy:
    """One report a period: every charge is a whole budget."""
    renewing = {"a": analysis(period=f"{period}s")}
    its = policy(renewing, age=f"{SILENCE}s", period=f"{period}s", reports=1)
    assert its.checkpoint_max_age == AGE
    return its


def most(period: int, stretch: int, slow: int = 0) -> int:
    """What docs/concepts/budget.md says."""
    return -(-(stretch + slow) // period) + 1


@dataclass
class LateRegistry:
    """A device, a registry that shows it what it likes, and an analyst who always asks."""

    period: int
    offset: int = 0
    slow: int = 0  # the most that the device's clock is behind
    charged_at: list[int] = field(default_factory=list)  # real times
    shown: int = 0  # the time of the last checkpoint that was accepted

    def __post_init__(self) -> None:
        self.policy = a_policy(self.period)
        self.system = SettableClock(START)
        connection = apsw.Connection(":memory:")
        self.clock = DeviceClock(connection, self.system)
        self.ledger = Ledger(
            connection, self.policy, None, clock=self.clock, randbelow=lambda _: self.offset
        )
        self.connection = connection
        self.trust = Trust(
            origin=ORIGIN,
            log_keys=(public("log"),),
            leader=CosignerKeys(name=key_name(LEADER), keys=(public("leader"),)),
            helper=CosignerKeys(name=key_name(HELPER), keys=(public("helper"),)),
            max_age=self.policy.checkpoint_max_age,
            witnesses=None,
            authors={},
        )

    def show(
        self, real: int, checkpoint: int, *, clock: int | None = None, honest: bool = True
    ) -> bool:
        """At a real time, with the device's clock at `clock`; says whether it was accepted."""
        assert not honest or checkpoint <= real + MAX_SKEW, "no honest cosigner signs that"
        self.system.set(real if clock is None else clock)
        signed = Checkpoint(origin=ORIGIN, size=1, root=bytes(32)).sign(key("log"))
        for url, signer in ((LEADER, "leader"), (HELPER, "helper")):
            name = key_name(url)
            line = signed.checkpoint.cosign(name=name, key=key(signer), time=checkpoint)
            signed = signed.with_cosigner(line)
        try:
            leader, helper = self.trust.check_signatures(signed)
            times, last = (leader.time, helper.time), LastAccepted(time=self.shown)
            _check_recent(signed.checkpoint, times, self.trust.max_age, self.clock, last)
        except LogError:
            return False
        with transaction(self.connection):
            self.clock.accept_checkpoint(min(times))
        self.shown = min(times)
        self.ledger.settle(self.shown)
        self._ask(real)
        return True

    def _ask(self, real: int) -> None:
        while True:
            question = charge(f"question {len(self.charged_at)}")
            try:
                with transaction(self.connection):
                    self.ledger.append(question, self.shown)
            except (BudgetExceeded, LedgerYoung):
                return
            self.charged_at.append(real)

    def grow_up(self) -> int:
        """A ledger that is old enough; the end of the period it is then in."""
        self.show(START, START)
        end = period_end(START + SILENCE, self.period, self.offset)
        assert end is not None
        return end + self.period  # a whole period, in which nothing was charged yet

    def most_within(self, stretch: int) -> int:
        """The most charges in any stretch of this length, both ends included."""
        return max(
            (
                bisect_right(self.charged_at, first + stretch) - place
                for place, first in enumerate(self.charged_at)
            ),
            default=0,
        )

    def check(self) -> None:
        assert self.charged_at == sorted(self.charged_at)
        for stretch in (0, 1, self.period // 2, self.period - AGE, self.period - 1, self.period,
                        self.period + 1, 2 * self.period, 5 * self.period // 2):  # fmt: skip
            assert self.most_within(stretch) <= most(self.period, stretch, self.slow)


Choice = Callable[[random.Random, int, int, Sequence[int]], int]


def the_oldest(_: random.Random, low: int, _high: int, _ends: Sequence[int]) -> int:
    return low


def the_newest(_: random.Random, _low: int, high: int, _ends: Sequence[int]) -> int:
    return high


def any_one(source: random.Random, low: int, high: int, _ends: Sequence[int]) -> int:
    return source.randint(low, high)


def one_at_an_end(source: random.Random, low: int, high: int, ends: Sequence[int]) -> int:
    """Just before or after a period's end, where there is one; else as old as permitted."""
    near = [time for end in ends for time in (end - 1, end) if low <= time <= high]
    return source.choice(near) if near else low


MIXES: list[list[Choice]] = [
    [one_at_an_end],
    [one_at_an_end, the_oldest, the_newest],
    [any_one],
]


def run(
    schedule: LateRegistry, source: random.Random, choices: Sequence[Choice], steps: int
) -> None:
    period, real = schedule.period, START
    for _ in range(steps):
        real += source.choice([0, 0, 1, 60, MAX_SKEW, AGE, period // 3, source.randint(0, period)])
        clock = real - source.choice([0, schedule.slow, source.randint(0, schedule.slow)])
        # By the reader's rules, as the device's clock never goes back.
        now = max(clock, schedule.clock.now())
        low = max(schedule.shown, now - AGE)
        high = min(real + MAX_SKEW, now + AGE)
        if low > high:
            continue
        first = period_end(low, period, schedule.offset)
        assert first is not None
        ends = range(first, high + 1, period)
        chosen = source.choice(choices)(source, low, high, ends)
        schedule.show(real, chosen, clock=clock)


@pytest.mark.parametrize("slow", [0, 1, AGE // 2, AGE, 5 * AGE])
def test_no_schedule_of_checkpoints_exceeds_the_bound(slow: int) -> None:
    source = random.Random(slow)
    charges = 0
    for _ in range(20):
        period = source.choice([AGE, AGE + 1, AGE + MAX_SKEW, 3 * AGE, 10 * AGE])
        schedule = LateRegistry(period=period, offset=source.randrange(period), slow=slow)
        run(schedule, source, source.choice(MIXES), steps=60)
        schedule.check()
        charges += len(schedule.charged_at)
    assert charges > 20 * 5  # there was something to bound


def test_the_bound_is_reached_with_a_right_clock() -> None:
    """Two budgets in two seconds, and a third when a second more than a period has passed."""
    schedule = LateRegistry(period=10 * DAY, offset=12_345)
    end = schedule.grow_up()
    schedule.show(end - MAX_SKEW - 1, end - MAX_SKEW - 1)
    schedule.show(end - MAX_SKEW, end)
    schedule.show(end - MAX_SKEW + schedule.period, end + schedule.period)
    assert len(schedule.charged_at) == 3
    assert schedule.most_within(1) == most(schedule.period, 1) == 2
    assert schedule.most_within(schedule.period) == most(schedule.period, schedule.period) == 2
    assert schedule.most_within(schedule.period + 1) == most(schedule.period, schedule.period + 1)


@pytest.mark.parametrize("slow", [1, AGE // 2, AGE])
def test_the_bound_is_reached_with_a_slow_clock(slow: int) -> None:
    """A clock that is slow brings the first charge nearer to the third by as much."""
    schedule = LateRegistry(period=10 * DAY, offset=12_345, slow=slow)
    end = schedule.grow_up()
    first = end - MAX_SKEW - 1
    schedule.show(first + slow, end - MAX_SKEW - 1, clock=first)
    schedule.show(first + slow, end, clock=first)
    third = end + schedule.period - MAX_SKEW
    schedule.show(third, end + schedule.period, clock=third)
    assert len(schedule.charged_at) == 3
    stretch = schedule.period + 1 - slow
    assert schedule.most_within(stretch) == most(schedule.period, stretch, slow) == 3
    schedule.check()


def test_a_period_as_short_as_the_age_with_a_clock_as_slow_as_the_age() -> None:
    """The worst that a policy permits while clocks are as good as it demands."""
    schedule = LateRegistry(period=AGE, offset=0, slow=AGE)
    assert most(AGE, AGE, slow=AGE) == 3
    end = schedule.grow_up()
    real = end + AGE - MAX_SKEW - 1
    schedule.show(real, end - MAX_SKEW - 1, clock=real - AGE)
    schedule.show(real, end, clock=real - AGE)
    schedule.show(real + 1, end + AGE, clock=real + 1)
    assert schedule.most_within(1) == 3
    schedule.check()


def test_a_period_of_a_day_beside_checkpoints_of_a_week_is_refused() -> None:
    """A device whose clock is as slow as that would be charged eight budgets at once.

    By the checkpoints' times alone, with a right clock, it would have been nine: a week and the
    five minutes that a checkpoint may be ahead touch nine days.
    """
    assert most(DAY, 0, slow=7 * DAY) == 8
    assert most(DAY, 0, slow=7 * DAY + MAX_SKEW) == 9
    for device, its in (("1d", "30d"), ("30d", "1d")):
        tree = policy({"a": analysis(period=its)}, period=device).model_dump(mode="json")
        tree["log"]["checkpoint_max_age"] = "7d"
        with pytest.raises(ValidationError, match="must be at least log"):
            Policy.model_validate(tree)


def test_a_clock_that_is_fast_gains_nothing() -> None:
    schedule = LateRegistry(period=AGE, offset=0)
    source = random.Random(7)
    real = START
    for _ in range(80):
        real += source.choice([0, 60, AGE // 4, AGE])
        low = max(schedule.shown, real - AGE)
        schedule.show(
            real, source.randint(low, max(low, real)), clock=real + source.choice([0, AGE])
        )
    assert len(schedule.charged_at) > 5
    schedule.check()


def test_no_clock_at_all_gains_a_budget_per_period_of_cosigned_time_and_no_more() -> None:
    """Clock and registry in one hand can save periods up; they can't make any."""
    for seed in range(10):
        source = random.Random(seed)
        schedule = LateRegistry(period=AGE + seed, offset=source.randrange(AGE))
        real, clock = START, START
        for _ in range(80):
            real += source.choice([0, 60, AGE // 3, AGE])
            clock = source.choice([clock, clock + AGE // 2, real, real - 30 * AGE])
            checkpoint = min(real, max(schedule.shown, clock + source.randint(-AGE, AGE)))
            schedule.show(real, checkpoint, clock=clock)
        began = (START + schedule.offset) // schedule.period
        periods = (schedule.shown + schedule.offset) // schedule.period - began + 1
        assert 3 < len(schedule.charged_at) <= periods


@pytest.mark.parametrize("period", [AGE, 3 * AGE, 10 * AGE])
def test_both_aggregators_together_make_no_periods(period: int) -> None:
    """They sign any time, and devices accept it within the age of their own clock, not beyond."""
    schedule = LateRegistry(period=period, offset=period // 3)
    real = START
    for _ in range(40):
        real += AGE // 4
        for ahead in (AGE, AGE + 1, *range(2 * AGE, 6 * AGE, AGE)):
            accepted = schedule.show(real, max(real, schedule.shown) + ahead, honest=False)
            assert not accepted or schedule.shown <= real + AGE
        schedule.show(real, real + AGE, honest=False)
        assert schedule.shown == real + AGE
    for stretch in (0, 1, period - 1, period, period + 1, 2 * period):
        assert schedule.most_within(stretch) <= most(period, stretch, AGE)
    assert len(schedule.charged_at) > 10 * AGE // period - 3


def test_a_new_ledger_is_silent_for_its_age_but_for_what_a_checkpoint_may_be_ahead() -> None:
    for late in (0, AGE // 2, AGE):
        schedule = LateRegistry(period=10 * DAY)
        schedule.show(START, START - late)
        ready = START + SILENCE - MAX_SKEW
        schedule.show(ready - 1, ready - 1 + MAX_SKEW)
        assert not schedule.charged_at
        schedule.show(ready, ready + MAX_SKEW)
        assert schedule.charged_at == [ready]
