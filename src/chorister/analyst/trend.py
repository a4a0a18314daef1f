"""What a series found: levels over time, and which changes are certain.

The numbers are shares of the fleet, window by window; `trend_intervals` says what their intervals
cover and why they hold, however often somebody looks before the series is over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chorister.analyst import report, trend_changes, trend_pictures, trend_statistics
from chorister.analyst.estimate import Floats, column_names, estimate, part_columns
from chorister.analyst.result import Result
from chorister.analyst.tables import Tabular, html_table, paragraphs
from chorister.analyst.trend_intervals import Levels, z_of
from chorister.canonical import decimal_text
from chorister.clock import utc_minute
from chorister.errors import InvalidInput
from chorister.recipe import Recipe

if TYPE_CHECKING:
    import altair


@dataclass(frozen=True, kw_only=True, eq=False)
class Trend(Tabular):
    """The share of the fleet's devices in every bin, window by window.

    Intervals hold for all windows of the series, groups and bins at once, and cover the noise and
    which devices were drawn.
    """

    recipe: Recipe
    """The question exactly as it was asked."""
    results: Mapping[int, Result]
    """What each window found, by its number from 0, among the devices that answered in it."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Why a window will never have a result, by its number."""
    confidence: float = 0.95
    bins: tuple[int, ...] | None = None
    """The bins that were chosen with `only`; None: all."""

    def __post_init__(self) -> None:
        if self.recipe.series is None:
            raise InvalidInput("a trend needs a series: ask one with `study.track`")
        object.__setattr__(self, "results", dict(sorted(self.results.items())))
        z_of(1.0 - self.confidence, 1)  # raises if it is invalid

    def with_confidence(self, confidence: float) -> Trend:
        """Return the same estimates with other intervals."""
        return replace(self, confidence=confidence)

    def only(self, *labels: str) -> Trend:
        """Keep the bins with one of these labels. Choose them before you look.

        Intervals then hold for these bins, and are narrower the fewer there are. With several
        features, the labels of a bin are joined by " · ".
        """
        names = self.names
        unknown = [label for label in labels if label not in names]
        if unknown or not labels:
            raise InvalidInput(f"there is no bin {unknown[:1] or labels}; there are: {names[:20]}")
        chosen = tuple(i for i, name in enumerate(names) if name in labels)
        within = self._chosen
        return replace(self, bins=tuple(int(within[i]) for i in chosen))

    # --- What there is --------------------------------------------------------------------------

    @property
    def windows(self) -> tuple[int, ...]:
        """The numbers of the windows with a result."""
        return tuple(self.results)

    @property
    def planned(self) -> int:
        """How many windows the series has in all."""
        return self.recipe.window_count

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups and arms that were released in some window; without any, one empty group."""
        found = {part.group: None for result in self.results.values() for part in result.parts}
        return tuple(found)

    @cached_property
    def cells(self) -> int:
        """Into how many groups and arms the fleet is split, released or not."""
        return max((len(r.parts) + len(r.missing) for r in self.results.values()), default=1)

    @cached_property
    def _chosen(self) -> NDArray[np.int64]:
        every = np.arange(self.recipe.encoding.size)
        return every if self.bins is None else np.array(self.bins, dtype=np.int64)

    @cached_property
    def labels(self) -> dict[str, list[str]]:
        """One column per feature, with the label of every bin."""
        features, sizes = self.recipe.features, [each.size for each in self.recipe.features]
        cells = np.unravel_index(self._chosen, sizes)
        names = column_names(self.recipe)[part_columns(self.recipe) :]
        return {
            name: [feature.label(int(cell)) for cell in of]
            for name, feature, of in zip(names, features, cells, strict=True)
        }

    @property
    def names(self) -> list[str]:
        """Every bin's labels in one text."""
        return [" · ".join(each) for each in zip(*self.labels.values(), strict=True)]

    @property
    def candidates(self) -> int:
        """How many levels the intervals hold for at once, over the whole series."""
        return self.planned * self.cells * len(self._chosen)

    @cached_property
    def by_group(self) -> dict[tuple[str, ...], tuple[list[int], Levels]]:
        """By group: the windows in which it was released, and its shares in them."""
        series, law = self.recipe.series, self.recipe.randomizer
        trials = self.recipe.privacy.noise_trials
        if series is None:
            raise InvalidInput("a trend needs a series")
        found = {}
        for group in self.groups:
            parts = [
                (number, part)
                for number, result in self.results.items()
                for part in result.parts
                if part.group == group
            ]
            shares = [
                estimate(law, part.sums, part.reports, trials).value[self._chosen] / part.reports
                for _, part in parts
            ]
            found[group] = (
                [number for number, _ in parts],
                Levels(
                    shares=np.stack(shares),
                    reports=np.array([float(part.reports) for _, part in parts]),
                    law=law,
                    noise_trials=trials,
                    overlap=(series.answers - 1) / (series.windows - 1),
                ),
            )
        return found

    def levels(self, group: tuple[str, ...] = ()) -> tuple[list[int], Levels]:
        """The windows in which a group was released, and the law of its shares in them."""
        if group not in self.by_group:
            raise InvalidInput(f"nothing was released about the group {group}")
        return self.by_group[group]

    # --- Levels ---------------------------------------------------------------------------------

    def columns(self) -> dict[str, Any]:
        """Window, opens, groups, bins, reports, estimate (a share), std_error, ci_low, ci_high."""
        z = z_of(1.0 - self.confidence, self.candidates)
        size = len(self._chosen)
        rows: list[tuple[int, int, tuple[str, ...], int]] = []
        values: dict[str, list[Floats]] = {
            name: [] for name in ("estimate", "std_error", "ci_low", "ci_high")
        }
        for order, (group, (windows, levels)) in enumerate(self.by_group.items()):
            low, high = levels.ends(z)
            rows += [
                (number, order, group, int(n))
                for number, n in zip(windows, levels.reports, strict=True)
            ]
            for name, each in zip(
                values, (levels.shares, levels.std_error, low, high), strict=True
            ):
                values[name].extend(each)
        at = sorted(range(len(rows)), key=lambda i: rows[i][:2])
        numbers = [rows[i][0] for i in at]
        group_names = column_names(self.recipe)[: part_columns(self.recipe)]
        return {
            "window": np.repeat(np.array(numbers, dtype=np.int64), size),
            "opens": np.repeat(self.opens(numbers), size),
            **{
                name: [rows[i][2][column] for i in at for _ in range(size)]
                for column, name in enumerate(group_names)
            },
            **{name: list(labels) * len(at) for name, labels in self.labels.items()},
            "reports": np.repeat(np.array([rows[i][3] for i in at], dtype=np.int64), size),
            **{
                name: np.concatenate([each[i] for i in at]) if at else np.zeros(0)
                for name, each in values.items()
            },
        }

    def opens(self, numbers: Sequence[int]) -> NDArray[np.datetime64]:
        """When windows open, in UTC."""
        seconds = [self.recipe.window_at(number).opens for number in numbers]
        return np.array(seconds, dtype="datetime64[s]").astype("datetime64[ms]")

    changes = trend_changes.changes
    statistics = trend_statistics.statistics

    # --- Output ---------------------------------------------------------------------------------

    def plot(self, *, width: int = 560) -> altair.TopLevelMixin:
        """Lines with their intervals; small multiples of several bins; a heat strip of many."""
        return trend_pictures.draw(self, width=width)

    def explain(self) -> str:
        """In words: of whom, what is missing, what changed, and what the intervals cover."""
        series, privacy = self.recipe.series, self.recipe.privacy
        if series is None:
            raise InvalidInput("a trend needs a series")
        reports = [result.n_reports for result in self.results.values()]
        count = f"{len(reports)} of {self.planned} windows have a result"
        if reports:
            count += f", with {min(reports):,} to {max(reports):,} devices each"
        lines = [
            f"{count}. Each device answered at most {series.answers} of them, drawn at random, and "
            f"was charged epsilon {decimal_text(privacy.epsilon)}, delta "
            f"{decimal_text(privacy.delta)} for each.",
            f"Intervals hold with {self.confidence:.0%} confidence for all {self.candidates:,} "
            "levels of the whole series at once. They are about the share of all devices that "
            "would answer, and reflect the noise and the random choice of devices. If the kind of "
            "devices that come online changes, that shows as a change too.",
        ]
        lines += [f"Window {number} has no result: {why}." for number, why in self.failed.items()]
        if len(self.results) > 1:
            lines.append(self.changes(trend_changes.comparison_in_words(self)).explain())
        marked = [number for number, result in self.results.items() if result.marked]
        if marked:
            lines.append(f"Treat these windows with care, see their `weight`: {marked}.")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Write the rows as JSON."""
        document = {
            "trend": self.recipe.id,
            "recipe": self.recipe.digest.hex(),
            "confidence": self.confidence,
            "windows": self.planned,
            "failed": {str(number): why for number, why in self.failed.items()},
            "columns": {name: plain_list(column) for name, column in self.columns().items()},
        }
        return json.dumps(document, ensure_ascii=False)

    def to_html(self, path: str | os.PathLike[str] | None = None, *, title: str = "") -> str | None:
        """Write a report in one HTML file that needs nothing else, or return it as text."""
        return report.written(
            path, title=title or f"{self.recipe.study}, {self.recipe.analysis}",
            words=self.explain(), columns=self.columns(), results=list(self.results.values())[:1],
            chart=self.plot().to_dict() if self.results else None,
            window=min(self.results, default=0),
        )  # fmt: skip

    def __len__(self) -> int:
        return sum(len(windows) for windows, _ in self.by_group.values()) * len(self._chosen)

    def __repr__(self) -> str:
        return f"<Trend: {len(self.results)} of {self.planned} windows, {len(self.names)} bins>"

    def _repr_html_(self) -> str:
        chart = report.inline_chart(self.plot) if self.results else ""
        return f"<div>{chart}{paragraphs(self.explain())}{html_table(self.columns())}</div>"


def plain_list(column: Any) -> list[Any]:  # noqa: ANN401 (a list or an array)
    """A column as JSON values: times as text."""
    if isinstance(column, np.ndarray) and column.dtype.kind == "M":
        return [utc_minute(int(at)) for at in column.astype("datetime64[s]").astype(np.int64)]
    return column.tolist() if isinstance(column, np.ndarray) else list(column)
