"""Amplification by aggregation: what a sum over a cohort reveals, by every method.

Four questions, one for each quantity that can be unknown: :func:`epsilon`, :func:`delta`,
:func:`min_cohort`, :func:`local_epsilon`. Every answer is a certified upper bound on the privacy
loss (or a cohort and a local epsilon for which that bound holds). Answers are cached in this
process only and never read from a disk, so a device may enforce them. Planning tools that may trust
their own disk go through :mod:`chorister.privacy.cache`. The bounds of the literature need numpy,
which a device does not have: they are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction

from chorister.errors import InvalidInput
from chorister.privacy.certified import (
    MAX_COHORT,
    Crowd,
    Setting,
    exact_delta,
    exact_epsilon,
    honest_members,
    renyi_delta,
    renyi_epsilon,
    witness_delta,
)
from chorister.privacy.decimals import DOWN, Number, as_choice, as_delta, as_epsilon
from chorister.privacy.randomizers import MAX_LOCAL_EPSILON, MIN_LOCAL_EPSILON, Mechanism

_STEP = Decimal("0.0001")  # resolution of the largest local epsilon


class Method(StrEnum):
    """How amplification is computed."""

    EXACT = "exact"
    CLONES = "clones"
    CLOSED_FORM = "closed-form"
    RENYI = "renyi"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """A certified upper bound, and where the method has one a lower bound on the truth."""

    upper: float  # certified
    lower: float | None  # a witness attains it; None where the method knows none
    method: Method


def epsilon(
    setting: Setting, *, cohort: int, delta: Number, method: Method | str = Method.EXACT
) -> Bound:
    """Epsilon of one release over at least `cohort` reports, at `delta`."""
    chosen = as_choice(Method, method, "method")
    members, wanted = setting.members(cohort), as_delta(delta)
    if chosen is Method.EXACT:
        found = exact_epsilon(
            members, setting.mechanism, setting.parameter, wanted, noised=setting.noised
        )
        return Bound(upper=found.upper, lower=found.lower, method=chosen)
    from chorister.privacy import published_bounds as published

    if chosen is Method.CLONES:
        bound = published.CloneBound.ONE_HOT_SUM
        upper = published.clones_epsilon(members, setting.replacement, wanted, bound)
    elif chosen is Method.CLOSED_FORM:
        upper = published.closed_form_epsilon(members, setting.replacement, wanted)
    else:
        upper, _ = renyi_epsilon([setting.renyi(members)], wanted)
        upper = min(upper, setting.replacement)
    return Bound(upper=upper, lower=None, method=chosen)


def delta(
    setting: Setting, *, cohort: int, epsilon: Number, method: Method | str = Method.EXACT
) -> Bound:
    """Delta of one release over at least `cohort` reports, at `epsilon`."""
    chosen = as_choice(Method, method, "method")
    members, wanted = setting.members(cohort), as_epsilon(epsilon)
    if wanted >= setting.replacement:
        return Bound(upper=0.0, lower=0.0, method=chosen)
    if chosen is Method.EXACT:
        found = exact_delta(
            members, setting.mechanism, setting.parameter, wanted, noised=setting.noised
        )
        return Bound(upper=found.upper, lower=found.lower, method=chosen)
    from chorister.privacy import published_bounds as published

    if chosen is Method.CLONES:
        upper = published.clones_certified_delta(members, setting.replacement, wanted)
    elif chosen is Method.CLOSED_FORM:
        upper = published.closed_form_delta(members, setting.replacement, wanted)
    else:
        upper, _ = renyi_delta([setting.renyi(members)], wanted)
    return Bound(upper=upper, lower=None, method=chosen)


def min_cohort(
    setting: Setting, *, epsilon: Number, delta: Number, method: Method | str = Method.EXACT
) -> int:
    """Least cohort found for which the certified bound holds.

    Epsilon does not rise with the cohort (dropping a user never lowers a divergence), so whatever
    holds at this size holds at every larger one, however the search got there. The witness, which
    is cheap, says where to start; certified tests decide.
    """
    chosen = as_choice(Method, method, "method")
    target, wanted = as_epsilon(epsilon), as_delta(delta)
    fraction = setting.honest_fraction
    most = fraction.numerator * MAX_COHORT // fraction.denominator

    def holds(members: int) -> bool:
        return _holds(setting, chosen, members, target, wanted)

    if chosen is Method.EXACT:
        first = _first_member(
            lambda n: _witness_holds(setting, n, target, wanted), 1, most, _guess(setting, target)
        )
        members = None if first is None else _next_certified(holds, first, most)
    else:
        from chorister.privacy import published_bounds as published

        valid = published.smallest_valid_cohort(setting.replacement, wanted)
        least = valid if chosen is Method.CLOSED_FORM else 1
        members = _first_member(holds, least, most, _guess(setting, target))
    if members is None:
        raise InvalidInput(
            f"no cohort up to {MAX_COHORT:,} gives epsilon {target:g} at delta {wanted:g} with "
            f"local epsilon {setting.local_epsilon} by method {chosen}: ask for a larger "
            "epsilon or a smaller local epsilon"
        )
    # ceil(members / fraction), then checked with the very function that enforcement uses.
    cohort = -(-members * fraction.denominator // fraction.numerator)
    while honest_members(cohort, fraction) < members:
        cohort += 1
    return cohort


def _holds(setting: Setting, method: Method, members: int, target: float, wanted: float) -> bool:
    """Whether the method certifies (target, wanted) for this many honest members."""
    if target >= setting.replacement:
        return True
    if method is Method.EXACT:
        # The number that a device compares, so no device refuses what is found here.
        found = exact_epsilon(
            members, setting.mechanism, setting.parameter, wanted, noised=setting.noised
        )
        return found.upper <= target
    from chorister.privacy import published_bounds as published

    if method is Method.CLONES:
        return published.clones_hold(members, setting.replacement, target, wanted)
    if method is Method.CLOSED_FORM:
        return published.closed_form_epsilon(members, setting.replacement, wanted) <= target
    value, _ = renyi_delta([setting.renyi(members)], target)
    return value <= wanted


def _witness_holds(setting: Setting, members: int, target: float, wanted: float) -> bool:
    if target >= setting.replacement:
        return True
    value = witness_delta(
        members, setting.mechanism, setting.parameter, target, noised=setting.noised
    )
    return value <= wanted


def _guess(setting: Setting, target: float) -> int:
    """A Gaussian estimate of the cohort, to start the search from; never a bound."""
    q, h = (each / 2**64 for each in setting.mechanism.thresholds(setting.local_epsilon))
    per_user = (h - q) ** 2 / (q * (1.0 - q))
    return max(1, round(40.0 * per_user / max(target, 1e-9) ** 2))


def _first_member(holds: Callable[[int], bool], least: int, most: int, guess: int) -> int | None:
    """Least n in [least, most] for which a monotone test holds, galloping from a guess."""
    guess = min(max(guess, least), most)
    if holds(guess):
        good, growth = guess, 1.125
        while good > least:
            trial = max(least, min(good - 1, round(good / growth)))
            if not holds(trial):
                return _bisect(holds, trial, good, 1)
            good, growth = trial, growth * growth
        return good
    bad, growth = guess, 1.125
    while bad < most:
        trial = min(most, max(bad + 1, round(bad * growth)))
        if holds(trial):
            return _bisect(holds, bad, trial, 1)
        bad, growth = trial, growth * growth
    return None


def _next_certified(holds: Callable[[int], bool], first: int, most: int) -> int | None:
    """The least n from `first` on that passes an expensive test, to one part in ten thousand.

    The answer lies at `first` or just above it, so the steps begin small.
    """
    bad, step = first - 1, 1
    while bad < most:
        trial = min(most, bad + step)
        if holds(trial):
            return _bisect(holds, bad, trial, 1 + trial // 10_000)
        step = max(2 * step, trial // 4000)
        bad = trial
    return None


def _bisect(holds: Callable[[int], bool], bad: int, good: int, tolerance: int) -> int:
    while good - bad > tolerance:
        middle = (bad + good) // 2
        if holds(middle):
            good = middle
        else:
            bad = middle
    return good


def local_epsilon(
    *,
    cohort: int,
    epsilon: Number,
    delta: Number,
    mechanism: Mechanism | str = Mechanism.ASYMMETRIC,
    crowd: Crowd | str = Crowd.HONEST,
    honest_fraction: Fraction | int | str = Fraction(1),
    method: Method | str = Method.EXACT,
) -> Decimal:
    """Largest eps0 (to 0.0001, rounded down) for which a cohort gives (epsilon, delta).

    A smaller eps0 is a post-processing of a larger one (a binary symmetric channel on every bit),
    so the test is monotone; the returned value was itself certified.
    """
    chosen = as_choice(Method, method, "method")
    target, wanted = as_epsilon(epsilon), as_delta(delta)

    def holds(steps: int) -> bool:
        setting = Setting(
            local_epsilon=DOWN.multiply(_STEP, steps),
            mechanism=mechanism,
            crowd=crowd,
            honest_fraction=honest_fraction,
        )
        members = setting.members(cohort)
        if chosen is Method.CLOSED_FORM:
            from chorister.privacy import published_bounds as published

            needed = published.smallest_valid_cohort(setting.replacement, wanted)
            if members < needed and target < setting.replacement:
                return False
        return _holds(setting, chosen, members, target, wanted)

    least = int(DOWN.divide_int(MIN_LOCAL_EPSILON, _STEP))
    most = int(DOWN.divide_int(MAX_LOCAL_EPSILON, _STEP))
    if not holds(least):
        raise InvalidInput(
            f"a cohort of {cohort:,} gives epsilon {target:g} at delta {wanted:g} for no local "
            f"epsilon of at least {MIN_LOCAL_EPSILON}: ask for a larger cohort or a larger epsilon"
        )
    if holds(most):
        return DOWN.multiply(_STEP, most)
    good, bad = least, most
    while bad - good > 1:
        middle = (good + bad) // 2
        if holds(middle):
            good = middle
        else:
            bad = middle
    return DOWN.multiply(_STEP, good)
