"""What one run of a device did."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Run", "Tally"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one run did, in recipe identifiers."""

    silent: str | None = None  # why nothing was done at all
    problems: tuple[str, ...] = ()  # what was wrong with the log, pair by pair
    refused: tuple[str, ...] = ()
    declined: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()
    uploaded: int = 0
    postponed: int = 0
    dropped: int = 0
    busy_until: int | None = None  # by their deadlines its queries are over then; none ran if None


@dataclass(slots=True)
class Tally:
    """What a run is doing, until it is a `Run`."""

    problems: list[str]
    refused: list[str]
    declined: list[str]
    answered: list[str]
    uploaded: int = 0
    postponed: int = 0
    dropped: int = 0
    busy_until: int | None = None

    @classmethod
    def empty(cls) -> Tally:
        """Nothing yet."""
        return cls([], [], [], [])

    def run(self, *, silent: str | None = None) -> Run:
        """All of it, for the caller of the device."""
        return Run(
            silent=silent,
            problems=tuple(self.problems),
            refused=tuple(self.refused),
            declined=tuple(self.declined),
            answered=tuple(self.answered),
            uploaded=self.uploaded,
            postponed=self.postponed,
            dropped=self.dropped,
            busy_until=self.busy_until,
        )
