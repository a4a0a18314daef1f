"""A leader that lies to the helper."""

from __future__ import annotations

import dataclasses
import os

import pytest

from chorister._native import HPKEKeypair
from chorister.aggregator.known_tasks import KnownTask
from chorister.canonical import sha256
from chorister.dap.draft import (
    Problem,
    ReportError,
)
from chorister.dap.messages import (
    CollectionJobResp,
)
from chorister.dap.task import Interval, task_id
from chorister.errors import HPKEError, ProblemError
from tests.aggregator.hostile import (
    begun,
    codes,
    pair,
    refusal,
    sent,
    share_request,
    task,
)
from tests.aggregator.world import (
    Pair,
    collection_request,
    collector_digest,
    one_bit,
    opened,
    small_recipe,
)

__all__ = ["pair", "task"]


def test_a_report_in_a_second_job_is_refused(pair: Pair, task: KnownTask) -> None:
    first, second = pair.reports(task, one_bit(4, [0, 1]))
    assert codes(sent(pair, task, begun(pair, task, first).verify_inits).body) == [0]
    again = sent(pair, task, begun(pair, task, first + second).verify_inits)
    assert codes(again.body) == [ReportError.REPORT_REPLAYED, 0]
    (status,) = pair.helper.status([task])
    assert status.verified == 2


def test_forgetting_a_job_does_not_make_its_reports_new(pair: Pair, task: KnownTask) -> None:
    (report,) = pair.reports(task, one_bit(4, [0]))
    inits = begun(pair, task, report).verify_inits
    job = sent(pair, task, inits)
    pair.helper.delete_job(task, job.resource_id)
    with pytest.raises(ProblemError) as caught:
        pair.helper.find_job(task, job.resource_id)
    assert caught.value.problem == Problem.UNRECOGNIZED_AGGREGATION_JOB
    assert codes(sent(pair, task, inits).body) == [ReportError.REPORT_REPLAYED]


def test_a_report_twice_in_one_job_fails_the_job(pair: Pair, task: KnownTask) -> None:
    (report,) = pair.reports(task, one_bit(4, [0]))
    inits = begun(pair, task, report).verify_inits
    with pytest.raises(ProblemError) as caught:
        sent(pair, task, inits + inits)
    assert caught.value.problem == Problem.INVALID_MESSAGE
    assert pair.row_counts()[1]["report_ids"] == 0


def test_after_collection_nothing_is_added(pair: Pair, task: KnownTask) -> None:
    reports = pair.reports(task, one_bit(4, [0, 1, 2, 3]))
    job = begun(pair, task, b"".join(reports[:3]))
    led = job.finish(sent(pair, task, job.verify_inits).body)
    pair.helper.create_share(task, share_request(task, led.count, led.checksum))
    late = sent(pair, task, begun(pair, task, reports[3]).verify_inits)
    assert codes(late.body) == [ReportError.BATCH_COLLECTED]
    again = sent(pair, task, job.verify_inits)
    assert codes(again.body) == [ReportError.BATCH_COLLECTED] * 3
    rows = pair.row_counts()[1]
    assert rows["accumulators"] == rows["helper_jobs"] == 0


def test_after_the_end_everything_is_refused_and_nothing_comes_back(
    pair: Pair, task: KnownTask
) -> None:
    (report,) = pair.reports(task, one_bit(4, [0]))
    inits = begun(pair, task, report).verify_inits
    sent(pair, task, inits)
    pair.set_clocks(task.ends)
    for call in (
        lambda: sent(pair, task, inits),
        lambda: pair.helper.create_share(task, share_request(task, 1, bytes(32))),
        lambda: pair.collect(task),
    ):
        with pytest.raises(ProblemError) as caught:
            call()
        assert caught.value.problem == Problem.UNRECOGNIZED_TASK
    pair.set_clocks(task.bucket_end)
    pair.helper.garbage_collector.run()
    # The clock was wrong, and the recipe is seen again: the task must not start over.
    pair.set_clocks(task.opens)
    pair.accept(small_recipe(min_cohort=3, crowd="honest"))
    assert pair.helper.tasks.find(task.task_id) is None
    # Nor for a process that still remembers it.
    assert codes(sent(pair, task, inits).body) == [ReportError.BATCH_COLLECTED]
    assert pair.row_counts()[1]["report_ids"] == 0


def test_swapped_shares_do_not_verify(pair: Pair, task: KnownTask) -> None:
    one, two = pair.reports(task, one_bit(4, [0, 1]))
    first, second = (begun(pair, task, each).verify_inits for each in (one, two))
    # The helper's ciphertext and all that follows it, under the other report's header.
    header = 16 + 8 + 2 + 4 + 64
    swapped = first[:header] + second[header:]
    assert codes(sent(pair, task, swapped).body) == [ReportError.HPKE_DECRYPT_ERROR]
    # The other report's first message only.
    tail = 20
    assert codes(sent(pair, task, first[:-tail] + second[-tail:]).body) == [
        ReportError.VDAF_VERIFY_ERROR
    ]
    (status,) = pair.helper.status([task])
    assert status.verified == 0


