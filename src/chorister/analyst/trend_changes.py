"""Which changes of a series are certain: differences between windows, all intervals at once."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.estimate import Floats, column_names, part_columns
from chorister.analyst.tables import Tabular, html_table, paragraphs
from chorister.analyst.trend_intervals import pair_weights, step_weights, z_of
from chorister.errors import InvalidInput

if TYPE_CHECKING:
    from chorister.analyst.trend import Trend

Comparison: TypeAlias = Literal["pairs", "previous", "first", "steps"]
_MAX_ROWS: Final = 5_000_000
_TABLE: Final = ("group", "bin", "before", "after", "change", "low", "high")
_COMPARED: Final[dict[str, str]] = {
    "pairs": "every window with every earlier one",
    "previous": "every window with the one before it",
    "first": "every window with the first one",
    "steps": "all windows from each one on with all before it",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedRow:
    """The difference between two windows (or before and from a window on) in one bin."""

    group: tuple[str, ...]
    bin: int  # among the trend's
    before: int  # the earlier window; of steps, the last one before
    after: int  # the later window; of steps, the first one after
    change: float  # of the share
    low: float
    high: float

    @property
    def certain(self) -> bool:
        """Whether the interval excludes no change."""
        return self.low > 0.0 or self.high < 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Changes(Tabular):
    """Differences between windows, with intervals that hold at once over the whole series."""

    trend: Trend
    compare: Comparison
    false_alarms: float
    """The chance that any interval of the whole series misses: at most this, at all looks."""
    candidates: int
    """How many differences that counts."""
    table: Mapping[str, NDArray[Any]]
    """Arrays of the same length: group and bin (their places in the trend's), before, after,
    change, low, high."""

    @cached_property
    def rows(self) -> tuple[ChangedRow, ...]:
        """All differences, one by one."""
        groups = self.trend.groups
        lists = [self.table[name].tolist() for name in _TABLE]
        return tuple(
            ChangedRow(group=groups[group], bin=b, before=before, after=after, change=change,
                       low=low, high=high)
            for group, b, before, after, change, low, high in zip(*lists, strict=True)
        )  # fmt: skip

    @property
    def _is_certain(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (self.table["low"] > 0.0) | (self.table["high"] < 0.0)
        return found

    def certain(self) -> Changes:
        """Keep the differences whose intervals exclude 0."""
        kept = self._is_certain
        return replace(self, table={name: column[kept] for name, column in self.table.items()})

    def __len__(self) -> int:
        return len(self.table["change"])

    def columns(self) -> dict[str, Any]:
        """Windows before and after, groups, bins, change (of the share), its interval, certain."""
        trend, table = self.trend, self.table
        names = column_names(trend.recipe)[: part_columns(trend.recipe)]
        of_group, of_bin = table["group"].tolist(), table["bin"].tolist()
        return {
            "before": table["before"],
            "after": table["after"],
            **{name: [trend.groups[g][i] for g in of_group] for i, name in enumerate(names)},
            **{name: [labels[b] for b in of_bin] for name, labels in trend.labels.items()},
            "change": table["change"],
            "ci_low": table["low"],
            "ci_high": table["high"],
            "certain": self._is_certain,
        }

    def name(self, row: ChangedRow) -> str:
        """The group and labels of a row in one text."""
        return " · ".join((*row.group, self.trend.names[row.bin]))

    def explain(self) -> str:
        """The largest change of every bin that has one, in words."""
        largest: dict[str, ChangedRow] = {}
        for row in self.certain().rows:
            known = largest.get(self.name(row))
            if known is None or abs(row.change) > abs(known.change):
                largest[self.name(row)] = row
        rule = (
            f"Comparing {_COMPARED[self.compare]} ({self.candidates:,} comparisons over the whole "
            f"series), a false alarm has a chance of at most {self.false_alarms:.3g}."
        )
        if not largest:
            return f"No change is certain. {rule}"
        ranked = sorted(largest.items(), key=lambda each: -abs(each[1].change))
        listed = "; ".join(
            f"{name}: {row.change:+.2%} ({row.low:+.2%} to {row.high:+.2%}) "
            f"{_when(self.compare, row)}"
            for name, row in ranked[:5]
        )
        more = f"; and {len(ranked) - 5} more bins" if len(ranked) > 5 else ""
        return f"Certain changes, the largest of each bin: {listed}{more}. {rule}"

    def __repr__(self) -> str:
        certain = int(self._is_certain.sum())
        return f"<Changes: {certain:,} of {len(self):,} differences are certain>"

    def _repr_html_(self) -> str:
        table = html_table(self.certain().columns())
        return f"<div>{paragraphs(self.explain())}{table}</div>"


def _when(compare: Comparison, row: ChangedRow) -> str:
    if compare == "steps":
        return f"from window {row.after} on"
    return f"from window {row.before} to {row.after}"


# --- From levels to differences ----------------------------------------------------------------


def changes(
    trend: Trend, compare: Comparison = "pairs", *, false_alarms: float | None = None
) -> Changes:
    """Compare windows. Over the whole series, some interval misses with chance `false_alarms`.

    That is 1 - confidence unless you say otherwise, and includes every look before the series
    is over. "pairs" compares all windows with each other; "previous" and "first" only with the
    one before or the first; "steps" the mean of all windows from one on with the mean of those
    before, which finds smaller shifts that last.
    """
    alpha = 1.0 - trend.confidence if false_alarms is None else false_alarms
    if compare not in _COMPARED:
        raise InvalidInput(f"compare is one of {', '.join(_COMPARED)}, not {compare!r}")
    count = trend.planned - 1 if compare in ("previous", "first") else (
        trend.planned * (trend.planned - 1) // 2
    )  # fmt: skip
    candidates = count * trend.cells * len(trend.names)
    z = z_of(alpha, candidates)
    blocks: list[tuple[NDArray[Any], ...]] = []
    size, bins = 0, len(trend.names)
    for number, (windows, levels) in enumerate(trend.by_group.values()):
        size += _pair_size(len(windows), bins)
        if compare == "pairs" and size > _MAX_ROWS:
            raise InvalidInput(
                f'more than {_MAX_ROWS:,} comparisons: choose bins with `only`, or compare="steps"'
            )
        weights, between = _contrasts(trend, compare, windows)
        pairs = np.repeat(np.array(between, dtype=np.int64).reshape(-1, 2), bins, axis=0)
        measured = levels.contrasts(weights, z) if between else (np.zeros((0, bins)),) * 3
        blocks.append(
            (
                np.full(len(pairs), number),
                np.tile(np.arange(bins), len(between)),
                pairs[:, 0],
                pairs[:, 1],
                *(each.ravel() for each in measured),
            )
        )
    empty = tuple(np.zeros(0) for _ in _TABLE)
    joined = [np.concatenate(column) for column in zip(*(blocks or [empty]), strict=True)]
    return Changes(
        trend=trend, compare=compare, false_alarms=alpha, candidates=candidates,
        table=dict(zip(_TABLE, joined, strict=True)),
    )  # fmt: skip


def comparison_in_words(trend: Trend) -> Comparison:
    """All pairs, or steps where the whole series will have too many pairs.

    It is the same at every look: who sees both would see twice as many false alarms.
    """
    size = trend.cells * _pair_size(trend.planned, len(trend.names))
    return "pairs" if size <= _MAX_ROWS else "steps"


def _pair_size(windows: int, bins: int) -> int:
    """How much it takes to compare all pairs of windows."""
    return windows**2 * max(bins, windows // 10)


def _contrasts(
    trend: Trend, compare: Comparison, windows: list[int]
) -> tuple[Floats, list[tuple[int, int]]]:
    """One row of weights per comparison of these windows, and the windows that it is about."""
    size = len(windows)
    if size < 2:
        return np.zeros((0, size)), []
    if compare == "steps":
        return step_weights(size), list(itertools.pairwise(windows))
    if compare == "pairs":
        places = zip(*np.triu_indices(size, 1), strict=True)
        return pair_weights(size), [(windows[a], windows[b]) for a, b in places]
    place = {window: k for k, window in enumerate(windows)}
    base = {after: _compared_with(trend, compare, after, place) for after in windows}
    pairs = [(before, after) for after, before in base.items() if before is not None]
    weights = np.zeros((len(pairs), size))
    for row, (before, after) in enumerate(pairs):
        weights[row, place[before]], weights[row, place[after]] = -1.0, 1.0
    return weights, pairs


def _compared_with(
    trend: Trend, compare: Comparison, after: int, windows: Container[int]
) -> int | None:
    """The window to compare with: one for each, whatever arrives later.

    A window without a result is passed over only where it will never have one.
    """
    earlier = range(after - 1, -1, -1) if compare == "previous" else range(after)
    for number in earlier:
        if number in windows:
            return number
        if number not in trend.failed and number not in trend.results:
            return None
    return None
