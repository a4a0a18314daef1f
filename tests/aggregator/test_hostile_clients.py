"""Clients that cheat."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister._native import hpke_seal
from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.storage.batches import batch_total
from chorister.codec import uint16, uint64, vector
from chorister.dap.draft import (
    VERSION_TAG,
    Problem,
    Role,
    input_share_info,
)
from chorister.dap.task import Prio3MultihotCountVec
from chorister.errors import ProblemError
from tests.aggregator.faults import fast_folder
from tests.aggregator.hostile import (
    pair,
    task,
)
from tests.aggregator.world import (
    Pair,
    collector_digest,
    collector_keys,
    one_bit,
    small_recipe,
)
from tests.native.hostile_client import all_ones_without_a_proof

__all__ = ["pair", "task"]


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
            shares.append(batch_total(database, connection, task).share)
    return np.frombuffer(task.vdaf.unshard(*shares, count=1000), np.uint64)


def test_the_collectors_key_is_needed(pair: Pair, task: KnownTask) -> None:
    assert collector_keys().config_id == 7
    del pair.collectors[collector_digest()]
    with pytest.raises(ProblemError) as caught:
        pair.collect(task)
    assert caught.value.problem == Problem.INVALID_TASK
