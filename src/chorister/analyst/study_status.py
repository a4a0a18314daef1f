"""Why is there no result yet? How far open rounds are, and what became of earlier ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from rich import progress as rich_progress
from rich.console import Console

from chorister.analyst.rounds import Round, RoundState
from chorister.analyst.tables import Tabular, html_table, paragraphs
from chorister.canonical import decimal_text
from chorister.clock import utc_minute
from chorister.policy.values import duration_text

if TYPE_CHECKING:
    from chorister.analyst.study import Study


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """All that may be known about an open round."""

    waiting_for: str  # the step that is waiting and for what, in words
    filled: float = 0.0  # share of the minimum cohort, in tenths; 1 once it is reached
    reports: int | None = None  # about how many, once every group reached the minimum
    closes: int | None = None  # POSIX seconds: until when devices answer
    ends: int | None = None  # until when the result can be collected
    expected: int | None = None  # when the result is expected
    rejected: dict[str, dict[str, int]] = field(default_factory=dict)  # by aggregator and reason


OnProgress: TypeAlias = Callable[[Progress], None]
"""Called again and again while waiting for a cohort."""


@contextmanager
def progress_bar(study: str, round_: Round, show: bool | None) -> Iterator[OnProgress]:
    """Show how a cohort fills. By default, only where stderr is a terminal."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda _: None
        return
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.TextColumn("{task.fields[words]}"),
        rich_progress.TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with rich_progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"{study}, round {round_.number}", total=1.0, words="asked")
        yield lambda progress: bar.update(
            task, completed=progress.filled, words=progress.waiting_for
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenRound:
    """A round without a result."""

    number: int
    min_cohort: int
    progress: Progress

    def explain(self, now: int) -> str:
        progress = self.progress
        lines = [f"Round {self.number}: {progress.waiting_for}."]
        if progress.reports is not None:
            lines.append(f"About {progress.reports:,} reports are verified.")
        else:
            lines.append(
                f"{progress.filled:.0%} of the minimum cohort of {self.min_cohort:,} has answered; "
                "below the minimum, progress is shown in tenths only."
            )
        if progress.closes is not None:
            when = utc_minute(progress.closes)
            lines.append(
                f"Devices could answer until {when}."
                if now >= progress.closes
                else f"Devices can answer until {when}, for another "
                f"{duration_text(progress.closes - now)}."
            )
        if progress.expected is not None:
            lines.append(f"The result is expected at {utc_minute(progress.expected)}.")
        for who, reasons in progress.rejected.items():
            counted = ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())
            if counted:
                lines.append(f"Rejected by the {who}: {counted}.")
        return " ".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyStatus:
    """The open rounds of a study, or the outcome of its last one."""

    study: str
    now: int
    waiting: tuple[OpenRound, ...]
    rounds: int
    last: str  # the outcome of the last closed round

    @classmethod
    def of(cls, study: Study) -> StudyStatus:
        """Ask the fleet about every open round of a study."""
        rounds = study.rounds
        closed = [round_ for round_ in rounds if round_.state is not RoundState.ASKED]
        return cls(
            study=study.name,
            now=study.fleet.clock.now(),
            waiting=tuple(
                OpenRound(
                    number=round_.number,
                    min_cohort=round_.recipe.privacy.min_cohort,
                    progress=_progress(study, round_),
                )
                for round_ in rounds
                if round_.state is RoundState.ASKED
            ),
            rounds=len(rounds),
            last=f"Round {closed[-1].number}: {_outcome(closed[-1])}" if closed else "",
        )

    def explain(self) -> str:
        if not self.rounds:
            return f"Nothing has been asked in the study {self.study} yet."
        if not self.waiting:
            return f"No question is open. {self.last}"
        return "\n".join(round_.explain(self.now) for round_ in self.waiting)

    def __str__(self) -> str:
        return self.explain()

    def _repr_html_(self) -> str:
        return paragraphs(self.explain())


def _progress(study: Study, round_: Round) -> Progress:
    if round_.published:
        if round_.recipe.series is not None:
            now = study.fleet.clock.now()
            round_ = replace(round_, number_in_series=round_.recipe.window_open(now) or 0)
        return study.fleet.progress(round_)
    return Progress(
        waiting_for="not published yet: ask the same question again to publish it",
        closes=round_.recipe.closes,
    )


class History(tuple[Round, ...], Tabular):
    """The rounds of a study in order, shown as a table in notebooks."""

    __slots__ = ()

    def columns(self) -> dict[str, Any]:
        """One row per round."""
        return {
            "round": [round_.number for round_ in self],
            "asked": [utc_minute(round_.recipe.window.opens) for round_ in self],
            "state": [str(round_.state) for round_ in self],
            "bins": [round_.recipe.encoding.size for round_ in self],
            "epsilon": [decimal_text(round_.recipe.privacy.epsilon) for round_ in self],
            "reports": [0 if r.result is None else r.result.n_reports for r in self],
            "outcome": [_outcome(round_) for round_ in self],
        }

    def _repr_html_(self) -> str:
        return html_table(self.columns(), rows=1000)


def _outcome(round_: Round) -> str:
    if round_.recipe.series is not None and round_.number_in_series is None:
        done = "over" if round_.state is not RoundState.ASKED else "open"
        return f"a series of {round_.recipe.series.windows} windows, {done}: see study.tracks()"
    if round_.result is not None:
        return f"{round_.result.n_reports:,} reports, noise ±{round_.result.noise_sigma:,.1f}"
    if round_.state is RoundState.WITHDRAWN:
        return "cancelled"
    if round_.failure is not None:
        return str(round_.failure["message"])
    return "open"
