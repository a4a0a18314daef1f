"""Which beginnings of words to ask about next, from what was measured and a character model.

- A beginning that devices hold is extended by the model's probabilities, from the most expected
  one on, until the list is full.
- Where devices hold a beginning far more often than the model expects, they hold words that it does
  not know, and what follows is as good as open. So a beginning carries two expected shares, of
  words like those of the model and of unfamiliar ones, and each is extended in its own way.
- A word that was found is not asked about again: a device then reports another of its words, a
  rarer one, which finds more than any finer noise would.
"""

from __future__ import annotations

import heapq
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.algorithms.character_model import END, CharacterModel
from chorister.analyst.algorithms.ngram_rules import above_noise, stratified_means
from chorister.errors import InvalidInput

MAX_CHARACTERS: Final = 40
"""The longest word that can be found, in characters."""
LEAST_UNFAMILIAR: Final = 0.25
"""The smallest share of words, after any beginning, that are taken to be unlike the model's."""
_FLOOR: Final = 0.02  # what is expected less than this, in parts of 1 / most, is not considered
_LENGTHS: Final = {
    1: (), 2: (4,), 3: (3, 5), 4: (3, 4, 6), 5: (3, 4, 5, 7), 6: (2, 3, 4, 5, 7),
    7: (2, 3, 4, 5, 6, 8), 8: (2, 3, 4, 5, 6, 7, 9),
}  # fmt: skip
_SHARES: Final = {
    1: (1.0,), 2: (0.25, 0.75), 3: (0.2, 0.3, 0.5), 4: (0.12, 0.16, 0.22, 0.5),
    5: (0.1, 0.13, 0.15, 0.17, 0.45), 6: (0.05, 0.08, 0.11, 0.14, 0.17, 0.45),
    7: (0.04, 0.06, 0.09, 0.11, 0.13, 0.16, 0.41),
    8: (0.03, 0.05, 0.07, 0.09, 0.11, 0.13, 0.15, 0.37),
}  # fmt: skip
MAX_ROUNDS: Final = max(_LENGTHS)
# Of the reports. Where three standard errors were .017 of them, one question found more words of
# IRC and of an invented language; at .006, rounds found more of the latter.
_TELLING_SHARE: Final = 0.01
_TELLING_SIGMAS: Final = 3.0
Asked: TypeAlias = list[tuple[str, float]]
"""Candidates of a round with their expected shares."""

