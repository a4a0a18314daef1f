"""The aggregators' own noise: a crowd that nobody can take away.

Each aggregator adds to every bin of its aggregate share an independent Bin(M, q), M being the
recipe's min_cohort - 1 and q the chance with which a device sets a bit that is not its own. Whoever
the other clients are, one device's bits are then hidden as among min_cohort honest ones: the pair
`Ber(h) + Bin(M, q)` and `Ber(q) + Bin(M, q)` is the one that the stated epsilon is certified for.
Drawn exactly, from the operating system's generator, once for each batch: the draw that is
committed with the mark `collected` is the only one that ever leaves the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from chorister._native import Prio3, sample_binomials
from chorister.errors import InvalidInput
from chorister.recipe import Recipe

__all__ = ["Noise", "Sampler", "add_noise", "draw"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """The law of one bin's noise at one aggregator: Bin(trials, threshold / 2^64)."""

    trials: int
    threshold: int

    @classmethod
    def of(cls, recipe: Recipe) -> Noise | None:
        """What a recipe asks each aggregator for; None where it relies on honest devices."""
        if recipe.privacy.crowd != "noised":
            return None
        threshold = recipe.randomizer.q_threshold
        # q = 1 / (e^eps0 + 1) is below one half; the tables rely on it.
        if not 0 < threshold < 2**63:
            raise InvalidInput(f"a threshold of {threshold} is not below one half")
        return cls(trials=recipe.privacy.min_cohort - 1, threshold=threshold)


Sampler: TypeAlias = Callable[[int, Noise], bytes]
"""A number of bins and a law -> one draw a bin, as uint64."""


def draw(bins: int, noise: Noise) -> bytes:
    """One exact draw a bin."""
    return sample_binomials(bins, noise.trials, threshold=noise.threshold)


def add_noise(vdaf: Prio3, share: bytes, noise: Noise | None, sample: Sampler) -> bytes:
    """The share that may leave the aggregator."""
    if noise is None:
        return share
    return vdaf.add_counts(share, np.frombuffer(sample(vdaf.length, noise), np.uint64))
