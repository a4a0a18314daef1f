"""The privacy mathematics: randomizers, amplification by aggregation, composition, cost.

Pure functions and frozen values; the one module that touches a disk is
:mod:`chorister.privacy.cache`, which nothing that enforces imports.

- :mod:`randomizers`, :mod:`weights`: what a device sends; how an analyst reads the sum.
- :mod:`settings`: what stays fixed while cohort, epsilon and delta vary.
- :mod:`amplification`: epsilon, delta, minimum cohort, local epsilon, by :mod:`exact` (the default,
  and what devices enforce) or :mod:`renyi`, both computed by the native module, by :mod:`clones` or
  :mod:`closed_form`.
- :mod:`filters`: the compositions that a ledger may enforce. :mod:`composition` (on :mod:`losses`):
  those for sequences fixed beforehand.
- :mod:`planning`: what planned questions cost.
- :mod:`decimals`: sums that do not depend on the host's decimal context.
"""

from __future__ import annotations

from chorister.privacy.amplification import (
    Bound,
    Method,
    delta,
    epsilon,
    local_epsilon,
    min_cohort,
)
from chorister.privacy.clones import CloneBound, clones_epsilon
from chorister.privacy.composition import Composed, ExactTotal, FixedSequence, compose
from chorister.privacy.filters import (
    BasicFilter,
    Charge,
    Filter,
    Release,
    RenyiFilter,
    Spent,
    require_filter,
)
from chorister.privacy.planning import (
    Cost,
    Plan,
    PlannedQuestion,
    accuracy_for_cohort,
    cost,
    cost_of_accuracy,
)
from chorister.privacy.randomizers import (
    HostileInfluence,
    Interval,
    Mechanism,
    OneHotRandomizer,
)
from chorister.privacy.settings import Crowd, Setting
from chorister.privacy.weights import TotalWeight, delta_before_bound, delta_with_bound

__all__ = [
    "BasicFilter",
    "Bound",
    "Charge",
    "CloneBound",
    "Composed",
    "Cost",
    "Crowd",
    "ExactTotal",
    "Filter",
    "FixedSequence",
    "HostileInfluence",
    "Interval",
    "Mechanism",
    "Method",
    "OneHotRandomizer",
    "Plan",
    "PlannedQuestion",
    "Release",
    "RenyiFilter",
    "Setting",
    "Spent",
    "TotalWeight",
    "accuracy_for_cohort",
    "clones_epsilon",
    "compose",
    "cost",
    "cost_of_accuracy",
    "delta",
    "delta_before_bound",
    "delta_with_bound",
    "epsilon",
    "local_epsilon",
    "min_cohort",
    "require_filter",
]
