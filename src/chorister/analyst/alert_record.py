"""The record of a study's alerts: what rules found, and who still needs it. One file per study."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from chorister.analyst.alerts import Alert, AlertRule, WatchedShare
from chorister.analyst.json_files import require_format, write_atomically
from chorister.errors import ChoristerError, StudyError

_FORMAT: Final = "chorister-alerts-1"
_MAX_KEPT: Final = 1_000  # alerts in the record, besides those that are still to be delivered


class AlertRecord:
    """The alerts of one study, and which windows its rules have judged: one small file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._judged: dict[str, set[int]] = {}  # windows, by the rule's digest and the series
        self._alerts: dict[str, Alert] = {}
        if path.exists():
            self._read()

    @property
    def alerts(self) -> list[Alert]:
        """All alerts that are kept, the newest last."""
        return list(self._alerts.values())

    @property
    def pending(self) -> list[Alert]:
        """Alerts that a destination does not have yet."""
        return [alert for alert in self._alerts.values() if alert.pending]

    def to_judge(self, rule: AlertRule, series: int, windows: Iterable[int]) -> list[int]:
        """Which of these windows the rule has not judged yet."""
        return [each for each in windows if each not in self._judged.get(_key(rule, series), ())]

    def add(
        self, rule: AlertRule, series: int, windows: Sequence[int], alerts: Iterable[Alert]
    ) -> None:
        """Record what a rule found in these windows, all or nothing."""
        self._judged.setdefault(_key(rule, series), set()).update(windows)
        for alert in alerts:
            self._alerts.setdefault(alert.id, alert)
        self._write()

    def delivered(self, alert: Alert, destination: str, time: int) -> None:
        """Record that a destination has an alert."""
        done = {**self._alerts[alert.id].delivered, destination: time}
        self._change(alert, pending=self._others(alert, destination), delivered=done)

    def unclaimed(self, alert: Alert, destination: str, time: int) -> int:
        """Record that a process does not know a destination; return when one first did so."""
        found = self._alerts[alert.id]
        if destination not in found.unclaimed:
            self._change(alert, unclaimed={**found.unclaimed, destination: time})
        return self._alerts[alert.id].unclaimed[destination]

    def drop(self, alert: Alert, destination: str) -> None:
        """Forget a destination that no longer exists."""
        self._change(alert, pending=self._others(alert, destination))

    def _others(self, alert: Alert, destination: str) -> tuple[str, ...]:
        return tuple(name for name in self._alerts[alert.id].pending if name != destination)

    def _change(self, alert: Alert, **changes: Any) -> None:  # noqa: ANN401 (fields of an alert)
        """Change an alert, on disk as well or not at all."""
        before = self._alerts[alert.id]
        self._alerts[alert.id] = replace(before, **changes)
        try:
            self._write()
        except OSError:
            self._alerts[alert.id] = before
            raise

    def _write(self) -> None:
        settled = [key for key, alert in self._alerts.items() if not alert.pending]
        for key in settled[: max(0, len(settled) - _MAX_KEPT)]:
            del self._alerts[key]
        document = {
            "format": _FORMAT,
            "judged": {key: sorted(windows) for key, windows in self._judged.items()},
            "alerts": [asdict(alert) for alert in self._alerts.values()],
        }
        write_atomically(self.path, json.dumps(document, ensure_ascii=True).encode())

    def _read(self) -> None:
        try:
            tree: Any = json.loads(self.path.read_bytes())
            require_format(tree, _FORMAT)
            self._judged = {
                str(key): {int(window) for window in windows}
                for key, windows in tree["judged"].items()
            }
            found = [_alert_from_tree(each) for each in tree["alerts"]]
            self._alerts = {alert.id: alert for alert in found}
        except (
            OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
            ChoristerError,
        ) as error:  # fmt: skip
            raise StudyError(f"can't read {self.path} ({error}): restore it") from None


def _key(rule: AlertRule, series: int) -> str:
    return f"{rule.digest}/{series}"


def _alert_from_tree(tree: dict[str, Any]) -> Alert:
    rows = tuple(
        WatchedShare(
            labels={str(name): str(label) for name, label in row["labels"].items()},
            estimate=float(row["estimate"]),
            low=float(row["low"]),
            high=float(row["high"]),
        )
        for row in tree["rows"]
    )
    known: dict[str, Any] = {
        **{name: str(tree[name]) for name in ("id", "rule", "study", "text")},
        **{name: int(tree[name]) for name in ("series", "window", "opens", "closes", "more")},
    }
    return Alert(
        **known,
        rows=rows,
        pending=tuple(str(name) for name in tree["pending"]),
        delivered={str(name): int(time) for name, time in tree["delivered"].items()},
        # Absent from records of earlier versions.
        unclaimed={str(name): int(time) for name, time in tree.get("unclaimed", {}).items()},
    )
