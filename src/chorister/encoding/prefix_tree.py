"""n-grams: a known beginning and the word that follows it (the paper's section 4.1, appendix B).

Cell 0 is OOV: no prefix matches, or there is no text. Then, for each prefix in order: END (the text
stops after the prefix), OOV (the next word is not in the vocabulary) and one cell for every word of
the vocabulary. So a tree of 3 prefixes and 9 words has 1 + 3 x (1 + 1 + 9) = 34 cells.

Instead of the words a recipe may carry their salted hashes, in the same order and hence with the
same indices; then only whoever already guesses a phrase can tell that it is asked about.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import compress
from operator import itemgetter
from typing import Annotated, Any, Final, Literal, TypeAlias

import numpy as np
from pydantic import Field, StringConstraints, field_validator, model_validator

from chorister.canonical import Int
from chorister.encoding.feature import OOV, Column, Feature, Indices, Values
from chorister.encoding.words import TOKENISATION, canonical_texts
from chorister.errors import InvalidInput

__all__ = ["END", "HashedPrefixTree", "PrefixTree"]

END: Final = "END"
"""The label of a text that stops after a prefix. Words are case-folded: none reads END or OOV."""

MAX_DEPTH: Final = 8
_EXTRA: Final = 2  # END and OOV, at every prefix
_Text: TypeAlias = Annotated[str, StringConstraints(max_length=400, strict=True)]
_Hash: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$", strict=True)]


class _Tree(Feature):
    """What plain and hashed trees share: the numbering of cells."""

    column: Column
    tokenisation: Literal[1] = TOKENISATION

    @property
    @abstractmethod
    def _lists(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Prefixes and vocabulary, as the recipe spells them."""

    @property
    @abstractmethod
    def _locate(self) -> Callable[[str], int]:
        """The cell of a text in canonical form."""

    @property
    def columns_read(self) -> tuple[str, ...]:
        """The one column."""
        return (self.column,)

    @property
    def size(self) -> int:
        """1 + prefixes x (END, OOV and the vocabulary)."""
        prefixes, vocabulary = self._lists
        return 1 + len(prefixes) * (_EXTRA + len(vocabulary))

    def label(self, index: int) -> str:
        """OOV, "hello world END", "hello world OOV" or "hello world again"."""
        self._check_index(index)
        if index == 0:
            return OOV
        prefixes, vocabulary = self._lists
        at, rest = divmod(index - 1, _EXTRA + len(vocabulary))
        if rest < _EXTRA:
            return f"{prefixes[at] or '*'} {(END, OOV)[rest]}"
        return f"{prefixes[at]} {vocabulary[rest - _EXTRA]}".lstrip()

    def index(self, label: str) -> int:
        """The cell with this label."""
        if label == OOV:
            return 0
        prefix, _, last = label.rpartition(" ")
        bases, words = self._tables
        base, step = bases.get("" if prefix == "*" else prefix), words.get(last)
        if last in (END, OOV):
            step = (END, OOV).index(last)
        if base is None or step is None or self.label(base + step) != label:
            raise self._unknown(label)
        return base + step

    @cached_property
    def _tables(self) -> tuple[dict[str, int], dict[str, int]]:
        """Each prefix's first cell, and each word's distance from it."""
        prefixes, vocabulary = self._lists
        width = _EXTRA + len(vocabulary)
        bases = {prefix: 1 + i * width for i, prefix in enumerate(prefixes)}
        return bases, {word: i for i, word in enumerate(vocabulary, start=_EXTRA)}

    def find(self, *columns: Values) -> Indices:
        """The cell of every text."""
        (values,) = columns
        cells = np.zeros(len(values), dtype=np.int64)
        rows: Sequence[int] = range(len(values))
        try:
            texts = canonical_texts(values)
        except TypeError:  # not all of them are text
            rows = [i for i, value in enumerate(values) if type(value) is str]
            texts = canonical_texts([values[i] for i in rows])
        promising = list(self._promising(texts))
        if promising:
            locate = self._locate
            cells[[rows[i] for i in promising]] = [locate(texts[i]) for i in promising]
        return cells

    def _promising(self, texts: list[str]) -> Iterable[int]:
        """Which texts to look at more closely; all others are OOV."""
        return range(len(texts))