@pytest.mark.parametrize("change", [{"min_batch_size": 1}, {"task_info": b"invented"}])
def test_an_altered_task_is_unknown_and_leaves_no_row(
    pair: Pair, task: KnownTask, change: dict[str, object]
) -> None:
    before = pair.row_counts()
    altered = dataclasses.replace(task.configuration, **change)  # type: ignore[arg-type]
    for side in (pair.leader, pair.helper):
        assert side.tasks.find(task_id(altered)) is None
        assert side.tasks.find(os.urandom(32)) is None
    assert pair.row_counts() == before
    # Reports made for the altered task do not open under the real one.
    fake = dataclasses.replace(task, configuration=altered, task_id=task_id(altered))
    pair.upload(task, *pair.reports(fake, one_bit(4, [0, 1, 2])))
    pair.work()
    (status,) = pair.leader.status([task])
    assert status.rejected("leader") == {"hpke_decrypt_error": 3}
    assert status.verified == 0


def test_the_helper_counts_for_itself(pair: Pair, task: KnownTask) -> None:
    reports = pair.reports(task, one_bit(4, [0, 1, 2]))
    job = begun(pair, task, b"".join(reports[:2]))
    led = job.finish(sent(pair, task, job.verify_inits).body)
    # Two are fewer than three, whatever is claimed.
    for claimed in (2, 3, 1000):
        assert (
            refusal(pair, task, share_request(task, claimed, led.checksum))
            == Problem.INVALID_BATCH_SIZE
        )
    more = begun(pair, task, reports[2])
    last = more.finish(sent(pair, task, more.verify_inits).body)
    checksum = bytes(a ^ b for a, b in zip(led.checksum, last.checksum, strict=True))
    for count, claimed_sum in ((4, checksum), (2, checksum), (3, led.checksum)):
        wrong = share_request(task, count, claimed_sum)
        assert refusal(pair, task, wrong) == Problem.BATCH_MISMATCH
    for interval in (Interval(task.interval.start, 2), Interval(task.interval.start - 1, 1)):
        wrong = share_request(task, 3, checksum, interval)
        assert refusal(pair, task, wrong) == Problem.BATCH_INVALID
    released = pair.helper.create_share(task, share_request(task, 3, checksum))
    assert pair.helper.create_share(task, share_request(task, 3, checksum)) == released
    # Another request for the same batch, and the same one once its answer was deleted.
    assert refusal(pair, task, share_request(task, 4, checksum)) == Problem.BATCH_OVERLAP
    pair.helper.delete_share(task, released.resource_id)
    assert refusal(pair, task, share_request(task, 3, checksum)) == Problem.BATCH_OVERLAP


def test_only_the_recipes_collector_collects(pair: Pair, task: KnownTask) -> None:
    stranger = HPKEKeypair.generate(9)
    pair.collectors[sha256(stranger.config)] = stranger.config
    pair.upload(task, *pair.reports(task, one_bit(4, [0, 1, 2])))
    pair.work()
    request = collection_request(task)
    with pytest.raises(ProblemError) as caught:
        pair.leader.collection.create(task, request, sha256(stranger.config))
    assert caught.value.status == 403
    ref = pair.collect(task)
    pair.work()
    for call in (pair.leader.collection.result, pair.leader.collection.delete):
        with pytest.raises(ProblemError) as caught:
            call(task, ref.collection_id, sha256(stranger.config))
        assert caught.value.status == 403
    found = pair.leader.collection.result(task, ref.collection_id, collector_digest())
    assert isinstance(found, CollectionJobResp)
    with pytest.raises(HPKEError):
        stranger.open(found.helper_encrypted_agg_share, b"", b"")
    assert opened(task, found)[1].tolist() == [1, 1, 1, 0]


def test_a_batch_is_collected_once(pair: Pair, task: KnownTask) -> None:
    pair.upload(task, *pair.reports(task, one_bit(4, [0, 1, 2])))
    pair.work()
    ref = pair.collect(task)
    pair.work()
    first = pair.result(task)
    assert first is not None
    assert pair.collect(task) == ref  # the same job, and the same sealed result
    pair.leader.collection.delete(task, ref.collection_id, collector_digest())
    with pytest.raises(ProblemError) as caught:
        pair.collect(task)
    assert caught.value.problem == Problem.BATCH_OVERLAP
    late = pair.upload(task, *pair.reports(task, one_bit(4, [0])))
    assert [status.error for status in late.statuses] == [ReportError.BATCH_COLLECTED]
