"""Generated texts that are spelled like those of no model: codes, and a made-up language.

They are the same on every machine: they have seeds of their own. Every device of `GENERATED` holds
a few words; how many devices hold a word falls as 1/rank.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

DEVICES = 20_000
KINDS = 3_000  # of words


def _held(words: list[str], rng: np.random.Generator, most: int) -> pl.DataFrame:
    """Devices with 1 to `most` words each: one row per word."""
    weights = 1.0 / np.arange(2.0, len(words) + 2.0)
    counts = rng.integers(1, most + 1, DEVICES)
    device = np.repeat(np.arange(DEVICES), counts)
    which = rng.choice(len(words), len(device), p=weights / weights.sum())
    return pl.DataFrame({"device": device, "word": [words[i] for i in which.tolist()]})


def codes() -> pl.DataFrame:
    """Error codes of several makers, such as e1234, kb5012345, 0x80070005 and err_gone."""
    rng = np.random.default_rng(31)
    nouns = ("gone", "lost", "full", "busy", "late", "dead", "open", "shut", "void", "hung")
    makers: tuple[Callable[[], str], ...] = (
        lambda: f"e{rng.integers(1000, 10_000)}",
        lambda: f"kb50{rng.integers(10_000, 100_000)}",
        lambda: f"0x8007{rng.integers(0, 65_536):04x}",
        lambda: f"ora{rng.integers(0, 32_768):05d}",
        lambda: f"err{rng.choice(nouns)}{rng.integers(0, 100)}",
    )
    words = dict.fromkeys(makers[int(rng.integers(len(makers)))]() for _ in range(2 * KINDS))
    return _held(list(words)[:KINDS], rng, 3)


def invented() -> pl.DataFrame:
    """Words of a language that no model knows: one to four syllables of 12 consonants, 6 vowels."""
    rng = np.random.default_rng(32)
    onsets = [a + b for a in "bdgklmnprstz" for b in ("", "", "r", "w")]
    vowels, codas = [*"aeiouy"], ["", "", "n", "k", "sh"]

    def word() -> str:
        parts = (rng.choice(each) for _ in range(rng.integers(1, 5)) for each in (onsets, vowels))
        return "".join(parts) + str(rng.choice(codas))

    words = dict.fromkeys(word() for _ in range(3 * KINDS))
    return _held(list(words)[:KINDS], rng, 8)


GENERATED: dict[str, Callable[[], pl.DataFrame]] = {"codes": codes, "invented": invented}
