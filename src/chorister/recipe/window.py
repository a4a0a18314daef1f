"""When a recipe is answered and collected, and the one bucket of time that holds all of it."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field, model_validator

from chorister.canonical import Complaint, Int, Model

__all__ = ["Bucket", "Window"]

_MAX_LENGTH = 10 * 366 * 86_400
_Time = Annotated[Int, Field(ge=0, le=2**40)]


class Bucket(NamedTuple):
    """The `number`-th interval of `length` seconds since 1970: DAP's batch bucket."""

    number: int
    length: int

    @property
    def start(self) -> int:
        """POSIX seconds."""
        return self.number * self.length

    @property
    def end(self) -> int:
        """POSIX seconds; the first one outside."""
        return self.start + self.length


class Window(Model):
    """POSIX seconds; each end is the first second outside."""

    opens: _Time
    """From when devices answer."""
    closes: _Time
    """The answer period's end: aggregators take no upload from then on, by their own clock."""
    ends: _Time
    """The end of the grace in which the result can be collected."""

    @model_validator(mode="after")
    def _ordered(self) -> Window:
        if not self.opens < self.closes:
            raise Complaint("closes", "the window closes after it opens")
        if not self.closes <= self.ends:
            raise Complaint("ends", "the grace ends after the window closes, or with it")
        if self.ends - self.opens > _MAX_LENGTH:
            raise Complaint("ends", "window and grace last at most ten years")
        return self

    @property
    def answer_seconds(self) -> int:
        """The length of the answer period."""
        return self.closes - self.opens

    @property
    def grace_seconds(self) -> int:
        """The time for collection after it."""
        return self.ends - self.closes

    @property
    def bucket(self) -> Bucket:
        """The shortest bucket that holds everything from `opens` to `ends`.

        DAP cuts time into buckets of `time_precision`; a window anywhere in time fits into one if
        that precision is chosen for it. Bucket k of length L holds the window if k L <= opens and
        ends <= (k + 1) L; so for each k, from the largest possible down, the least L is
        ceil(ends / (k + 1)), and the first k for which it also meets k L <= opens is the answer.
        """
        number = self.opens // (self.ends - self.opens)
        while True:
            length = -(-self.ends // (number + 1))
            if number * length <= self.opens:
                return Bucket(number, length)
            # The next k whose least L can be small enough; at k = 0 the loop always ends.
            number = min(number - 1, self.opens // length)
