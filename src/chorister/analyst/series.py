"""Tracking a question over many windows: planned, asked once, collected as windows close.

`study.track` plans a series and says what it costs; `ask` publishes it, once, as one recipe that
devices answer in windows of their own choice. `Track.collect` collects every window that is over:
it may run as often as you like, in any process, and a crash loses nothing, because each window is
stored in the study when it arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from chorister.analyst.arguments import as_count, as_seconds, valid_input
from chorister.analyst.question import Question
from chorister.analyst.rounds import Round, RoundState
from chorister.analyst.study_status import progress_bar
from chorister.analyst.tables import Tabular, html_table, paragraphs
from chorister.analyst.track_cost import TrackCost, price
from chorister.analyst.trend import Trend
from chorister.clock import utc_minute
from chorister.encoding import AnyFeature
from chorister.errors import ChoristerError, InvalidInput, ResultPending, StudyBusy
from chorister.recipe import Recipe, Series, Window

if TYPE_CHECKING:
    from chorister.analyst.study import Study

_POLL_SECONDS: Final = 60.0  # at most, between two looks at the clock
_RETRY_SECONDS: Final = 5.0  # until a window that could not be collected is tried again


class WindowState(StrEnum):
    """How far one window of a series has come."""

    TO_COME = "to come"
    OPEN = "open"
    CLOSED = "closed"  # and not collected yet
    COLLECTED = "collected"
    FAILED = "failed"
    ENDED = "ended"  # the series was ended before this window closed


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedWindow:
    """One window of a series."""

    number: int  # from 0
    window: Window
    state: WindowState
    reports: int | None  # verified, once it is collected
    why: str  # why it has no result, if it failed


@dataclass(frozen=True, kw_only=True, eq=False)
class TrackPlan:
    """A series that is planned but not asked."""

    question: Question
    """The question of every window."""

    @property
    def series(self) -> Series:
        """How many windows, how far apart, and how many of them one device answers."""
        if self.question.series is None:
            raise InvalidInput("this question has one window: plan a series with `study.track`")
        return self.question.series

    def cost(
        self,
        *,
        reports: int | None = None,
        level: float = 0.1,
        chance: float = 0.8,
        false_alarms: float = 0.05,
    ) -> TrackCost:
        """Say what the series would spend, how exact it would be, and which shift it would find.

        `reports` is how many to expect in each window, for a fleet of unknown size. The errors are
        stated for a bin that the share `level` of the devices holds; the shift is one from there
        that is found with the given `chance`, at this rate of `false_alarms` over the whole series.
        """
        return price(
            self.question, reports=reports, level=level, chance=chance, false_alarms=false_alarms
        )

    def ask(self) -> Track:
        """Publish the series, once; a series that the study has asked before is only looked up."""
        round_ = self.question.study.post(self.question)
        return Track(self.question.study, round_.number)

    def run(self, *, bar: bool | None = None) -> Trend:
        """Ask, and wait until the last window is collected."""
        return self.ask().wait(bar=bar)

    def again(self) -> TrackPlan:
        """Return a copy that a study asks again, where it would only look up the old one."""
        return replace(self, question=self.question.again())

    def _repr_html_(self) -> str:
        try:
            return self.cost()._repr_html_()
        except ChoristerError as error:
            return paragraphs(f"This series can't be asked: {error}.")


class Track(Tabular):
    """A series that was asked: what has arrived so far, and its future windows."""

    def __init__(self, study: Study, number: int) -> None:
        self.study = study
        self.number = number
        """Of its round in the study."""
        _ = self.round  # raises if there is none

    @property
    def round(self) -> Round:
        """The round that asked it, as stored."""
        for round_ in self.study.rounds:
            if round_.number == self.number and round_.recipe.series is not None:
                return round_
        raise InvalidInput(f"round {self.number} of the study {self.study.name!r} is not a series")

    @property
    def recipe(self) -> Recipe:
        """The question exactly as it was asked."""
        return self.round.recipe

    @property
    def windows(self) -> tuple[TrackedWindow, ...]:
        """All windows of the series, in order."""
        round_, now = self.round, self.study.fleet.clock.now()
        stored = self.study.fleet.archive.windows(self.study.name, self.number)
        return tuple(
            _tracked(self._record(round_, stored, number), ended_at(round_), now)
            for number in range(round_.recipe.window_count)
        )

    @property
    def finished(self) -> bool:
        """Whether every window has an outcome."""
        return not any(
            each.state in (WindowState.TO_COME, WindowState.OPEN, WindowState.CLOSED)
            for each in self.windows
        )

    @property
    def next_collection(self) -> int | None:
        """When the next window without a result closes, in POSIX seconds; None: none is left."""
        waiting = (WindowState.TO_COME, WindowState.OPEN, WindowState.CLOSED)
        return next((each.window.closes for each in self.windows if each.state in waiting), None)

    @property
    def due(self) -> bool:
        """Whether a window is over and has no outcome yet."""
        round_ = self.round
        stored = self.study.fleet.archive.windows(self.study.name, self.number)
        records = (self._record(round_, stored, k) for k in range(round_.recipe.window_count))
        return round_.published and any(
            self._collectable(each, ended_at(round_)) for each in records
        )

    @property
    def trend(self) -> Trend:
        """What has been collected so far."""
        stored = self.study.fleet.archive.windows(self.study.name, self.number)
        return Trend(
            recipe=self.recipe,
            results={
                number: each.result for number, each in stored.items() if each.result is not None
            },
            failed={
                number: str((each.failure or {}).get("message", "it failed"))
                for number, each in stored.items()
                if each.state is RoundState.FAILED
            },
        )

    def collect(self, *, up_to: int | None = None, bar: bool | None = None) -> Trend:
        """Collect every window that is over and has no outcome yet; return all that there is.

        Running it again, or in another process, changes nothing that was collected. A window whose
        cohort stays too small, or that nobody collected in time, is stored as failed. With `up_to`
        only that many windows from the first on: a rehearsal has no time, so all are over there.

        Raises `ResultPending`, after all other windows, if the aggregators have not released one
        yet: collect again later.
        """
        fleet, name = self.study.fleet, self.study.name
        last = as_count(up_to, "up_to")
        pending: ResultPending | None = None
        with fleet.archive.waiting(name, self.number):
            round_ = self.round
            if round_.published:
                stored = fleet.archive.windows(name, self.number)
                count = round_.recipe.window_count
                for number in range(count if last is None else min(last, count)):
                    record = self._record(round_, stored, number)
                    if self._collectable(record, ended_at(round_)):
                        try:
                            with progress_bar(name, record, bar) as on_progress:
                                self.study.collect_round(record, on_progress)
                        except ResultPending as error:
                            pending = pending or error
            self._close()
        if pending is not None:
            raise pending
        return self.trend

    def wait(self, *, bar: bool | None = None) -> Trend:
        """Collect windows as they close, until the last one.

        Another process may collect the same series: what it collects is read from the study.
        """
        fleet = self.study.fleet
        while True:
            try:
                found = self.collect(bar=bar)
            except (ResultPending, StudyBusy):
                fleet.pause(_RETRY_SECONDS)
                continue
            when = self.next_collection
            if when is None:
                return found
            fleet.pause(max(1.0, min(_POLL_SECONDS, when - fleet.clock.now())))

    def end(self) -> None:
        """Withdraw the remaining windows: devices stop answering. Collected results stay.

        Windows that have closed before can still be collected.
        """
        with self.study.fleet.archive.asking():
            round_ = self.round
            if round_.state is RoundState.ASKED:
                withdraw(self.study, round_)

    def _record(self, round_: Round, stored: Mapping[int, Round], number: int) -> Round:
        """What is stored of a window, or what it begins as."""
        fresh = replace(
            round_, number_in_series=number, state=RoundState.ASKED, failure=None, handles={}
        )
        return stored.get(number, fresh)

    def _collectable(self, record: Round, ended: int | None) -> bool:
        if record.state is not RoundState.ASKED or not self.study.fleet.is_over(record):
            return False
        return ended is None or record.window.closes <= ended

    def _close(self) -> None:
        """Note that a series is over, once every window has its outcome."""
        with self.study.fleet.archive.asking():
            round_ = self.round
            stored = self.study.fleet.archive.windows(self.study.name, self.number).values()
            done = sum(each.state is not RoundState.ASKED for each in stored)
            if round_.state is RoundState.ASKED and done == round_.recipe.window_count:
                over = replace(round_, state=RoundState.COLLECTED)
                self.study.fleet.archive.write(self.study.name, over)

    def columns(self) -> dict[str, Any]:
        """One row per window: number, opens, closes, state, reports, why it has no result."""
        windows = self.windows
        return {
            "window": [each.number for each in windows],
            "opens": [utc_minute(each.window.opens) for each in windows],
            "closes": [utc_minute(each.window.closes) for each in windows],
            "state": [str(each.state) for each in windows],
            "reports": [each.reports or 0 for each in windows],
            "why": [each.why for each in windows],
        }

    def __repr__(self) -> str:
        states = [each.state for each in self.windows]
        done = states.count(WindowState.COLLECTED)
        return f"<Track {self.recipe.id}: {done} of {len(states)} windows collected>"

    def _repr_html_(self) -> str:
        return f"<div>{self.trend._repr_html_()}{html_table(self.columns(), rows=1000)}</div>"


def withdraw(study: Study, round_: Round) -> None:
    """Withdraw an open question or series, and store that; call it inside `Archive.asking`."""
    fleet = study.fleet
    fleet.withdraw(round_)
    ended = None
    if round_.recipe.series is not None:
        ended = {"error": "Ended", "message": "the series was ended", "at": fleet.clock.now()}
    withdrawn = replace(round_, state=RoundState.WITHDRAWN, failure=ended)
    fleet.archive.write(study.name, withdrawn)


def ended_at(round_: Round) -> int | None:
    """When a series was ended before its time, in POSIX seconds; None if it was not."""
    if round_.state is not RoundState.WITHDRAWN:
        return None
    return int((round_.failure or {}).get("at", 0))


def _tracked(record: Round, ended: int | None, now: int) -> TrackedWindow:
    window = record.window
    if record.result is not None:
        state = WindowState.COLLECTED
    elif record.state is RoundState.FAILED:
        state = WindowState.FAILED
    elif ended is not None and ended < window.closes:
        state = WindowState.ENDED
    elif now < window.opens:
        state = WindowState.TO_COME
    else:
        state = WindowState.OPEN if now < window.closes else WindowState.CLOSED
    return TrackedWindow(
        number=record.number_in_series or 0,
        window=window,
        state=state,
        reports=None if record.result is None else record.result.n_reports,
        why=str((record.failure or {}).get("message", "")),
    )


def track(
    study: Study,
    features: AnyFeature | Sequence[AnyFeature],
    *,
    every: int | str = "1w",
    windows: int = 26,
    answers_per_device: int = 1,
    period: int | str | Mapping[str, int | str] | None = "every",
    window: int | str | None = None,
    **options: Any,  # noqa: ANN401 (whatever `histogram` takes)
) -> TrackPlan:
    """Plan to ask the same in many windows, one `every` so often. Nothing is asked or spent yet.

    Each device draws at random, once, which of the windows it answers: `answers_per_device` of
    them, each charged when its window opens. By default only events of the time since the previous
    window count (`period="every"`); give another time, such as "7d" (for all streams, or by
    stream), or None for all events that a device keeps. `window` is how long devices can answer;
    by default, until the next window opens. The other options are those of `histogram`.
    """
    seconds = as_seconds(every, "every")
    with valid_input():
        series = Series(
            windows=as_count(windows, "windows") or 0,
            every=seconds,
            answers=as_count(answers_per_device, "answers_per_device") or 0,
        )
    limits = study.terms.window
    question = study.histogram(
        features,
        series=series,
        period=seconds if period == "every" else period,
        window=min(seconds, limits.longest) if window is None else window,
        **options,
    )
    if question.participation.once_per_study and series.answers > 1:
        raise InvalidInput(
            "devices that answer once per study can't answer several windows: leave out "
            "`participation`, or set answers_per_device=1",
            field="answers_per_device",
        )
    return TrackPlan(question=question)


def tracks(study: Study) -> list[Track]:
    """All series that the study has asked, in order."""
    return [
        Track(study, round_.number) for round_ in study.rounds if round_.recipe.series is not None
    ]
