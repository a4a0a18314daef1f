"""Mean and quantiles of every window of a series, where bins are ordered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from chorister.analyst import report, trend_pictures
from chorister.analyst.algorithms.density_bands import distribution_band
from chorister.analyst.arguments import as_exact, as_list
from chorister.analyst.estimate import Floats, column_names, part_columns
from chorister.analyst.result import Result
from chorister.analyst.statistic_bounds import BinCounts, Bounds
from chorister.analyst.tables import Tabular, html_table
from chorister.encoding import Intervals
from chorister.errors import InvalidInput

if TYPE_CHECKING:
    import altair

    from chorister.analyst.trend import Trend

_SHARES: Final = (0.1, 0.25, 0.5, 0.75, 0.9)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrendStatistics(Tabular):
    """Mean and quantiles of every window, with intervals that hold for all of them at once."""

    trend: Trend
    rows: tuple[tuple[int, tuple[str, ...], str, Bounds], ...]

    def __len__(self) -> int:
        return len(self.rows)

    def columns(self) -> dict[str, Any]:
        """Window, opens, groups, statistic ("mean", or a share), estimate, ci_low, ci_high."""
        recipe, rows = self.trend.recipe, self.rows
        names = column_names(recipe)[: part_columns(recipe)]
        windows = [row[0] for row in rows]
        return {
            "window": np.array(windows, dtype=np.int64),
            "opens": self.trend.opens(windows),
            **{name: [row[1][i] for row in rows] for i, name in enumerate(names)},
            "statistic": [row[2] for row in rows],
            "estimate": np.array([row[3].estimate for row in rows]),
            "ci_low": np.array([row[3].low for row in rows]),
            "ci_high": np.array([row[3].high for row in rows]),
        }

    def plot(self, *, width: int = 560) -> altair.TopLevelMixin:
        """The mean and the quantiles as lines with their intervals."""
        return trend_pictures.draw_statistics(self, width=width)

    def __repr__(self) -> str:
        return f"<TrendStatistics: {len(self.rows):,} rows of {len(self.trend.results)} windows>"

    def _repr_html_(self) -> str:
        return f"<div>{report.inline_chart(self.plot)}{html_table(self.columns())}</div>"


def statistics(trend: Trend, shares: Sequence[float] = _SHARES) -> TrendStatistics:
    """Mean and quantiles of the values in the range, window by window.

    For a question about one feature in intervals. The intervals hold at once for all windows,
    and for any distribution within the cells: use more cells for a narrower mean.
    """
    features = trend.recipe.features
    if len(features) != 1 or not isinstance(features[0], Intervals) or trend.bins is not None:
        raise InvalidInput("statistics need one feature in intervals, with all its bins")
    shares = [float(as_exact(each, "shares")) for each in as_list(shares, "shares", "[0.5]")]
    if any(not 0.0 < share < 1.0 for share in shares):
        raise InvalidInput("shares lie strictly between 0 and 1: 0.5 is the median")
    candidates = trend.planned * trend.cells * (1 + len(shares))
    confidence = 1.0 - (1.0 - trend.confidence) / candidates
    rows = []
    for number, result in trend.results.items():
        for part in result.parts:
            one = result.group(*part.group) if part_columns(trend.recipe) else result
            found = [("mean", _mean(one, features[0], confidence))]
            found += zip(
                (f"{share:.4g}" for share in shares),
                _quantiles(one, features[0], shares, confidence),
                strict=True,
            )
            rows += [(number, part.group, name, bounds) for name, bounds in found]
    return TrendStatistics(trend=trend, rows=tuple(rows))


def _edges(feature: Intervals) -> Floats:
    return np.array(feature.edges, dtype=np.float64)


def _mean(one: Result, feature: Intervals, confidence: float) -> Bounds:
    """The mean of the values in the range: all of a cell may lie at either of its ends."""
    edges = _edges(feature)
    width = edges[-1] - edges[0]
    inside = np.concatenate([[0.0], np.ones(feature.size - 1)])
    counts = BinCounts.of(one)

    def at(places: Floats) -> Bounds:
        # The cohort is a sample of the fleet: values in [0, 1] have a variance of 1/4 at most.
        levels = np.concatenate([[0.0], (places - edges[0]) / width])
        found = counts.ratio(levels, inside, confidence, 0.25)
        return found.scaled(float(width), float(edges[0]))

    middle = at((edges[:-1] + edges[1:]) / 2.0)
    return replace(middle, low=at(edges[:-1]).low, high=at(edges[1:]).high)


def _quantiles(
    one: Result, feature: Intervals, shares: Sequence[float], confidence: float
) -> list[Bounds]:
    lows, highs = distribution_band([one], "everyone", confidence, drawn=True).quantiles(
        np.array(shares)
    )
    held = BinCounts.of(one).held[1:]
    below = np.concatenate([[0.0], np.cumsum(held)]) / max(held.sum(), 1.0)
    centres = np.clip(np.interp(shares, below, _edges(feature)), lows, highs)
    return [
        Bounds(estimate=float(centre), std_error=float("nan"), low=float(low), high=float(high))
        for centre, low, high in zip(centres, lows, highs, strict=True)
    ]
