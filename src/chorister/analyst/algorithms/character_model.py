"""How likely characters follow each other in words: a public model, to rank what devices may hold.

A model knows nothing about any device. It only orders the candidates of `discover_words`: a bad one
costs recall, never privacy or validity.

The probability of the next character mixes contexts from the longest to the shortest. The longest
is the whole beginning of the word, weighted by how frequent words are; the others are its last few
characters, weighted by how many words have them. So known words are ranked by frequency, and
unknown ones by how they are spelled.

The shipped model is trained on `character_words.txt.gz`: words of 36 languages with counts, from
the sentences of Mozilla Common Voice (CC0 1.0; its first lines name the source). Train your own
with `CharacterModel.train` for other languages, codes or jargon.
"""

from __future__ import annotations

import gzip
import heapq
import math
import unicodedata
from collections.abc import Iterable, Mapping
from copy import copy
from functools import lru_cache
from importlib.resources import files
from typing import Final, TypeAlias

from chorister.encoding import canonical_texts
from chorister.errors import InvalidInput

END: Final = "\u2403"
"""Follows the last character of a word. It is a symbol, and so in no word."""

Chances: TypeAlias = dict[str, float]
"""Characters with their probabilities, which add up to at most 1."""

_ORDER: Final = 4  # the longest context besides the whole beginning
_DISCOUNT: Final = 0.7  # of each character seen in a context, given to shorter contexts
_EXTRA: Final = 0.5  # given to shorter contexts by every context
_MOST: Final = 64  # characters that a context keeps
_FLAT: Final = 0.35  # what unfamiliar words owe to no context at all
_UNSEEN: Final = 0.8  # the same after a character that no word of the model has
_SCRIPT: Final = 30  # characters of a script that may follow in an unfamiliar word
_DIGITS: Final = "0123456789"
_PRINTABLE: Final = "".join(map(chr, range(32, 127)))  # of ASCII: what codes and names consist of
_OTHERS: Final = 0.05  # the weight of all languages that were not asked for
_COMMON: Final = _DIGITS + "'" + END  # characters of no script


class CharacterModel:
    """Probabilities of the next character of a word, from words with counts."""

    def __init__(self, words: Mapping[str, float]) -> None:
        if not words:
            raise InvalidInput("a character model needs at least one word")
        self._words: dict[str, float] = {}
        for word, count in words.items():
            _require_word(word, count)
            spelled = unicodedata.normalize("NFC", word)  # as recipes write text
            self._words[spelled] = self._words.get(spelled, 0.0) + float(count)
        self._begins: dict[str, Chances] = {}  # by the whole beginning
        self._ends: dict[str, Chances] = {}  # by the last characters
        for word, count in self._words.items():
            self._add(word, count)
        self._mixed: dict[str, Chances] = {}
        self._unfamiliar: dict[str, Chances] = {}
        self._scripts = _alphabets(self._ends[""])
        self._mixed[""] = self._first()

    def _add(self, word: str, count: float) -> None:
        once = min(count, 1.0)
        spelled = word + END
        self._add_beginnings(spelled, count)
        for i, character in enumerate(spelled):
            for size in range(min(_ORDER, i) + 1):
                seen = self._ends.setdefault(spelled[i - size : i], {})
                seen[character] = seen.get(character, 0.0) + once

    def _add_beginnings(self, spelled: str, count: float) -> None:
        for i, character in enumerate(spelled):
            seen = self._begins.setdefault(spelled[:i], {})
            seen[character] = seen.get(character, 0.0) + count

    @classmethod
    def train(cls, words: Iterable[str] | Mapping[str, float]) -> CharacterModel:
        """Train a model on words, each as often as it occurs, or on words with counts."""
        if isinstance(words, Mapping):
            return cls(words)
        counts: dict[str, float] = {}
        for word in words:
            counts[word] = counts.get(word, 0.0) + 1.0
        return cls(counts)

    @staticmethod
    def shipped(*languages: str) -> CharacterModel:
        """Return the model that comes with the package, for some languages (default: "en").

        A twentieth of its weight is on all the others, so that their words can be found too.
        """
        return _shipped(languages or ("en",))

    def without(self, words: Iterable[str]) -> CharacterModel:
        """Return a model that does not expect these words, but still knows how they are spelled."""
        gone = self._words.keys() & set(words)
        if not gone:
            return self
        found = copy(self)
        found._begins = {}
        for word, count in self._words.items():
            if word not in gone:
                found._add_beginnings(word + END, count)
        return found

    def folded(self) -> CharacterModel:
        """Return a model of the same words as devices split and spell them: in lower case."""
        given = list(self._words)
        texts = canonical_texts(given)
        if texts == given and not any(" " in text for text in texts):
            return self
        counts: dict[str, float] = {}
        for text, count in zip(texts, self._words.values(), strict=True):
            for word in text.split():
                counts[word] = counts.get(word, 0.0) + count
        if not counts:
            raise InvalidInput("the character model has no word with a letter or a digit")
        return CharacterModel(counts)

    def _first(self) -> Chances:
        """The probabilities without any context: as counted, and a little for every character."""
        seen = self._ends[""]
        total = sum(seen.values())
        found = {character: 0.98 * count / total for character, count in seen.items()}
        usual = dict.fromkeys([*_usual(found), *_PRINTABLE])
        for character in usual:
            found[character] = found.get(character, 0.0) + 0.02 / len(usual)
        return found

    def following(self, begin: str) -> Chances:
        """Return which characters follow the beginning of a word, `END` if none does."""
        return _mix(self._begins.get(begin), self._by_end(begin[-_ORDER:]))

    def _by_end(self, end: str) -> Chances:
        found = self._mixed.get(end)
        if found is None:
            found = _mix(self._ends.get(end), self._by_end(end[1:]))
            if len(found) > _MOST:
                found = dict(heapq.nlargest(_MOST, found.items(), key=lambda each: each[1]))
            self._mixed[end] = found
        return found

    def following_unfamiliar(self, begin: str) -> Chances:
        """The same for a word unlike those of the model: flat, in the script it began in."""
        last = begin[-1:]
        found = self._unfamiliar.get(last)
        if found is None:
            near = self._by_end(last)
            weight = _FLAT if last in self._ends else _UNSEEN
            found = {character: (1.0 - weight) * chance for character, chance in near.items()}
            flat = self._scripts.get(_script(last)) or _usual(near)
            for character in flat:
                found[character] = found.get(character, 0.0) + weight / len(flat)
            self._unfamiliar[last] = found
        return found

    def chance(self, begin: str) -> float:
        """Return the probability that a word begins like this; with `END`, that it is this."""
        found = 1.0
        for i, character in enumerate(begin):
            found *= self.following(begin[:i]).get(character, 0.0)
        return found


