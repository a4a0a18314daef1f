"""Alerts: rules about the levels and changes of a series, and what they find.

A rule judges each window once, when its result is there, by intervals that hold for the whole
series at once: so a series raises a false alarm only as often as its trend states. An alert has
shares and their intervals, rounded so that no count of reports follows from them. It is on disk,
with the destinations that still need it, before anything is sent: a crash repeats an alert, with
the same id, but never loses one.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, Self, TypeAlias

import numpy as np
from pydantic import Field, StringConstraints, ValidationError, model_validator

from chorister import key_files
from chorister.analyst.estimate import column_names
from chorister.analyst.trend import Trend
from chorister.canonical import FieldError, Int, Model, Number, first_error, sha256
from chorister.clock import utc_minute
from chorister.errors import InvalidInput
from chorister.policy.values import Identifier, Name, legible
from chorister.recipe import Recipe

if TYPE_CHECKING:
    from chorister.analyst.alert_record import AlertRecord

LOG: Final = "log"
"""The destination that is always there."""
_MAX_FINDINGS: Final = 20  # rows that one alert names
_MAX_LABEL: Final = 200  # characters
_DIGITS: Final = (
    3  # significant digits that an alert shows; more would reveal the number of reports
)
_WEBHOOK: Final = re.compile(
    r"(https://[A-Za-z0-9._\[\]:-]+|http://(?:localhost|127\.0\.0\.1|\[::1\])(?::\d{1,5})?)"
    r"(?:/[!-\"$-~]*)?"
)
_Text: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=2000, strict=True)
]


class AlertDestination(Model):
    """Where alerts go: a webhook or a file."""

    webhook: Annotated[_Text | None, Field(repr=False)] = None
    """A URL that accepts JSON in a POST, or `env:NAME`: such URLs are often secrets."""
    token: _Text | None = None
    """Sent to the webhook as a bearer token: a file of `chorister keygen token`, or `env:NAME`."""
    file: _Text | None = None
    """Instead: a file that gets one line of JSON per alert."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.webhook is None) == (self.file is None):
            raise FieldError("webhook", "a destination has either a webhook or a file")
        if self.file is not None and self.token is not None:
            raise FieldError("token", "only a webhook has a token")
        for name in ("webhook", "token"):
            if (value := getattr(self, name)) is not None:
                key_files.check_reference(name, value)
        if self.webhook is not None and not self.webhook.startswith("env:"):
            check_webhook(self.webhook)
        return self


def check_webhook(url: str) -> None:
    """Raise unless alerts may be sent to this URL; the message does not quote it."""
    if not _WEBHOOK.fullmatch(url):
        raise FieldError(
            "webhook",
            "must be an https:// URL without a user name or a fragment (http:// for this "
            "machine only), or env: and the name of a variable",
        )


class AlertRule(Model):
    """When to raise an alert about a series: a level outside its limits, or a change."""

    name: Name
    study: Identifier
    series: Annotated[Int, Field(ge=1)] | None = None
    """The number of the series in its study; all of them if left out."""
    where: Annotated[dict[_Text, _Text], Field(min_length=1, max_length=20)] | None = None
    """Only rows with these labels, by column; all rows if left out."""
    above: Number | None = None
    """Raise an alert if a share is surely above this: its whole interval is."""
    below: Number | None = None
    """Raise an alert if a share is surely below this."""
    change: Literal["previous", "first"] | None = None
    """Raise an alert if a share surely changed since the previous or the first window."""
    by: Number = Decimal(0)
    """Only changes that are surely larger than this."""
    false_alarms: Number = Decimal("0.05")
    """The largest chance of any false alarm of this rule, over the whole series."""
    to: Annotated[tuple[Name, ...], Field(min_length=1, max_length=10)] = (LOG,)
    """The destinations."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        level = self.above is not None or self.below is not None
        if level == (self.change is not None):
            raise FieldError("above", "a rule has limits (above, below) or a change, not both")
        for name in ("above", "below", "by"):
            share = getattr(self, name)
            if share is not None and not 0 <= share < 1:
                raise FieldError(name, "is a share of the reports, from 0 to below 1")
        if not 0 < self.false_alarms < 1:
            raise FieldError("false_alarms", "is a chance, such as 0.05")
        if level and self.by:
            raise FieldError("by", "belongs to a rule about a change")
        if self.above is not None and self.below is not None and self.below > self.above:
            raise FieldError("below", "is larger than above, so every share would be outside")
        return self

    @property
    def digest(self) -> str:
        """Changes with what the rule judges, but not with where its alerts go."""
        return sha256(self.model_copy(update={"to": (LOG,)}).canonical()).hex()

    def watches(self, study: str, series: int) -> bool:
        """Whether the rule is about this series."""
        return self.study == study and self.series in (None, series)


class AlertSettings(Model):
    """Rules and destinations: a TOML file, described in docs/howto/watch-a-series.md."""

    destinations: Annotated[dict[Name, AlertDestination], Field(max_length=50)] = Field(
        default_factory=dict
    )
    rules: Annotated[tuple[AlertRule, ...], Field(max_length=200)] = ()

    @model_validator(mode="after")
    def _known(self) -> Self:
        if LOG in self.destinations:
            raise FieldError("destinations", f"{LOG} is built in: choose another name")
        names = [rule.name for rule in self.rules]
        if len(set(names)) != len(names):
            raise FieldError("rules", "two of them have the same name")
        for rule in self.rules:
            for name in rule.to:
                if name != LOG and name not in self.destinations:
                    raise FieldError("rules", f"{rule.name}: there is no destination {name}")
        return self

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file; the paths of its destinations become absolute."""
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
            settings = cls.model_validate(values)
        except OSError as error:
            raise InvalidInput(f"can't read {path}: {error.strerror}") from None
        except ValidationError as error:
            where, why = first_error(error)
            raise InvalidInput(f"{path}: {where}: {why}") from None
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{path}: {error}") from None
        base = path.resolve().parent
        moved = {name: _moved(each, base) for name, each in settings.destinations.items()}
        return settings.model_copy(update={"destinations": moved})


