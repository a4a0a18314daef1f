"""Small rehearsals that the tests of the analyst share."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import chorister as ch
from chorister.analyst.rehearsal import Rehearsal
from chorister.encoding import AnyFeature
from chorister.policy import Policy
from tests.keyboard import ANALYSIS, analysis_at, policy_at

AGES: dict[str, Any] = {"age": list(range(5, 95)), "count": [100 + 20 * i for i in range(90)]}
"""Devices by age: 89,100 of them."""
DEVICES = sum(AGES["count"])


def decades() -> AnyFeature:
    return ch.intervals("age", range(10, 90, 10))


def generous(reports: int = 3, **changes: Any) -> Policy:
    """The example policy with room for several reports and for small cohorts."""
    fields = {
        ref: {"local_epsilon": 8, "epsilon": 3, "delta": Decimal("1e-5"), "reports": reports}
        for ref in ("keyboard.ngram", "keyboard.perplexity", "user.age")
    }
    base = {
        f"analyses/{ANALYSIS}/budget/epsilon": 3,
        f"analyses/{ANALYSIS}/budget/delta": Decimal("1e-5"),
        f"analyses/{ANALYSIS}/budget/reports": reports,
        f"analyses/{ANALYSIS}/fields": fields,
        f"analyses/{ANALYSIS}/cohort/smallest": 50,
        "device/epsilon": 3,
        "device/delta": Decimal("1e-5"),
        "device/reports": max(reports, 4),
    }
    return policy_at({**base, **changes})


def honest(**changes: Any) -> Policy:
    """The example policy with a crowd assumed honest."""
    return analysis_at({"crowds": ["noised", "honest"], "honest_fraction": "1/1", **changes})


def fleet(policy: Policy | None = None, **options: Any) -> Rehearsal:
    found: Rehearsal = ch.rehearse(AGES, policy or generous(), **{"seed": 7, **options})
    return found


def series_fleet(*, windows: int = 26, answers: int = 1, **options: Any) -> Rehearsal:
    """A rehearsal of the same people under a policy that permits series."""
    limits = {"windows": windows, "longest": "400d", "answers": answers, "cells": 1000}
    changes: dict[str, Any] = {f"analyses/{ANALYSIS}/series": limits}
    return fleet(generous(**changes), **options)
