"""Deny lists: phrases that a device leaves out before it chooses a row.

An analyst lists what is already known (so that devices offer something else) or must not be
collected. A row whose text contains a denied phrase, as whole words, is treated as if it were not
there; a device left with no row reports OOV, as one without data does.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, StringConstraints, field_validator

from chorister.canonical import Model
from chorister.encoding.feature import Column, Values
from chorister.encoding.words import canonical_texts

__all__ = ["DenyList"]


class DenyList(Model):
    """Phrases (canonical words) that no row's text in `column` may contain."""

    column: Column
    phrases: Annotated[
        tuple[Annotated[str, StringConstraints(min_length=1, max_length=400, strict=True)], ...],
        Field(min_length=1, max_length=100_000),
    ]

    @field_validator("phrases")
    @classmethod
    def _canonical(cls, phrases: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(phrases)) != len(phrases):
            raise ValueError("a phrase occurs twice")
        for phrase, canonical in zip(phrases, canonical_texts(phrases), strict=True):
            if phrase != canonical:
                raise ValueError(f"{phrase!r} is not in canonical form: write {canonical!r}")
        return phrases

    @cached_property
    def _by_length(self) -> dict[int, set[str]]:
        """Phrases by their number of words."""
        groups: dict[int, set[str]] = {}
        for phrase in self.phrases:
            groups.setdefault(phrase.count(" ") + 1, set()).add(phrase)
        return groups

    def denied(self, values: Values) -> NDArray[np.bool_]:
        """Which rows contain a denied phrase. What is not text contains none."""
        result = np.zeros(len(values), dtype=np.bool_)
        rows = [i for i, value in enumerate(values) if type(value) is str]
        for i, text in zip(rows, canonical_texts([values[i] for i in rows]), strict=True):
            result[i] = self._contains(text.split())
        return result

    def _contains(self, words: list[str]) -> bool:
        return any(
            " ".join(words[i : i + length]) in phrases
            for length, phrases in self._by_length.items()
            for i in range(len(words) - length + 1)
        )
