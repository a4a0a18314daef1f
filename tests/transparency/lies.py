"""What the tests of a lying registry share: the honest log, its forger, a device that reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from chorister.clock import SettableClock
from chorister.transparency.client import Source
from chorister.transparency.entries import Entry, RecipeEntry
from chorister.transparency.reader import Current, read_log
from tests.logworld import (
    ANALYSIS,
    HELPER,
    LEADER,
    NOW,
    forge,
    hpke_entry,
    recipe_entry,
    trust,
)

HONEST: list[Entry] = [
    hpke_entry(LEADER),
    hpke_entry(HELPER),
    recipe_entry("first"),
    recipe_entry("second"),
]


def forged(tmp_path: Path, *entries: Entry, time: int = NOW + 10, **options: object) -> Source:
    encoded = [entry.encode() for entry in entries]
    return forge(tmp_path / "forged", encoded, time=time, **options)  # type: ignore[arg-type]


def device_reads(
    source: Source, now: int = NOW + 10, not_before: int = 0, not_smaller: int = 0
) -> list[RecipeEntry]:
    """The recipes of one analysis, or why there are none."""
    only = trust()
    reading = read_log(
        source,
        [replace(only, authors={ANALYSIS: only.authors[ANALYSIS]})],
        clock=SettableClock(now),
        not_before=not_before,
        not_smaller=not_smaller,
        kept=tuple,
        forget=lambda: None,
    )
    (outcome,) = reading.outcomes
    if isinstance(outcome, Current):
        return list(outcome.recipes)
    raise outcome
