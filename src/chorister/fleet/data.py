"""Made-up people with known truth: what they type, where they are, how they score, how they live.

A seed gives the same fleet again. It is the only thing here that a seed may decide: devices draw
their noise, coins and times from the operating system.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.random import Generator

from chorister.errors import InvalidInput

__all__ = ["AREAS", "COMMUTES", "KINDS", "VOCABULARY", "Person", "people"]

Row: TypeAlias = Mapping[str, str | int | float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Person:
    """What one device holds: rows of streams, and one row a profile."""

    streams: Mapping[str, tuple[Row, ...]]
    profiles: Mapping[str, Row]


# --- What people type -----------------------------------------------------------------------------

# Each word with what follows it, the likeliest first; a phrase is a walk of three words.
_STARTS: Final = ("see", "how", "good", "on", "i", "thank", "where", "happy")
_FOLLOWS: Final[Mapping[str, tuple[str, ...]]] = {
    "see": ("you", "them"),
    "how": ("are", "was", "about"),
    "good": ("morning", "night", "luck"),
    "on": ("my", "the"),
    "i": ("love", "miss", "am"),
    "thank": ("you",),
    "where": ("are", "is"),
    "happy": ("birthday", "new"),
    "you": ("soon", "tomorrow", "later"),
    "them": ("soon", "later"),
    "are": ("you", "they"),
    "was": ("work", "school"),
    "about": ("lunch", "dinner"),
    "morning": ("everyone", "dear"),
    "night": ("everyone", "dear"),
    "luck": ("tomorrow", "dear"),
    "my": ("way", "own"),
    "the": ("train", "way"),
    "love": ("you", "this"),
    "miss": ("you", "home"),
    "am": ("home", "late"),
    "is": ("everyone", "lunch"),
    "birthday": ("dear", "everyone"),
    "new": ("year", "home"),
}
VOCABULARY: Final = tuple(
    dict.fromkeys([*_STARTS, *_FOLLOWS, *(word for many in _FOLLOWS.values() for word in many)])
)
"""The words that an analyst knows beforehand; what comes after what is for the study to find."""
_UNIQUE: Final = 0.02
"""Share of people who type something that nobody else does: a study must never show it."""
_SYLLABLES: Final = ("ba", "do", "fi", "ka", "lu", "mo", "ne", "ri", "so", "tu", "va", "zi")


def _phrase(random: Generator) -> str:
    if random.random() < _UNIQUE:
        return " ".join("".join(random.choice(_SYLLABLES, 4)) for _ in range(3))
    words = [_pick(random, _STARTS)]
    while len(words) < 3:
        words.append(_pick(random, _FOLLOWS[words[-1]]))
    return " ".join(words)


def _pick(random: Generator, choices: tuple[str, ...]) -> str:
    """Each is about 0.7 times as likely as the one before it."""
    weights = 0.7 ** np.arange(len(choices))
    return choices[int(random.choice(len(choices), p=weights / weights.sum()))]


def _typist(random: Generator) -> Person:
    # The second field is open to no analysis: whom somebody writes to is nobody's business.
    rows = ({"text": _phrase(random), "recipient": f"friend-{random.integers(1000)}"},)
    return Person(streams={"keyboard": rows}, profiles={})


# --- Where people are -----------------------------------------------------------------------------

# Latitude, longitude, spread in degrees, share: towns of one country, and a few travellers.
_TOWNS: Final = (
    (48.86, 2.35, 0.35, 0.34),
    (45.76, 4.84, 0.30, 0.18),
    (43.30, 5.37, 0.30, 0.14),
    (43.60, 1.44, 0.30, 0.12),
    (47.22, -1.55, 0.35, 0.12),
)


def _walker(random: Generator) -> Person:
    weights = [town[3] for town in _TOWNS]
    place = int(random.choice(len(_TOWNS) + 1, p=[*weights, 1.0 - sum(weights)]))
    if place == len(_TOWNS):
        latitude, longitude = random.uniform(-55.0, 70.0), random.uniform(-180.0, 180.0)
    else:
        latitude = random.normal(_TOWNS[place][0], _TOWNS[place][2])
        longitude = random.normal(_TOWNS[place][1], _TOWNS[place][2])
    row = {"latitude": round(float(latitude), 4), "longitude": round(float(longitude), 4)}
    return Person(streams={"visits": (row,)}, profiles={})


# --- How people score, and how they live ----------------------------------------------------------

AREAS: Final = ("city", "suburb", "village")
_AREA_SHARES: Final = (0.5, 0.3, 0.2)
COMMUTES: Final = ("foot", "bike", "bus", "train", "car")
_COMMUTE_SHARES: Final[Mapping[str, tuple[float, ...]]] = {
    "city": (0.25, 0.25, 0.30, 0.10, 0.10),
    "suburb": (0.05, 0.10, 0.20, 0.35, 0.30),
    "village": (0.05, 0.05, 0.10, 0.10, 0.70),
}


def _profile(random: Generator) -> dict[str, str | int | float]:
    age = int(np.clip(random.gamma(6.0, 7.0), 10, 95))
    score = float(np.clip(random.normal(62.0 - 0.25 * (age - 40), 11.0), 0.0, 100.0))
    area = str(random.choice(AREAS, p=_AREA_SHARES))
    commute = str(random.choice(COMMUTES, p=_COMMUTE_SHARES[area]))
    return {"age": age, "score": round(score, 2), "area": area, "commute": commute}


def _citizen(random: Generator) -> Person:
    return Person(streams={}, profiles={"user": _profile(random)})


def _anybody(random: Generator) -> Person:
    """All of it, as the devices of `chorister up` have it."""
    streams = {**_typist(random).streams, **_walker(random).streams}
    return Person(streams=streams, profiles=_citizen(random).profiles)


KINDS: Final[Mapping[str, Callable[[Generator], Person]]] = {
    "phrases": _typist,
    "places": _walker,
    "profiles": _citizen,
    "everything": _anybody,
}


def people(kind: str, count: int, seed: int) -> list[Person]:
    """So many people of a kind. The first ones stay the same when there are more."""
    make = KINDS.get(kind)
    if make is None:
        raise InvalidInput(f"there are people of these kinds: {', '.join(KINDS)}; not {kind!r}")
    if count < 1 or seed < 0:
        raise InvalidInput("at least one person, and a seed of 0 or more")
    return [make(np.random.default_rng([seed, number])) for number in range(count)]
