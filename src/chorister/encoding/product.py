"""The product of features: one bin for every combination of their cells."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Final, Literal, TypeAlias

import numpy as np
from pydantic import Field

from chorister.encoding.categories import Categories
from chorister.encoding.deny import DenyList
from chorister.encoding.feature import Feature, Indices, Values
from chorister.encoding.grid import Grid
from chorister.encoding.intervals import Intervals
from chorister.encoding.prefix_tree import HashedPrefixTree, PrefixTree
from chorister.errors import InvalidInput

__all__ = ["MAX_BINS", "AnyFeature", "Encoding", "Selection"]

MAX_BINS: Final = 2**31 - 1
"""Above it a VDAF's length (uint32) ends; policies set far smaller limits."""

AnyFeature: TypeAlias = Annotated[
    Intervals | Categories | PrefixTree | HashedPrefixTree | Grid, Field(discriminator="kind")
]
Selection: TypeAlias = Literal["uniform", "first"]


@dataclass(frozen=True)
class Encoding:
    """Rows of a query's result -> bins of a histogram, and back.

    Bins are numbered in row-major order: the last feature changes fastest. Bin 0 is OOV in every
    feature.
    """

    features: tuple[Feature, ...]
    deny: tuple[DenyList, ...] = ()

    def __post_init__(self) -> None:
        if not self.features:
            raise InvalidInput("an encoding has at least one feature")
        if self.size > MAX_BINS:
            raise InvalidInput(f"{self.size} bins, where at most {MAX_BINS} can be encoded")

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
        """The label of each feature's cell."""
        cells = self.cells(bin_)
        return tuple(f.label(cell) for f, cell in zip(self.features, cells, strict=True))

    def index(self, labels: Sequence[str]) -> int:
        """The bin with these labels, one for each feature."""
        if len(labels) != len(self.features):
            raise InvalidInput(f"{len(labels)} labels for {len(self.features)} features")
        cells = (f.index(label) for f, label in zip(self.features, labels, strict=True))
        return sum(cell * stride for cell, stride in zip(cells, self._strides, strict=True))

    def cells(self, bin_: int) -> tuple[int, ...]:
        """The index of each feature's cell."""
        if not 0 <= bin_ < self.size:
            raise InvalidInput(f"bin {bin_} is outside 0..{self.size - 1}")
        return tuple(
            bin_ // stride % feature.size
            for feature, stride in zip(self.features, self._strides, strict=True)
        )

    def find(self, columns: Mapping[str, Values]) -> Indices:
        """The bin of every row, given the columns of the query's result; -1 for a denied row."""
        for column in self.columns:
            if column not in columns:
                raise InvalidInput(f"the query's result has no column {column!r}")
        if len({len(columns[column]) for column in self.columns}) > 1:
            raise InvalidInput("the columns differ in length")
        bins = np.zeros(len(columns[self.columns[0]]), dtype=np.int64)
        for feature, stride in zip(self.features, self._strides, strict=True):
            bins += stride * feature.find(*(columns[column] for column in feature.columns_read))
        for deny in self.deny:
            bins[deny.denied(columns[deny.column])] = -1
        return bins

    def select(
        self,
        bins: Indices,
        selection: Selection,
        *,
        randbelow: Callable[[int], int] = secrets.randbelow,
    ) -> int:
        """The one bin that a device reports, among the bins of its rows.

        Candidates are the rows that fall best into a bucket: not denied, and OOV in as few
        features as possible. `uniform` draws one of these rows, `first` takes the smallest bin.
        Without any row, 0: OOV in every feature.
        """
        bins = bins[bins >= 0]
        if not len(bins):
            return 0
        misses = np.zeros(len(bins), dtype=np.int64)
        for feature, stride in zip(self.features, self._strides, strict=True):
            misses += bins // stride % feature.size == 0
        candidates = bins[misses == misses.min()]
        if selection == "first":
            return int(candidates.min())
        return int(candidates[randbelow(len(candidates))])
