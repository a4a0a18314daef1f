"""What the tests of a lying registry share: the honest log, its forger, a device that reads."""

from __future__ import annotations

from pathlib import Path

from chorister.clock import SettableClock
from chorister.transparency.entries import Entry, RecipeEntry
from chorister.transparency.reader import read_current
from chorister.transparency.sources import Source
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
    current = read_current(
        source,
        trust=trust(),
        clock=SettableClock(now),
        analyses={ANALYSIS},
        not_before=not_before,
        not_smaller=not_smaller,
    )
    return list(current.recipes)