class PrefixTree(_Tree):
    """Prefixes (leaves: none begins another; "" alone asks for first words) and a vocabulary."""

    kind: Literal["prefix_tree"] = "prefix_tree"
    prefixes: Annotated[tuple[_Text, ...], Field(min_length=1, max_length=100_000)]
    vocabulary: Annotated[tuple[_Text, ...], Field(max_length=100_000)]

    @field_validator("prefixes", "vocabulary")
    @classmethod
    def _canonical(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(texts)) != len(texts):
            raise ValueError("an entry occurs twice")
        for text, canonical in zip(texts, canonical_texts(texts), strict=True):
            if text != canonical:
                raise ValueError(f"{text!r} is not in canonical form: write {canonical!r}")
            if text.count(" ") >= MAX_DEPTH:
                raise ValueError(f"{text!r} has more than {MAX_DEPTH} words")
        return texts

    @field_validator("vocabulary")
    @classmethod
    def _single_words(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        for word in words:
            if not word or " " in word:
                raise ValueError(f"{word!r} is not one word")
        return words

    @model_validator(mode="after")
    def _leaves(self) -> PrefixTree:
        known = set(self.prefixes)
        if "" in known and len(known) > 1:
            raise ValueError('the empty prefix "" stands alone')
        for prefix in self.prefixes:
            words = prefix.split()
            for depth in range(1, len(words)):
                if (begin := " ".join(words[:depth])) in known:
                    raise ValueError(f"the prefix {begin!r} begins {prefix!r}: keep one of them")
        return self

    @property
    def _lists(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.prefixes, self.vocabulary

    @cached_property
    def _trie(self) -> dict[str, Any]:
        """Nested dictionaries word by word; a leaf is its first cell."""
        root: dict[str, Any] = {}
        for prefix, base in self._tables[0].items():
            node = root
            *path, last = prefix.split()
            for word in path:
                node = node.setdefault(word, {})
            node[last] = base
        return root

    @cached_property
    def _locate(self) -> Callable[[str], int]:
        bases, words = self._tables
        if "" in bases:
            return lambda text: _next(text.split(" ", 1), 0, 1, words)
        trie = self._trie

        def locate(text: str) -> int:
            parts = text.split(" ", MAX_DEPTH + 1)
            node = trie.get(parts[0])
            depth = 1
            while node is not None:
                if type(node) is int:
                    return _next(parts, depth, node, words)
                if depth == len(parts):
                    return 0
                node = node.get(parts[depth])
                depth += 1
            return 0

        return locate

    def _promising(self, texts: list[str]) -> Iterable[int]:
        """Those that begin with the same letters as a prefix: few do, and this loop runs in C."""
        length = min(len(prefix) for prefix in self.prefixes)
        begins = {prefix[:length] for prefix in self.prefixes}
        heads = map(itemgetter(slice(0, length)), texts)
        return compress(range(len(texts)), map(begins.__contains__, heads))

    def hashed(self, salt: bytes) -> HashedPrefixTree:
        """The same tree, the same indices, without its words."""
        if len(salt) != 16:
            raise InvalidInput(f"a salt has 16 bytes, not {len(salt)}")
        return HashedPrefixTree(
            column=self.column,
            tokenisation=self.tokenisation,
            salt=salt.hex(),
            depths=tuple(sorted({len(prefix.split()) for prefix in self.prefixes})),
            prefixes=tuple(_hash(salt, prefix).hex() for prefix in self.prefixes),
            vocabulary=tuple(_hash(salt, word).hex() for word in self.vocabulary),
        )


class HashedPrefixTree(_Tree):
    """A tree whose prefixes and words are the first 16 bytes of SHA-256(salt || text)."""

    kind: Literal["hashed_prefix_tree"] = "hashed_prefix_tree"
    salt: _Hash
    depths: Annotated[tuple[Int, ...], Field(min_length=1, max_length=MAX_DEPTH + 1)]
    """The numbers of words of the prefixes, increasing; a text's shortest match counts."""
    prefixes: Annotated[tuple[_Hash, ...], Field(min_length=1, max_length=100_000)]
    vocabulary: Annotated[tuple[_Hash, ...], Field(max_length=100_000)]

    @field_validator("prefixes", "vocabulary")
    @classmethod
    def _distinct(cls, hashes: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(hashes)) != len(hashes):
            raise ValueError("an entry occurs twice")
        return hashes

    @field_validator("depths")
    @classmethod
    def _increasing(cls, depths: tuple[int, ...]) -> tuple[int, ...]:
        if list(depths) != sorted(set(depths)) or depths[0] < 0 or depths[-1] > MAX_DEPTH:
            raise ValueError(f"depths increase, from 0 to at most {MAX_DEPTH}")
        return depths

    @property
    def _lists(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.prefixes, self.vocabulary

    @cached_property
    def _digests(self) -> tuple[dict[bytes, int], dict[bytes, int]]:
        """The tables by digest."""
        bases, words = self._tables
        return (
            {bytes.fromhex(prefix): base for prefix, base in bases.items()},
            {bytes.fromhex(word): step for word, step in words.items()},
        )

    @property
    def _locate(self) -> Callable[[str], int]:
        salt = bytes.fromhex(self.salt)
        bases, words = self._digests
        # Real text repeats itself: hash each phrase once. Made anew for every column, so that
        # nothing that was typed outlives the query.
        hashes: dict[str, bytes] = {}

        def hashed(text: str) -> bytes:
            found = hashes.get(text)
            if found is None:
                found = hashes[text] = _hash(salt, text)
            return found

        def locate(text: str) -> int:
            parts = text.split()
            for depth in self.depths:
                if depth > len(parts):
                    return 0
                base = bases.get(hashed(" ".join(parts[:depth])))
                if base is not None:
                    if depth == len(parts):
                        return base
                    return base + words.get(hashed(parts[depth]), 1)
            return 0

        return locate


def _next(parts: list[str], depth: int, base: int, words: dict[str, int]) -> int:
    """END, OOV or the vocabulary's cell for the word after a matched prefix."""
    if depth == len(parts) or not parts[depth]:
        return base
    return base + words.get(parts[depth], 1)


def _hash(salt: bytes, text: str) -> bytes:
    return hashlib.sha256(salt + text.encode("utf-8")).digest()[:16]
