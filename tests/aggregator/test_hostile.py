"""A leader that lies to the helper, a helper that lies to the leader, and clients that cheat."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister._native import HPKEKeypair, LeaderJob, hpke_seal
from chorister.aggregator.batches import total
from chorister.aggregator.helper import Answer
from chorister.aggregator.tasks import KnownTask
from chorister.canonical import sha256
from chorister.dap.codec import uint16, uint64, vector
from chorister.dap.draft import (
    VERSION_TAG,
    Problem,
    ReportError,
    Role,
    VerifyRespType,
    input_share_info,
)
from chorister.dap.messages import (
    AggregateShare,
    AggregateShareReq,
    AggregationJobInitReq,
    AggregationJobResp,
    BatchSelector,
    CollectionJobReq,
    CollectionJobResp,
    Query,
)
from chorister.dap.task import Interval, task_id
from chorister.dap.taskprov import verify_key
from chorister.dap.vdaf import Prio3MultihotCountVec
from chorister.errors import HPKEError, ProblemError, Unreachable
from tests.aggregator.faults import fast_folder
from tests.aggregator.world import (
    Pair,
    collection_request,
    collector_digest,
    collector_keys,
    one_bit,
    opened,
    small_recipe,
)
from tests.native.hostile_client import all_ones_without_a_proof


@pytest.fixture
def pair() -> Iterator[Pair]:
    folder = fast_folder()
    made = Pair.in_folder(folder)
    yield made
    made.stop()
    shutil.rmtree(folder)


@pytest.fixture
def task(pair: Pair) -> KnownTask:
    (found,) = pair.accept(small_recipe(min_cohort=3, crowd="honest"))
    return found


def begun(pair: Pair, task: KnownTask, reports: bytes) -> LeaderJob:
    """A job as this leader, or any that holds its keys, begins it."""
    key = verify_key(pair.verify_key_init, task.task_id)
    return task.binding.leader_initialize(key, pair.leader.keys.keypairs(), reports)


def sent(pair: Pair, task: KnownTask, verify_inits: bytes) -> Answer:
    return pair.helper.aggregate(task, AggregationJobInitReq(verify_inits=verify_inits).encode())


def codes(answer: bytes) -> list[int]:
    return [each.error for each in AggregationJobResp(answer).responses()]


def share_request(
    task: KnownTask, count: int, checksum: bytes, interval: Interval | None = None
) -> bytes:
    return AggregateShareReq(
        collection_job_req=CollectionJobReq(query=Query.of(interval or task.interval)),
        batch_selector=BatchSelector.of(interval or task.interval),
        report_count=count,
        checksum=checksum,
    ).encode()


def refusal(pair: Pair, task: KnownTask, request: bytes) -> str | None:
    with pytest.raises(ProblemError) as caught:
        pair.helper.aggregate_share(task, request)
    return caught.value.problem


# --- a hostile leader ---------------------------------------------------------------------------


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
    pair.helper.delete_aggregation_job(task, job.resource_id)
    with pytest.raises(ProblemError) as caught:
        pair.helper.aggregation_job(task, job.resource_id)
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
    pair.helper.aggregate_share(task, share_request(task, led.count, led.checksum))
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
        lambda: pair.helper.aggregate_share(task, share_request(task, 1, bytes(32))),
        lambda: pair.collect(task),
    ):
        with pytest.raises(ProblemError) as caught:
            call()
        assert caught.value.problem == Problem.UNRECOGNIZED_TASK
    pair.set_clocks(task.bucket_end)
    pair.helper.sweep()
    # The clock was wrong, and the recipe is seen once more: the task must not begin anew.
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
    released = pair.helper.aggregate_share(task, share_request(task, 3, checksum))
    assert pair.helper.aggregate_share(task, share_request(task, 3, checksum)) == released
    # Another request for the same batch, and the same one once its answer was deleted.
    assert refusal(pair, task, share_request(task, 4, checksum)) == Problem.BATCH_OVERLAP
    pair.helper.delete_aggregate_share(task, released.resource_id)
    assert refusal(pair, task, share_request(task, 3, checksum)) == Problem.BATCH_OVERLAP


def test_only_the_recipes_collector_collects(pair: Pair, task: KnownTask) -> None:
    stranger = HPKEKeypair.generate(9)
    pair.collectors[sha256(stranger.config)] = stranger.config
    pair.upload(task, *pair.reports(task, one_bit(4, [0, 1, 2])))
    pair.work()
    request = collection_request(task)
    with pytest.raises(ProblemError) as caught:
        pair.leader.create_collection(task, request, sha256(stranger.config))
    assert caught.value.status == 403
    ref = pair.collect(task)
    pair.work()
    for call in (pair.leader.collection, pair.leader.delete_collection):
        with pytest.raises(ProblemError) as caught:
            call(task, ref.collection_id, sha256(stranger.config))
        assert caught.value.status == 403
    found = pair.leader.collection(task, ref.collection_id, collector_digest())
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
    pair.leader.delete_collection(task, ref.collection_id, collector_digest())
    with pytest.raises(ProblemError) as caught:
        pair.collect(task)
    assert caught.value.problem == Problem.BATCH_OVERLAP
    late = pair.upload(task, *pair.reports(task, one_bit(4, [0])))
    assert [status.error for status in late.statuses] == [ReportError.BATCH_COLLECTED]


# --- a hostile helper ---------------------------------------------------------------------------


class LyingHelper:
    """Does as told with what an honest helper answers."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.answer: Callable[[bytes], bytes] = bytes
        self.share: Callable[[bytes], bytes] = bytes

    def create_aggregation_job(self, task: KnownTask, request: bytes) -> bytes:
        return self.answer(self.pair.helper.aggregate(task, request).body)

    def aggregate_share(self, task: KnownTask, request: bytes) -> bytes:
        return self.share(self.pair.helper.aggregate_share(task, request).body)


