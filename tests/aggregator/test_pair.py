"""The way of reports through an honest pair."""

from __future__ import annotations

import numpy as np
import pytest

from tests.aggregator.conftest import MakePair
from tests.aggregator.world import one_bit, small_recipe


@pytest.mark.parametrize("crowd", ["noised", "honest"])
def test_reports_become_one_sum(make_pair: MakePair, crowd: str) -> None:
    pair = make_pair()
    (task,) = pair.accept(small_recipe(min_cohort=3, crowd=crowd))
    places = [0, 1, 1, 3]
    assert not pair.upload(task, *pair.reports(task, one_bit(4, places))).statuses
    assert pair.work() == []
    pair.collect(task)
    assert pair.work() == []
    collected = pair.result(task)
    assert collected is not None
    count, summed = collected
    noise = sum((draws for each in pair.noise for draws in each.draws), np.zeros(4, np.uint64))
    assert count == 4
    assert (summed - noise).tolist() == [1, 2, 0, 1]
    assert len(pair.noise[0].draws) == len(pair.noise[1].draws) == (crowd == "noised")
    leader, helper = pair.row_counts()
    for rows in (leader, helper):
        assert rows["segments"] == rows["report_blobs"] == rows["aggregation_jobs"] == 0
        assert rows["accumulators"] == rows["helper_jobs"] == 0
        assert rows["report_ids"] == 4
