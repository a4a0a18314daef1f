"""What the tests of a lying registry share: the honest log, its forger, a device that reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from chorister.clock import SettableClock
from chorister.transparency.entries import (
    Entry,
    HPKEConfigEntry,
    ListEntry,
    RecipeBody,
    SignedEntry,
)
from chorister.transparency.reader import Current, LastAccepted, read_log
from chorister.transparency.state import CurrentList, ListedRecipe, LogState
from chorister.transparency.tiles import Source
from tests.logworld import (
    ANALYSIS,
    HELPER,
    HELPER_NAME,
    LEADER,
    LEADER_NAME,
    NOW,
    forge,
    hpke_entry,
    recipe_entry,
    trust,
)


def with_lists(*batches: Sequence[SignedEntry]) -> list[Entry]:
    """These batches, each closed with its list, a second apart."""
    state, entries = LogState(), list[Entry]()
    for time, batch in enumerate(batches, start=NOW + 1):
        for entry in batch:
            state.append(entry.encode())
        closing = ListEntry(time=time, digest=state.current(time).digest)
        state.append(closing.encode())
        entries += [*batch, closing]
    return entries


LEADER_CONFIG, HELPER_CONFIG = hpke_entry(LEADER), hpke_entry(HELPER)
FIRST, SECOND = recipe_entry("first"), recipe_entry("second")
HONEST = with_lists([LEADER_CONFIG, HELPER_CONFIG, FIRST], [SECOND])
"""What `logworld.a_world` publishes: two batches, and the lists that close them."""


def forged(tmp_path: Path, *entries: Entry, time: int = NOW + 10, **options: object) -> Source:
    encoded = [entry.encode() for entry in entries]
    return forge(tmp_path / "forged", encoded, time=time, **options)  # type: ignore[arg-type]


def served(tmp_path: Path, *entries: Entry, listed: CurrentList) -> Source:
    """A log that both cosigned without a look at it, whose last entry is this list."""
    return forged(
        tmp_path,
        *entries,
        list_digest=listed.digest,
        served_list=listed.encode(),
        cosigned=True,
        name="checkpoint",
    )


def a_list(*recipes: ListedRecipe, leader_config: HPKEConfigEntry = LEADER_CONFIG) -> CurrentList:
    """A list with both aggregators' configs."""
    configs = [(LEADER_NAME, leader_config.address), (HELPER_NAME, HELPER_CONFIG.address)]
    return CurrentList.of(hpke_configs=configs, recipes=recipes)


def device_reads(
    source: Source,
    now: int = NOW + 10,
    not_before: int = 0,
    not_smaller: int = 0,
    root: bytes = b"",
) -> list[RecipeBody]:
    """The recipes of one analysis, or why there are none."""
    only = trust()
    reading = read_log(
        source,
        [replace(only, authors={ANALYSIS: only.authors[ANALYSIS]})],
        clock=SettableClock(now),
        last=LastAccepted(time=not_before, size=not_smaller, root=root),
        kept=tuple,
        forget=lambda: None,
    )
    (outcome,) = reading.outcomes
    if isinstance(outcome, Current):
        return list(outcome.recipes)
    raise outcome
