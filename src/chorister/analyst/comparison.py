"""Two results side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from chorister.analyst import tables
from chorister.analyst.estimate import Floats, quantile
from chorister.errors import InvalidInput

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow  # type: ignore[import-untyped]

    from chorister.analyst.result import Result

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Comparison:
    """Differences of shares (second minus first), row by row."""

    labels: Mapping[str, Sequence[str]]
    first: Floats  # share of the first result's reports
    second: Floats
    difference: Floats
    std_error: Floats
    ci_low: Floats
    ci_high: Floats
    confidence: float
    population: bool  # intervals cover who happened to answer, too

    def columns(self) -> dict[str, Any]:
        """All columns."""
        return {
            **{name: list(column) for name, column in self.labels.items()},
            "first": self.first,
            "second": self.second,
            "difference": self.difference,
            "std_error": self.std_error,
            "ci_low": self.ci_low,
            "ci_high": self.ci_high,
        }

    def to_polars(self) -> polars.DataFrame:
        """As a polars frame."""
        return tables.to_polars(self.columns())

    def to_arrow(self) -> pyarrow.Table:
        """As an Arrow table."""
        return tables.to_arrow(self.columns())

    def to_pandas(self) -> pandas.DataFrame:
        """As a pandas frame."""
        return tables.to_pandas(self.columns())

    def explain(self) -> str:
        """In words."""
        apart = int(np.sum((self.ci_low > 0.0) | (self.ci_high < 0.0)))
        what = "the noise and who happened to answer" if self.population else "the noise alone"
        return (
            f"{apart:,} of {len(self.difference):,} shares differ by more than their "
            f"{self.confidence:.0%} interval, which covers {what}. By chance alone "
            f"{(1 - self.confidence) * len(self.difference):.1f} would."
        )

    def _repr_html_(self) -> str:
        return tables.html_table(self.columns())


def compare(first: Result, second: Result, *, population: bool) -> Comparison:
    """Differences of shares: the rows must have the same labels."""
    if {name: list(c) for name, c in first.labels.items()} != {
        name: list(c) for name, c in second.labels.items()
    }:
        raise InvalidInput("two results are compared row by row: their labels must be the same")
    one, two = first.rows, second.rows
    shares = one.value / one.reports, two.value / two.reports
    variance = one.variance / one.reports**2.0 + two.variance / two.reports**2.0
    if population:
        for share, rows in zip(shares, (one, two), strict=True):
            inside = np.clip(share, 0.0, 1.0)
            variance = variance + inside * (1.0 - inside) / rows.reports
    error = np.sqrt(variance)
    difference = shares[1] - shares[0]
    z = quantile(first.confidence, max(first.candidates, second.candidates))
    return Comparison(
        labels=first.labels,
        first=shares[0],
        second=shares[1],
        difference=difference,
        std_error=error,
        ci_low=difference - z * error,
        ci_high=difference + z * error,
        confidence=first.confidence,
        population=population,
    )
