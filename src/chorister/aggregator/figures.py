"""What the metrics show of the database: jobs that are stuck, reports that were refused.

Every process of an aggregator sees the same database and shows the same figures: alerts take their
maximum. Sums over all tasks; counts by task are `chorister tasks`.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import func, select

from chorister.aggregator.counters import UPLOADED, VERIFIED
from chorister.aggregator.database import Database
from chorister.aggregator.metrics import Metrics
from chorister.aggregator.queue import dead_jobs
from chorister.aggregator.schema import aggregation_jobs, counters, tasks
from chorister.clock import Clock

__all__ = ["Figures"]

_ACCEPTED: Final = frozenset((UPLOADED, VERIFIED))


class Figures:
    """Looks at one database."""

    def __init__(self, database: Database, clock: Clock, metrics: Metrics, *, queue: bool) -> None:
        """`queue`: whether there are workers, and so a queue."""
        self._database = database
        self._clock = clock
        self._metrics = metrics
        self._queue = queue

    def look(self) -> None:
        """One look."""
        now = self._clock.now()
        with self._database.read() as connection:
            number, oldest = connection.execute(
                select(func.count(), func.min(aggregation_jobs.c.created)).join(
                    tasks, tasks.c.task_id == aggregation_jobs.c.task_id
                )
            ).one()
            decided = connection.execute(
                select(counters.c.name, func.sum(counters.c.value)).group_by(counters.c.name)
            ).all()
        self._metrics.unfinished.set(number)
        self._metrics.oldest.set(0 if oldest is None else max(0, now - oldest))
        for name, value in decided:
            outcome, _, reason = name.partition(":")
            labels = (outcome, "") if name in _ACCEPTED else (f"rejected by {outcome}", reason)
            self._metrics.decided.labels(*labels).set(int(value))
        if self._queue:
            self._metrics.dead.set(len(dead_jobs(self._database)))