def _moved(destination: AlertDestination, base: Path) -> AlertDestination:
    changes: dict[str, str] = {}
    if destination.file is not None:
        changes["file"] = str(base / destination.file)
    if destination.token is not None and not destination.token.startswith("env:"):
        changes["token"] = str(base / destination.token)
    return destination.model_copy(update=changes)


# --- Judging ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedShare:
    """A share in one window, or its change since another, with an interval for all at once."""

    labels: dict[str, str]  # by column
    estimate: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """What a rule found in one window."""

    id: str  # the same if it is delivered twice
    rule: str
    study: str
    series: int
    window: int  # from 0
    opens: int  # POSIX seconds
    closes: int
    text: str
    rows: tuple[WatchedShare, ...]  # the first of those outside
    more: int = 0  # further rows outside
    pending: tuple[str, ...] = ()  # destinations that do not have it yet
    delivered: dict[str, int] = field(default_factory=dict)  # when others got it
    unclaimed: dict[str, int] = field(default_factory=dict)
    """Pending destinations that some process does not know, and since when."""

    def message(self) -> bytes:
        """The alert as JSON, for destinations; `text` alone says it all."""
        tree = asdict(self)
        del tree["pending"], tree["delivered"], tree["unclaimed"]
        return json.dumps(tree, ensure_ascii=True).encode()


def judge_trend(record: AlertRecord, rule: AlertRule, series: int, trend: Trend) -> None:
    """Judge the windows of a series that a rule has not judged yet, and record what it finds."""
    windows = record.to_judge(rule, series, trend.windows)
    if rule.change is not None:
        # What a window is compared with must not change when an earlier one arrives.
        settled = set(trend.results) | set(trend.failed)
        windows = [each for each in windows if settled.issuperset(range(each))]
    if not windows:
        return
    _check_where(rule, series, trend)
    found = _shares(rule, trend, windows)
    alerts = [
        judge(rule, found.get(window, ()), series=series, window=window, times=trend.recipe)
        for window in windows
    ]
    record.add(rule, series, windows, [alert for alert in alerts if alert is not None])


def _check_where(rule: AlertRule, series: int, trend: Trend) -> None:
    """Raise if no row of the series can ever have the labels of a rule: it would stay silent."""
    names = column_names(trend.recipe)
    cells = [
        group
        for result in trend.results.values()
        for group in (*(part.group for part in result.parts), *result.missing)
    ]
    known = {name: {group[i] for group in cells} for i, name in enumerate(names)
             if name not in trend.labels}  # fmt: skip
    known |= {name: set(labels) for name, labels in trend.labels.items()}
    for name, label in (rule.where or {}).items():
        there = known.get(name)
        if there is None or label not in there:
            what = f"column {name!r}" if there is None else f"{name} {label!r}"
            some = ", ".join(map(_label, sorted(names if there is None else there)[:20]))
            raise InvalidInput(
                f"the rule {rule.name} has no effect: series {series} has no {what}; it has: "
                f"{some}. Correct `where`, or say with `series` which one is meant"
            )