def _resps(body: bytes) -> list[bytes]:
    """The encoded responses, one by one: id, type, and what follows."""
    found = []
    for each in AggregationJobResp(body).responses():
        encoded = each.report_id + bytes([each.kind])
        if each.kind is VerifyRespType.CONTINUE:
            encoded += len(each.payload).to_bytes(4, "big") + each.payload
        elif each.kind is VerifyRespType.REJECT:
            encoded += bytes([each.error])
        found.append(encoded)
    return found


LIES: dict[str, Callable[[bytes], bytes]] = {
    "reordered": lambda body: b"".join(reversed(_resps(body))),
    "one missing": lambda body: b"".join(_resps(body)[1:]),
    "one too many": lambda body: body + _resps(body)[0],
    "another id": lambda body: os.urandom(16) + body[16:],
    "garbage": lambda body: b"\xff" * len(body),
    "empty": lambda body: body[:0],
    "cut off": lambda body: body[:-1],
}


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_to_another_job_adds_nothing(pair: Pair, task: KnownTask, lie: str) -> None:
    liar = LyingHelper(pair)
    pair.wire = liar  # type: ignore[assignment]
    pair.start()
    liar.answer = LIES[lie]
    pair.upload(task, *pair.reports(task, one_bit(4, [0, 1, 2])))
    assert len(pair.work()) == 1
    (status,) = pair.leader.status([task])
    assert (status.verified, status.unfinished_jobs) == (0, 1)
    assert status.failures
    assert pair.row_counts()[0]["report_blobs"] == 1
    # Once the helper tells the truth, the same job goes through.
    liar.answer = lambda body: body
    assert pair.work() == []
    (status,) = pair.leader.status([task])
    assert (status.verified, status.unfinished_jobs) == (3, 0)


def test_a_helper_that_drops_reports_gets_no_result_out(pair: Pair, task: KnownTask) -> None:
    """It says `rejected` and adds the report all the same: the counts differ, and all stops."""
    liar = LyingHelper(pair)
    pair.wire = liar  # type: ignore[assignment]
    pair.start()

    def reject_first(body: bytes) -> bytes:
        first, *rest = _resps(body)
        return b"".join([first[:16] + b"\x02\x06", *rest])

    liar.answer = reject_first
    pair.upload(task, *pair.reports(task, one_bit(4, [0, 1, 2, 3])))
    pair.work()
    ref = pair.collect(task)
    pair.work()
    with pytest.raises(ProblemError) as caught:
        pair.leader.collection(task, ref.collection_id, collector_digest())
    assert caught.value.problem == Problem.BATCH_MISMATCH
    (status,) = pair.leader.status([task])
    assert status.rejected("helper") == {"vdaf_verify_error": 1}


