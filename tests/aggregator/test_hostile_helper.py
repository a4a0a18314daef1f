"""A helper that lies to the leader."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from chorister.aggregator.known_tasks import KnownTask
from chorister.dap.draft import (
    Problem,
    ReportError,
    VerifyRespType,
)
from chorister.dap.helper_client import HelperClient
from chorister.dap.messages import (
    AggregateShare,
    AggregationJobResp,
)
from chorister.dap.task import AdvertisedTask
from chorister.errors import ProblemError, Unreachable
from tests.aggregator.hostile import (
    pair,
    task,
)
from tests.aggregator.world import (
    Pair,
    collector_digest,
    one_bit,
)

__all__ = ["pair", "task"]


class LyingHelper(HelperClient):
    """Does as told with what an honest helper answers."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.answer: Callable[[bytes], bytes] = bytes
        self.share: Callable[[bytes], bytes] = bytes

    def create_aggregation_job(self, task: AdvertisedTask, request: bytes) -> bytes:
        return self.answer(self.pair.helper.create_job(self._known(task), request).body)

    def aggregate_share(self, task: AdvertisedTask, request: bytes) -> bytes:
        return self.share(self.pair.helper.create_share(self._known(task), request).body)

    def _known(self, task: AdvertisedTask) -> KnownTask:
        known = self.pair.helper.tasks.find(task.task_id)
        assert known is not None
        return known


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
        pair.leader.collection.result(task, ref.collection_id, collector_digest())
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
    (job,) = pair.leader.aggregation.create_jobs(10)
    refused, away, served = (pair.leader.aggregation.step(job) for _ in range(3))
    assert (refused.done, refused.helper_away) == (False, False)
    assert (away.done, away.helper_away) == (False, True)
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
    with pytest.raises(ProblemError, match="can't hold 5000 reports") as refused:
        pair.leader.writer.check(task, tinies(5000))
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
