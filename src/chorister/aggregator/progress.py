"""Why there is no result yet: for the analyst in tenths and by recipe, for operators exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select

from chorister.aggregator.counters import UPLOADED, VERIFIED, counts
from chorister.aggregator.database import Database
from chorister.aggregator.schema import BatchState, aggregation_jobs, batches, collections
from chorister.aggregator.tasks import KnownTask

__all__ = ["TaskStatus", "progress", "task_status"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskStatus:
    """One task, for its operator."""

    task: KnownTask
    state: BatchState
    counts: Mapping[str, int]  # `uploaded`, `verified`, `WHO:REASON`
    unfinished_jobs: int
    failures: tuple[str, ...]  # why unfinished jobs did not step, and why there is no result

    @property
    def uploaded(self) -> int:
        """Reports taken by the leader."""
        return self.counts.get(UPLOADED, 0)

    @property
    def verified(self) -> int:
        """Reports that are in the sum."""
        return self.counts.get(VERIFIED, 0)

    def rejected(self, who: str) -> dict[str, int]:
        """By reason; `who` is upload, leader or helper."""
        return {
            name.removeprefix(f"{who}:"): value
            for name, value in self.counts.items()
            if name.startswith(f"{who}:")
        }


def task_status(database: Database, tasks: Sequence[KnownTask]) -> list[TaskStatus]:
    """Exact figures."""
    ids = [task.task_id for task in tasks]
    with database.read() as connection:
        counted = counts(connection, ids)
        states: dict[bytes, int] = {}
        jobs: dict[bytes, list[str | None]] = {task_id: [] for task_id in ids}
        said: dict[bytes, list[str | None]] = {task_id: [] for task_id in ids}
        for start in range(0, len(ids), 500):
            some = ids[start : start + 500]
            for task_id, state in connection.execute(
                select(batches.c.task_id, batches.c.state).where(batches.c.task_id.in_(some))
            ):
                states[bytes(task_id)] = state
            for table, found in ((aggregation_jobs, jobs), (collections, said)):
                for task_id, failure in connection.execute(
                    select(table.c.task_id, table.c.failure).where(table.c.task_id.in_(some))
                ):
                    found[bytes(task_id)].append(failure)
    return [
        TaskStatus(
            task=task,
            state=BatchState(states.get(task.task_id, BatchState.ENDED)),
            counts=counted[task.task_id],
            unfinished_jobs=len(jobs[task.task_id]),
            failures=_distinct(jobs[task.task_id] + said[task.task_id]),
        )
        for task in tasks
    ]


def _distinct(texts: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for text in texts if text))


def progress(statuses: Sequence[TaskStatus], now: int) -> dict[str, object]:
    """What an analyst may see of a recipe.

    Below the minimum: tenths of it, over all tasks together, and no failure's text, which may name
    a group's task. A live count would tell when one person arrived.
    """
    least = statuses[0].task.min_batch_size
    verified = [status.verified for status in statuses]
    filled = sum(min(each, least) for each in verified)
    full = filled == least * len(statuses)
    shown: dict[str, object] = {
        "tasks": len(statuses),
        "state": _state(statuses, now, full=full),
        "filled": 10 * filled // (least * len(statuses)) / 10,
        "waiting_for": _waiting(statuses, now, full=full),
        "rejected": {
            "leader": _rounded(statuses, ("upload", "leader"), least),
            "helper": _rounded(statuses, ("helper",), least),
        },
        "closes": statuses[0].task.closes,
        "ends": statuses[0].task.ends,
    }
    if full:
        shown["reports"] = _down(min(verified), least)
    return shown


def _down(number: int, least: int) -> int:
    """Round down to tenths of the minimum."""
    return least * (10 * number // least) // 10


def _rounded(statuses: Sequence[TaskStatus], whose: Iterable[str], least: int) -> dict[str, int]:
    total: Counter[str] = Counter()
    for status in statuses:
        for who in whose:
            total.update(status.rejected(who))
    return {reason: _down(number, least) for reason, number in sorted(total.items())}


def _state(statuses: Sequence[TaskStatus], now: int, *, full: bool) -> str:
    if now >= statuses[0].task.ends:
        return "expired"
    if all(status.state >= BatchState.COLLECTED for status in statuses):
        return "collected"
    return "ready" if full else "collecting"


def _waiting(statuses: Sequence[TaskStatus], now: int, *, full: bool) -> str | None:
    match _state(statuses, now, full=full):
        case "expired" | "collected":
            return None
        case "ready":
            if any(status.unfinished_jobs for status in statuses):
                return "the last reports are being verified"
            return "a collector"
    if now >= statuses[0].task.closes:
        return "nothing: the window is closed and too few reports were verified"
    if any(status.failures and status.unfinished_jobs for status in statuses):
        return "the helper, to verify reports"
    return "more reports"
