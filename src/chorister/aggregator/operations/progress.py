"""A recipe's progress as its analyst sees it: why there is no result yet, in tenths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from chorister.aggregator.storage.schema import BatchState
from chorister.aggregator.storage.statistics import TaskStatus


def recipe_progress(statuses: Sequence[TaskStatus], now: int) -> dict[str, object]:
    """Return what an analyst sees of a recipe.

    Below the minimum: tenths of it, over all tasks together, and no text of a failure, which may
    name a group's task. That keeps counts off screens and out of logs, but hides nothing: with
    uploads of their own, an analyst can find exact counts, group by group. Participation is public.
    """
    minimum = statuses[0].task.min_batch_size
    verified = [status.verified for status in statuses]
    filled = sum(min(each, minimum) for each in verified)
    full = filled == minimum * len(statuses)
    shown: dict[str, object] = {
        "tasks": len(statuses),
        "state": _state(statuses, now, full=full),
        "filled": 10 * filled // (minimum * len(statuses)) / 10,
        "waiting_for": _waiting(statuses, now, full=full),
        "rejected": {
            "leader": _rounded(statuses, ("upload", "leader"), minimum),
            "helper": _rounded(statuses, ("helper",), minimum),
        },
        "closes": statuses[0].task.closes,
        "ends": statuses[0].task.ends,
    }
    if full:
        shown["reports"] = _down(min(verified), minimum)
    return shown


def _down(number: int, minimum: int) -> int:
    """Round down to tenths of the minimum."""
    return minimum * (10 * number // minimum) // 10


def _rounded(statuses: Sequence[TaskStatus], whose: Iterable[str], minimum: int) -> dict[str, int]:
    total: Counter[str] = Counter()
    for status in statuses:
        for who in whose:
            total.update(status.rejected(who))
    return {reason: _down(number, minimum) for reason, number in sorted(total.items())}


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
