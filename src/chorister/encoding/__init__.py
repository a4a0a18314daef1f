"""Features -> one-hot index and back: intervals, categories, prefix trees, grids, their product."""

from __future__ import annotations

from chorister.encoding.categories import Categories
from chorister.encoding.deny import DenyList
from chorister.encoding.feature import OOV, Feature, Indices
from chorister.encoding.grid import Grid
from chorister.encoding.intervals import Intervals
from chorister.encoding.prefix_tree import END, HashedPrefixTree, PrefixTree
from chorister.encoding.product import MAX_BINS, AnyFeature, Encoding, Selection
from chorister.encoding.words import TOKENISATION, canonical_text, canonical_texts, split_words

__all__ = [
    "END",
    "MAX_BINS",
    "OOV",
    "TOKENISATION",
    "AnyFeature",
    "Categories",
    "DenyList",
    "Encoding",
    "Feature",
    "Grid",
    "HashedPrefixTree",
    "Indices",
    "Intervals",
    "PrefixTree",
    "Selection",
    "canonical_text",
    "canonical_texts",
    "split_words",
]
