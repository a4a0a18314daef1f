"""What to ask next, and what to report, when n-grams are discovered word by word.

Pure functions of the results so far. The words are numbered 0 .. V-1, and an n-gram is the integer
with these digits in base V: its first n-1 words are `code // V`, its last ones `code % V^(n-1)`.

- **extend** joins n-grams that overlap in all but their outer words. The expected share of an
  (n+1)-gram `abc` is f(ab) f(bc) / sum_x f(bx), as in a Markov chain. Single words overlap in
  nothing but are not independent: two rare words that occur together do so far more often than the
  product says, so only the root of the larger share counts (scaled to the same total).
- **worth_asking** keeps as many candidates as the domain holds, and only those with an expected
  count of at least a tenth of a standard error. A device reports one of its candidates, so hopeless
  ones take reports away from the others.
- **above_noise** reports what exceeds the exact binomial tail 1/M over all M candidates: at most
one
  false discovery is expected, whatever the data. Pruning is loose, reporting is strict.
- **posterior_means** rank candidates by empirical Bayes. The true count of a cell has an unknown
  distribution G on [0, infinity), and is observed with normal noise of variance `sigma^2 + count`
  (that of the asymmetric mechanism). G is estimated from the cells themselves by maximum likelihood
  on a grid (Kiefer and Wolfowitz 1956; EM). Unlike shrinkage by two moments, this keeps a single
  heavy cell among thousands of empty ones heavy. Posterior means are never reported, because they
  are biased on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.cohorts import Cohorts
from chorister.errors import InvalidInput
from chorister.privacy.total_weight import upper_tail

Floats: TypeAlias = NDArray[np.float64]
Codes: TypeAlias = NDArray[np.int64]

LEAST_EXPECTED: Final = 0.1
"""The smallest expected count of a candidate, in standard errors."""
LEAST_BEFORE_LAST: Final = 0.01
"""The same for rounds before the last, where pruning is loose."""
MAX_EXTENDED: Final = 20_000
"""The largest number of n-grams that are extended."""
MAX_LISTS: Final = 16
"""The largest number of lists into which the candidates of a round are dealt."""
_USUAL_LISTS: Final = 4
_ENOUGH_DEVICES: Final = 1_000_000  # for several lists: each asks only a part of the devices


def number_of_lists(words: int, most: int, cohorts: Cohorts, devices: int | None) -> int:
    """Choose how many lists the candidates are dealt as.

    One report can ask about `most` of them. A list that goes to a part of the devices has as much
    noise for fewer reports, so more lists pay only if many likely candidates would be left out.
    """
    enough = cohorts == "disjoint" and (devices or 0) >= _ENOUGH_DEVICES
    return _USUAL_LISTS if enough and words * words > _USUAL_LISTS * most else 1


def lists_by_length(depth: int, lists: int) -> tuple[int, ...]:
    """As how many lists the n-grams of each length are asked: several, but for the first and last.

    The last round must distinguish n-grams from noise, which takes all of its devices.
    """
    return tuple(lists if 1 < n < depth else 1 for n in range(1, depth + 1))


def dealt_shares(shares: Sequence[float], counts: Sequence[int]) -> tuple[float, ...]:
    """Split the share of every round evenly between its lists."""
    parts = zip(shares, counts, strict=True)
    return tuple(share / count for share, count in parts for _ in range(count))


@dataclass(frozen=True, eq=False, slots=True)
class Ranked:
    """N-grams with their expected shares of the reports, in any order."""

    codes: Codes
    shares: Floats

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Ranked:
        return Ranked(self.codes[rows], self.shares[rows])

    def rarest_first(self) -> Ranked:
        """Sort by expected share, smallest first, then by code."""
        return self.take(np.lexsort((self.codes, self.shares)))


def check_vocabulary(words: int, depth: int) -> None:
    """Refuse vocabularies whose n-grams do not fit into 63-bit numbers."""
    if words < 2:
        raise InvalidInput("a vocabulary needs at least two words")
    if words**depth >= 2**63:
        raise InvalidInput(
            f"{depth}-grams of {words:,} words can't be numbered: use fewer words or a smaller n"
        )


def largest(ranked: Ranked, most: int) -> Ranked:
    """Keep the `most` n-grams with the largest expected shares."""
    if len(ranked) <= most:
        return ranked
    return ranked.take(np.argpartition(-ranked.shares, most - 1)[:most])


def extend(known: Ranked, words: int, n: int, most: int) -> Ranked:
    """Join overlapping n-grams to (n+1)-grams, and keep the `most` best of them.

    Within one overlap, at least i j - 1 other pairs are as good as the pair of the i-th best
    beginning and the j-th best ending: only pairs with i j <= most can be among the best.
    """
    known = known.take(known.shares > 0.0)
    if not len(known) or most < 1:
        return Ranked(np.zeros(0, dtype=np.int64), np.zeros(0))
    inner = words ** (n - 1)
    begins, ends = known.codes // words, known.codes % inner
    # The overlap is the last n-1 words of the left n-gram and the first n-1 of the right one.
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
        shares = _expected_pairs(known.shares[first], known.shares[second], float(shares.sum()))
    codes = known.codes[first] * words + known.codes[second] % words
    return largest(Ranked(codes, shares), most)


def _expected_pairs(left: Floats, right: Floats, total: float) -> Floats:
    """The expected shares of pairs of words; they rise with both, as `extend` needs."""
    found: Floats = np.minimum(left, right) * np.sqrt(np.maximum(left, right))
    return found * (total / float(found.sum()))


@dataclass(frozen=True, eq=False, slots=True)
class _Grouped:
    """Rows sorted by group, the best of each group first."""

    order: Codes
    ranks: Codes  # of each sorted row within its group, from 0
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
    """Choose the candidates of the next round: promising ones, and at most `most`.

    `reports` and `sigma` (the standard error of an empty cell, in devices) belong to the next
    round; `least` is the smallest expected count in units of `sigma`.
    """
    promising = ranked.take(ranked.shares * reports >= least * sigma)
    if not len(promising):  # nothing is promising: ask for the best there is
        promising = largest(ranked, min(most, 100))
    return largest(promising, most)


def above_noise(
    sums: NDArray[np.integer], *, trials: int, q: float, candidates: int
) -> NDArray[np.bool_]:
    """Return which cells have more bits than, on average, one of `candidates` empty cells would.

    The sum of an empty cell is Bin(trials, q), where `trials` counts the reports and the trials
    that both aggregators add.
    """
    if candidates < 1:
        raise InvalidInput("there is no candidate")
    # A single candidate may be false in one of twenty cases.
    chance = 0.05 if candidates == 1 else 1.0 / candidates
    found: NDArray[np.bool_] = upper_tail(sums.astype(np.float64) - 1.0, trials, q) <= chance
    return found


_ATOMS: Final = 40  # support points of G
_NEAR: Final = 400  # cells of the observed values up to 8 sigma, for the likelihood
_FAR: Final = 80  # and above
_STEPS: Final = 60  # of EM
_STRATA: Final = 20
_FIRST_STRATUM: Final = 200
_TINY: Final = 1e-300


def posterior_means(values: Floats, sigma: float) -> Floats:
    """Return the mean of each true count given its noisy one, for cells of one kind."""
    if not sigma > 0.0:
        raise InvalidInput(f"sigma must be above 0, not {sigma}")
    if not values.size:
        return values.astype(np.float64)
    low, top = float(values.min()), max(float(values.max()), 4.0 * sigma)
    bend = min(8.0 * sigma, 0.99 * top)
    edges = np.concatenate(
        [
            np.linspace(min(low, 0.0) - 1e-6 * sigma, bend, _NEAR)[:-1],
            np.geomspace(bend, top * 1.0001, _FAR),
        ]
    )
    cell = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    seen = np.bincount(cell, minlength=len(edges) - 1)
    used = seen > 0
    middle = ((edges[1:] + edges[:-1]) / 2.0)[used]
    share = seen[used] / seen.sum()
    atoms = np.concatenate([[0.0], np.geomspace(0.05 * sigma, top, _ATOMS - 1)])
    spread = np.sqrt(sigma * sigma + atoms)
    likelihood = np.exp(-0.5 * ((middle[:, None] - atoms) / spread) ** 2) / spread + _TINY
    weights = np.full(_ATOMS, 0.5 / (_ATOMS - 1))
    weights[0] = 0.5
    for _ in range(_STEPS):
        weights = share @ _posterior(likelihood, weights)
    means: Floats = np.interp(values, middle, _posterior(likelihood, weights) @ atoms)
    return means


def _posterior(likelihood: Floats, weights: Floats) -> Floats:
    """The posterior distribution over the atoms for each observed value."""
    joint = likelihood * weights
    normed: Floats = joint / joint.sum(axis=1, keepdims=True)
    return normed


def stratified_means(values: Floats, sigma: float, expected: Floats) -> Floats:
    """The same with a separate distribution G for each stratum of similar expectation.

    Strata are geometrically growing ranges of ranks by `expected`, so that the few most promising
    cells are not lumped together with the many others.
    """
    if values.shape != expected.shape:
        raise InvalidInput("expected one expectation per value")
    order = np.argsort(-expected, kind="stable")
    means = np.zeros(len(values))
    begin = 0
    ends = np.geomspace(min(_FIRST_STRATUM, max(len(order), 1)), max(len(order), 1), _STRATA)
    for end in np.unique(np.rint(ends).astype(np.int64)).tolist():
        part = order[begin:end]
        means[part] = posterior_means(values[part], sigma)
        begin = end
    return means
