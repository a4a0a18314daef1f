"""Why is there no result yet? And what came of earlier rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from chorister.analyst.fleet import Progress
from chorister.analyst.rounds import Round, State
from chorister.analyst.tables import html_table, to_polars
from chorister.canonical import decimal_text
from chorister.policy.values import duration_text

if TYPE_CHECKING:
    import polars

    from chorister.analyst.study import Study

__all__ = ["History", "OpenRound", "Status", "history_of", "status_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenRound:
    """A round without a result."""

    number: int
    min_cohort: int
    progress: Progress

    def explain(self, now: int) -> str:
        """In words."""
        progress = self.progress
        lines = [f"Round {self.number}: {progress.waiting_for}."]
        if progress.reports is not None:
            lines.append(f"About {progress.reports:,} reports are verified.")
        else:
            lines.append(
                f"{progress.filled:.0%} of the minimum cohort ({self.min_cohort:,}) is there; "
                "below it progress is shown in tenths only."
            )
        if progress.closes is not None:
            lines.append(_until("Devices answer", progress.closes, now))
        if progress.expected is not None:
            lines.append(f"The result is expected at {_time(progress.expected)}.")
        for who, reasons in progress.rejected.items():
            counted = ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())
            if counted:
                lines.append(f"Rejected by the {who}: {counted}.")
        return " ".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Of a whole study."""

    study: str
    now: int
    waiting: tuple[OpenRound, ...]
    rounds: int
    last: str  # what became of the last round that is not open

    def explain(self) -> str:
        """In words."""
        if not self.rounds:
            return f"Nothing was asked in the study {self.study} yet."
        if not self.waiting:
            return f"No question is open. {self.last}"
        return "\n".join(round_.explain(self.now) for round_ in self.waiting)

    def __str__(self) -> str:
        return self.explain()

    def _repr_html_(self) -> str:
        from html import escape

        return "".join(f"<p>{escape(line)}</p>" for line in self.explain().split("\n"))


class History(tuple[Round, ...]):
    """Rounds in order, with a table for notebooks."""

    __slots__ = ()

    def columns(self) -> dict[str, Any]:
        """One row a round."""
        return {
            "round": [round_.number for round_ in self],
            "asked": [_time(round_.recipe.window.opens) for round_ in self],
            "state": [str(round_.state) for round_ in self],
            "bins": [round_.recipe.encoding.size for round_ in self],
            "epsilon": [decimal_text(round_.recipe.privacy.epsilon) for round_ in self],
            "reports": [0 if r.result is None else r.result.n_reports for r in self],
            "outcome": [_outcome(round_) for round_ in self],
        }

    def to_polars(self) -> polars.DataFrame:
        """As a polars frame."""
        return to_polars(self.columns())

    def _repr_html_(self) -> str:
        return html_table(self.columns(), rows=1000)


def history_of(rounds: Sequence[Round]) -> History:
    """The history of a study."""
    return History(rounds)


def status_of(study: Study) -> Status:
    """The status of a study, asking its fleet about every open round."""
    rounds = study.rounds
    waiting = []
    for round_ in rounds:
        if round_.state is not State.ASKED:
            continue
        if round_.published:
            progress = study.fleet.progress(round_)
        else:
            progress = Progress(
                waiting_for="not published yet: ask it again and it will be",
                closes=round_.recipe.window.closes,
            )
        waiting.append(
            OpenRound(
                number=round_.number,
                min_cohort=round_.recipe.privacy.min_cohort,
                progress=progress,
            )
        )
    closed = [round_ for round_ in rounds if round_.state is not State.ASKED]
    last = f"Round {closed[-1].number}: {_outcome(closed[-1])}" if closed else ""
    return Status(
        study=study.name,
        now=study.fleet.clock.now(),
        waiting=tuple(waiting),
        rounds=len(rounds),
        last=last,
    )


def _outcome(round_: Round) -> str:
    if round_.result is not None:
        return f"{round_.result.n_reports:,} reports, noise ±{round_.result.noise_sigma:,.1f}"
    if round_.state is State.WITHDRAWN:
        return "cancelled"
    if round_.failure is not None:
        return str(round_.failure["message"])
    return "open"


def _until(what: str, end: int, now: int) -> str:
    if now >= end:
        return f"{what} no more since {_time(end)}."
    return f"{what} until {_time(end)}, for another {duration_text(end - now)}."


def _time(posix: int) -> str:
    return datetime.fromtimestamp(posix, UTC).strftime("%Y-%m-%d %H:%M UTC")
