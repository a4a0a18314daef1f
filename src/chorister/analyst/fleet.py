"""What a study talks to: a live fleet or a rehearsed one, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from chorister.analyst.ledgers import Ledgers
from chorister.analyst.rounds import Archive, Round, State
from chorister.analyst.view import Part
from chorister.clock import Clock
from chorister.policy import Policy
from chorister.recipe import Recipe

__all__ = ["Fleet", "Gathered", "Progress", "Tell", "expected_reports", "foreseen"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """What the aggregators released for one recipe."""

    parts: tuple[Part, ...]  # of the groups that reached the minimum cohort
    missing: tuple[tuple[str, ...], ...] = ()  # the others


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Why there is no result yet: what is known of an open round, and nothing finer."""

    waiting_for: str  # the step that waits, and for what, in words
    filled: float = 0.0  # of the minimum cohort, in tenths; 1 once it is reached
    reports: int | None = None  # once every group reached the minimum: about how many
    closes: int | None = None  # POSIX seconds: until when devices answer
    ends: int | None = None  # until when the result can be collected
    expected: int | None = None  # when the result is expected
    rejected: dict[str, dict[str, int]] = field(default_factory=dict)  # by aggregator and reason


Tell = Callable[[Progress], None]
"""Called while waiting, so that a progress bar can show how the cohort fills."""


class Fleet(Protocol):
    """Devices, aggregators and registry, as an analyst meets them."""

    policy: Policy
    """What the analyst believes the devices to allow."""
    clock: Clock
    archive: Archive
    identity: str
    """What studies on disk belong to."""
    devices: int | None
    """How many devices may answer, if anybody knows."""
    margin: float
    """The share of the expected reports that a minimum cohort relies on."""

    def collector(self, analysis: str) -> str:
        """Digest of the HPKE configuration that results are sealed to."""
        ...

    def publish(self, round_: Round) -> None:
        """Let the devices know; may be repeated."""
        ...

    def gather(self, round_: Round, tell: Tell, keep: Callable[[Round], None]) -> Gathered:
        """Wait for the result; `keep` stores what is needed to go on after a crash."""
        ...

    def settle(self, round_: Round) -> None:
        """The result is kept: the aggregators may forget it."""
        ...

    def progress(self, round_: Round) -> Progress:
        """How far an open round is."""
        ...

    def withdraw(self, round_: Round) -> None:
        """Let the devices know that a question is asked no more; may be repeated."""
        ...


def foreseen(fleet: Fleet, *, withdrawn: bool = False) -> Ledgers[float]:
    """The ledgers to expect after all rounds asked so far, weighted by shares of the fleet.

    Who answered a question before it was taken back is not known: nobody, or with `withdrawn`
    everybody who could.
    """
    ledgers: Ledgers[float] = Ledgers(policy=fleet.policy, fresh=1.0)
    now = fleet.clock.now()
    for round_ in fleet.archive.all_rounds():
        counts = round_.published and (withdrawn or round_.state is not State.WITHDRAWN)
        if counts and not _renewed(round_.recipe, fleet.policy, now):
            answered(ledgers, round_.recipe, most=_most(round_, fleet.devices))
    return ledgers


def _most(round_: Round, devices: int | None) -> float:
    """The largest share of the fleet that answered: a target ends a recipe before all did."""
    if round_.target is None or devices is None:
        return 1.0
    parts = len(round_.result.parts) if round_.result is not None else 1
    reports = round_.result.n_reports if round_.result is not None else round_.target * parts
    return min(1.0, reports / devices)


def answered(ledgers: Ledgers[float], recipe: Recipe, *, most: float = 1.0) -> float:
    """Let a recipe be answered; returns the share of the fleet that does, at most `most`."""
    chance = float(recipe.participation.probability)
    willing = sum(
        weight
        for ledger, weight in ledgers.classes.values()
        if ledgers.would_answer(ledger, recipe)
    )
    if chance * willing > most:
        chance = most / willing
    shares = ledgers.answer(
        recipe,
        take=lambda weight: (weight * chance, weight * (1.0 - chance)),
        join=lambda one, other: one + other,
    )
    return sum(shares)


def expected_reports(fleet: Fleet, recipe: Recipe) -> float | None:
    """How many reports to expect, with the budgets as they are; None if nobody knows."""
    share = answered(foreseen(fleet), recipe)
    return None if fleet.devices is None else share * fleet.devices


def _renewed(recipe: Recipe, policy: Policy, now: int) -> bool:
    """Whether what a recipe cost counts no more on any device."""
    analysis = policy.analyses.get(recipe.analysis)
    periods = [policy.device.period, analysis.budget.period if analysis is not None else None]
    if any(period is None for period in periods):
        return False
    return now >= recipe.window.closes + max(period for period in periods if period is not None)
