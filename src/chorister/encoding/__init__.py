"""From features to one-hot bins and back: intervals, categories, prefix trees, grids."""

from __future__ import annotations

from chorister.encoding.encoder import Encoder, Selection
from chorister.encoding.features import OOV, Categories, Feature, Grid, Intervals
from chorister.encoding.lookup import MAX_TEXT_CHARACTERS
from chorister.encoding.prefix_tree import END, HashedPrefixTree, PrefixTree
from chorister.encoding.product import (
    MAX_BINS,
    MAX_DENIED_WORDS,
    MAX_DENY_LISTS,
    AnyFeature,
    DenyList,
    Encoding,
)
from chorister.encoding.tokenizer import TOKENISATION, canonical_text, canonical_texts, split_words

__all__ = [
    "END",
    "MAX_BINS",
    "MAX_DENIED_WORDS",
    "MAX_DENY_LISTS",
    "MAX_TEXT_CHARACTERS",
    "OOV",
    "TOKENISATION",
    "AnyFeature",
    "Categories",
    "DenyList",
    "Encoder",
    "Encoding",
    "Feature",
    "Grid",
    "HashedPrefixTree",
    "Intervals",
    "PrefixTree",
    "Selection",
    "canonical_text",
    "canonical_texts",
    "split_words",
]
