"""Rounds of one algorithm on one scale: all the devices that answered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chorister.analyst.cohorts import Cohorts
from chorister.analyst.estimate import Estimates
from chorister.analyst.result import Result
from chorister.errors import DecodeError, InvalidInput

__all__ = ["as_cohorts", "devices_of", "scaled"]


def as_cohorts(value: object) -> Cohorts:
    """Read back which devices answered which round."""
    if value == "everyone":
        return "everyone"
    if value == "disjoint":
        return "disjoint"
    raise DecodeError("cohorts are everyone or disjoint", field="cohorts")


def devices_of(results: Sequence[Result], cohorts: Cohorts) -> int:
    """How many devices a map or a density speaks about: all that answered any round."""
    reports = [result.n_reports for result in results]
    if not reports:
        raise InvalidInput("there is no round yet")
    return sum(reports) if cohorts == "disjoint" else max(reports)


def scaled(result: Result, devices: int) -> Estimates:
    """A round's bins as numbers of `devices`, the law of their error included.

    A cohort of n is a sample of the N devices: a bin that f of N hold is held by about f n/N of the
    cohort, so the estimate times N/n has the noise's variance times (N/n)^2 and the sample's,
    f (N/n - 1). Both are linear in f, as the noise's own is.
    """
    rows = result.rows
    factor = max(devices / result.n_reports, 1.0)
    return Estimates(
        value=rows.value * factor,
        base=rows.base * factor**2,
        slope=rows.slope * factor + (factor - 1.0),
        reports=np.full(len(rows), devices, dtype=np.int64),
    )
