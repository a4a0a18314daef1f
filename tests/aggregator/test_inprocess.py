"""The pair without sockets: from uploads to a collected sum, through the same applications."""

from __future__ import annotations

from pathlib import Path

from chorister.clock import SystemClock
from chorister.dap.collector import Collected
from tests.aggregator.inprocess_pair import a_pair, wait_until


def test_reports_become_a_sum(tmp_path: Path) -> None:
    with a_pair(tmp_path) as pair:
        recipe = pair.operators.recipe("ages", SystemClock().now())
        task = pair.publish(recipe)
        for report in pair.seal(task, [2, 2, 2, 1]):
            answer = pair.upload(task, report)
            assert (answer.status_code, answer.content) == (200, b"")
        collector = pair.collector()
        handle = collector.create(task)

        def result() -> Collected | None:
            found = collector.poll(handle, noise_trials=2)
            return found if isinstance(found, Collected) else None

        found = wait_until(result, "the result")
        assert found.report_count == 4
        # Each aggregator throws min_cohort - 1 = 2 coins a bin, which are almost always 0.
        assert found.counts.sum() <= 4 + 4 * task.configuration.vdaf.length
        assert all(found.counts >= [0, 1, 3] + [0] * (task.configuration.vdaf.length - 3))
        status = collector.status(recipe.digest)
        assert status.state == "collected"
        collector.delete(handle)
