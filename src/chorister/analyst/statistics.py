"""Mean, total, rate and quantiles: the statistics people ask for first, each one question.

All are of *values in a range*, and a value beyond an end counts as that end; how many did is part
of the answer. Where a device has several rows, each of them weighs as much as the others of that
device, and every device with a value weighs the same.

**A mean over few bins.** A histogram of many cells adds up the noise of all of them, and one of few
cells does not say where in a cell its values lie. So the query rounds at random instead: it returns
every row of a device `steps` times, and a value that lies at the part p of the way between two
levels is put on the upper one in the share p of these rows. A device reports one row drawn
uniformly, as it always does, so the mean of the levels is the mean of the values: three to five
levels are enough, and nothing is assumed about the distribution. Where `steps` rows can't express p
exactly, the interval is wider by what rounding can do. `benchmarks/coverage_statistics.py` measures
how often intervals hold.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from chorister.analyst import report
from chorister.analyst.algorithms.density_bands import distribution_band
from chorister.analyst.estimate import Floats, column_names, part_columns
from chorister.analyst.result import Result
from chorister.analyst.statistic_bounds import BinCounts, Bounds
from chorister.analyst.tables import Tabular, html_table, number_text, paragraphs
from chorister.canonical import decimal_text
from chorister.encoding import Intervals
from chorister.errors import InvalidInput

StatisticKind: TypeAlias = Literal["mean", "total", "rate", "quantiles"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StatisticRange:
    """The range of the values, and how they are rounded to levels."""

    low: Decimal
    high: Decimal
    gaps: int = 4  # between levels
    steps: int = 64  # rows per value
    exact: bool = False  # whether rounding at random has no error

    @property
    def width(self) -> float:
        return float(self.high - self.low)

    @property
    def slack(self) -> float:
        """How far rounding can move a mean."""
        return 0.0 if self.exact else self.width / (2 * self.gaps * self.steps)


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistic(Tabular):
    """One statistic, with a row per group (and per share, for quantiles)."""

    kind: StatisticKind
    subject: str  # a column, or the condition of a rate
    result: Result
    """The histogram that it was computed from."""
    scale: StatisticRange | None  # of the values; a rate has none
    several: bool  # whether a device may have drawn its row among several
    confidence: float = 0.95
    shares: tuple[float, ...] = ()  # of quantiles

    def with_confidence(self, confidence: float) -> Statistic:
        """Return the same estimates with other intervals."""
        return replace(self, confidence=confidence)

    @cached_property
    def _parts(self) -> list[Result]:
        if not part_columns(self.result.recipe):
            return [self.result]
        return [self.result.group(*part.group) for part in self.result.parts]

    @cached_property
    def _rows(self) -> list[Bounds]:
        found: list[Bounds] = []
        for part in self._parts:
            found.extend(_ANSWERS[self.kind](self, part))
        return found

    @cached_property
    def beyond(self) -> tuple[tuple[Bounds, Bounds], ...]:
        """The shares of values below and above the range, which count as its ends; per group."""
        if self.kind == "rate":
            return ()
        found = []
        for part in self._parts:
            size = len(part.rows)
            counts, every = BinCounts.of(part), _weights(size, range(1, size))
            found.append(
                (
                    counts.ratio(_weights(size, [1]), every, self.confidence),
                    counts.ratio(_weights(size, [size - 1]), every, self.confidence),
                )
            )
        return tuple(found)

    def __len__(self) -> int:
        return len(self._rows)

    def columns(self) -> dict[str, Any]:
        """Groups, share (of quantiles), estimate, std_error, ci_low, ci_high."""
        names = column_names(self.result.recipe)[: part_columns(self.result.recipe)]
        repeated = max(len(self.shares), 1)
        parts = self.result.parts
        columns: dict[str, Any] = {
            name: [part.group[i] for part in parts for _ in range(repeated)]
            for i, name in enumerate(names)
        }
        if self.shares:
            columns["share"] = np.array(self.shares * len(parts))
        for name, key in (("estimate", "estimate"), ("std_error", "std_error"), ("ci_low", "low"),
                          ("ci_high", "high")):  # fmt: skip
            if name != "std_error" or self.kind != "quantiles":
                columns[name] = np.array([getattr(row, key) for row in self._rows])
        return columns

    @property
    def estimate(self) -> float:
        """The one estimate, without groups or shares; else see `columns`."""
        return self._only().estimate

    @property
    def interval(self) -> tuple[float, float]:
        """The one interval, without groups or shares; else see `columns`."""
        return self._only().low, self._only().high

    def _only(self) -> Bounds:
        if len(self._rows) != 1:
            raise InvalidInput(f"there are {len(self._rows):,} rows: use `columns()` or a frame")
        return self._rows[0]

    def explain(self) -> str:
        """In words: of whom, what was cut to the range, and what the intervals cover."""
        result = self.result
        groups = f" in {len(result.parts):,} groups" if part_columns(result.recipe) else ""
        lines = [f"{_heading(self)}: {_shown(self)}."]
        lines.append(
            f"{result.n_reports:,} devices{groups} answered. Intervals hold with "
            f"{self.confidence:.0%} confidence, each on its own, for the devices that answered, "
            "whatever their values are: they reflect the noise"
            + (", which of its rows each device drew" if self.several else "")
            + (", and rounding." if self.scale and not self.scale.exact and not self.shares
               else ".")
        )  # fmt: skip
        if self.scale is not None:
            lines.append(_clipping(self))
        if result.missing:
            named = "; ".join(", ".join(group) for group in result.missing)
            lines.append(
                f"Groups with fewer than {result.min_cohort:,} reports are missing: {named}."
            )
        lines.extend(check.explain() for check in result.weight if check.marked)
        return "\n".join(lines)

    def to_json(self) -> str:
        """Write the rows, what they are of, and the histogram behind them as JSON."""
        document = {
            "statistic": self.kind,
            "of": self.subject,
            "confidence": self.confidence,
            "columns": {name: list(map(_plain, c)) for name, c in self.columns().items()},
            "result": json.loads(self.result.to_json()),
        }
        return json.dumps(document, ensure_ascii=False)

    def to_html(self, path: str | os.PathLike[str] | None = None, *, title: str = "") -> str | None:
        """Write a report in one HTML file that needs nothing else, or return it as text."""
        return report.written(
            path, title=title or _heading(self), words=self.explain(), columns=self.columns(),
            results=[self.result],
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Statistic: {_heading(self)}: {_shown(self)}>"

    def _repr_html_(self) -> str:
        return f"<div>{html_table(self.columns())}{paragraphs(self.explain())}</div>"


def _plain(value: Any) -> str | float:  # noqa: ANN401 (of a list or an array)
    return value if isinstance(value, str) else float(value)


def _heading(found: Statistic) -> str:
    if found.kind == "rate":
        return f"rate of {found.subject}"
    return f"{found.kind} of {found.subject}"


def _shown(found: Statistic) -> str:
    columns = found.columns()
    labels = [column for name, column in columns.items() if name not in _MEASURED]
    texts = []
    for i, row in enumerate(found._rows):
        named = " · ".join(f"{c[i]:.0%}" if isinstance(c[i], float) else str(c[i]) for c in labels)
        if found.kind == "rate":
            text = f"{row.estimate:.2%} ({row.low:.2%} to {row.high:.2%})"
        else:
            width = found.scale.width if found.scale is not None else 1.0
            unit = width * (found.result.n_reports if found.kind == "total" else 1.0)
            low, value, high = (
                number_text(each, unit) for each in (row.low, row.estimate, row.high)
            )
            text = f"{value} ({low} to {high})"
        texts.append(f"{named}: {text}" if named else text)
    return "; ".join(texts)


_MEASURED: Final = {"estimate", "std_error", "ci_low", "ci_high"}


def _clipping(found: Statistic) -> str:
    if found.scale is None:
        raise InvalidInput("a rate has no range")
    low, high = decimal_text(found.scale.low), decimal_text(found.scale.high)
    above_words = "at or above" if found.kind == "quantiles" else "above"
    parts = [
        f"{below.low:.1%} to {below.high:.1%} of the values were below {low} and counted as "
        f"{low}; {above.low:.1%} to {above.high:.1%} were {above_words} {high} and counted as "
        f"{high}"
        for below, above in found.beyond
    ]
    words = {
        "mean": "Values far outside could move the mean of the uncut values by more than that.",
        "total": "Devices without a value count as 0.",
        "quantiles": "Quantiles inside the range are not moved by that.",
    }
    if len(parts) > 1:
        named = [", ".join(part.group) for part in found.result.parts]
        parts = [f"{name}: {part}" for name, part in zip(named, parts, strict=True)]
    return f"{'. '.join(parts)}. {words[found.kind]}"


# --- From bins to rows --------------------------------------------------------------------------


def _weights(size: int, chosen: Iterable[int], value: float = 1.0) -> Floats:
    found = np.zeros(size)
    found[list(chosen)] = value
    return found


def _levels(statistic: Statistic) -> tuple[StatisticRange, Floats, Floats, float]:
    """The range; each bin's level as a part of it, and whether it holds values; the spread.

    Bins: no value, below, the levels, above.
    """
    scale = statistic.scale
    if scale is None:
        raise InvalidInput("a rate has no range")
    inner = np.arange(scale.gaps + 1) / scale.gaps
    levels = np.concatenate([[0.0, 0.0], inner, [1.0]])
    spread = 0.25 if statistic.several else 0.25 / scale.gaps**2
    return scale, levels, _weights(len(levels), range(1, len(levels))), spread


def _mean(statistic: Statistic, part: Result) -> list[Bounds]:
    scale, levels, inside, spread = _levels(statistic)
    found = BinCounts.of(part).ratio(levels, inside, statistic.confidence, spread)
    return [_cut(found.scaled(scale.width, float(scale.low), scale.slack), scale)]


def _cut(found: Bounds, scale: StatisticRange) -> Bounds:
    low, high = float(scale.low), float(scale.high)
    return Bounds(
        estimate=found.estimate, std_error=found.std_error, low=max(found.low, low),
        high=min(found.high, high),
    )  # fmt: skip


def _total(statistic: Statistic, part: Result) -> list[Bounds]:
    scale, levels, inside, spread = _levels(statistic)
    counts = BinCounts.of(part)
    values = inside * float(scale.low) + levels * scale.width
    drawn = spread * scale.width**2 * counts.reports
    found = counts.total(values, statistic.confidence, drawn)
    return [found.scaled(1.0, 0.0, scale.slack * counts.reports)]


def _rate(statistic: Statistic, part: Result) -> list[Bounds]:
    """Bins: not asked, no, yes."""
    found = BinCounts.of(part).ratio(
        np.array([0.0, 0.0, 1.0]), np.array([0.0, 1.0, 1.0]), statistic.confidence
    )
    return [found]


def _quantiles(statistic: Statistic, part: Result) -> list[Bounds]:
    (feature,) = part.features
    if statistic.scale is None or not isinstance(feature, Intervals):
        raise InvalidInput("quantiles need one feature in intervals")
    band = distribution_band(
        [part], "everyone", statistic.confidence, drawn=statistic.several
    )  # fmt: skip
    shares = np.array(statistic.shares)
    lows, highs = band.quantiles(shares)
    edges = np.array(feature.edges, dtype=np.float64)
    held = BinCounts.of(part).held[1:]
    below = np.concatenate([[0.0], np.cumsum(held)]) / max(held.sum(), 1.0)
    centres = np.interp(shares, below, edges)
    ends = float(statistic.scale.low), float(statistic.scale.high)
    found = []
    for centre, low, high in zip(centres, lows, highs, strict=True):
        middle, least, most = (min(max(float(v), ends[0]), ends[1]) for v in (centre, low, high))
        found.append(
            Bounds(estimate=middle, std_error=math.nan, low=min(least, middle),
                   high=max(most, middle))
        )  # fmt: skip
    return found


_ANSWERS: Final[dict[StatisticKind, Callable[[Statistic, Result], list[Bounds]]]] = {
    "mean": _mean,
    "total": _total,
    "rate": _rate,
    "quantiles": _quantiles,
}
