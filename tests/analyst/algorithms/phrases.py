"""A fleet that types known phrases, for the tests of n-grams."""

from __future__ import annotations

from typing import Any

import chorister as ch
from chorister.analyst.rehearsal import Rehearsal
from chorister.policy import Policy
from tests.analyst.fleets import generous
from tests.keyboard import ANALYSIS

VOCABULARY = (
    "good",
    "morning",
    "to",
    "all",
    "of",
    "you",
    "see",
    "soon",
    "again",
    "how",
    "are",
    "things",
    "red",
    "blue",
)
PHRASES = {
    "good morning to all": 6_000,
    "good morning to you": 4_000,
    "see you soon again": 5_000,
    "how are you": 3_000,
    "how are things": 2_000,
    "red": 2_000,
    "nothing known here": 2_000,
}
DEVICES = sum(PHRASES.values())


def policy(reports: int = 4, **changes: Any) -> Policy:
    return generous(reports, **{f"analyses/{ANALYSIS}/functions": ["ngrams", "random"], **changes})


def typing_fleet(rules: Policy | None = None, **options: Any) -> Rehearsal:
    frame = {"ngram": list(PHRASES), "count": list(PHRASES.values())}
    found: Rehearsal = ch.rehearse(frame, rules or policy(), **{"seed": 5, **options})
    return found
