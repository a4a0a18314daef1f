"""A recipe's encoding: one bin for every combination of its features' cells, without denied rows.

A deny list has phrases that are already known (so that devices offer something else) or must not be
collected. A row whose text contains a denied phrase, as whole words, is treated as if it did not
exist; so is a row whose text is too long to search. A device without any row left reports OOV, as
one without data does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Final, TypeAlias

from pydantic import Field, field_validator

from chorister.canonical import Model, dumps
from chorister.encoding.encoder import Encoder, PhraseMatcher
from chorister.encoding.features import (
    Categories,
    Column,
    Feature,
    Grid,
    Intervals,
    Phrase,
    check_phrases,
)
from chorister.encoding.lookup import Values, canonical_column
from chorister.encoding.prefix_tree import HashedPrefixTree, PrefixTree
from chorister.errors import InvalidInput

MAX_BINS: Final = 2**31 - 1
"""What fits a VDAF's length (uint32); policies set far smaller limits."""

AnyFeature: TypeAlias = Annotated[
    Intervals | Categories | PrefixTree | HashedPrefixTree | Grid, Field(discriminator="kind")
]


MAX_DENY_LISTS: Final = 8
MAX_DENIED_WORDS: Final = 200_000
"""In all of a recipe's deny lists together: each may be a state of an automaton."""
MAX_PHRASE_WORDS: Final = 16
"""No n-gram is longer."""


def count_words(phrase: str) -> int:
    """Count the words of a phrase in canonical form."""
    return phrase.count(" ") + 1


class DenyList(Model):
    """Phrases in canonical form; rows whose text in `column` contains one are ignored."""

    column: Column
    phrases: Annotated[
        tuple[Annotated[Phrase, Field(min_length=1)], ...],
        Field(min_length=1, max_length=100_000),
    ]

    @field_validator("phrases")
    @classmethod
    def _canonical(cls, phrases: tuple[str, ...]) -> tuple[str, ...]:
        return check_phrases(phrases, max_words=MAX_PHRASE_WORDS)

    @cached_property
    def words(self) -> int:
        """The number of words in all phrases."""
        return sum(map(count_words, self.phrases))

    @cached_property
    def _matcher(self) -> PhraseMatcher:
        return PhraseMatcher(self.phrases)

    def denied(self, values: Values) -> list[bool]:
        """Return which rows contain a denied phrase. Values that are not text contain none."""
        return self._matcher.contained(canonical_column(values))


@dataclass(frozen=True)
class Encoding:
    """Turns rows of a query's result into bins of a histogram, and bins into labels.

    It has the models and the names of the bins; `Encoder` does everything that touches data.
    """

    features: tuple[Feature, ...]
    deny: tuple[DenyList, ...] = ()

    def __post_init__(self) -> None:
        if not self.features:
            raise InvalidInput("an encoding needs at least one feature")
        if self.size > MAX_BINS:
            raise InvalidInput(f"{self.size} bins, but at most {MAX_BINS} can be encoded")

    @cached_property
    def size(self) -> int:
        """The number of bins: the product of the features' sizes."""
        return math.prod(feature.size for feature in self.features)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The columns that a row must have, each once."""
        read = [column for feature in self.features for column in feature.columns_read]
        return tuple(dict.fromkeys([*read, *(deny.column for deny in self.deny)]))

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        sizes = [feature.size for feature in self.features]
        return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))

    def labels(self, bin_: int) -> tuple[str, ...]:
        """Return the label of each feature's cell."""
        cells = self.cells(bin_)
        return tuple(f.label(cell) for f, cell in zip(self.features, cells, strict=True))

    def index(self, labels: Sequence[str]) -> int:
        """Return the bin with these labels, one for each feature."""
        if len(labels) != len(self.features):
            raise InvalidInput(f"{len(labels)} labels for {len(self.features)} features")
        cells = (f.index(label) for f, label in zip(self.features, labels, strict=True))
        return sum(cell * stride for cell, stride in zip(cells, self._strides, strict=True))

    def cells(self, bin_: int) -> tuple[int, ...]:
        """Return the index of each feature's cell."""
        if not 0 <= bin_ < self.size:
            raise InvalidInput(f"bin {bin_} is not in 0..{self.size - 1}")
        return tuple(
            bin_ // stride % feature.size
            for feature, stride in zip(self.features, self._strides, strict=True)
        )

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder(list(map(vars, self.features)), list(map(vars, self.deny)))

    @cached_property
    def canonical(self) -> bytes:
        """The features and deny lists as canonical JSON, which `Encoder.parse` can read."""
        parts = {"features": self.features, "deny": self.deny}
        data = dumps(
            {
                name: [model.model_dump(mode="json", exclude_none=True) for model in models]
                for name, models in parts.items()
            }
        )
        Encoder.parse(data)
        return data

    def find(self, columns: Mapping[str, Values]) -> list[int]:
        """Return the bin of every row of the query's result, given by columns; -1 if denied."""
        return self.encoder.find(columns)
