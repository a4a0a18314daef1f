"""The way of reports through an honest pair."""

from __future__ import annotations

import numpy as np
import pytest

from tests.aggregator.conftest import MakePair
from tests.aggregator.world import HELPER_URL, one_bit, small_recipe


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


def test_tasks_take_turns(make_pair: MakePair) -> None:
    pair = make_pair()
    tasks = pair.accept(*(small_recipe(id=f"recipe-{each}") for each in range(4)))
    for task in tasks:
        for _ in range(3):
            pair.upload(task, *pair.reports(task, one_bit(4, [0])))
    # A job takes all that waits of a task, so four calls are for four tasks.
    seen = [pair.leader.aggregation.create_jobs(1)[0].task_id for _ in tasks]
    assert set(seen) == {task.task_id for task in tasks}
    assert pair.leader.aggregation.create_jobs(1) == []
    for task in tasks:
        pair.upload(task, *pair.reports(task, one_bit(4, [0])))
    assert len(pair.leader.aggregation.create_jobs(10)) == 4
    assert pair.work() == []
    assert all(status.verified == 4 for status in pair.leader.status(tasks))


def test_no_job_is_made_for_a_helper_that_is_away(make_pair: MakePair) -> None:
    pair = make_pair()
    tasks = pair.accept(*(small_recipe(id=f"recipe-{each}") for each in range(3)))
    for task in tasks:
        pair.upload(task, *pair.reports(task, one_bit(4, [0])))
    driver = pair.leader.aggregation
    assert driver.helper_of(tasks[0].task_id) == HELPER_URL
    assert driver.helper_of(bytes(32)) == ""
    assert driver.create_jobs(10, away={HELPER_URL}) == []
    elsewhere = {"https://elsewhere.example/"}
    seen = [driver.create_jobs(1, away=elsewhere)[0].task_id for _ in tasks]
    assert set(seen) == {task.task_id for task in tasks}


def test_jobs_are_no_larger_than_their_capacity(make_pair: MakePair) -> None:
    pair = make_pair()
    (task,) = pair.accept(small_recipe())
    reports = pair.reports(task, one_bit(4, [0] * 1_100))
    pair.upload(task, *reports[:70])
    pair.upload(task, *reports[70:])
    sizes = []
    while jobs := pair.leader.aggregation.create_jobs(1):
        assert pair.leader.aggregation.step(jobs[0]).done
        (status,) = pair.leader.status([task])
        sizes.append(status.verified)
    assert sizes[-1] == 1_100
    assert len(sizes) == 3
    assert max(np.diff([0, *sizes])) <= 500
