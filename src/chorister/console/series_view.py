"""A series as the pages of the console show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chorister.analyst.alerts import Alert
from chorister.analyst.series import Track, TrackedWindow, WindowState
from chorister.analyst.trend import Trend
from chorister.analyst.unattended import Pause, alert_record, pauses
from chorister.console.workspace import StudyView, Workspace

_TO_COME = (WindowState.TO_COME, WindowState.OPEN)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesView:
    """A series as its page shows it."""

    track: Track
    windows: tuple[TrackedWindow, ...]
    trend: Trend
    paused: Pause | None
    stopped: str  # why the last attempt to collect it failed
    alerts: list[Alert]  # the newest first

    @classmethod
    def of(cls, workspace: Workspace, view: StudyView, track: Track) -> SeriesView:
        record = alert_record(view.study)
        collector = workspace.collectors[view.connection.name]
        return cls(
            track=track,
            windows=track.windows,
            trend=track.trend,
            paused=pauses(view.study).get(track.number),
            stopped=collector.error(view.study.name, "series", track.number),
            alerts=[each for each in reversed(record.alerts) if each.series == track.number],
        )

    @classmethod
    def all_of(cls, workspace: Workspace, view: StudyView) -> list[SeriesView]:
        """All series of a study, the newest first."""
        return [cls.of(workspace, view, track) for track in reversed(view.study.tracks())]

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Changes whenever there is something new to show."""
        states = tuple(each.state for each in self.windows)
        return self.track.number, states, self.paused, self.stopped, len(self.alerts)

    @property
    def collected(self) -> int:
        return len(self.trend.results)

    @property
    def to_come(self) -> list[TrackedWindow]:
        """Windows that devices can still answer."""
        return [each for each in self.windows if each.state in _TO_COME]

    @property
    def waiting(self) -> list[TrackedWindow]:
        """Windows that are closed and not collected yet."""
        return [each for each in self.windows if each.state is WindowState.CLOSED]

    @property
    def text(self) -> str:
        """The chart in words."""
        latest = max(self.trend.results)
        columns = self.trend.columns()
        rows = [i for i, window in enumerate(columns["window"].tolist()) if window == latest]
        rows = sorted(rows, key=lambda i: -columns["estimate"][i])[:5]
        names = [name for name in columns if name in self.trend.labels]
        listed = "; ".join(
            f"{' · '.join(columns[name][i] for name in names)}: {columns['estimate'][i]:.1%}"
            for i in rows
        )
        return (
            f"Shares of devices over {self.collected} of {self.trend.planned} windows; in window "
            f"{latest} the largest are {listed}"
        )
