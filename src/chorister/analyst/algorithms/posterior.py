"""What a noisy count is worth once it is seen among many others: an empirical-Bayes posterior mean.

Model: a cell's true count has some unknown law G on [0, infinity), and is seen with normal noise of
variance `sigma^2 + count` (the asymmetric mechanism's). G is estimated from the cells themselves by
maximum likelihood on a grid (Kiefer and Wolfowitz 1956; EM). Unlike shrinkage by two moments this
keeps a lone heavy cell among thousands of empty ones heavy.

Posterior means rank candidates; they are never reported, because they are biased on purpose.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.errors import InvalidInput

__all__ = ["posterior_means", "stratified_means"]

Floats: TypeAlias = NDArray[np.float64]

_ATOMS: Final = 40  # support points of G
_NEAR: Final = 400  # cells of the seen values up to 8 sigma, which the likelihood is computed for
_FAR: Final = 80  # and above
_STEPS: Final = 60  # of EM
_FIRST_STRATUM: Final = 200
_TINY: Final = 1e-300


def posterior_means(values: Floats, sigma: float) -> Floats:
    """The mean of each cell's true count given its noisy one, all cells of one kind."""
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
    return np.interp(values, middle, _posterior(likelihood, weights) @ atoms)


def _posterior(likelihood: Floats, weights: Floats) -> Floats:
    """Each seen value's law over the atoms."""
    joint = likelihood * weights
    normed: Floats = joint / joint.sum(axis=1, keepdims=True)
    return normed


def stratified_means(values: Floats, sigma: float, expected: Floats, *, strata: int = 20) -> Floats:
    """The same, with a law G of its own for cells of which about the same was expected.

    Strata are ranges of ranks by `expected`, growing geometrically: the few cells that promise most
    are not lumped together with the many that promise little.
    """
    if values.shape != expected.shape:
        raise InvalidInput("one expectation a value")
    order = np.argsort(-expected, kind="stable")
    means = np.zeros(len(values))
    begin = 0
    ends = np.geomspace(min(_FIRST_STRATUM, max(len(order), 1)), max(len(order), 1), strata)
    for end in np.unique(np.rint(ends).astype(np.int64)).tolist():
        part = order[begin:end]
        means[part] = posterior_means(values[part], sigma)
        begin = end
    return means
