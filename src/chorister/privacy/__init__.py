"""The privacy mathematics: randomizers, amplification by aggregation, composition, cost.

Pure functions and frozen values; the one module that touches a disk is
:mod:`chorister.privacy.cache`, which nothing that enforces imports.

- :mod:`randomizers`, :mod:`weights`: what a device sends; how an analyst reads the sum.
  :mod:`total_weight`: what the sum's total must look like.
- :mod:`certified`: the bounds on one release that devices enforce, computed by the native module.
  :mod:`published_bounds`: those of the literature, for comparison.
- :mod:`amplification`: epsilon, delta, minimum cohort or local epsilon, by any of these.
- :mod:`filters`: the compositions that a ledger may enforce. :mod:`composition` (on :mod:`losses`):
  those for sequences fixed in advance.
- :mod:`planning`: what planned questions cost.
- :mod:`decimals`: how numbers are read and added, whatever the host's decimal context.

A device has no numpy. What needs it is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from chorister.privacy.amplification import (
    Bound,
    Method,
    delta,
    epsilon,
    local_epsilon,
    min_cohort,
)
from chorister.privacy.certified import Crowd, Setting
from chorister.privacy.filters import (
    BasicFilter,
    Filter,
    Release,
    RenyiFilter,
    Spent,
    StatedCost,
    require_filter,
)
from chorister.privacy.randomizers import (
    HostileInfluence,
    Mechanism,
    OneHotRandomizer,
)
from chorister.privacy.weights import delta_before_bound

if TYPE_CHECKING:
    from chorister.privacy.composition import Composed, ExactTotal, FixedSequence, compose
    from chorister.privacy.planning import (
        Cost,
        Plan,
        PlannedQuestion,
        accuracy_for_cohort,
        cost,
        cost_of_accuracy,
    )
    from chorister.privacy.published_bounds import CloneBound, clones_epsilon
    from chorister.privacy.total_weight import TotalWeight

__all__ = [
    "BasicFilter",
    "Bound",
    "CloneBound",
    "Composed",
    "Cost",
    "Crowd",
    "ExactTotal",
    "Filter",
    "FixedSequence",
    "HostileInfluence",
    "Mechanism",
    "Method",
    "OneHotRandomizer",
    "Plan",
    "PlannedQuestion",
    "Release",
    "RenyiFilter",
    "Setting",
    "Spent",
    "StatedCost",
    "TotalWeight",
    "accuracy_for_cohort",
    "clones_epsilon",
    "compose",
    "cost",
    "cost_of_accuracy",
    "delta",
    "delta_before_bound",
    "epsilon",
    "local_epsilon",
    "min_cohort",
    "require_filter",
]

_MODULES: Final = {
    "composition": ("Composed", "ExactTotal", "FixedSequence", "compose"),
    "planning": (
        "Cost",
        "Plan",
        "PlannedQuestion",
        "accuracy_for_cohort",
        "cost",
        "cost_of_accuracy",
    ),
    "published_bounds": ("CloneBound", "clones_epsilon"),
    "total_weight": ("TotalWeight",),
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 (whatever the name stands for)
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
