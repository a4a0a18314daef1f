"""Tokenisation version 1 of `chorister.encoding.words`, one text at a time.

That module cuts ten thousand texts at once, with numpy, which a sandbox must not load: its threads
do not survive a fork, and a query that broke out would find a whole numerical library. Here the
same rules are spelled with the standard library alone; a test holds the two together.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

__all__ = ["split_words"]

_WORD: Final = re.compile("[^ ']+(?:'[^ ']+)*")


class _WordCharacters(dict[int, str]):
    """For `str.translate`: word characters and apostrophes stay, all else becomes a space."""

    def __missing__(self, code: int) -> str:
        keep = code == ord("'") or unicodedata.category(chr(code))[0] in "LMN"
        self[code] = chr(code) if keep else " "
        return self[code]


_WORD_CHARACTERS: Final = _WordCharacters({0x2019: "'"})


def split_words(text: str) -> list[str]:
    """The words of `text`."""
    for _ in range(2):
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return _WORD.findall(text.translate(_WORD_CHARACTERS))
