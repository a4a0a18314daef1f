"""Minimum cohorts, local epsilons and the other methods, against the reference values."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from chorister.errors import InvalidInput
from chorister.privacy import (
    Crowd,
    Mechanism,
    Method,
    Setting,
    delta,
    epsilon,
    local_epsilon,
    min_cohort,
)
from chorister.privacy.certified import honest_members
from chorister.privacy.published_bounds import (
    CloneBound,
    clones_delta,
    clones_epsilon,
    conditional_divergence,
)

EXTREME = ["1e300000000", "1e-300000000", f"1/{'9' * 5000}"]
COHORTS = [  # mechanism, eps0, eps, the witness's cohort, certified at most, clones
    ("asymmetric", 3, "0.5", 586, 586, 2350),
    ("asymmetric", 3, "1", 152, 152, 736),
    ("asymmetric", 5, "0.3", 12353, 12355, 49949),
    ("asymmetric", 6, "0.5", 12998, 12998, 54497),
    ("asymmetric", 8, "1", 25406, 25411, 127022),
    ("symmetric", 3, "0.5", 2784, 2786, None),
    ("symmetric", 6, "1", 20094, 20114, None),
]


@pytest.mark.parametrize(("mechanism", "local", "target", "least", "most", "clones"), COHORTS)
def test_minimum_cohorts_match_the_table_and_are_certified(
    mechanism: str, local: int, target: str, least: int, most: int, clones: int | None
) -> None:
    setting = Setting(local_epsilon=local, mechanism=mechanism)
    found = min_cohort(setting, epsilon=target, delta="1e-6")
    assert least <= found <= most
    assert epsilon(setting, cohort=found, delta="1e-6").upper <= float(target) * (1 + 1e-9)
    if clones is not None:
        by_clones = min_cohort(setting, epsilon=target, delta="1e-6", method="clones")
        assert by_clones == clones


def test_the_closed_form_needs_twenty_thousand() -> None:
    setting = Setting(local_epsilon=3)
    assert min_cohort(setting, epsilon="0.5", delta="1e-6", method="closed-form") == 20204


@pytest.mark.parametrize(("local", "target", "cohort"), [(3, "0.5", 2467), (6, "1", 17120)])
def test_noise_shrinks_symmetric_cohorts(local: int, target: str, cohort: int) -> None:
    setting = Setting(local_epsilon=local, mechanism="symmetric", crowd="noised")
    assert min_cohort(setting, epsilon=target, delta="1e-6") == cohort


TABLE = [  # eps0, n, closed form, clones 2020, clones
    (1, 10**3, 0.4876, 0.1824, 0.1487),
    (1, 10**5, 0.0604, 0.01528, 0.01243),
    (3, 10**3, None, 1.2646, 0.8231),
    (3, 10**4, 0.6546, 0.3207, 0.2261),
    (3, 10**5, 0.2551, 0.0928, 0.0656),
    (3, 10**6, 0.0878, 0.0269, 0.0190),
    (6, 10**4, None, 5.721, 1.4724),
    (6, 10**5, 0.8804, 0.5242, 0.3570),
    (6, 10**6, 0.3667, 0.1493, 0.1031),
]


@pytest.mark.parametrize(("local", "n", "closed", "clones_2020", "clones"), TABLE)
def test_other_methods_match_the_table(
    local: int, n: int, closed: float | None, clones_2020: float, clones: float
) -> None:
    setting = Setting(local_epsilon=local)
    by_clones = epsilon(setting, cohort=n, delta="1e-6", method=Method.CLONES)
    assert by_clones.upper == pytest.approx(clones, abs=5.1e-5)
    older = clones_epsilon(n, float(local), 1e-6, CloneBound.ANY_RANDOMIZER)
    assert older == pytest.approx(clones_2020, abs=5.1e-4 if clones_2020 > 5 else 5.1e-5)
    if closed is None:
        with pytest.raises(InvalidInput, match="needs a cohort of at least"):
            epsilon(setting, cohort=n, delta="1e-6", method=Method.CLOSED_FORM)
    else:
        by_formula = epsilon(setting, cohort=n, delta="1e-6", method=Method.CLOSED_FORM)
        assert by_formula.upper == pytest.approx(closed, abs=5.1e-5)


@pytest.mark.parametrize(
    ("mechanism", "within", "inputs"),
    [
        ("asymmetric", 1e-4, [("1", 1000), ("2", 1000), ("4", 1000), ("3", 10_000), ("8", 10**6)]),
        ("symmetric", 7e-4, [("3", 1000), ("4", 1000), ("6", 10_000), ("8", 100_000)]),
        ("asymmetric", 2e-2, [("0.01", 10**6), ("0.03", 10**6), ("0.1", 1000)]),
        ("symmetric", 2e-2, [("0.01", 10**6), ("0.1", 1000)]),
    ],
)
def test_the_bound_is_as_near_to_its_witness_as_the_documentation_says(
    mechanism: str, within: float, inputs: list[tuple[str, int]]
) -> None:
    """The worst of a sweep over local epsilons and cohorts, at delta 1e-6: docs/privacy.md."""
    for local, cohort in inputs:
        setting = Setting(local_epsilon=local, mechanism=mechanism)
        found = epsilon(setting, cohort=cohort, delta="1e-6")
        assert found.lower is not None
        assert found.lower <= found.upper <= found.lower * (1 + within), (local, cohort)


def test_clones_read_symmetric_with_twice_the_local_epsilon() -> None:
    """Trap: with E = e^3 the bound would claim .2261 where the truth is above .2410."""
    setting = Setting(local_epsilon=3, mechanism="symmetric")
    truth = epsilon(setting, cohort=10**4, delta="1e-6")
    assert truth.lower is not None
    assert truth.lower > 0.2409
    wrong = clones_epsilon(10**4, 3.0, 1e-6, CloneBound.ONE_HOT_SUM)
    assert wrong == pytest.approx(0.2261, abs=5e-5)
    for method in (Method.CLONES, Method.RENYI):
        assert epsilon(setting, cohort=10**4, delta="1e-6", method=method).upper > truth.upper


@pytest.mark.parametrize("local", [0.5, 3.0])
@pytest.mark.parametrize("clones", [0, 1, 2, 7])
def test_clones_formula_equals_direct_summation(local: float, clones: int) -> None:
    """Given C = c almost surely (p = 1 in the limit): sum (P - gQ)+ over all counts."""
    a = math.exp(local) / (math.exp(local) + 1)
    half = [math.comb(clones, i) / 2**clones for i in range(clones + 1)]
    for target in (0.01, 0.3, 0.9 * local):
        g = math.exp(target)
        direct = 0.0
        for count in range(clones + 2):
            here = half[count] if count <= clones else 0.0
            below = half[count - 1] if count else 0.0
            p, q = a * below + (1 - a) * here, (1 - a) * below + a * here
            direct += max(0.0, p - g * q)
        formula = conditional_divergence(np.array([float(clones)]), local, target)[0]
        assert formula == pytest.approx(direct, rel=1e-12, abs=1e-16)
    assert clones_delta(10, local, local, CloneBound.ANY_RANDOMIZER) == 0.0


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("mechanism", list(Mechanism))
def test_every_method_is_at_least_the_exact_witness(method: Method, mechanism: Mechanism) -> None:
    setting = Setting(local_epsilon="1.5", mechanism=mechanism)
    for n in (500, 3000, 20_000):
        truth = epsilon(setting, cohort=n, delta="1e-6").lower
        assert truth is not None
        try:
            found = epsilon(setting, cohort=n, delta="1e-6", method=method)
        except InvalidInput:
            assert method is Method.CLOSED_FORM
            continue
        assert found.upper >= truth
        assert found.method is method


@pytest.mark.parametrize("method", list(Method))
def test_delta_and_epsilon_are_inverse(method: Method) -> None:
    setting = Setting(local_epsilon=2)
    found = epsilon(setting, cohort=30_000, delta="1e-6", method=method).upper
    back = delta(setting, cohort=30_000, epsilon=found * (1 + 1e-6), method=method).upper
    assert back <= 1e-6 * (1 + 5e-3)
    assert back >= 1e-6 * (1 - 5e-3)


@pytest.mark.parametrize("crowd", list(Crowd))
@pytest.mark.parametrize("mechanism", list(Mechanism))
def test_the_largest_local_epsilon_is_certified_and_largest(
    mechanism: Mechanism, crowd: Crowd
) -> None:
    largest = local_epsilon(
        cohort=1000, epsilon="0.5", delta="1e-6", mechanism=mechanism, crowd=crowd
    )
    fits = Setting(local_epsilon=largest, mechanism=mechanism, crowd=crowd)
    assert epsilon(fits, cohort=1000, delta="1e-6").upper <= 0.5 * (1 + 1e-6)
    above = Setting(local_epsilon=largest + Decimal("0.01"), mechanism=mechanism, crowd=crowd)
    assert epsilon(above, cohort=1000, delta="1e-6").upper > 0.5


def test_a_local_epsilon_below_the_target_needs_no_crowd() -> None:
    assert local_epsilon(cohort=1, epsilon="0.5", delta="1e-6") >= Decimal("0.5")
    assert min_cohort(Setting(local_epsilon="0.5"), epsilon="0.5", delta="1e-6") == 1


# --- Honest fractions ---------------------------------------------------------------------------


def test_honest_members_are_counted_in_integers() -> None:
    """Trap: int(0.29 * 100) is 28, and hundreds of other cohorts fail likewise."""
    wrong = 0
    for percent in range(1, 100):
        for cohort in range(100, 2000, 100):
            exact = percent * cohort // 100
            assert honest_members(cohort, Fraction(percent, 100)) == exact
            wrong += int(percent / 100 * cohort) != exact
    assert wrong > 0


@pytest.mark.parametrize("value", [0.9, 1.0, True, "0", "5/4", "x", "1/0", *EXTREME])
def test_honest_fractions_other_than_rationals_in_range_are_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match="honest_fraction"):
        Setting(local_epsilon=3, honest_fraction=value)  # type: ignore[arg-type]


def test_an_honest_fraction_replaces_the_cohort_everywhere() -> None:
    some = Setting(local_epsilon=3, honest_fraction=Fraction(9, 10))
    everyone = Setting(local_epsilon=3)
    assert epsilon(some, cohort=1000, delta="1e-6") == epsilon(everyone, cohort=900, delta="1e-6")
    cohort = min_cohort(some, epsilon="0.5", delta="1e-6")
    assert honest_members(cohort, Fraction(9, 10)) >= 586
    assert honest_members(cohort - 1, Fraction(9, 10)) < 586
    with pytest.raises(InvalidInput, match="at least 10"):
        epsilon(Setting(local_epsilon=3, honest_fraction="1/10"), cohort=9, delta="1e-6")
    with pytest.raises(InvalidInput, match="assumes nothing"):
        Setting(local_epsilon=3, crowd="noised", honest_fraction="1/2")


# --- Bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "local", [0, -1, "nan", math.nan, math.inf, "inf", 21, "x", True, "1" * 40]
)
def test_bad_local_epsilons_are_refused_with_the_range(local: object) -> None:
    with pytest.raises(InvalidInput, match="local_epsilon"):
        Setting(local_epsilon=local)  # type: ignore[arg-type]


@pytest.mark.parametrize("cohort", [0, -5, 10**9 + 1, 1.5, True])
def test_bad_cohorts_are_refused_with_the_range(cohort: object) -> None:
    with pytest.raises(InvalidInput, match="from 1 to 1,000,000,000"):
        epsilon(Setting(local_epsilon=3), cohort=cohort, delta="1e-6")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0, 1, -1e-6, 2.0, math.nan, "nan", "x", None])
def test_bad_deltas_are_refused_with_the_range(bad: object) -> None:
    with pytest.raises(InvalidInput, match="delta"):
        epsilon(Setting(local_epsilon=3), cohort=100, delta=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [-0.1, math.nan, 51, "x", "1e-99999999999999999999"])
def test_bad_epsilons_are_refused_with_the_range(bad: object) -> None:
    with pytest.raises(InvalidInput, match="epsilon"):
        delta(Setting(local_epsilon=3), cohort=100, epsilon=bad)  # type: ignore[arg-type]


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="asymmetric, symmetric"):
        Setting(local_epsilon=3, mechanism="skewed")
    with pytest.raises(InvalidInput, match="closed-form"):
        epsilon(Setting(local_epsilon=3), cohort=100, delta="1e-6", method="gdp")


def test_impossible_wishes_say_what_to_do() -> None:
    with pytest.raises(InvalidInput, match="ask for a larger epsilon"):
        min_cohort(Setting(local_epsilon=20), epsilon="0.000001", delta="1e-12")
    with pytest.raises(InvalidInput, match="larger cohort"):
        local_epsilon(cohort=2, epsilon="0.0001", delta="1e-12")