def test_a_helper_that_vouches_for_an_invalid_report_convinces_no_leader(
    pair: Pair, task: KnownTask
) -> None:
    liar = LyingHelper(pair)
    pair.wire = liar  # type: ignore[assignment]
    pair.start()
    honest = pair.reports(task, one_bit(4, [0, 1, 2]))
    broken = bytearray(pair.reports(task, one_bit(4, [3]))[0])
    broken[-1] ^= 1  # the helper's ciphertext

    def vouch(body: bytes) -> bytes:
        resps = _resps(body)
        good = next(each for each in resps if each[16] == VerifyRespType.CONTINUE)
        return b"".join(each[:16] + good[16:] for each in resps)

    liar.answer = vouch
    pair.upload(task, *honest, bytes(broken))
    pair.work()
    (status,) = pair.leader.status([task])
    # The finish message is bound to each report's proof: only the one it was made for passes.
    assert status.verified == 1
    assert status.rejected("disputed") == {"vdaf_verify_error": 3}
    assert status.rejected("helper") == {}


def test_a_helper_that_is_away_is_asked_again_with_the_same_bytes(
    pair: Pair, task: KnownTask
) -> None:
    requests: list[bytes] = []

    def away(request: bytes) -> None:
        requests.append(request)
        raise Unreachable("no route")

    pair.wire.before = away
    pair.upload(task, *pair.reports(task, one_bit(4, [0, 1, 2])))
    for _ in range(2):
        assert pair.work() == ["the helper: no route"]
        pair.start()
    pair.upload(task, *pair.reports(task, one_bit(4, [0])))
    pair.leader.keys.publish(pair.leader.keys.generate())
    pair.work()
    assert requests.count(requests[0]) == 3
    assert len(set(requests)) == 2


def test_a_job_that_the_helper_refuses_says_nothing_of_the_helper(
    pair: Pair, task: KnownTask
) -> None:
    """Else one such task would make the leader pause with all of them."""
    errors = [ProblemError(Problem.INVALID_TASK, "never heard of it"), Unreachable("away")]

    def refuse(_: bytes) -> None:
        if errors:
            raise errors.pop(0)

    pair.wire.before = refuse
    pair.upload(task, *pair.reports(task, one_bit(4, [0])))
    (job,) = pair.leader.create_aggregation_jobs(10)
    refused, away, served = (pair.leader.step(job) for _ in range(3))
    assert (refused.done, refused.peer) == (False, False)
    assert (away.done, away.peer) == (False, True)
    assert served.done


def test_thousands_of_tiny_reports_are_refused_at_once(pair: Pair, task: KnownTask) -> None:
    """Few wrong ones are named one by one; of that many none is looked at."""
    (report,) = pair.reports(task, one_bit(4, [0]))
    sealed = b"\x01\0\1x\0\0\0\1y"
    tiny = report[16:24] + b"\0\0" + b"\0\0\0\0" + 2 * sealed

    def tinies(count: int) -> bytes:
        return b"".join(os.urandom(16) + tiny for _ in range(count))

    few = pair.upload(task, report, tinies(9))
    assert [status.error for status in few.statuses] == 9 * [ReportError.INVALID_MESSAGE]
    with pytest.raises(ProblemError, match="hold no 5000 reports") as refused:
        pair.leader.check_upload(task, tinies(5000))
    assert refused.value.problem == Problem.INVALID_MESSAGE


def test_a_garbled_share_is_asked_for_again(pair: Pair, task: KnownTask) -> None:
    liar = LyingHelper(pair)
    pair.wire = liar  # type: ignore[assignment]
    pair.start()
    liar.share = lambda body: body[:-3]
    pair.upload(task, *pair.reports(task, one_bit(4, [0, 1, 2])))
    pair.work()
    pair.collect(task)
    assert pair.result(task) is None
    pair.work()
    assert pair.result(task) is None
    liar.share = lambda body: AggregateShare.decode(body).encode()
    pair.work()
    collected = pair.result(task)
    assert collected is not None
    assert collected[1].tolist() == [1, 1, 1, 0]


# --- hostile clients ----------------------------------------------------------------------------