def _require_word(word: str, count: float) -> None:
    """Raise unless this is a word that can be asked about, with a count."""
    if not word or END in word or not (0.0 < count < math.inf):
        raise InvalidInput(f"{word!r} with count {count} is not a word with a count")
    try:
        word.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{word!r} is not Unicode text") from None


def _mix(seen: Chances | None, shorter: Chances) -> Chances:
    """Mix what was counted in a context with the probabilities of the next shorter one."""
    if not seen:
        return shorter
    total = sum(seen.values())
    kinds = sum(min(count, 1.0) for count in seen.values())
    less = min((_DISCOUNT * kinds + _EXTRA) / (total + _EXTRA), 1.0)
    found = {character: less * chance for character, chance in shorter.items()}
    scale = (1.0 - less) / total
    for character, count in seen.items():
        found[character] = found.get(character, 0.0) + scale * count
    return found


def _usual(chances: Chances) -> tuple[str, ...]:
    """The most common characters of any script, and those of none."""
    best = heapq.nlargest(_SCRIPT, chances.items(), key=lambda each: each[1])
    return tuple(dict.fromkeys([*(character for character, _ in best), *_COMMON]))


def _script(character: str) -> str:
    """The first word of a character's name: LATIN, CYRILLIC, DIGIT, ..."""
    return unicodedata.name(character, "?").split(" ", 1)[0] if character else ""


def _alphabets(counts: Chances) -> dict[str, tuple[str, ...]]:
    """The most common characters of each script, each time with those of none."""
    found: dict[str, Chances] = {}
    for character, count in counts.items():
        if character not in _COMMON:
            found.setdefault(_script(character), {})[character] = count
    digits = {"DIGIT": (*_DIGITS, END)}  # numbers go on with digits
    return digits | {script: _usual(letters) for script, letters in found.items()}


@lru_cache(maxsize=4)
def _shipped(languages: tuple[str, ...]) -> CharacterModel:
    lists = _word_lists()
    unknown = [language for language in languages if language not in lists]
    if unknown or not languages:
        raise InvalidInput(f"choose from these languages: {', '.join(lists)}")
    tokens = sum(lists["en"].values())
    others = [language for language in lists if language not in languages]
    mixed: dict[str, float] = {}
    for names, weight in ((languages, 1.0 - _OTHERS), (others, _OTHERS)):
        for words in (lists[name] for name in names):
            scale = weight * tokens / sum(words.values()) / len(names)
            for word, count in words.items():
                mixed[word] = mixed.get(word, 0.0) + scale * count
    return CharacterModel(mixed)


def _word_lists() -> dict[str, dict[str, float]]:
    """Read lines of a word and its count, after a line with the language; # begins a comment."""
    packed = files(__package__).joinpath("character_words.txt.gz").read_bytes()
    lists: dict[str, dict[str, float]] = {}
    for line in gzip.decompress(packed).decode().splitlines():
        word, _, count = line.partition(" ")
        if not count:
            lists[word] = words = {}
        elif word != "#":
            words[word] = float(count)
    return lists
