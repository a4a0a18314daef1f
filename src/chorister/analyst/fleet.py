"""The interface that a live fleet and a rehearsed one share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chorister.analyst.estimate import Part
from chorister.analyst.rounds import Archive, Round
from chorister.analyst.study_status import OnProgress, Progress
from chorister.clock import Clock
from chorister.errors import InvalidInput
from chorister.policy import Policy
from chorister.recipe import Recipe

if TYPE_CHECKING:
    from chorister.analyst.study import Study
    from chorister.transparency.client import HTTPSource


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleasedSums:
    """What the aggregators released for one recipe."""

    parts: tuple[Part, ...]  # of the groups that reached the minimum cohort
    missing: tuple[tuple[str, ...], ...] = ()  # the other groups


@dataclass(frozen=True, kw_only=True, slots=True)
class OthersQuestions:
    """What other analysts, or we from another folder, have asked the same devices."""

    recipes: tuple[Recipe, ...] = ()  # those that devices can have answered
    problem: str = ""  # why there may be more than these, if that is so


class Fleet(ABC):
    """Devices, aggregators and registry, as a study uses them."""

    policy: Policy
    """What the analyst believes the devices allow."""
    clock: Clock
    archive: Archive
    identity: str
    """Which fleet studies on disk belong to."""
    devices: int | None
    """How many devices may answer, if known."""
    margin: float
    """The share of the expected reports that a minimum cohort relies on."""

    def study(self, name: str, *, analysis: str | None = None) -> Study:
        """Begin a study, or resume the one of this name."""
        from chorister.analyst.study import Study

        if analysis is None:
            if len(self.policy.analyses) != 1:
                raise InvalidInput(f"choose an analysis: {', '.join(self.policy.analyses)}")
            analysis = next(iter(self.policy.analyses))
        return Study(self, name, analysis)

    def log_source(self) -> HTTPSource | None:
        """Open the public log for reading; the caller closes it. A rehearsal has none."""
        return None

    def others(self) -> OthersQuestions:
        """What is in the public log but not in our archive. A rehearsal has no others."""
        return OthersQuestions()

    def is_over(self, round_: Round) -> bool:
        """Whether the window of a round has closed, so that its result can be collected."""
        return self.clock.now() >= round_.window.closes

    def pause(self, seconds: float) -> None:
        """Wait, between two looks at what has arrived."""
        time.sleep(seconds)

    @abstractmethod
    def collector(self, analysis: str) -> str:
        """Return the digest of the HPKE configuration that results are sealed to."""

    @abstractmethod
    def publish(self, round_: Round) -> None:
        """Publish the round's recipe to the devices. Doing so twice changes nothing."""

    @abstractmethod
    def withdraw(self, round_: Round) -> None:
        """Tell the devices to stop answering. Doing so twice changes nothing.

        Also for a question whose publication may have failed.
        """

    @abstractmethod
    def progress(self, round_: Round) -> Progress:
        """Report how far an open round has come."""

    @abstractmethod
    def collect(
        self, round_: Round, on_progress: OnProgress, save: Callable[[Round], None]
    ) -> ReleasedSums:
        """Wait for the result. `save` stores whatever a restart needs to resume."""

    @abstractmethod
    def acknowledge(self, round_: Round) -> None:
        """Confirm that the result is saved, so that the aggregators may delete it."""
