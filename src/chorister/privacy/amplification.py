"""Amplification by aggregation: what a sum over a cohort reveals, by every method.

Four questions, one for each quantity that can be unknown: :func:`epsilon`, :func:`delta`,
:func:`min_cohort`, :func:`local_epsilon`. Every answer is a certified upper bound on the privacy loss
(or a cohort and a local epsilon for which that bound holds). Answers are remembered in this process
only and never read from a disk: a device may enforce what it gets here. Planning tools that may trust
their own disk go through :mod:`chorister.privacy.cache`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal
from enum import StrEnum
from fractions import Fraction

from chorister.errors import InvalidInput
from chorister.privacy.closed_form import closed_form_epsilon, smallest_valid_cohort
from chorister.privacy.clones import CloneBound, clones_delta, clones_epsilon
from chorister.privacy.envelopes import certified_slack
from chorister.privacy.exact import exact_delta, exact_epsilon, witness_delta
from chorister.privacy.randomizers import (
    MAX_LOCAL_EPSILON,
    MIN_LOCAL_EPSILON,
    Mechanism,
    Number,
    as_local_epsilon,
)
from chorister.privacy.renyi import renyi_delta, renyi_epsilon

__all__ = [
    "MAX_COHORT",
    "Bound",
    "Crowd",
    "Method",
    "Setting",
    "delta",
    "epsilon",
    "honest_members",
    "local_epsilon",
    "min_cohort",
]

MAX_COHORT = 10**9
_MAX_EPSILON = 50.0
_STEP = Decimal("0.0001")  # resolution of the largest local epsilon


class Method(StrEnum):
    """How amplification is computed."""

    EXACT = "exact"
    CLONES = "clones"
    CLOSED_FORM = "closed-form"
    RENYI = "renyi"


class Crowd(StrEnum):
    """What hides a device: other people assumed honest, or noise of the aggregators."""

    HONEST = "honest"
    NOISED = "noised"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """A certified upper bound, and where the method has one a lower bound on the truth."""

    upper: float  # certified
    lower: float | None  # a witness attains it; None where the method knows none
    method: Method


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What stays fixed while cohort, epsilon and delta vary."""

    local_epsilon: Decimal  # eps0, the mechanism's parameter
    mechanism: Mechanism
    crowd: Crowd
    honest_fraction: Fraction  # of the cohort, in every released batch; 1 for a noised crowd

    def __init__(
        self,
        *,
        local_epsilon: Number,
        mechanism: Mechanism | str = Mechanism.ASYMMETRIC,
        crowd: Crowd | str = Crowd.HONEST,
        honest_fraction: Fraction | int | str = Fraction(1),
    ) -> None:
        object.__setattr__(self, "local_epsilon", as_local_epsilon(local_epsilon))
        object.__setattr__(self, "mechanism", _choice(Mechanism, mechanism, "mechanism"))
        object.__setattr__(self, "crowd", _choice(Crowd, crowd, "crowd"))
        object.__setattr__(self, "honest_fraction", _as_fraction(honest_fraction))
        if self.crowd is Crowd.NOISED and self.honest_fraction != 1:
            raise InvalidInput(
                "a crowd noised by the aggregators assumes nothing of other clients: "
                "leave honest_fraction at 1"
            )

    @property
    def noised(self) -> bool:
        """Whether the aggregators hide the device."""
        return self.crowd is Crowd.NOISED

    @property
    def parameter(self) -> float:
        """eps0 as a float, rounded up: a larger eps0 never has a smaller epsilon."""
        nearest = float(self.local_epsilon)
        return nearest if Decimal(nearest) >= self.local_epsilon else math.nextafter(nearest, 99.0)

    @property
    def replacement(self) -> float:
        """The local guarantee in the replacement model, which bounds epsilon for every cohort."""
        return self.parameter * (2.0 if self.mechanism is Mechanism.SYMMETRIC else 1.0)

    def members(self, cohort: int) -> int:
        """How many of a cohort hide the device, itself included."""
        return honest_members(cohort, self.honest_fraction)


def _choice(kind: type[StrEnum], value: str, name: str) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise InvalidInput(f"{name} must be one of {', '.join(kind)}, not {value!r}") from None


def _as_fraction(value: Fraction | int | str) -> Fraction:
    """Floats are refused: floor(0.07 * 100) is 7 in arithmetic and 7.000000000000001's luck in code."""
    if isinstance(value, bool) or not isinstance(value, Fraction | int | str):
        raise InvalidInput("honest_fraction must be a rational such as Fraction(9, 10) or '9/10'")
    try:
        fraction = Fraction(value)
    except (ValueError, ZeroDivisionError):
        raise InvalidInput(f"honest_fraction {value!r} is not a rational number") from None
    if not 0 < fraction <= 1:
        raise InvalidInput(f"honest_fraction must lie in (0, 1], not {value}")
    return fraction


