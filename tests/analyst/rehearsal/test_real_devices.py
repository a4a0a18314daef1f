"""Real devices and real aggregators in one process: the same law as the rehearsal draws."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest

import chorister as ch
from chorister.errors import InvalidInput
from tests.analyst.fleets import AGES, generous
from tests.analyst.rehearsal.test_simulation import same_law
from tests.keyboard import ANALYSIS

HELD = {"age": [3, 50, 120], "count": [8, 14, 4]}
BINS = range(200)
ROUNDS = 3
SETTINGS: dict[str, Any] = {"local_epsilon": 1, "epsilon": Decimal("0.9"), "delta": "1e-6",
                            "min_cohort": 25}  # fmt: skip


def policy() -> ch.Policy:
    changes: dict[str, Any] = {f"analyses/{ANALYSIS}/cohort/smallest": 2}
    return generous(ROUNDS, **changes)


def test_both_modes_agree_in_distribution() -> None:
    sums: dict[str, list[np.ndarray[Any, Any]]] = {"law": [], "reports": []}
    with ch.rehearse(HELD, policy(), mode="reports") as real:
        study = real.study("agree", analysis=ANALYSIS)
        for number in range(ROUNDS):
            question = study.histogram(ch.intervals("age", BINS), repeat=number, **SETTINGS)
            result = question.run()
            assert result.n_reports == 26
            assert not result.marked
            sums["reports"].append(result.parts[0].sums.astype(np.int64))
        assert study.budget.more(question.again()) == 0
        with pytest.raises(ch.errors.BudgetExceeded):
            question.again().run()
        assert len(study.rounds) == ROUNDS
    for seed in range(40):
        simulated = ch.rehearse(HELD, policy(), seed=seed).study("agree", analysis=ANALYSIS)
        question = simulated.histogram(ch.intervals("age", BINS), **SETTINGS)
        sums["law"].append(question.run().parts[0].sums.astype(np.int64))
    law, reports = np.array(sums["law"]), np.array(sums["reports"])
    empty = np.setdiff1d(np.arange(200), [4, 51, 121])
    assert same_law(law[:, empty].ravel(), reports[:, empty].ravel())
    for cell in (4, 51, 121):
        spread = law[:, cell].std()
        assert abs(reports[:, cell].mean() - law[:, cell].mean()) < 6 * spread / np.sqrt(2)


def test_real_devices_are_few_and_draw_by_themselves() -> None:
    with pytest.raises(InvalidInput, match="at most"):
        ch.rehearse(AGES, policy(), mode="reports")
    with pytest.raises(InvalidInput, match="leave out seed"):
        ch.rehearse(HELD, policy(), mode="reports", seed=1)  # type: ignore[call-overload]


def test_real_devices_answer_the_windows_that_they_drew() -> None:
    """A series over real devices and servers: every device answers as often as it may, no more.

    Each draws three of four windows: with a chance of 1e-9, one has fewer reports than its minimum.
    """
    limits = {"windows": 8, "longest": "100d", "answers": 3, "cells": 100}
    changes: dict[str, Any] = {
        f"analyses/{ANALYSIS}/cohort/smallest": 2,
        f"analyses/{ANALYSIS}/series": limits,
    }
    with ch.rehearse(HELD, generous(3, **changes), mode="reports") as real:
        plan = real.study("series", analysis=ANALYSIS).track(
            ch.intervals("age", [0, 40, 80, 160]), every="1d", windows=4, answers_per_device=3,
            local_epsilon="0.01", epsilon="0.5", delta="1e-6", min_cohort=5,
        )  # fmt: skip
        track = plan.ask()
        first = track.collect(up_to=2)
        assert first.windows == (0, 1)
        trend = track.collect()
        assert track.finished
        assert trend.windows == (0, 1, 2, 3)
        reports = [result.n_reports for result in trend.results.values()]
        assert sum(reports) == 3 * 26
        assert min(reports) >= 5
        assert not any(result.marked for result in trend.results.values())
        with pytest.raises(ch.errors.BudgetExceeded):
            plan.again().ask()
