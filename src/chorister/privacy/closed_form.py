"""The closed-form bound on amplification by aggregation (paper, Theorem 2.4; Feldman et al. 2022).

For any eps0-DP randomizer in the replacement model, E = e^eps0, if
`eps0 <= ln(n/(8 ln(2/delta)) - 1)`:

    eps <= ln(1 + (E-1) (4 sqrt(2 ln(4/delta)) / sqrt((E+1) n) + 4/n)).

Outside that regime the theorem says nothing, and neither does this module: it refuses.
"""

from __future__ import annotations

import math

from chorister.errors import InvalidInput

__all__ = ["closed_form_epsilon", "smallest_valid_cohort"]


def smallest_valid_cohort(replacement_epsilon: float, delta: float) -> int:
    """Least n for which the theorem holds: n >= 8 ln(2/delta) (E + 1)."""
    return math.ceil(8.0 * math.log(2.0 / delta) * (math.exp(replacement_epsilon) + 1.0))


def closed_form_epsilon(cohort: int, replacement_epsilon: float, delta: float) -> float:
    """Epsilon by the closed form; raises where the theorem does not apply."""
    needed = smallest_valid_cohort(replacement_epsilon, delta)
    if cohort < needed:
        raise InvalidInput(
            f"the closed form needs a cohort of at least {needed:,} here "
            f"(local epsilon {replacement_epsilon:g} in the replacement model, delta {delta:g}), "
            f"not {cohort:,}; the methods exact, clones and renyi have no such limit"
        )
    grown = math.exp(replacement_epsilon)
    spread = 4.0 * math.sqrt(2.0 * math.log(4.0 / delta)) / math.sqrt((grown + 1.0) * cohort)
    return math.log1p((grown - 1.0) * (spread + 4.0 / cohort))
