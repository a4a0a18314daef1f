"""The encoder's rules once more: one row at a time, slowly, without any of its tricks."""

from __future__ import annotations

import hashlib
import math
import unicodedata
from collections.abc import Mapping
from typing import Any

from chorister.encoding import (
    Categories,
    DenyList,
    Encoding,
    Feature,
    Grid,
    HashedPrefixTree,
    Intervals,
    PrefixTree,
)
from chorister.unicode14 import find_unassigned, is_word_character

LONGEST_TEXT = 65_536
LONGEST_PHRASE = 400


def is_non_starter(character: str) -> bool:
    return unicodedata.combining(unicodedata.normalize("NFKD", character)[0]) > 0


def cut(text: str) -> str:
    """Rule 2: of more than 30 non-starters in a row the others separate words."""
    kept, run = [], 0
    for character in text:
        run = run + 1 if is_non_starter(character) else 0
        kept.append(character if run <= 30 else " ")
    return "".join(kept)


def words_of(text: str) -> list[str]:
    """Tokenisation 1, by the letter of its rules."""
    text = cut("".join(" " if find_unassigned(c) else c for c in text))
    for _ in range(2):
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    text = text.replace("\u2019", "'")

    def is_word(i: int) -> bool:
        return 0 <= i < len(text) and is_word_character(ord(text[i]))

    kept = [
        c if is_word(i) or (c == "'" and is_word(i - 1) and is_word(i + 1)) else " "
        for i, c in enumerate(text)
    ]
    return cut("".join(kept)).split()


def cell_of(feature: Feature, *values: Any) -> int:
    """The cell of one value, or of one point."""
    match feature:
        case Intervals():
            return _interval(feature, values[0])
        case Categories():
            same = [
                i
                for i, each in enumerate(feature.values, start=1)
                if type(each) is type(values[0]) and each == values[0]
            ]
            return same[0] if same else 0
        case Grid():
            return _square(feature, *values)
        case PrefixTree():
            return _leaf(feature, values[0], lambda text: text)
        case HashedPrefixTree():
            salt = bytes.fromhex(feature.salt)

            def digest(text: str) -> str:
                return hashlib.sha256(salt + text.encode()).hexdigest()[:32]

            return _leaf(feature, values[0], digest)
    raise AssertionError(feature)


def as_double(value: Any) -> float:
    if type(value) not in (int, float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _interval(feature: Intervals, value: Any) -> int:
    for i in range(1, feature.size):
        low, high = map(float, feature.bounds(i))
        if low <= as_double(value) < high:
            return i
    return 0


def _square(feature: Grid, *values: Any) -> int:
    low, high = list(map(float, feature.box[:2])), list(map(float, feature.box[2:]))
    numbers = list(map(as_double, values))
    if not all(a <= n < b for a, n, b in zip(low, numbers, high, strict=True)):
        return 0
    shares = [(n - a) / (b - a) for a, n, b in zip(low, numbers, high, strict=True)]
    key = ""
    for _ in range(24):  # halve the box, and see in which half the point lies
        halves = [min(int(share * 2), 1) for share in shares]
        shares = [share * 2 - half for share, half in zip(shares, halves, strict=True)]
        key += str(halves[0] + 2 * halves[1])
    if feature.level is not None:
        return 1 + int(key[: feature.level], 4)
    cells = feature.cells or ()
    found = [i for i, cell in enumerate(cells, start=1) if key.startswith(cell)]
    return found[0] if found else 0


def _leaf(feature: PrefixTree | HashedPrefixTree, value: Any, spelled: Any) -> int:
    if type(value) is not str or len(value) > LONGEST_TEXT:
        return 0
    words = words_of(value)
    plain = feature.prefixes if isinstance(feature, PrefixTree) else None
    depths = {len(prefix.split()) for prefix in plain} if plain else set(feature.depths)  # type: ignore[union-attr]
    width = 2 + len(feature.vocabulary)
    for depth in sorted(depths):
        prefix = " ".join(words[:depth])
        if depth > len(words) or len(prefix) > LONGEST_PHRASE:
            continue
        if spelled(prefix) not in feature.prefixes:
            continue
        first = 1 + width * feature.prefixes.index(spelled(prefix))
        if depth == len(words):
            return first
        word = words[depth]
        if len(word) > LONGEST_PHRASE or spelled(word) not in feature.vocabulary:
            return first + 1
        return first + 2 + feature.vocabulary.index(spelled(word))
    return 0


def is_denied(deny: DenyList, value: Any) -> bool:
    if type(value) is not str:
        return False
    if len(value) > LONGEST_TEXT:
        return True
    text = f" {' '.join(words_of(value))} "
    return any(f" {phrase} " in text for phrase in deny.phrases)


def bin_of(encoding: Encoding, row: Mapping[str, Any]) -> int:
    """The bin of one row; -1 if it is denied."""
    if any(is_denied(deny, row[deny.column]) for deny in encoding.deny):
        return -1
    found = 0
    for feature in encoding.features:
        values = [row[name] for name in feature.columns_read]
        found = found * feature.size + cell_of(feature, *values)
    return found


def first_of(encoding: Encoding, bins: list[int]) -> int:
    """What a device reports that selects the first."""
    kept = [bin_ for bin_ in bins if bin_ >= 0]
    ranked = [(sum(cell == 0 for cell in encoding.cells(bin_)), bin_) for bin_ in kept]
    return min(ranked)[1] if ranked else 0
