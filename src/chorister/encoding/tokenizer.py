"""What a word is: tokenisation version 1.

Devices and analysts must split text into the same words, or counts land in the wrong bins. This is
the only tokenizer: features, deny lists and the SQL functions `words` and `ngrams` use it. Recipes
name version 1, which never changes:

1. characters that are not in Unicode 14.0 separate words, whatever the device's Python knows;
2. of more than 30 non-starters in a row (characters whose NFKD begins with a combining class above
   0: accents stacked on one letter) the first 30 count, and the others separate words;
3. Unicode NFKC, then case folding, then NFKC again (case folding can undo NFKC), all of it twice,
   which makes it idempotent;
4. U+2019 (right single quotation mark) becomes U+0027 (apostrophe);
5. word characters are those that Unicode 14.0 has in the general categories L (letters), M (marks)
   and N (numbers); an apostrophe between two of them counts as one ("don't"); all else separates
   words, and so does what rule 2 finds now, because rule 3 turns some characters into two
   non-starters;
6. a word is a maximal run of word characters. A text's canonical form is its words, joined by one
   space.

So the words of a text are the same on every Python (see `chorister.unicode14`), and a word with a
newer character is OOV. Normalising sorts a run of non-starters in quadratic time: rule 2 makes the
work linear in the length of the text. 30 is the limit of Unicode's stream-safe text format (UAX
#15, section 13).

Only the standard library is imported here, because the tokenizer also runs in the sandbox.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Final

from chorister.unicode14 import JOINING, is_word_character, separate_unassigned

TOKENISATION: Final = 1

MAX_NON_STARTERS: Final = 30

# NUL separates texts that go through a step together; SOH stands for a character that can't be
# folded on its own. Neither is in any text at that point: control characters separate words.
_SEPARATOR: Final = "\0"
_JOINED: Final = "\1"

_LONG_RUN: Final = re.compile(f"(?<=1{{{MAX_NON_STARTERS}}})1+")
_EXPANDING: Final = {"\ufdfa": 18, "\ufdfb": 8}
"""The characters that become more than six in NFKC, and how many they become."""
_JOINING_CODES: Final = frozenset(map(ord, JOINING))
_FIRST_SIGHT: Final = 60
"""What a character costs that no text had before: what becomes of it is found once a process."""


class _NonStarters(dict[int, str]):
    """For `str.translate`: 1 for non-starters, 0 for everything else."""

    def __missing__(self, code: int) -> str:
        is_starter = not unicodedata.combining(unicodedata.normalize("NFKD", chr(code))[0])
        self[code] = "0" if is_starter else "1"
        return self[code]


class _WordCharacters(dict[int, str]):
    """For `str.translate`: keeps word characters, apostrophe and NUL; the rest becomes a space."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        keep = character in ("'", _SEPARATOR) or is_word_character(code)
        self[code] = character if keep else " "
        return self[code]


class _Folded(dict[int, str]):
    """For `str.translate`: folds a character that joins no other; `_JOINED` for those that may."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = _JOINED if character in JOINING else _fold(character)
        return self[code]


_NON_STARTERS: Final = _NonStarters()
_WORD_CHARACTERS: Final = _WordCharacters({0x2019: "'"})
_FOLDED: Final = _Folded()


def _cut(text: str) -> str:
    """Apply rule 2."""
    marks = text.translate(_NON_STARTERS)
    if "1" * (MAX_NON_STARTERS + 1) not in marks:
        return text
    pieces, start = [], 0
    for run in _LONG_RUN.finditer(marks):
        pieces.append(text[start : run.start()])
        start = run.end()
    return " ".join([*pieces, text[start:]])


def _fold(text: str) -> str:
    """Apply rules 1 to 5 except for lone apostrophes, in time linear in the text's length."""
    text = unicodedata.normalize("NFKC", _cut(separate_unassigned(text)))
    for _ in range(2):
        folded = unicodedata.normalize("NFKC", text.casefold())
        if folded == text:
            break
        text = folded
    return _cut(text.translate(_WORD_CHARACTERS))


# ASCII is folded as bytes: most text is ASCII, and this is 10 times faster.
_ASCII: Final = bytes(ord(_fold(chr(code))) if code < 128 else 0x20 for code in range(256))


def _fold_ascii(text: str) -> str:
    return text.encode("ascii").translate(_ASCII).decode("ascii")


def _fold_alone(text: str) -> str:
    return text.translate(_FOLDED)


def canonical_texts(texts: Sequence[str]) -> list[str]:
    """Return the canonical form of each text.

    Many texts go through each step as one string, separated by NUL, which neither changes nor joins
    its neighbours: ten thousand short texts take a few milliseconds.
    """
    narrow = list(map(str.isascii, texts))
    if all(narrow):
        return _together(_fold_ascii, texts)
    ascii_texts = iter(_together(_fold_ascii, list(compress(texts, narrow))))
    wide = [text for text, is_ascii in zip(texts, narrow, strict=True) if not is_ascii]
    folded = _together(_fold_alone, wide)
    joining = [_JOINED in text for text in folded]
    joined = iter(_together(_fold, list(compress(wide, joining))))
    others = iter([next(joined) if j else t for j, t in zip(joining, folded, strict=True)])
    return [next(ascii_texts) if is_ascii else next(others) for is_ascii in narrow]


def _together(fold: Callable[[str], str], texts: Sequence[str]) -> list[str]:
    if not texts:
        return []
    joined = _SEPARATOR.join(texts)
    if joined.count(_SEPARATOR) != len(texts) - 1:  # NUL in a text also separates words
        joined = _SEPARATOR.join([text.replace(_SEPARATOR, " ") for text in texts])
    folded = fold(joined)
    if "'" in folded:  # those that are not between two word characters separate words
        folded = f"{_SEPARATOR}{folded}{_SEPARATOR}"
        for lone in ("''", " '", "' ", f"{_SEPARATOR}'", f"'{_SEPARATOR}"):
            folded = folded.replace(lone, lone.replace("'", " "))
        folded = folded[1:-1]
    while "  " in folded:
        folded = folded.replace("  ", " ")
    return list(map(str.strip, folded.split(_SEPARATOR)))


def canonical_text(text: str) -> str:
    """Return the words of `text`, joined by one space."""
    return canonical_texts([text])[0]


def split_words(text: str) -> list[str]:
    return canonical_text(text).split()


def effort(texts: Iterable[str]) -> int:
    """Return the most that the canonical forms of texts cost, in ASCII characters."""
    wide, cost = [], 0
    for text in texts:
        if text.isascii():
            cost += len(text)
        else:
            wide.append(text)
    if not wide:
        return cost
    codes = set(map(ord, "".join(wide)))
    # One by one: `codes - _FOLDED.keys()` would visit every character that was ever seen.
    cost += _FIRST_SIGHT * sum(code not in _FOLDED for code in codes)
    sizes = list(map(len, wide))
    for character, more in _EXPANDING.items():
        if ord(character) in codes:
            sizes = [n + (more - 1) * t.count(character) for n, t in zip(sizes, wide, strict=True)]
    if codes.isdisjoint(_JOINING_CODES):
        return cost + 4 * sum(sizes)
    factors = (4 if JOINING.isdisjoint(text) else 16 for text in wide)
    return cost + sum(f * n for f, n in zip(factors, sizes, strict=True))