def _shares(rule: AlertRule, trend: Trend, windows: Sequence[int]) -> dict[int, list[WatchedShare]]:
    """The levels of these windows, or their changes."""
    chance = float(rule.false_alarms)
    if rule.change is None:
        columns, at, value = trend.with_confidence(1.0 - chance).columns(), "window", "estimate"
    else:
        changes = trend.changes(rule.change, false_alarms=chance)
        columns, at, value = changes.columns(), "after", "change"
    names = column_names(trend.recipe)
    least = 0.0 if rule.change is None else -1.0  # a share is not negative, a change may be
    found: dict[int, list[WatchedShare]] = {}
    for i in np.flatnonzero(np.isin(columns[at], windows)).tolist():
        found.setdefault(int(columns[at][i]), []).append(
            WatchedShare(
                labels={name: columns[name][i] for name in names},
                estimate=float(columns[value][i]),
                low=max(least, float(columns["ci_low"][i])),
                high=min(1.0, float(columns["ci_high"][i])),
            )
        )
    return found


def judge(
    rule: AlertRule, shares: Iterable[WatchedShare], *, series: int, window: int, times: Recipe
) -> Alert | None:
    """Return the alert that a rule raises about a window, if it does.

    `shares` are the levels of the window or, for a rule about changes, the differences.
    """
    found = [each for each in shares if _fits(rule, each) and _outside(rule, each)]
    if not found:
        return None
    identity = [rule.digest, rule.study, series, window]
    period = times.window_at(window)
    when = f"window {window}, from {utc_minute(period.opens)} to {utc_minute(period.closes)}"
    shown = [_described(rule, each) for each in found[:_MAX_FINDINGS]]
    more = len(found) - len(shown)
    rest = f"; and {more:,} more rows" if more else ""
    return Alert(
        id=sha256(json.dumps(identity).encode()).hex()[:32],
        rule=rule.name,
        study=rule.study,
        series=series,
        window=window,
        opens=period.opens,
        closes=period.closes,
        text=f"{rule.name}: {rule.study}, series {series}, {when}: {'; '.join(shown)}{rest}",
        rows=tuple(_shortened(each) for each in found[:_MAX_FINDINGS]),
        more=more,
        pending=tuple(dict.fromkeys(rule.to)),
    )


def _fits(rule: AlertRule, share: WatchedShare) -> bool:
    return all(share.labels.get(name) == label for name, label in (rule.where or {}).items())


def _outside(rule: AlertRule, share: WatchedShare) -> bool:
    if rule.change is not None:
        return share.low > float(rule.by) or share.high < -float(rule.by)
    return _above(rule, share) or (rule.below is not None and share.high < float(rule.below))


def _above(rule: AlertRule, share: WatchedShare) -> bool:
    return rule.above is not None and share.low > float(rule.above)


def _described(rule: AlertRule, exact: WatchedShare) -> str:
    share = _shortened(exact)
    row = ", ".join(f"{name} {label}" for name, label in share.labels.items())
    if rule.change is not None:
        since = "the previous window" if rule.change == "previous" else "the first window"
        points = f"({100 * share.low:+.3g} to {100 * share.high:+.3g})"
        return (
            f"{row} changed by {100 * share.estimate:+.3g} percentage points {points} since {since}"
        )
    limit, side = (rule.above, "above") if _above(rule, exact) else (rule.below, "below")
    interval = f"({100 * share.low:.3g}% to {100 * share.high:.3g}%)"
    return f"{row} is {100 * share.estimate:.3g}% {interval}, {side} {100 * float(limit or 0):.3g}%"


def _label(text: str) -> str:
    return legible(text if len(text) <= _MAX_LABEL else f"{text[:_MAX_LABEL]}…")


def _shortened(share: WatchedShare) -> WatchedShare:
    return WatchedShare(
        labels={name: _label(text) for name, text in share.labels.items()},
        estimate=_rounded(share.estimate, ROUND_HALF_EVEN),
        low=_rounded(share.low, ROUND_FLOOR),  # outward, so that the interval still holds
        high=_rounded(share.high, ROUND_CEILING),
    )


def _rounded(value: float, rounding: str) -> float:
    return float(Context(prec=_DIGITS, rounding=rounding).create_decimal(repr(value)))
