"""The pair without sockets: from uploads to a collected sum, through the same applications."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from chorister.clock import SystemClock
from chorister.dap.draft import ReportError
from chorister.dap.upload_messages import UploadErrors
from chorister.errors import ProblemError
from tests.aggregator.inprocess_pair import a_pair, wait_until
from tests.aggregator.postgres import PostgresServer


@pytest.fixture(params=["sqlite", "postgresql"])
def settings(request: pytest.FixtureRequest) -> Iterator[Mapping[str, Mapping[str, Any]]]:
    """Of a pair on either kind of database."""
    if request.param == "sqlite":
        yield {}
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with server.databases(2) as (leader, helper):
        yield {"leader": {"database": leader}, "helper": {"database": helper}}


def test_reports_become_a_sum(tmp_path: Path, settings: Mapping[str, Mapping[str, Any]]) -> None:
    with a_pair(tmp_path, settings=settings) as pair:
        recipe = pair.operators.recipe("ages", SystemClock().now())
        task = pair.publish(recipe)
        reports = pair.seal(task, [2, 2, 2, 1])
        for report in reports:
            answer = pair.upload(task, report)
            assert (answer.status_code, answer.content) == (200, b"")
        (replayed,) = UploadErrors.decode(pair.upload(task, reports[0]).content).statuses
        assert replayed.error == ReportError.REPORT_REPLAYED
        collector = pair.collector()
        handle = collector.create(task)
        found = wait_until(lambda: pair.result(collector, handle, noise_trials=2), "the result")
        assert found.report_count == 4
        # Each aggregator throws min_cohort - 1 = 2 coins a bin, which are almost always 0.
        assert found.counts.sum() <= 4 + 4 * task.configuration.vdaf.length
        assert all(found.counts >= [0, 1, 3] + [0] * (task.configuration.vdaf.length - 3))
        status = collector.status(recipe.digest)
        assert status.state == "collected"
        for service in (pair.leader, pair.helper):  # new processes know all that was answered
            pair.stop(service)
        pair.leader, pair.helper = pair.start("leader"), pair.start("helper")
        again = wait_until(lambda: pair.result(collector, handle, noise_trials=2), "the result")
        assert (again.counts == found.counts).all()
        (late,) = pair.seal(task, [3])
        (refused,) = UploadErrors.decode(pair.upload(task, late).content).statuses
        assert refused.error == ReportError.BATCH_COLLECTED
        collector.delete(handle)
        with pytest.raises(ProblemError, match="batchOverlap"):
            collector.create(task)
