"""n-grams: a known prefix and the word that follows it (the paper's section 4.1, appendix B).

Cell 0 is OOV: no prefix matches, or there is no text. Then, for each prefix in order: END (the text
ends after the prefix), OOV (the next word is not in the vocabulary) and one cell for every word of
the vocabulary. So a tree of 3 prefixes and 9 words has 1 + 3 x (1 + 1 + 9) = 34 cells.

Instead of words, a recipe may have their salted hashes, in the same order and thus with the same
indices. Then only someone who guesses a phrase can tell that it is asked about.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Final, Literal, TypeAlias, cast

from pydantic import Field, StringConstraints, field_validator, model_validator

from chorister.canonical import Int
from chorister.encoding.features import OOV, Column, Feature, Phrase, check_phrases
from chorister.encoding.lookup import EXTRA_STEPS, TreeLookup, hash_phrase
from chorister.encoding.tokenizer import TOKENISATION
from chorister.errors import InvalidInput

END: Final = "END"
"""The label of a text that ends after a prefix. No word is END or OOV: words are case-folded."""

MAX_DEPTH: Final = 8
_Hash: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$", strict=True)]


class _Tree(Feature):
    """What plain and hashed trees share: the numbering of cells."""

    column: Column
    tokenisation: Literal[1] = TOKENISATION

    @property
    @abstractmethod
    def _lists(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Prefixes and vocabulary as the recipe spells them."""

    @property
    def columns_read(self) -> tuple[str, ...]:
        return (self.column,)

    def label(self, index: int) -> str:
        """Return OOV, "hello world END", "hello world OOV" or "hello world again"."""
        self._check_index(index)
        if index == 0:
            return OOV
        prefixes, vocabulary = self._lists
        at, rest = divmod(index - 1, EXTRA_STEPS + len(vocabulary))
        if rest < EXTRA_STEPS:
            return f"{prefixes[at] or '*'} {(END, OOV)[rest]}"
        return f"{prefixes[at]} {vocabulary[rest - EXTRA_STEPS]}".lstrip()

    def index(self, label: str) -> int:
        if label == OOV:
            return 0
        prefix, _, last = label.rpartition(" ")
        tables = cast(TreeLookup, self.lookup)
        base, step = tables.bases.get("" if prefix == "*" else prefix), tables.steps.get(last)
        if last in (END, OOV):
            step = (END, OOV).index(last)
        if base is None or step is None or self.label(base + step) != label:
            raise self._unknown(label)
        return base + step


class PrefixTree(_Tree):
    """Prefixes (none begins another; "" alone asks for first words) and a vocabulary."""

    kind: Literal["prefix_tree"] = "prefix_tree"
    prefixes: Annotated[tuple[Phrase, ...], Field(min_length=1, max_length=100_000)]
    vocabulary: Annotated[tuple[Phrase, ...], Field(max_length=100_000)]

    @field_validator("prefixes", "vocabulary")
    @classmethod
    def _canonical(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        return check_phrases(texts, max_words=MAX_DEPTH)

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
            raise ValueError('the empty prefix "" must be the only one')
        for prefix in self.prefixes:
            words = prefix.split()
            for depth in range(1, len(words)):
                if (begin := " ".join(words[:depth])) in known:
                    raise ValueError(f"the prefix {begin!r} begins {prefix!r}: keep one of them")
        return self

    @property
    def _lists(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.prefixes, self.vocabulary

    def hashed(self, salt: bytes) -> HashedPrefixTree:
        """Return the same tree with the same indices, but hashes instead of words."""
        if len(salt) != 16:
            raise InvalidInput(f"a salt must have 16 bytes, not {len(salt)}")
        return HashedPrefixTree(
            column=self.column,
            tokenisation=self.tokenisation,
            salt=salt.hex(),
            depths=tuple(sorted({len(prefix.split()) for prefix in self.prefixes})),
            prefixes=tuple(hash_phrase(salt, prefix) for prefix in self.prefixes),
            vocabulary=tuple(hash_phrase(salt, word) for word in self.vocabulary),
        )


class HashedPrefixTree(_Tree):
    """A tree whose prefixes and words are the first 16 bytes of SHA-256(salt || text)."""

    kind: Literal["hashed_prefix_tree"] = "hashed_prefix_tree"
    salt: _Hash
    depths: Annotated[tuple[Int, ...], Field(min_length=1, max_length=MAX_DEPTH + 1)]
    """How many words the prefixes have, increasing; the shortest match of a text counts."""
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
            raise ValueError(f"depths must increase, from 0 to at most {MAX_DEPTH}")
        return depths

    @property
    def _lists(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.prefixes, self.vocabulary