def honest_members(cohort: int, fraction: Fraction) -> int:
    """floor(fraction x cohort), in integers; refused if nobody is left to be honest."""
    _check_cohort(cohort)
    members = fraction.numerator * cohort // fraction.denominator
    if members < 1:
        least = -(-fraction.denominator // fraction.numerator)
        raise InvalidInput(
            f"{fraction} of a cohort of {cohort} is nobody: the cohort must be at least {least}"
        )
    return members


def _check_cohort(cohort: int) -> None:
    whole = isinstance(cohort, int) and not isinstance(cohort, bool)
    if not whole or not 1 <= cohort <= MAX_COHORT:
        raise InvalidInput(f"cohort must be an integer from 1 to {MAX_COHORT:,}, not {cohort}")


def _check_delta(value: Number) -> float:
    number = _as_float(value, "delta")
    if not 0.0 < number < 1.0:
        raise InvalidInput(f"delta must lie strictly between 0 and 1, not {value}")
    # Rounded down: a smaller delta never has a smaller epsilon.
    exact = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    return number if Decimal(number) <= exact else math.nextafter(number, 0.0)


def _check_epsilon(value: Number) -> float:
    number = _as_float(value, "epsilon")
    if not 0.0 <= number <= _MAX_EPSILON:
        raise InvalidInput(f"epsilon must lie between 0 and {_MAX_EPSILON:g}, not {value}")
    exact = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    return number if Decimal(number) <= exact else max(0.0, math.nextafter(number, 0.0))


def _as_float(value: Number, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, ArithmeticError):
        raise InvalidInput(f"{name} {value!r} is not a number") from None
    if math.isnan(number) or isinstance(value, bool):
        raise InvalidInput(f"{name} must be a number, not {value}")
    return number


def epsilon(
    setting: Setting, *, cohort: int, delta: Number, method: Method | str = Method.EXACT
) -> Bound:
    """Epsilon of one release over at least `cohort` reports, at `delta`."""
    chosen = Method(_choice(Method, method, "method"))
    members, wanted = setting.members(cohort), _check_delta(delta)
    if chosen is Method.EXACT:
        found = exact_epsilon(
            members, setting.mechanism, setting.parameter, wanted, noised=setting.noised
        )
        return Bound(upper=found.upper, lower=found.lower, method=chosen)
    if chosen is Method.CLONES:
        upper = clones_epsilon(members, setting.replacement, wanted, CloneBound.ONE_HOT_SUM)
    elif chosen is Method.CLOSED_FORM:
        upper = closed_form_epsilon(members, setting.replacement, wanted)
    else:
        upper, _ = renyi_epsilon(
            members, setting.mechanism, setting.parameter, wanted, noised=setting.noised
        )
        upper = min(upper, setting.replacement)
    return Bound(upper=upper, lower=None, method=chosen)


def delta(
    setting: Setting, *, cohort: int, epsilon: Number, method: Method | str = Method.EXACT
) -> Bound:
    """Delta of one release over at least `cohort` reports, at `epsilon`."""
    chosen = Method(_choice(Method, method, "method"))
    members, wanted = setting.members(cohort), _check_epsilon(epsilon)
    if wanted >= setting.replacement:
        return Bound(upper=0.0, lower=0.0, method=chosen)
    if chosen is Method.EXACT:
        found = exact_delta(
            members, setting.mechanism, setting.parameter, wanted, noised=setting.noised
        )
        return Bound(upper=found.upper, lower=found.lower, method=chosen)
    if chosen is Method.CLONES:
        value = clones_delta(members, setting.replacement, wanted, CloneBound.ONE_HOT_SUM, 1e-30)
        upper = min(1.0, value + certified_slack(value))
    elif chosen is Method.CLOSED_FORM:
        upper = _closed_form_delta(members, setting.replacement, wanted)
    else:
        upper, _ = renyi_delta(
            members, setting.mechanism, setting.parameter, wanted, noised=setting.noised
        )
    return Bound(upper=upper, lower=None, method=chosen)


def _closed_form_delta(members: int, replacement: float, wanted: float) -> float:
    """Least delta for which the theorem applies and gives at most `wanted`."""

    def holds(log_delta: float) -> bool:
        trial = math.exp(log_delta)
        if members < smallest_valid_cohort(replacement, trial):
            return False
        return closed_form_epsilon(members, replacement, trial) <= wanted

    if not holds(math.log(0.999)):
        raise InvalidInput(
            f"the closed form proves epsilon {wanted:g} for no delta at a cohort of {members:,}; "
            "the methods exact, clones and renyi have no such limit"
        )
    low, high = -700.0, math.log(0.999)
    while high - low > 1e-12 * abs(low):
        middle = (low + high) / 2.0
        low, high = (low, middle) if holds(middle) else (middle, high)
        if high - low < 1e-9:
            break
    return math.exp(high)


def min_cohort(
    setting: Setting, *, epsilon: Number, delta: Number, method: Method | str = Method.EXACT
) -> int:
    """Least cohort found for which the certified bound holds.

    Epsilon does not rise with the cohort (dropping a user never lowers a divergence), so whatever
    holds at this size holds at every larger one, however the search got there. The witness, which is
    cheap, says where to start; certified tests decide.
    """
    chosen = Method(_choice(Method, method, "method"))
    target, wanted = _check_epsilon(epsilon), _check_delta(delta)
    fraction = setting.honest_fraction
    most = fraction.numerator * MAX_COHORT // fraction.denominator

    def holds(members: int) -> bool:
        return _holds(setting, chosen, members, target, wanted)

    first = 1
    if chosen is Method.EXACT:
        first = _first_member(
            lambda n: _witness_holds(setting, n, target, wanted), 1, most, _guess(setting, target)
        )
    elif chosen is Method.CLOSED_FORM:
        first = smallest_valid_cohort(setting.replacement, wanted)
    members = None if first is None else _first_member(holds, first, most, first)
    if members is None:
        raise InvalidInput(
            f"no cohort up to {MAX_COHORT:,} gives epsilon {target:g} at delta {wanted:g} with local "
            f"epsilon {setting.local_epsilon} by method {chosen}: ask for a larger epsilon or a "
            "smaller local epsilon"
        )
    # ceil(members / fraction), then checked with the very function that enforcement uses.
    cohort = -(-members * fraction.denominator // fraction.numerator)
    while honest_members(cohort, fraction) < members:
        cohort += 1
    return cohort


def _holds(setting: Setting, method: Method, members: int, target: float, wanted: float) -> bool:
    """Whether the method certifies (target, wanted) for so many honest members."""
    if target >= setting.replacement:
        return True
    if method is Method.EXACT:
        found = exact_delta(
            members, setting.mechanism, setting.parameter, target, noised=setting.noised
        )
        return found.upper + certified_slack(wanted) <= wanted
    if method is Method.CLONES:
        value = clones_delta(
            members, setting.replacement, target, CloneBound.ONE_HOT_SUM, wanted * 1e-9
        )
        return value + certified_slack(wanted) <= wanted
    if method is Method.CLOSED_FORM:
        return closed_form_epsilon(members, setting.replacement, wanted) <= target
    value, _ = renyi_delta(
        members, setting.mechanism, setting.parameter, target, noised=setting.noised
    )
    return value <= wanted


def _witness_holds(setting: Setting, members: int, target: float, wanted: float) -> bool:
    if target >= setting.replacement:
        return True
    value = witness_delta(
        members, setting.mechanism, setting.parameter, target, noised=setting.noised
    )
    return value <= wanted


def _guess(setting: Setting, target: float) -> int:
    """A Gaussian's idea of the cohort: a place to start the search, never a bound."""
    q = 1.0 / (math.exp(setting.parameter) + 1.0)
    h = 0.5 if setting.mechanism is Mechanism.ASYMMETRIC else 1.0 - q
    per_user = (h - q) ** 2 / (q * (1.0 - q))
    return max(1, round(40.0 * per_user / max(target, 1e-9) ** 2))


def _first_member(holds: Callable[[int], bool], least: int, most: int, guess: int) -> int | None:
    """Least n in [least, most] for which a monotone test holds, galloping from a guess."""
    guess = min(max(guess, least), most)
    if holds(guess):
        good, step = guess, 1
        while good > least:
            trial = max(least, good - step if guess == least else round(good / (1.0 + step / 8.0)))
            if not holds(trial):
                return _bisect(holds, trial, good)
            good, step = trial, 2 * step
        return good
    bad, step = guess, 1
    while bad < most:
        trial = min(
            most, bad + step if guess == least else max(bad + 1, round(bad * (1 + step / 8)))
        )
        if holds(trial):
            return _bisect(holds, bad, trial)
        bad, step = trial, 2 * step
    return None


def _bisect(holds: Callable[[int], bool], bad: int, good: int) -> int:
    while good - bad > 1:
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

    A smaller eps0 is a post-processing of a larger one (a binary symmetric channel on every bit), so
    the test is monotone; the returned value was itself certified.
    """
    chosen = Method(_choice(Method, method, "method"))
    target, wanted = _check_epsilon(epsilon), _check_delta(delta)

    def holds(steps: int) -> bool:
        setting = Setting(
            local_epsilon=steps * _STEP,
            mechanism=mechanism,
            crowd=crowd,
            honest_fraction=honest_fraction,
        )
        members = setting.members(cohort)
        if chosen is Method.CLOSED_FORM:
            needed = smallest_valid_cohort(setting.replacement, wanted)
            if members < needed and target < setting.replacement:
                return False
        return _holds(setting, chosen, members, target, wanted)

    least = int((MIN_LOCAL_EPSILON / _STEP).to_integral_value(ROUND_FLOOR))
    most = int((MAX_LOCAL_EPSILON / _STEP).to_integral_value(ROUND_FLOOR))
    if not holds(least):
        raise InvalidInput(
            f"a cohort of {cohort:,} gives epsilon {target:g} at delta {wanted:g} for no local epsilon "
            f"of at least {MIN_LOCAL_EPSILON}: ask for a larger cohort or a larger epsilon"
        )
    if holds(most):
        return most * _STEP
    good, bad = least, most
    while bad - good > 1:
        middle = (good + bad) // 2
        if holds(middle):
            good = middle
        else:
            bad = middle
    return good * _STEP