_Child: TypeAlias = tuple[float, float, float, str]  # expected share, its two parts, character


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first characters of words that devices hold."""

    text: str
    share: float  # of the reports
    unfamiliar: float = LEAST_UNFAMILIAR  # which part of it is unlike the model's words


def lengths(rounds: int) -> tuple[int, ...]:
    """How many characters each round asks about, the end of a word counting as one."""
    if rounds not in _LENGTHS:
        raise InvalidInput(f"rounds must be from 1 to {MAX_ROUNDS}, not {rounds}")
    return (*_LENGTHS[rounds], MAX_CHARACTERS + 1)


def round_shares(rounds: int) -> tuple[float, ...]:
    """The share of each round: of the devices, or of 1/sigma^2 if everyone answers."""
    return _SHARES[rounds]


def first_round_tells(reports: int, sigma: float) -> bool:
    """Return whether common beginnings stand out from the noise of a first round.

    Otherwise it would add nothing to what the model says, at the cost of devices or budget.
    """
    return _TELLING_SIGMAS * sigma <= _TELLING_SHARE * reports


def measured(model: CharacterModel, text: str, share: float) -> Beginning:
    """Judge a beginning with its measured share: how much of that did the model expect?"""
    surplus = 1.0 - min(model.chance(text) / share, 1.0)
    return Beginning(text, share, max(surplus, LEAST_UNFAMILIAR))


def likely(
    model: CharacterModel,
    known: Iterable[Beginning],
    length: int,
    most: int,
    skip: Collection[str] = frozenset(),
) -> Asked:
    """List the `most` likely beginnings of `length` characters with their expected shares.

    Whole words, with `END`, may be shorter; those in `skip` (with `END`) are left out.
    """
    heap: list[tuple[float, int, str, list[_Child], int]] = []
    found: Asked = []
    for number, each in enumerate(known):
        familiar = each.share * (1.0 - each.unfamiliar)
        first = (each.share, familiar, each.share - familiar, "")
        heap.append((-each.share, number, each.text, [first], 0))
    heapq.heapify(heap)
    number, floor = len(heap), -_FLOOR / most * sum(entry[0] for entry in heap)
    while heap and len(found) < most:
        # An entry stands for the child at `place`, and for all less expected ones after it.
        _, _, parent, children, place = heap[0]
        share, familiar, open_, character = children[place]
        text = parent + character
        if place + 1 < len(children):
            number += 1
            after = children[place + 1]
            heapq.heapreplace(heap, (-after[0], number, parent, children, place + 1))
        else:
            heapq.heappop(heap)
        if not unicodedata.is_normalized("NFC", text):
            continue  # no recipe can ask about it, and devices spell it differently
        if text.endswith(END) or len(text) >= length:
            if text not in skip and text != END:
                found.append((text, share))
            continue
        extended = _children(model, text, familiar, open_, floor)
        if extended:
            number += 1
            heapq.heappush(heap, (-extended[0][0], number, text, extended, 0))
    return found


def _children(
    model: CharacterModel, text: str, familiar: float, open_: float, floor: float
) -> list[_Child]:
    """One more character, most expected first."""
    near, far = model.following(text), model.following_unfamiliar(text)
    found: list[_Child] = []
    for character, chance in far.items():
        one, other = familiar * near.get(character, 0.0), open_ * chance
        if one + other >= floor:
            found.append((one + other, one, other, character))
    for character, chance in near.items():
        if character not in far and (one := familiar * chance) >= floor:
            found.append((one, one, 0.0, character))
    found.sort(reverse=True)
    return found


def whole_words(candidates: Sequence[str]) -> NDArray[np.bool_]:
    """Return which candidates are whole words; the others are beginnings."""
    return np.array([text.endswith(END) for text in candidates], dtype=np.bool_)


def reported(
    candidates: Sequence[str],
    sums: NDArray[np.integer],
    *,
    trials: int,
    q: float,
    rounds: int,
) -> NDArray[np.bool_]:
    """Return which candidates are words above the noise; all rounds expect one false one."""
    whole = whole_words(candidates)
    if not whole.any():
        return whole
    number = rounds * int(whole.sum())
    return whole & above_noise(sums, trials=trials, q=q, candidates=number)


@dataclass(eq=False, slots=True)
class Learned:
    """What the rounds so far have taught. Mutable: every answer changes it."""

    model: CharacterModel
    rounds: int
    skip: frozenset[str] = frozenset()  # whole words, with `END`, that are never asked about
    found: set[str] = field(default_factory=set)
    _known: list[Beginning] = field(default_factory=lambda: [Beginning("", 1.0)])
    _unsure: list[Beginning] = field(default_factory=list)  # whole words asked about, not found

    def ask(self, length: int, most: int) -> Asked:
        """Choose the candidates of the next round; whole words are asked again in the last one."""
        known = [*self._known, *self._unsure] if length > MAX_CHARACTERS else self._known
        return likely(self.model, known, length, most, self.skip | self.found)

    def answer(
        self,
        asked: Asked,
        *,
        sums: NDArray[np.integer],
        counts: NDArray[np.float64],
        sigma: float,
        reports: int,
        trials: int,
        q: float,
    ) -> None:
        """Learn from the sums and the estimated counts of the candidates asked."""
        texts = [text for text, _ in asked]
        above = reported(texts, sums, trials=trials, q=q, rounds=self.rounds)
        self.found.update(texts[i] for i in np.flatnonzero(above))
        expected = np.array([share for _, share in asked])
        shares = stratified_means(counts, sigma, expected) / reports
        self._known = []
        for i in np.flatnonzero(shares > 0.0).tolist():
            text, share = texts[i], float(shares[i])
            if not text.endswith(END):
                self._known.append(measured(self.model, text, share))
            elif not above[i]:
                self._unsure.append(Beginning(text, share, 0.0))
