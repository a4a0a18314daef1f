"""The register of tasks, HPKE keys, uploads' errors, progress and the garbage collector."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from chorister.aggregator.http.leader_routes import recipe_progress
from chorister.aggregator.known_tasks import KnownTask, served_tasks
from chorister.aggregator.storage import database as database_module
from chorister.aggregator.storage.counters import VERIFIED, TaskStatus
from chorister.aggregator.storage.schema import BatchState, hpke_keys
from chorister.canonical import WIRE
from chorister.dap import task as task_module
from chorister.dap.draft import Problem, ReportError, Role
from chorister.dap.task import task_configurations
from chorister.errors import InvalidInput, ProblemError
from chorister.policy import Policy
from chorister.recipe import Recipe, SignedRecipe, sign
from tests.aggregator.faults import fast_folder
from tests.aggregator.world import NOW, Pair, one_bit, signed, small_policy, small_recipe
from tests.keyboard import ANALYSIS, STRANGER, changed


@pytest.fixture
def pair() -> Iterator[Pair]:
    folder = fast_folder()
    made = Pair.in_folder(folder)
    yield made
    made.stop()
    shutil.rmtree(folder)


@pytest.fixture
def task(pair: Pair) -> KnownTask:
    (found,) = pair.accept(small_recipe(min_cohort=20))
    return found


def errors(pair: Pair, task: KnownTask, *reports: bytes) -> list[int]:
    return [status.error for status in pair.upload(task, *reports).statuses]


# --- the register -------------------------------------------------------------------------------


def test_all_tasks_of_a_recipe_are_written_down_once(pair: Pair) -> None:
    recipe = small_recipe(group_by=["user.locale"])
    for _ in range(2):
        found = pair.accept(recipe)
    enumerated = {task.task_id for task in task_configurations(small_policy(), recipe)}
    assert {task.task_id for task in found} == enumerated
    assert len(found) > 1
    assert pair.row_counts()[0]["tasks"] == pair.row_counts()[1]["batches"] == len(found)
    assert pair.leader.tasks.find(found[0].task_id) == found[0]


@pytest.mark.parametrize(
    "why", ["stranger", "another pair", "swapped", "another analysis", "too fine", "cohort"]
)
def test_what_no_device_would_answer_is_passed_over(pair: Pair, why: str) -> None:
    recipe = small_recipe()
    tree = json.loads(recipe.canonical())
    ours = tree["aggregators"]
    other = "https://other.example/"
    changes: dict[str, dict[str, object]] = {
        "stranger": {},
        "another pair": {"aggregators": ours | {"leader": other}},
        "swapped": {"aggregators": {"leader": ours["helper"], "helper": ours["leader"]}},
        "another analysis": {"analysis": "another.analysis"},
        "too fine": {"privacy/epsilon": "0.5"},  # certified for more people than these
        "cohort": {"privacy/min_cohort": 1_000_000_000},
    }
    altered = Recipe.model_validate(changed(tree, changes[why]), context=WIRE)
    item = signed(altered)
    if why == "stranger":
        item = SignedRecipe.parse(sign(altered, STRANGER))
    pair.leader.tasks.accept([item])
    pair.helper.tasks.accept([item])
    assert pair.row_counts()[0]["tasks"] == pair.row_counts()[1]["tasks"] == 0


def test_a_task_that_has_ended_is_not_written_down(pair: Pair) -> None:
    recipe = small_recipe()
    pair.set_clocks(recipe.window.bucket.end)
    assert pair.accept(recipe) == []


# --- uploads ------------------------------------------------------------------------------------


def test_each_reason_has_the_drafts_error(pair: Pair, task: KnownTask) -> None:
    good, other, third = pair.reports(task, one_bit(4, [0, 1, 2]))
    (outside,) = pair.reports(task, one_bit(4, [0]), time=task.interval.start - 1)
    unknown = bytearray(other)
    unknown[16 + 8 + 2 + 4 + 64] ^= 0x40  # the config id of the leader's ciphertext
    assert errors(pair, task, good) == []
    assert errors(pair, task, good) == [ReportError.REPORT_REPLAYED]
    assert errors(pair, task, outside) == [ReportError.REPORT_DROPPED]
    assert errors(pair, task, bytes(unknown)) == [ReportError.OUTDATED_CONFIG]
    pair.clock.set(task.starts - 3600)
    assert errors(pair, task, other) == [ReportError.REPORT_TOO_EARLY]
    pair.clock.set(task.closes)
    assert errors(pair, task, other, third) == [ReportError.TASK_EXPIRED] * 2
    pair.clock.set(NOW)
    # In the order of the request, and only those that failed.
    answer = pair.upload(task, outside, other, good)
    assert [status.error for status in answer.statuses] == [
        ReportError.REPORT_DROPPED,
        ReportError.REPORT_REPLAYED,
    ]
    (status,) = pair.leader.status([task])
    assert status.uploaded == 2
    assert status.rejected("upload") == {
        "report_replayed": 2,
        "report_dropped": 2,
        "outdated_config": 1,
        "report_too_early": 1,
        "task_expired": 2,
    }


def test_extensions_and_odd_sizes_are_malformed(pair: Pair, task: KnownTask) -> None:
    (report,) = pair.reports(task, one_bit(4, [0]))
    extended = report[:24] + b"\x00\x04" + b"\x00\x01\x00\x00" + report[26:]
    assert errors(pair, task, extended) == [ReportError.INVALID_MESSAGE]
    for body in (report[:-1], report + b"x", b"\xff" * 50):
        with pytest.raises(ProblemError) as caught:
            pair.upload(task, body)
        assert caught.value.problem == Problem.INVALID_MESSAGE
    assert pair.row_counts()[0]["report_blobs"] == 0


def test_a_big_vdafs_reports_are_as_long_as_they_must_be(pair: Pair) -> None:
    for bins in (2, 3, 50, 333):
        (task,) = pair.accept(small_recipe(bins=bins, id=f"bins-{bins}"))
        reports = pair.reports(task, np.zeros((2, bins), np.uint8))
        assert {len(report) for report in reports} == {task.report_bytes}


# --- keys ---------------------------------------------------------------------------------------


def test_reports_sealed_to_an_old_key_open_until_the_task_ends(pair: Pair, task: KnownTask) -> None:
    old = pair.reports(task, one_bit(4, [0]))
    for keys in (pair.leader.keys, pair.helper.keys):
        (before,) = keys.published()
        made = keys.generate()
        assert keys.published() == [before]  # until it is in the log
        assert keys.unpublished() == [made]
        keys.publish(made)
        keys.publish(made)
        assert keys.published() == [made]
        assert made[0] != before[0]
    pair.set_clocks(task.closes - 1)
    pair.leader.garbage_collector.run()
    pair.helper.garbage_collector.run()
    pair.upload(task, *old, *pair.reports(task, one_bit(4, [1])))
    pair.work()
    (status,) = pair.leader.status([task])
    assert status.verified == 2
    pair.set_clocks(task.bucket_end)
    pair.leader.garbage_collector.run()
    assert len(pair.leader.keys.keypairs()) == 1
    assert len(pair.leader.keys.own_configs()) == 2
    with pytest.raises(InvalidInput):
        pair.leader.keys.publish(b"not ours")


def test_keys_survive_a_start_and_ids_go_round(pair: Pair) -> None:
    keys = pair.leader.keys
    for _ in range(300):
        keys.publish(keys.generate())
        pair.clock.advance(4000)
        keys.destroy_due()
    alive = {each.config for each in keys.keypairs()}
    assert len(alive) <= 2
    pair.start()
    assert {each.config for each in pair.leader.keys.keypairs()} == alive
    assert len(pair.leader.keys.own_configs()) == 301
    assert b"private" not in repr(pair.leader.keys.keypairs()).encode()


def test_a_destroyed_key_is_in_no_file_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "_BUSY_TIMEOUT_SECONDS", 0)
    pair = Pair.in_folder(tmp_path)
    keys, collector = pair.leader.keys, pair.leader.garbage_collector
    with pair.databases[0].read() as tx:
        sealed = bytes(tx.scalars(select(hpke_keys.c.private_key)).one())
    collector.run()

    def files_with_the_key() -> list[str]:
        return [each.name for each in tmp_path.glob("leader.db*") if sealed in each.read_bytes()]

    assert files_with_the_key()
    keys.publish(keys.generate())
    pair.clock.advance(4000)
    with pair.databases[0].read() as tx:  # somebody still reads SQLite's log
        tx.execute(select(hpke_keys)).all()
        assert keys.destroy_due() == 1  # as cosigning does
        collector.run()
        assert len(keys.keypairs()) == 1
    collector.run()
    assert files_with_the_key() == []
    pair.stop()


# --- progress -----------------------------------------------------------------------------------


def test_analysts_see_tenths_of_the_recipe_and_operators_see_counts(pair: Pair) -> None:
    recipe = small_recipe(min_cohort=20, group_by=["user.locale"])
    tasks = pair.accept(recipe)
    first = tasks[0]
    pair.upload(first, *pair.reports(first, one_bit(4, [0] * 19)))
    pair.work()
    shown = pair.leader.progress(recipe.digest)
    assert shown is not None
    assert shown["state"] == "collecting"
    assert shown["filled"] == 10 * 19 // (20 * len(tasks)) / 10
    assert shown["waiting_for"] == "more reports"
    assert "reports" not in shown
    for task in tasks:
        pair.upload(task, *pair.reports(task, one_bit(4, [0] * 23)))
    pair.work()
    shown = pair.leader.progress(recipe.digest)
    assert shown is not None
    assert (shown["state"], shown["filled"], shown["reports"]) == ("ready", 1.0, 22)
    assert pair.leader.tasks.of_recipe(bytes(32)) == []
    for task in tasks:
        pair.collect(task)
    pair.work()
    shown = pair.leader.progress(recipe.digest)
    assert shown is not None
    assert (shown["state"], shown["waiting_for"]) == ("collected", None)
    pair.set_clocks(first.ends)
    shown = pair.leader.progress(recipe.digest)
    assert shown is not None
    assert shown["state"] == "expired"


def test_own_uploads_turn_tenths_into_exact_counts(pair: Pair) -> None:
    """What tenths do not hide, as the documentation says: 273 uploads find a group of 47 people.

    Anybody can upload. Whoever fills all other groups and then counts how many reports of their own
    one more group takes knows who was there; and one report before a tenth, when the next one came.
    """
    recipe = small_recipe(min_cohort=64, group_by=["user.locale"])
    tasks = pair.accept(recipe)
    target = tasks[0].task_id
    people = {task.task_id: 3 + 7 * place for place, task in enumerate(tasks)} | {target: 47}
    own = dict.fromkeys(people, 0)

    def shown() -> dict[str, object]:
        statuses = [
            TaskStatus(
                task=task,
                state=BatchState.OPEN,
                counts={VERIFIED: people[task.task_id] + own[task.task_id]},
                unfinished_jobs=0,
                failures=(),
            )
            for task in tasks
        ]
        return recipe_progress(statuses, NOW)

    for task_id in own.keys() - {target}:
        own[task_id] = 64  # whatever is there: more than the minimum does not count
    while shown()["filled"] != 1.0:
        own[target] += 1
    assert 64 - own[target] == people[target] == 47
    assert sum(own.values()) == 4 * 64 + 17 == 273
    own[target] -= 1
    assert shown()["filled"] == 0.9
    people[target] += 1  # somebody answers
    assert shown()["filled"] == 1.0


# --- the end ------------------------------------------------------------------------------------


def test_a_sweep_leaves_nothing_of_an_ended_task(pair: Pair, task: KnownTask) -> None:
    later = small_recipe(id="later", window={
        "opens": NOW, "closes": task.ends + 50_000, "ends": task.ends + 90_000,
    })  # fmt: skip
    (living,) = pair.accept(later)
    for each in (task, living):
        pair.upload(each, *pair.reports(each, one_bit(4, [0, 1, 2])))
        pair.leader.aggregation.step(pair.leader.aggregation.create_jobs(1)[0])
        pair.upload(each, *pair.reports(each, one_bit(4, [3])))
    pair.collect(task)
    pair.set_clocks(task.ends - 1)
    assert pair.leader.garbage_collector.run().emptied == 0
    pair.set_clocks(task.ends)
    assert (
        pair.leader.garbage_collector.run().emptied
        == pair.helper.garbage_collector.run().emptied
        == 1
    )
    for rows in pair.row_counts():
        assert rows["report_ids"] >= 6  # what protects against replays outlives the task
        assert rows["accumulators"] == 1
        assert rows["collections"] == 0
        assert rows["report_blobs"] <= 1
    assert errors(pair, task, *pair.reports(task, one_bit(4, [0]))) == [ReportError.TASK_EXPIRED]
    pair.set_clocks(task.bucket_end)
    assert (
        pair.leader.garbage_collector.run().removed
        == pair.helper.garbage_collector.run().removed
        == 1
    )
    for rows in pair.row_counts():
        assert rows["tasks"] == rows["batches"] == 1
    assert pair.leader.tasks.find(task.task_id) is None
    assert pair.helper.tasks.find(task.task_id) is None
    assert (
        pair.leader.garbage_collector.run().removed
        == pair.helper.garbage_collector.run().removed
        == 0
    )
    assert pair.row_counts()[0]["report_ids"] == 4
    assert pair.row_counts()[1]["report_ids"] == 3
    pair.work()
    (status,) = pair.leader.status([living])
    assert status.verified == 4


def test_a_helper_whose_clock_is_behind_is_asked_again(pair: Pair, task: KnownTask) -> None:
    pair.helper_clock.set(task.starts - 3600)
    pair.upload(task, *pair.reports(task, one_bit(4, [0])))
    (why,) = pair.work()
    assert "helper's clock" in why
    pair.helper_clock.set(NOW)
    assert pair.work() == []


# --- series -------------------------------------------------------------------------------------

EVERY = 7 * 86_400
LIMITS = {"windows": 26, "longest": "200d", "answers": 4, "cells": 26 * 5}


def series_policy(**limits: object) -> Policy:
    tree = small_policy().model_dump(mode="json", exclude_none=True)
    tree["analyses"][ANALYSIS]["series"] = LIMITS | limits
    return Policy.model_validate_json(json.dumps(tree))


def a_series(windows: int = 26, **changes: Any) -> Recipe:
    series = {"windows": windows, "every": EVERY, "answers": 2}
    window = {"opens": NOW - 3600, "closes": NOW + 86_400, "ends": NOW + 2 * 86_400}
    return small_recipe(**{"series": series, "window": window, **changes})


def served(recipe: Recipe, policy: Policy) -> list[KnownTask]:
    url = recipe.aggregators.leader
    return served_tasks(signed(recipe), url=url, role=Role.LEADER, policies=[policy])


def test_each_window_of_a_series_is_a_task_of_its_own() -> None:
    recipe = a_series(group_by=["user.locale"])
    found = served(recipe, series_policy())
    assert len(found) == len({task.task_id for task in found}) == 26 * 5
    for number in range(26):
        window = recipe.window_at(number)
        times = (window.opens, window.closes, window.ends, window.bucket.end)
        of_window = [
            task
            for task in found
            if (task.opens, task.closes, task.ends, task.bucket_end) == times
            and task.starts <= window.opens
        ]
        assert len({task.group for task in of_window}) == len(of_window) == 5


def test_no_more_tasks_than_the_policy_permits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An absurd series costs a cosigner no enumeration, whatever else it asks for."""
    grouped = a_series(group_by=["user.locale"])
    absurd = a_series(500, group_by=["user.locale"])
    monkeypatch.setattr(task_module, "_task", pytest.fail)
    for recipe, policy in (
        (grouped, small_policy()),
        (grouped, series_policy(cells=26 * 5 - 1)),
        (grouped, series_policy(windows=25)),
        (grouped, series_policy(longest="100d")),
        (grouped, series_policy(answers=1)),
        (absurd, series_policy()),
        (absurd, series_policy(windows=500, longest="7000d")),
    ):
        assert served(recipe, policy) == []


def test_windows_of_a_series_end_one_after_the_other() -> None:
    folder = fast_folder()
    pair = Pair.in_folder(folder, policies=[series_policy()])
    try:
        recipe = a_series(3)
        first, second, third = pair.accept(recipe)
        assert [task.opens for task in (first, second, third)] == [
            recipe.window_at(number).opens for number in range(3)
        ]
        (report,) = pair.reports(first, one_bit(4, [1]))
        (other,) = pair.reports(second, one_bit(4, [1]))
        assert errors(pair, first, report) == []
        # Nobody answers a window before it opens, and no report fits another window's task.
        assert errors(pair, second, other) == [ReportError.REPORT_TOO_EARLY]
        assert errors(pair, second, report) != []
        pair.set_clocks(second.opens)
        assert errors(pair, first, report) == [ReportError.TASK_EXPIRED]
        assert errors(pair, second, other) == []
        pair.set_clocks(first.bucket_end)
        assert pair.accept(recipe) == [first, second, third]
    finally:
        pair.stop()
        shutil.rmtree(folder)
