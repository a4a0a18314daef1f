"""Made-up people, so that the truth is known: what they type, where they are, how they live.

The same seed makes the same people. Nothing else depends on it: devices draw their noise, coins and
times from the operating system.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.random import Generator

from chorister.errors import InvalidInput

Row: TypeAlias = Mapping[str, str | int | float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Person:
    """What one device holds: rows of streams, and one row per profile."""

    streams: Mapping[str, tuple[Row, ...]]
    profiles: Mapping[str, Row]


# --- What people type -----------------------------------------------------------------------------

# Each word with its possible successors, most likely first; a phrase is a walk of three words.
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
"""The words that an analyst knows in advance; the study finds out which follow each other."""
_UNIQUE: Final = 0.02
"""The share of people who type something unique, which a study must never show."""
_SYLLABLES: Final = ("ba", "do", "fi", "ka", "lu", "mo", "ne", "ri", "so", "tu", "va", "zi")


def _phrase(random: Generator) -> str:
    if random.random() < _UNIQUE:
        return " ".join("".join(random.choice(_SYLLABLES, 4)) for _ in range(3))
    words = [_pick(random, _STARTS)]
    while len(words) < 3:
        words.append(_pick(random, _FOLLOWS[words[-1]]))
    return " ".join(words)


def _pick(random: Generator, choices: tuple[str, ...]) -> str:
    """Pick one; each is about 0.7 times as likely as the one before."""
    weights = 0.7 ** np.arange(len(choices))
    return choices[int(random.choice(len(choices), p=weights / weights.sum()))]


def _typist(random: Generator) -> Person:
    # No analysis may read the second field: whom people write to is nobody's business.
    rows = ({"text": _phrase(random), "recipient": f"friend-{random.integers(1000)}"},)
    return Person(streams={"keyboard": rows}, profiles={})


# --- Where people are -----------------------------------------------------------------------------

# Latitude, longitude, spread in degrees, and share: towns of one country, plus a few travellers.
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
    """All kinds of data, for the devices of `chorister up`."""
    streams = {**_typist(random).streams, **_walker(random).streams}
    return Person(streams=streams, profiles=_citizen(random).profiles)


KINDS: Final[Mapping[str, Callable[[Generator], Person]]] = {
    "phrases": _typist,
    "places": _walker,
    "profiles": _citizen,
    "everything": _anybody,
}


def moved(person: Person, number: int, share: float) -> Person:
    """The same person after this share of all people has begun to go to work by bike.

    The larger the share, the more people: nobody changes back before the share falls again.
    """
    row = person.profiles.get("user")
    if row is None or number * _GOLDEN % 1.0 >= share:
        return person
    return replace(person, profiles={**person.profiles, "user": {**row, "commute": "bike"}})


_GOLDEN: Final = 0.6180339887498949  # its multiples are spread evenly


def bike_share(window: int) -> float:
    """How many people have changed to the bike by a window of a series: up and down again."""
    return 0.3 * (1.0 - math.cos(2.0 * math.pi * window / 12.0))


def people(kind: str, count: int, seed: int) -> list[Person]:
    """Make people of a kind. The first ones stay the same when you ask for more."""
    make = KINDS.get(kind)
    if make is None:
        raise InvalidInput(f"the kind of people must be one of {', '.join(KINDS)}, not {kind!r}")
    if count < 1 or seed < 0:
        raise InvalidInput("there must be at least one person, and the seed must be 0 or above")
    return [make(np.random.default_rng([seed, number])) for number in range(count)]
