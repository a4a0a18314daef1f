"""What a word is: tokenisation version 1.

Device and analyst must cut text into the same words, or counts land in the wrong bins. Version 1,
which a recipe names and which never changes:

1. characters that are not in Unicode 14.0 separate words, whatever the device's Python knows;
2. Unicode NFKC, then case folding, then NFKC again (case folding can undo NFKC), twice over, which
   makes it idempotent;
3. U+2019 (right single quotation mark) becomes U+0027 (apostrophe);
4. word characters are those that Unicode 14.0 has in the general categories L (letters), M (marks)
   and N (numbers); an apostrophe counts as one if it stands between two of them ("don't"); all else
   separates words;
5. a word is a maximal run of word characters. A text's canonical form is its words, joined by one
   space.

So the words of a text are the same on every Python (`chorister.unicode14` says why), and a word
with a newer character falls into an OOV bin.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from chorister.unicode14 import is_word_character, separate_unassigned

__all__ = ["TOKENISATION", "canonical_text", "canonical_texts", "is_canonical", "split_words"]

TOKENISATION: Final = 1
"""The version of these rules."""

_SEPARATOR: Final = "\0"
_NUL, _SPACE, _APOSTROPHE = 0x00, 0x20, 0x27
_TRUE: Final = np.ones(1, dtype=np.bool_)
_Code = TypeVar("_Code", np.uint8, np.uint32)


class _WordCharacters(dict[int, str]):
    """For `str.translate`: word characters, apostrophe and NUL stay, all else becomes a space."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        keep = character in ("'", _SEPARATOR) or is_word_character(code)
        self[code] = character if keep else " "
        return self[code]


_WORD_CHARACTERS: Final = _WordCharacters({0x2019: "'"})
# The same with folding, for ASCII, on bytes: most text is ASCII, and this is 10 x faster.
_ASCII: Final = bytes(
    ord(_WORD_CHARACTERS[code].lower()) if code < 128 else 0x20 for code in range(256)
)


def canonical_texts(texts: Sequence[str]) -> list[str]:
    """The canonical form of each text.

    All texts go through each step as one string, separated by NUL, which is neither changed by a
    step nor combines with its neighbours: ten thousand short texts cost a few milliseconds.
    """
    if not texts:
        return []
    found = _canonical(_SEPARATOR.join(texts))
    if len(found) != len(texts):  # a text contains NUL, which separates words as well
        found = _canonical(_SEPARATOR.join([text.replace(_SEPARATOR, " ") for text in texts]))
    return found


def _canonical(joined: str) -> list[str]:
    if joined.isascii():
        codes = np.frombuffer(joined.encode("ascii").translate(_ASCII), dtype=np.uint8)
        return _tidy(codes).tobytes().decode("ascii").split(_SEPARATOR)
    folded = _fold(separate_unassigned(joined)).translate(_WORD_CHARACTERS)
    wide = np.frombuffer(folded.encode("utf-32-le"), dtype=np.dtype("<u4"))
    return _tidy(wide).tobytes().decode("utf-32-le").split(_SEPARATOR)


def _tidy(codes: NDArray[_Code]) -> NDArray[_Code]:
    """Lone apostrophes become spaces; then spaces are left only between two words."""
    apostrophe, separator = codes == _APOSTROPHE, (codes == _SPACE) | (codes == _NUL)
    if apostrophe.any():
        edge = apostrophe | separator
        lone = apostrophe & (_before(edge) | _after(edge))
        codes, separator = codes.copy(), separator | lone
        codes[lone] = _SPACE
    # Of each run of spaces the first stays, unless a text begins with it ...
    codes = codes[~((codes == _SPACE) & _before(separator))]
    # ... or ends with it.
    tidy: NDArray[_Code] = codes[~((codes == _SPACE) & _after(codes == _NUL))]
    return tidy


def _before(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether the character before is marked; the beginning is."""
    return np.concatenate((_TRUE, mask))[:-1]


def _after(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether the character after is marked; the end is."""
    return np.concatenate((mask, _TRUE))[1:]


def canonical_text(text: str) -> str:
    """The words of `text`, joined by one space."""
    return canonical_texts([text])[0]


def split_words(text: str) -> list[str]:
    """The words of `text`."""
    return canonical_text(text).split()


def is_canonical(text: str) -> bool:
    """Whether `text` is its own canonical form: words joined by one space (or nothing at all)."""
    return canonical_text(text) == text


def _fold(text: str) -> str:
    for _ in range(2):
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return text
