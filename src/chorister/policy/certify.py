"""Check 3: what epsilon the aggregate of a minimum cohort is certified to have."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Final

from chorister.errors import InvalidInput
from chorister.policy.model import Crowd, ReportKind
from chorister.privacy.exact import exact_epsilon
from chorister.privacy.randomizers import Mechanism

__all__ = ["BOUNDED_DELTA", "certified_epsilon"]

BOUNDED_DELTA: Final = Decimal("1e-12")
"""The part of delta that bounded reports use up."""

_BOUNDED_LIMIT: Final = Decimal("1.2e12")


def certified_epsilon(
    *,
    mechanism: Mechanism,
    local_epsilon: Decimal,
    min_cohort: int,
    epsilon: Decimal,
    delta: Decimal,
    crowd: Crowd,
    honest_fraction: Fraction | None,
    report: ReportKind,
) -> float:
    """The certified upper bound on epsilon at `delta`, to be compared with the stated `epsilon`.

    That bounded reports add less than `BOUNDED_DELTA` is proven for m e^epsilon <= 1.2e12 (with m
    honest devices, or m = 1 with aggregator noise); beyond that this refuses.
    """
    cohort = min_cohort
    if crowd == "honest":
        if honest_fraction is None:
            raise InvalidInput("an honest crowd comes with the fraction that is assumed honest")
        cohort = honest_fraction.numerator * min_cohort // honest_fraction.denominator
        if cohort < 1:
            raise InvalidInput(f"{honest_fraction} of {min_cohort} is no honest device at all")
    if report == "bounded":
        honest = 1 if crowd == "noised" else cohort
        if honest * epsilon.exp() > _BOUNDED_LIMIT:
            raise InvalidInput("bounded reports are proven for m e^epsilon of at most 1.2e12")
        delta -= BOUNDED_DELTA
        if delta <= 0:
            raise InvalidInput(f"bounded reports use {BOUNDED_DELTA} of delta: ask for more")
    return exact_epsilon(
        cohort,
        mechanism,
        float(local_epsilon),
        # Never more delta than was asked for.
        math.nextafter(float(delta), 0.0),
        noised=crowd == "noised",
    ).upper
