"""The weight bound, its price, and the law of a sum's total weight."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from chorister.errors import InvalidInput
from chorister.privacy import Mechanism, OneHotRandomizer, delta_before_bound


def delta_with_bound(delta: float, epsilon: float, honest: int, tau: float) -> float:
    """The aggregate's delta when `honest` reports are conditioned on their weight bound."""
    log_kept = honest * math.log1p(-tau)
    return (delta - math.exp(epsilon) * math.expm1(log_kept)) / math.exp(log_kept)


def exact_tail(randomizer: OneHotRandomizer, w: int) -> Fraction:
    """Pr[weight > w] in rationals."""
    q, h = Fraction(randomizer.q_threshold, 2**64), Fraction(randomizer.h_threshold, 2**64)
    others = randomizer.length - 1

    def reach(least: int) -> Fraction:
        return sum(
            (
                math.comb(others, i) * q**i * (1 - q) ** (others - i)
                for i in range(max(least, 0), others + 1)
            ),
            Fraction(0),
        )

    return h * reach(w) + (1 - h) * reach(w + 1)


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize(
    ("length", "local"), [(2, "3"), (5, "8"), (40, "3"), (120, "6"), (120, "1")]
)
def test_the_weight_bound_is_the_least_in_exact_rationals(
    mechanism: Mechanism, length: int, local: str
) -> None:
    randomizer = OneHotRandomizer(mechanism=mechanism, local_epsilon=local, length=length)
    w = randomizer.max_weight
    assert w <= length
    assert exact_tail(randomizer, w) <= Fraction(1, 2**80)
    assert exact_tail(randomizer, w - 1) > Fraction(1, 2**80)


def test_the_stated_bounds() -> None:
    for local, bound in ((3, 130), (5, 48)):
        randomizer = OneHotRandomizer(mechanism="asymmetric", local_epsilon=local, length=1000)
        assert randomizer.max_weight == bound
        influence, grown = randomizer.hostile_influence(), math.exp(local)
        assert influence.bins == bound
        assert influence.up == pytest.approx(2 * grown / (grown - 1))
        assert influence.down == pytest.approx(2 / (grown - 1))


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("bounded", [True, False])
def test_a_hostile_report_moves_every_bin_and_no_further_than_stated(
    mechanism: Mechanism, bounded: bool
) -> None:
    """All zeros, a single 1, and as many ones as are accepted, against no such report."""
    randomizer = OneHotRandomizer(mechanism=mechanism, local_epsilon=3, length=200)
    influence = randomizer.hostile_influence(bounded=bounded)
    sums = np.random.default_rng(1).integers(0, 900, 200)
    before = randomizer.debias(sums, 1_000, 499)
    for ones in (0, 1, influence.bins):
        report = (np.arange(200) < ones).astype(np.int64)
        moved = randomizer.debias(sums + report, 1_001, 499) - before
        np.testing.assert_allclose(moved[:ones], influence.up)
        np.testing.assert_allclose(moved[ones:], -influence.down)


def test_the_price_of_the_bound_is_below_what_recipes_set_aside() -> None:
    tau = 2.0**-80
    assert delta_with_bound(1e-6 - 1e-12, 1.0, 10**11, tau) <= 1e-6
    assert delta_with_bound(0.25, 0.0, 1, 0.5) == pytest.approx((0.25 + 0.5) / 0.5)
    assert delta_before_bound(Decimal("1e-6"), Decimal(1), 10**6) == Decimal("0.999999e-6")
    with pytest.raises(InvalidInput, match="honest reports x e"):
        delta_before_bound(Decimal("1e-6"), Decimal(30), 10**6)
    with pytest.raises(InvalidInput, match="strictly between"):
        delta_before_bound(Decimal("1e-12"), Decimal(1), 1)


