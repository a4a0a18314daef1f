"""What to ask next, and what to report, when n-grams are discovered word by word.

Pure functions of what was seen so far. An n-gram of words numbered 0 .. V-1 is the integer whose
digits in base V they are: its first n-1 words are `code // V`, its last ones `code % V^(n-1)`.

- **extend**: n-grams that overlap in all but their outer words are joined; an (n+1)-gram `abc` is
  expected to have the share f(ab) f(bc) / sum_x f(bx), as in a Markov chain. Single words have the
  empty overlap, but are not independent: two rare words that stand together do so far more often
  than the product says, so of the larger share only the root counts (scaled to the same total).
- **worth_asking**: of what comes out, as many as the domain holds, and only those of which at least
  a tenth of a standard error is expected. A device reports one of its candidates, so hopeless ones
  take reports away from the others.
- **heard**: report what lies above the exact binomial tail 1/M over all M candidates: at most one
  false discovery is expected, whatever the data. Pruning on the way is loose, reporting is strict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from chorister.errors import InvalidInput

__all__ = [
    "KEPT",
    "LEAST_EXPECTED",
    "LEAST_ON_THE_WAY",
    "Ranked",
    "check_vocabulary",
    "extend",
    "heard",
    "largest",
    "worth_asking",
]

Floats: TypeAlias = NDArray[np.float64]
Codes: TypeAlias = NDArray[np.int64]

LEAST_EXPECTED: Final = 0.1
"""Standard errors that a candidate is expected to have at least."""
LEAST_ON_THE_WAY: Final = 0.01
"""The same where what is heard only leads to the next round: pruning is loose."""
KEPT: Final = 20_000
"""n-grams that are extended, at most."""


@dataclass(frozen=True, eq=False, slots=True)
class Ranked:
    """n-grams with the share of reports that each is expected to have (any order)."""

    codes: Codes
    shares: Floats

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Ranked:
        """Some of them."""
        return Ranked(self.codes[rows], self.shares[rows])

    def rarest_first(self) -> Ranked:
        """By what is expected, least first; ties by code, so that the order is always the same."""
        return self.take(np.lexsort((self.codes, self.shares)))


def check_vocabulary(words: int, depth: int) -> None:
    """Refuse vocabularies whose n-grams have no 63-bit number."""
    if words < 2:
        raise InvalidInput("a vocabulary has at least two words")
    if words**depth >= 2**63:
        raise InvalidInput(
            f"{depth}-grams of {words:,} words can't be numbered: use fewer words or a smaller n"
        )


def largest(ranked: Ranked, most: int) -> Ranked:
    """The `most` n-grams of which most is expected."""
    if len(ranked) <= most:
        return ranked
    return ranked.take(np.argpartition(-ranked.shares, most - 1)[:most])


def extend(known: Ranked, words: int, n: int, most: int) -> Ranked:
    """The (n+1)-grams that two overlapping n-grams make, the `most` best of them.

    Within one overlap, the i-th best beginning and the j-th best ending make a pair that i j - 1
    others are at least as good as: only pairs with i j <= most can be among the best.
    """
    known = known.take(known.shares > 0.0)
    if not len(known) or most < 1:
        return Ranked(np.zeros(0, dtype=np.int64), np.zeros(0))
    inner = words ** (n - 1)
    begins, ends = known.codes // words, known.codes % inner
    # The overlap is the last n-1 words of the left one and the first n-1 of the right one.
    overlaps, group = np.unique(np.concatenate([ends, begins]), return_inverse=True)
    left_group, right_group = group[: len(known)], group[len(known) :]
    left = _Grouped.of(left_group, known.shares, len(overlaps))
    right = _Grouped.of(right_group, known.shares, len(overlaps))
    totals = np.bincount(right_group, known.shares, len(overlaps))
    here = left_group[left.order]
    pairs = np.minimum(right.sizes[here], most // (left.ranks + 1))
    first = np.repeat(left.order, pairs)
    step = np.arange(len(first)) - np.repeat(np.cumsum(pairs) - pairs, pairs)
    second = right.order[np.repeat(right.starts[here], pairs) + step]
    shares = known.shares[first] * known.shares[second] / totals[left_group[first]]
    if n == 1:
        shares = _hanging_together(known.shares[first], known.shares[second], float(shares.sum()))
    codes = known.codes[first] * words + known.codes[second] % words
    return largest(Ranked(codes, shares), most)


def _hanging_together(left: Floats, right: Floats, total: float) -> Floats:
    """What pairs of words are expected to have; rises with both, as `extend` needs."""
    found: Floats = np.minimum(left, right) * np.sqrt(np.maximum(left, right))
    return found * (total / float(found.sum()))


@dataclass(frozen=True, eq=False, slots=True)
class _Grouped:
    """Rows in the order of their group, the best of each group first."""

    order: Codes
    ranks: Codes  # of the row at each place, within its group, from 0
    starts: Codes  # of each group
    sizes: Codes

    @classmethod
    def of(cls, group: Codes, shares: Floats, size: int) -> _Grouped:
        order = np.lexsort((-shares, group))
        sizes = np.bincount(group, minlength=size)
        starts = np.cumsum(sizes) - sizes
        ranks = np.arange(len(order)) - starts[group[order]]
        return cls(order, ranks, starts, sizes)


def worth_asking(
    ranked: Ranked, *, reports: int, sigma: float, most: int, least: float = LEAST_EXPECTED
) -> Ranked:
    """The candidates of the next round: expected to be heard of, and as many as it holds.

    `reports` and `sigma` (the standard error of an empty cell, in devices) are the next round's;
    `least` is how many of these a candidate is expected to have.
    """
    promising = ranked.take(ranked.shares * reports >= least * sigma)
    if not len(promising):  # nothing promises anything: ask for the best there is
        promising = largest(ranked, min(most, 100))
    return largest(promising, most)


def heard(
    sums: NDArray[np.integer], *, trials: int, q: float, candidates: int
) -> NDArray[np.bool_]:
    """Which cells have more bits than chance gives one of `candidates` empty cells on average.

    An empty cell's sum is Bin(trials, q), where `trials` counts the reports and what both
    aggregators add.
    """
    if candidates < 1:
        raise InvalidInput("there is no candidate")
    if candidates == 1:  # a single one is held to one in twenty
        return sums > binom.isf(0.05, trials, q)
    found: NDArray[np.bool_] = sums > binom.isf(1.0 / candidates, trials, q)
    return found