@settings(max_examples=60)
@given(data=st.data())
def test_tampered_reports_never_change_a_sum(data: st.DataObject) -> None:
    """Altered anywhere, a report is refused or verified as what it was: never anything else."""
    pair, task = _shared()
    (report,) = pair.reports(task, one_bit(4, [1]))
    altered = bytearray(report)
    at = data.draw(st.integers(0, len(report) - 1))
    altered[at] ^= data.draw(st.integers(1, 255))
    before = _sum(pair, task)
    try:
        pair.upload(task, bytes(altered))
    except ProblemError as error:
        assert error.problem == Problem.INVALID_MESSAGE
    pair.work()
    assert _sum(pair, task).tolist() == before.tolist()


def test_too_heavy_a_report_is_not_added(pair: Pair) -> None:
    """A client can set max_weight bits at most: the proof is of the weight too."""
    (task,) = pair.accept(small_recipe(min_cohort=3, bins=100, crowd="honest", local_epsilon="3"))
    vdaf = task.configuration.vdaf
    assert isinstance(vdaf, Prio3MultihotCountVec)
    assert vdaf.max_weight < 100
    lax = dataclasses.replace(vdaf, max_weight=100)
    cheat = dataclasses.replace(task.configuration, vdaf_configuration=lax.encode())
    heavy = np.ones((1, 100), np.uint8)
    fake = dataclasses.replace(task, configuration=cheat)
    pair.upload(task, *pair.reports(fake, heavy))
    pair.work()
    (status,) = pair.leader.status([task])
    assert status.verified == 0


_made: list[tuple[Pair, KnownTask]] = []


@pytest.mark.parametrize(("kind", "bins"), [("plain", 4), ("bounded", 8)])
def test_a_report_that_only_the_leader_would_refuse_ends_no_batch(
    pair: Pair, kind: str, bins: int
) -> None:
    """Its proof passes under every joint randomness, and the helper's part of it is misstated."""
    (task,) = pair.accept(small_recipe(min_cohort=3, crowd="honest", report=kind, bins=bins))
    report_id = os.urandom(16)
    bits = 0
    if isinstance(task.configuration.vdaf, Prio3MultihotCountVec):
        bits = task.configuration.vdaf.max_weight.bit_length()
    public, leader, helper = all_ones_without_a_proof(
        task.vdaf, VERSION_TAG + task.task_id, report_id, elements=task.vdaf.length + bits
    )
    public = public[:32] + bytes([public[32] ^ 1]) + public[33:]
    metadata = report_id + uint64(task.interval.start) + uint16(0)
    head = metadata + vector(public, prefix=4)
    aad = task.task_id + task.configuration.encode() + head
    sealed = [
        hpke_seal(
            side.keys.published()[0],
            input_share_info(role),
            aad,
            uint16(0) + vector(share, prefix=4),
        )
        for role, side, share in (
            (Role.LEADER, pair.leader, leader),
            (Role.HELPER, pair.helper, helper),
        )
    ]
    honest = pair.reports(task, one_bit(task.vdaf.length, [0, 1, 2]))
    assert pair.upload(task, head + b"".join(sealed), *honest).statuses == ()
    pair.work()
    (status,) = pair.leader.status([task])
    assert (status.verified, status.rejected("helper")) == (3, {"vdaf_verify_error": 1})
    pair.collect(task)
    pair.work()
    found = pair.result(task)
    assert found is not None
    assert found[0] == 3


def _shared() -> tuple[Pair, KnownTask]:
    """One pair for all examples: what they upload never counts."""
    if not _made:
        pair = Pair.in_folder(fast_folder())
        (task,) = pair.accept(small_recipe(min_cohort=3, crowd="honest"))
        pair.upload(task, *pair.reports(task, one_bit(4, [0, 1, 1])))
        pair.work()
        _made.append((pair, task))
    return _made[0]


def _sum(pair: Pair, task: KnownTask) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    shares = []
    for database in pair.databases:
        with database.read() as connection:
            shares.append(total(database, connection, task).share)
    return np.frombuffer(task.vdaf.unshard(*shares, count=1000), np.uint64)


def test_the_collectors_key_is_needed(pair: Pair, task: KnownTask) -> None:
    assert collector_keys().config_id == 7
    del pair.collectors[collector_digest()]
    with pytest.raises(ProblemError) as caught:
        pair.collect(task)
    assert caught.value.problem == Problem.INVALID_TASK
