"""When a device does what: all times are drawn before data is touched, and none by a server."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from chorister.errors import InvalidInput, QueryRefused
from chorister.recipe import Recipe

__all__ = ["Timing", "flip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds. The host app may change them; recipes and servers can't."""

    query: int = 20
    """What one query and the encoding of its rows may take; then it has failed."""
    slack: int = 10
    """What reading the events before it, noise and sealing after it may take."""
    spread: int = 3600
    """Uploads are spread over this much time, so that polls and uploads do not pair up."""
    poll: int = 3600
    """Between two polls, on average."""

    def __post_init__(self) -> None:
        if min(self.query, self.slack, self.spread, self.poll) < 1:
            raise InvalidInput("every time is at least one second")

    def busy_until(self, now: int, queries: int) -> int:
        """When so many queries, begun now, are over: by their deadlines, whatever they find."""
        return now + queries * (self.query + self.slack)

    def draw_upload(
        self,
        recipe: Recipe,
        *,
        now: int,
        before: int,
        randbelow: Callable[[int], int] = secrets.randbelow,
    ) -> int:
        """When a report will be uploaded, drawn before its query runs.

        It lies after the query's deadline, and after those of the `before` other queries of the
        same run: so the moment tells nothing of how long any of them took.
        """
        earliest = self.busy_until(now, before + 1)
        latest = min(earliest + self.spread, recipe.window.closes - 1)
        if latest < earliest:
            raise QueryRefused(check="time", why="its answer period ends too soon for an upload")
        return earliest + randbelow(latest - earliest + 1)

    def next_poll(self, now: int, *, randbelow: Callable[[int], int] = secrets.randbelow) -> int:
        """When to poll next: half to one and a half times the interval from now."""
        return now + self.poll // 2 + 1 + randbelow(self.poll)


def flip(probability: Decimal, *, randbelow: Callable[[int], int] = secrets.randbelow) -> bool:
    """True with exactly this probability: a decimal is a fraction over a power of ten."""
    numerator, denominator = probability.as_integer_ratio()
    return randbelow(denominator) < numerator