def test_conditioning_costs_what_is_stated_by_brute_force() -> None:
    """One device, three coordinates, a bound that bites: exact rationals, all events."""
    randomizer = OneHotRandomizer(mechanism="asymmetric", local_epsilon=2, length=3)
    q, h = Fraction(randomizer.q_threshold, 2**64), Fraction(1, 2)
    noise = [Fraction(1, 8), Fraction(3, 8), Fraction(3, 8), Fraction(1, 8)]  # Bin(3, 1/2) each

    def law(held: int, bound: int) -> dict[tuple[int, ...], Fraction]:
        reports: dict[tuple[int, int, int], Fraction] = {}
        for code in range(8):
            bits = (code >> 2 & 1, code >> 1 & 1, code & 1)
            if sum(bits) <= bound:
                chance = Fraction(1)
                for place, bit in enumerate(bits):
                    p = h if place == held else q
                    chance *= p if bit else 1 - p
                reports[bits] = chance
        whole = sum(reports.values())
        sums: dict[tuple[int, ...], Fraction] = {}
        for bits, chance in reports.items():
            for code in range(64):
                drawn = (code >> 4, code >> 2 & 3, code & 3)
                weight = noise[drawn[0]] * noise[drawn[1]] * noise[drawn[2]]
                key = tuple(b + d for b, d in zip(bits, drawn, strict=True))
                sums[key] = sums.get(key, Fraction(0)) + chance / whole * weight
        return sums

    def delta(bound: int, g: Fraction) -> Fraction:
        one, other = law(0, bound), law(1, bound)
        return sum(
            (max(p - g * other.get(key, Fraction(0)), Fraction(0)) for key, p in one.items()),
            Fraction(0),
        )

    tau = float(exact_tail(randomizer, 1))
    for epsilon in (0.1, 0.5):
        g = Fraction(math.exp(epsilon))
        plain, bounded = float(delta(3, g)), float(delta(1, g))
        assert bounded <= delta_with_bound(plain, epsilon, 1, tau)


# --- Total weight --------------------------------------------------------------------------------


def test_the_law_of_the_total_weight() -> None:
    randomizer = OneHotRandomizer(mechanism="asymmetric", local_epsilon=3, length=1000)
    law = randomizer.total_weight(10_000, 585)
    q = randomizer.q
    assert law.mean == pytest.approx(10_000 * (0.5 + 999 * q) + 2 * 585 * 1000 * q)
    assert law.p_value(round(law.mean)) > 0.9
    # Five standard deviations have a two-sided p of 5.7e-7 in a law this close to a normal one.
    for sign in (-1, 1):
        assert law.p_value(round(law.mean + sign * 5 * law.std)) == pytest.approx(5.7e-7, rel=0.15)


def test_p_values_match_simulated_sums() -> None:
    """400 seeded sums of a small cohort: p-values are uniform (Kolmogorov at 1e-6)."""
    randomizer = OneHotRandomizer(mechanism="asymmetric", local_epsilon=1, length=200)
    n, trials = 400, 100
    law = randomizer.total_weight(n, trials)
    rng = np.random.default_rng(11)
    bits = n * 199 + 2 * trials * 200
    totals = rng.binomial(n, 0.5, 400) + rng.binomial(bits, randomizer.q, 400)
    values = [law.p_value(int(total)) for total in totals]
    assert stats.kstest(values, "uniform").pvalue > 1e-6


def test_about_fifty_full_reports_are_noticed_and_explained() -> None:
    """52 hostile reports among 10,000 suffice to mark a result at |D| = 1000, eps0 = 3."""
    randomizer = OneHotRandomizer(mechanism="asymmetric", local_epsilon=3, length=1000)
    law = randomizer.total_weight(10_000, 585)
    honest = randomizer.total_weight(10_000 - 53, 585)
    full = round(honest.mean) + 53 * 130
    assert law.is_marked(full)
    assert law.least_hostile(full) == pytest.approx(1, abs=1)
    assert not law.is_marked(round(law.mean) + 40 * 82)
    assert law.least_hostile(round(law.mean)) == 0


@pytest.mark.parametrize("hostile", [200, 2000, 10_000])
@pytest.mark.parametrize("weight", [0, 130])
def test_the_least_number_explains_and_never_exceeds_what_was_there(
    hostile: int, weight: int
) -> None:
    randomizer = OneHotRandomizer(mechanism="asymmetric", local_epsilon=3, length=1000)
    law = randomizer.total_weight(10_000, 585)
    honest = 10_000 - hostile
    mean = honest * (0.5 + 999 * randomizer.q) + 2 * 585 * 1000 * randomizer.q
    least = law.least_hostile(round(mean) + hostile * weight)
    assert least is not None
    assert 0.5 * hostile <= least <= hostile


def test_what_no_client_could_do_is_said() -> None:
    """More weight than all reports can carry: an aggregator is at fault."""
    randomizer = OneHotRandomizer(mechanism="asymmetric", local_epsilon=3, length=100)
    law = randomizer.total_weight(1000, 585)
    assert law.least_hostile(1000 * 100 + 2 * 585 * 100) is None
