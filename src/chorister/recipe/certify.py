"""Check 3: what epsilon the aggregate of a recipe's minimum cohort is certified to have."""

from __future__ import annotations

import math
from decimal import Decimal

from chorister.errors import InvalidInput
from chorister.privacy.exact import exact_epsilon
from chorister.recipe.model import BOUNDED_DELTA, Privacy

__all__ = ["certified_epsilon"]


def certified_epsilon(privacy: Privacy) -> float:
    """The certified upper bound on epsilon at the recipe's delta.

    Bounded reports use up `BOUNDED_DELTA` of delta; that addition is proven for
    m e^epsilon <= 1.2e12 (m honest devices, or 1 with aggregator noise), so beyond it we refuse.
    """
    cohort = privacy.min_cohort
    if privacy.honest_fraction is not None:
        fraction = privacy.honest_fraction
        cohort = fraction.numerator * cohort // fraction.denominator
        if cohort < 1:
            raise InvalidInput(f"{fraction} of {privacy.min_cohort} is no honest device at all")
    delta = privacy.delta
    if privacy.report == "bounded":
        honest = 1 if privacy.crowd == "noised" else cohort
        if Decimal(honest) * privacy.epsilon.exp() > Decimal("1.2e12"):
            raise InvalidInput("bounded reports are proven for m e^epsilon of at most 1.2e12")
        delta -= BOUNDED_DELTA
    return exact_epsilon(
        cohort,
        privacy.mechanism,
        float(privacy.local_epsilon),
        # Never more delta than was asked for.
        math.nextafter(float(delta), 0.0),
        noised=privacy.crowd == "noised",
    ).upper
