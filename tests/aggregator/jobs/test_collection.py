"""A batch that is frozen and not yet collected waits, loses nothing, and is collected later."""

from __future__ import annotations

import pytest

from chorister.aggregator.known_tasks import KnownTask
from chorister.dap.draft import Problem, ReportError
from chorister.errors import ProblemError, Unreachable
from tests.aggregator.conftest import MakePair
from tests.aggregator.world import Pair, collector_digest, one_bit, small_recipe


def frozen(pair: Pair) -> KnownTask:
    """A task with four verified reports, for which a collector has asked; the helper is away."""
    (task,) = pair.accept(small_recipe(crowd="honest"))
    pair.set_clocks(task.opens)
    pair.upload(task, *pair.reports(task, one_bit(task.vdaf.length, [0, 1, 1, 2])))
    pair.work()
    pair.collect(task)

    def away(request: bytes) -> None:
        raise Unreachable("the helper is away")

    pair.wire.before = away
    assert "the helper is away" in pair.work()[0]
    return task


def upload_one(pair: Pair, task: KnownTask) -> list[int]:
    errors = pair.upload(task, *pair.reports(task, one_bit(task.vdaf.length, [3])))
    return [each.error for each in errors.statuses]


def test_it_waits_for_a_helper_that_is_away(make_pair: MakePair) -> None:
    pair = make_pair()
    task = frozen(pair)
    # Who comes now is told so; it is not lost in silence, nor is it in the sum of one side only.
    assert upload_one(pair, task) == [ReportError.BATCH_COLLECTED]
    pair.set_clocks(task.ends - 1)
    pair.start()
    assert pair.work()
    assert pair.result(task) is None
    pair.wire.before = lambda _request: None
    assert not pair.work()
    found = pair.result(task)
    assert found is not None
    assert (found[0], found[1].tolist()[:4]) == (4, [1, 2, 1, 0])


@pytest.mark.parametrize("problem", [Problem.BATCH_MISMATCH, Problem.INVALID_BATCH_SIZE])
def test_a_refusal_is_told_and_can_be_mended(make_pair: MakePair, problem: Problem) -> None:
    pair = make_pair()
    task = frozen(pair)

    def refuse(request: bytes) -> None:
        raise ProblemError(problem, "not the same reports", task_id=task.task_id)

    pair.wire.before = refuse
    pair.work()
    ref = pair.collect(task)
    with pytest.raises(ProblemError, match="not the same reports") as caught:
        pair.leader.collection.result(task, ref.collection_id, collector_digest())
    assert caught.value.problem == problem
    assert upload_one(pair, task) == [ReportError.BATCH_COLLECTED]
    # The operators have fixed it: the same request, sent again, collects the same reports.
    pair.wire.before = lambda _request: None
    assert not pair.work()
    pair.leader.collection.delete(task, ref.collection_id, collector_digest())
    assert pair.collect(task) == ref
    assert not pair.work()
    found = pair.result(task)
    assert found is not None
    assert (found[0], found[1].tolist()[:4]) == (4, [1, 2, 1, 0])


def test_an_answer_that_was_lost_is_the_same_when_asked_for_again(make_pair: MakePair) -> None:
    pair = make_pair()
    task = frozen(pair)
    answers: list[bytes] = []

    def lose(answer: bytes) -> None:
        answers.append(answer)
        if len(answers) == 1:
            raise Unreachable("lost on the way")

    pair.wire.before = lambda _request: None
    pair.wire.after = lose
    assert pair.work()
    assert not pair.work()
    assert len(answers) == 2
    assert answers[0] == answers[1]
    assert pair.result(task) is not None


def test_stuck_jobs_hide_no_others(make_pair: MakePair) -> None:
    pair = make_pair()
    (task,) = pair.accept(small_recipe())
    pair.set_clocks(task.opens)

    def refuse(request: bytes) -> None:
        raise ProblemError(Problem.INVALID_MESSAGE, "no", task_id=task.task_id)

    pair.wire.before = refuse
    jobs = []
    for _ in range(3):
        pair.upload(task, *pair.reports(task, one_bit(task.vdaf.length, [0])))
        (job,) = pair.leader.aggregation.create_jobs(4)
        jobs.append(job)
        pair.clock.set(pair.clock.now() + 1)
    for job in jobs[:2]:
        assert not pair.leader.aggregation.step(job).done
    assert pair.leader.aggregation.unfinished(1) == [jobs[2]]
    assert not pair.leader.aggregation.step(jobs[2]).done
    assert not pair.leader.aggregation.step(jobs[0]).done
    assert pair.leader.aggregation.unfinished(2) == [jobs[1], jobs[2]]  # in turn


def test_collections_that_wait_hide_no_others(make_pair: MakePair) -> None:
    pair = make_pair()
    tasks = pair.accept(*(small_recipe(id=f"recipe-{number}") for number in range(3)))
    pair.set_clocks(tasks[0].opens)
    refs = []
    for task in tasks:
        refs.append(pair.collect(task))
        pair.clock.set(pair.clock.now() + 1)
    assert pair.leader.collection.pending() == refs
