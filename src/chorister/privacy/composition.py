"""Compositions of a sequence that is fixed before its first question: planning and reporting only.

None of these is a filter; see :mod:`chorister.privacy.filters` for what a ledger may use.

- **basic** over T releases: each at delta/T, epsilons added.
- **advanced** (Dwork, Rothblum, Vadhan 2010, Theorem III.3): three tenths of delta for the tail,
  the rest shared by the releases. Worse than basic for every T below about 2 ln(1/delta).
- **renyi**: the sum of D_alpha at the best order.
- **exact**: convolution of certified privacy losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from itertools import groupby

from chorister.errors import InvalidInput
from chorister.privacy.amplification import epsilon
from chorister.privacy.certified import renyi_epsilon
from chorister.privacy.decimals import DOWN, UP, Number, as_decimal, as_delta
from chorister.privacy.filters import Release
from chorister.privacy.losses import (
    Envelope,
    PrivacyLoss,
    certified_slack,
    exact_envelope,
    least_epsilon,
    loss_deviation,
    release_loss,
)
from chorister.privacy.weights import BOUND_DELTA, covers_bound

_MOST_RELEASES = 100_000
_RESOLUTION = 120.0  # grid points per standard deviation of one coordinate's loss


class CompositionName(StrEnum):
    """The compositions of a fixed sequence."""

    BASIC = "basic"
    ADVANCED = "advanced"
    RENYI = "renyi"
    EXACT = "exact"


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedSequence:
    """Releases whose parameters were all written down before the first answer."""

    releases: tuple[Release, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.releases) <= _MOST_RELEASES:
            raise InvalidInput(f"a sequence must hold from 1 to {_MOST_RELEASES:,} releases")

    @classmethod
    def repeated(cls, release: Release, count: int) -> FixedSequence:
        """The same release `count` times."""
        if not 1 <= count <= _MOST_RELEASES:
            raise InvalidInput(f"count must lie between 1 and {_MOST_RELEASES:,}, not {count}")
        return cls(releases=(release,) * count)

    def __len__(self) -> int:
        return len(self.releases)

    def distinct(self) -> Iterator[tuple[Release, int]]:
        """Each release, with how often it is repeated in a row."""
        for release, same in groupby(self.releases):
            yield release, sum(1 for _ in same)


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """Epsilon of a fixed sequence at one delta, by every composition."""

    basic: float
    advanced: float
    renyi: float
    exact: float  # infinite where refused
    refusals: tuple[tuple[CompositionName, str], ...] = ()  # which prove nothing here, and why

    @property
    def best(self) -> tuple[CompositionName, float]:
        """The smallest. All are valid for a sequence fixed in advance; refusals are infinite."""
        values = {name: float(getattr(self, name)) for name in CompositionName}
        name = min(values, key=lambda each: values[each])
        return name, values[name]


def compose(sequence: FixedSequence, delta: Number, *, bounded: int = 0) -> Composed:
    """Epsilon of the whole sequence at `delta`, by every composition.

    `bounded` of its releases are of bounded reports, each of which takes 1e-12 of delta. For basic
    and advanced, whose parts are (epsilon, delta) guarantees of single releases, that is enough at
    each part's epsilon; for renyi and exact at the epsilon of the whole. Where it would not be
    enough, the local guarantees apply instead: they hold for bounded reports as they are.
    """
    wanted = _before_bounds(sequence, delta, bounded)
    basic = compose_basic(sequence, wanted, bounded=bounded > 0)
    advanced = compose_advanced(sequence, wanted, bounded=bounded > 0)
    renyi, exact = compose_renyi(sequence, wanted), math.inf
    refusals: list[tuple[CompositionName, str]] = []
    try:
        exact = compose_exact(sequence, wanted)
    except InvalidInput as refusal:  # its grid; whatever else is wrong was found above
        refusals.append((CompositionName.EXACT, str(refusal)))
    if bounded:
        honest = max(each.setting.bounded_reports(each.cohort) for each in sequence.releases)
        pure = _pure(sequence)
        renyi = renyi if covers_bound(renyi, honest) else pure
        exact = exact if math.isinf(exact) or covers_bound(exact, honest) else pure
    return Composed(
        basic=basic, advanced=advanced, renyi=renyi, exact=exact, refusals=tuple(refusals)
    )


def _before_bounds(sequence: FixedSequence, delta: Number, bounded: int) -> Decimal:
    """What bounded reports leave of delta, 1e-12 for each release that has them."""
    as_delta(delta)  # raises unless it is one
    if not 0 <= bounded <= len(sequence):
        raise InvalidInput(f"from 0 to {len(sequence):,} releases are bounded, not {bounded}")
    aside = UP.multiply(BOUND_DELTA, Decimal(bounded))
    whole = as_decimal(delta)
    if whole <= aside:
        raise InvalidInput(
            f"{bounded:,} releases of bounded reports use {aside} of delta: ask for more than "
            f"{whole}"
        )
    return DOWN.subtract(whole, aside)


def _each(release: Release, delta: float, *, bounded: bool) -> float:
    value = epsilon(release.setting, cohort=release.cohort, delta=delta).upper
    if bounded and not covers_bound(value, release.setting.bounded_reports(release.cohort)):
        return release.setting.replacement
    return value


def _pure(sequence: FixedSequence) -> float:
    """Sum of the local guarantees: bounds every composition."""
    return sum(release.setting.replacement for release in sequence.releases)


def compose_basic(sequence: FixedSequence, delta: Number, *, bounded: bool = False) -> float:
    """Each release at an equal share of delta; epsilons added."""
    share = as_delta(delta) / len(sequence)
    return sum(
        count * _each(release, share, bounded=bounded) for release, count in sequence.distinct()
    )


def compose_advanced(sequence: FixedSequence, delta: Number, *, bounded: bool = False) -> float:
    """`sqrt(2 ln(1/d') sum eps^2) + sum eps (e^eps - 1)`, d' = 0.3 delta.

    Any split of delta is valid; this one is close to the best for amplified releases.
    """
    whole = as_delta(delta)
    tail = 0.3 * whole
    share = (whole - tail) / len(sequence)
    squares = drift = 0.0
    for release, count in sequence.distinct():
        each = _each(release, share, bounded=bounded)
        squares += count * each * each
        drift += count * each * math.expm1(each)
    return min(math.sqrt(-2.0 * math.log(tail) * squares) + drift, _pure(sequence))


def compose_renyi(sequence: FixedSequence, delta: Number) -> float:
    """The sum of Renyi divergences at the best order."""
    releases = [
        release.setting.renyi(release.setting.members(release.cohort), count)
        for release, count in sequence.distinct()
    ]
    return min(renyi_epsilon(releases, as_delta(delta))[0], _pure(sequence))


def compose_exact(sequence: FixedSequence, delta: Number) -> float:
    """Convolution of certified privacy losses."""
    wanted = as_delta(delta)
    return ExactTotal.of(sequence, wanted).epsilon(wanted)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactTotal:
    """The privacy loss of a fixed sequence so far; adding to it convolves once more."""

    loss: PrivacyLoss
    pure: float  # sum of the local guarantees
    cut: float  # tail mass that a convolution may move to infinity

    @classmethod
    def of(cls, sequence: FixedSequence, delta: Number) -> ExactTotal:
        """The total of a sequence, on a grid fit for it, precise around `delta`."""
        cut = as_delta(delta) * 1e-8 / len(sequence)
        parts = [
            (release, count, _envelope(release, cut)) for release, count in sequence.distinct()
        ]
        squares = sum(count * loss_deviation(envelope) ** 2 for _, count, envelope in parts)
        spacing = math.sqrt(squares / len(sequence)) / _RESOLUTION
        total: PrivacyLoss | None = None
        for _, count, envelope in parts:
            part = release_loss(envelope, spacing, cut).times(count, cut)
            total = part if total is None else total.then(part, cut)
        if total is None:
            raise InvalidInput("a sequence must hold at least one release")
        return cls(loss=total, pure=_pure(sequence), cut=cut)

    def add(self, release: Release) -> ExactTotal:
        """The total after one more release, without going through the earlier ones again."""
        part = release_loss(_envelope(release, self.cut), self.loss.spacing, self.cut)
        return ExactTotal(
            loss=self.loss.then(part, self.cut),
            pure=self.pure + release.setting.replacement,
            cut=self.cut,
        )

    def epsilon(self, delta: Number) -> float:
        """Certified epsilon of the total."""
        wanted = as_delta(delta)
        slack = certified_slack(wanted)
        return least_epsilon(lambda e: self.loss.delta(e) + slack, wanted, self.pure)

    def delta(self, epsilon: float) -> float:
        """Certified delta of the total."""
        if epsilon >= self.pure:
            return 0.0
        value = self.loss.delta(epsilon)
        return min(1.0, value + certified_slack(value))


def _envelope(release: Release, cut: float) -> Envelope:
    setting = release.setting
    return exact_envelope(
        setting.members(release.cohort),
        setting.mechanism,
        setting.parameter,
        max(cut * 1e6, 1e-12),
        noised=setting.noised,
    )
