"""Edges around the quantiles that people ask for, so that their intervals are narrow.

An interval of a quantile that holds for any distribution ends at edges that were asked. More cells
everywhere make it narrower, but each adds noise to all sums. So a last round adds fine cells only
where the usual quantiles may lie, as far as the fit knows: a few edges around each, spaced over
what the fit leaves open and what the round's own noise will leave open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from chorister.analyst.algorithms.density import (
    DensityFit,
    Floats,
    Integers,
    cumulative_errors,
)

_ASKED: Final = np.array([0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99])
_FINE_CELLS: Final = (1, 2, 3, 4, 6, 8, 12)  # around each quantile: what is weighed
_STANDARD_ERRORS: Final = 2.2  # of a test at the last round's part of 5%
_SPREAD: Final = (-1.2, -0.4, 0.4, 1.2)  # standard errors at which widths are averaged


def asked_quantiles(fit: DensityFit, questions: Sequence[Integers], noise: float) -> list[Integers]:
    """Questions with fine cells added around the usual quantiles.

    `noise` is the standard error of one of their cells.
    """
    unsure = _unsure(fit)
    found = []
    for edges in questions:
        for count in _FINE_CELLS:
            cells = len(edges) - 1 + count * len(_ASKED)
            reach = _STANDARD_ERRORS * (unsure + noise * _below(cells, _ASKED))
            low = np.floor(_places(fit, np.maximum(_ASKED - reach, 0.0)))
            high = np.ceil(_places(fit, np.minimum(_ASKED + reach, 1.0)))
            added = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, count + 1)
            finer = np.union1d(edges, np.rint(added).astype(np.int64))
            found.append(finer)
    return found


def interval_mass(fit: DensityFit, edges: Integers, noise: float) -> float:
    """How much of the distribution an interval of a usual quantile will hold, on average."""
    at, cells = fit.cumulative[edges], len(edges) - 1
    reach = _STANDARD_ERRORS * noise * _below(cells, np.arange(cells + 1) / cells)
    surely_below, surely_above = at + reach, at - reach
    unsure, found = _unsure(fit), 0.0
    for errors in _SPREAD:
        true = np.clip(_ASKED + errors * unsure, 0.0, 1.0)
        # The last edge that is surely below a quantile, and the first one that is surely above.
        low = np.maximum(np.searchsorted(np.maximum.accumulate(surely_below), true) - 1, 0)
        high = np.searchsorted(np.maximum.accumulate(surely_above), true, side="right")
        found += float((at[np.minimum(high, cells)] - at[low]).mean()) / len(_SPREAD)
    return found


def _unsure(fit: DensityFit) -> Floats:
    """The standard error of the distribution function at the usual quantiles."""
    places = np.rint(_places(fit, _ASKED)).astype(np.int64)
    return cumulative_errors(fit, np.clip(places, 1, len(fit.density) - 1))


def _places(fit: DensityFit, shares: Floats) -> Floats:
    """Where the fitted distribution function reaches each share, in steps."""
    curve = fit.cumulative + 1e-12 * np.arange(len(fit.cumulative))
    found: Floats = np.interp(shares, curve, np.arange(len(curve)))
    return found


def _below(cells: int, shares: Floats) -> Floats:
    """The standard error of the share below an edge, in standard errors of a cell.

    That share is compared with all others, so the noise is that of a bridge over all cells.
    """
    part = np.clip(shares, 1.0 / cells, 1.0 - 1.0 / cells)
    found: Floats = np.sqrt(cells * part * (1.0 - part))
    return found
