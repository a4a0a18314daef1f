"""The certified bound at its limits: large crowds, tiny deltas, tiny crowds, hostile arguments."""

from __future__ import annotations

import ast
import math
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from chorister import _native
from chorister.errors import InternalError, InvalidInput
from chorister.policy.bounds import Claim
from chorister.privacy import Crowd, Mechanism, Setting, certified, epsilon, min_cohort
from chorister.privacy.certified import exact_delta, exact_epsilon, renyi_divergence
from tests.privacy.former import native_composition_delta, own

ASYMMETRIC, SYMMETRIC = Mechanism.ASYMMETRIC, Mechanism.SYMMETRIC
LARGEST = 10**9


# --- As tight as its witness where that is the truth ---------------------------------------------


@pytest.mark.parametrize(
    ("mechanism", "local", "n", "delta"),
    [
        (ASYMMETRIC, 3.0, 10**6, 1e-12),  # was 3.0, the local value
        (ASYMMETRIC, 3.0, 10**7, 1e-11),
        (SYMMETRIC, 3.0, 10**7, 1e-11),
        (ASYMMETRIC, 3.0, LARGEST, 1e-12),
        (SYMMETRIC, 3.0, LARGEST, 1e-12),
        (ASYMMETRIC, 8.0, 10**4, 1e-15),
        (ASYMMETRIC, 12.0, 10**5, 1e-15),
        (ASYMMETRIC, 20.0, LARGEST, 1e-15),
        (ASYMMETRIC, 5.0, 1000, 1e-30),
        (ASYMMETRIC, 3.0, 10**6, 1e-200),
        (ASYMMETRIC, 0.1, 10**6, 1e-12),
    ],
)
def test_large_crowds_and_tiny_deltas_do_not_fall_back_to_the_local_value(
    mechanism: Mechanism, local: float, n: int, delta: float
) -> None:
    for noised in (False, True):
        found = exact_epsilon(n, mechanism, local, delta, noised=noised)
        assert 0.0 < found.lower <= found.upper <= found.lower * 1.01


def test_a_delta_beyond_floats_gets_the_local_guarantee() -> None:
    """Below 1e-250 nothing is claimed; that is sound."""
    found = exact_epsilon(10**6, ASYMMETRIC, 3.0, 1e-300, noised=False)
    assert (found.lower, found.upper) == (0.0, 3.0)


# --- Monotone, and one function for cohorts and epsilons -----------------------------------------


def settings(seed: int, count: int) -> Iterator[tuple[Mechanism, float, int, float]]:
    """Random settings with a fixed seed, most of them tiny."""
    rng = random.Random(seed)
    for _ in range(count):
        mechanism = rng.choice(list(Mechanism))
        local = rng.choice([0.05, 0.3, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0, rng.uniform(0.2, 10.0)])
        cohort = rng.choice([rng.randint(1, 60), rng.randint(30, 400), rng.randint(400, 20_000)])
        yield mechanism, local, cohort, 10.0 ** rng.uniform(-13, -2)


def not_above(value: float, limit: float) -> bool:
    """At most, but for what blocks and knots may add to a certified value."""
    return value <= limit * (1.0 + 1e-4) + 1e-6


@pytest.mark.parametrize("noised", [False, True])
def test_epsilon_rises_neither_with_the_cohort_nor_with_delta(noised: bool) -> None:
    for mechanism, local, n, delta in settings(7, 150):
        here = exact_epsilon(n, mechanism, local, delta, noised=noised).upper
        for more in (n + 1, n + 7, n + n // 3 + 1):
            there = exact_epsilon(more, mechanism, local, delta, noised=noised).upper
            assert not_above(there, here), (mechanism, local, n, more, delta)
        there = exact_epsilon(n, mechanism, local, delta * 1.3, noised=noised).upper
        assert not_above(there, here), (mechanism, local, n, delta)


@pytest.mark.parametrize("local", [3.0, 6.0, 8.0])
@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("delta", [1e-12, 1e-9, 1e-6])
def test_every_tiny_crowd_is_bounded_by_the_one_before(
    mechanism: Mechanism, local: float, delta: float
) -> None:
    """Where the bound once rose from 4.44 at 33 members to 5.12 at 34."""
    before = math.inf
    for n in range(1, 80):
        here = exact_epsilon(n, mechanism, local, delta, noised=False).upper
        assert here <= before * (1 + 1e-8), n
        before = here


def test_minimum_cohorts_and_epsilons_always_agree() -> None:
    """What `min_cohort` finds is accepted by `epsilon`, and by the check of a recipe."""
    found = 0
    for mechanism, local, n, delta in settings(11, 80):
        crowd = Crowd.HONEST if n % 3 else Crowd.NOISED
        setting = Setting(local_epsilon=round(local, 4), mechanism=mechanism, crowd=crowd)
        reached = exact_epsilon(n, mechanism, setting.parameter, delta, noised=setting.noised).upper
        target = Decimal(repr(max(0.001, round(reached * 1.02, 4))))
        cohort = min_cohort(setting, epsilon=target, delta=delta)
        assert epsilon(setting, cohort=cohort, delta=delta).upper <= float(target)
        claim = Claim(
            mechanism=mechanism,
            local_epsilon=setting.local_epsilon,
            epsilon=target,
            delta=Decimal(repr(delta)),
            crowd="honest" if crowd is Crowd.HONEST else "noised",
            honest_fraction=Fraction(1) if crowd is Crowd.HONEST else None,
            report="plain",
        )
        assert claim.holds(claim.least_cohort()), (setting, target, delta)
        found += cohort > 1
    assert found > 60


# --- Never below the truth -----------------------------------------------------------------------


def test_certified_is_never_below_any_composition_of_random_crowds() -> None:
    """Epsilon's inverse: no composition has a larger delta at the certified epsilon."""
    rng = random.Random(5)
    for mechanism, local, n, delta in settings(13, 120):
        upper = exact_epsilon(n, mechanism, local, delta, noised=False).upper
        for _ in range(12):
            held = rng.choice([0, n - 1, rng.randint(0, n - 1)])
            instead = rng.choice([0, n - 1 - held, rng.randint(0, n - 1 - held)])
            truth = native_composition_delta(n, mechanism, local, upper, held=held, instead=instead)
            assert truth <= delta * (1 + 1e-9), (mechanism, local, n, delta, held, instead)


def truth_in_rationals(n: int, grown: int, mechanism: Mechanism, ratio: Fraction) -> float:
    """The supremum of delta over (k, k'), E = grown, in exact rationals."""
    q = Fraction(1, grown + 1)
    h = own(mechanism, q)

    def law(chances: list[Fraction]) -> list[Fraction]:
        mass = [Fraction(1)]
        for p in chances:
            mass = [
                sum(
                    (mass[j] * c for j, c in ((i, 1 - p), (i - 1, p)) if 0 <= j < len(mass)),
                    Fraction(0),
                )
                for i in range(len(mass) + 1)
            ]
        return mass

    def pair(k: int) -> tuple[list[Fraction], list[Fraction]]:
        others = [q] * (n - 1 - k) + [h] * k
        return law([*others, h]), law([*others, q])

    pairs = [pair(k) for k in range(n)]
    best = Fraction(0)
    for k in range(n):
        for kk in range(n - k):
            (a, b), (a2, b2) = pairs[k], pairs[kk]
            total = sum(
                (
                    max(Fraction(0), x * w - ratio * y * v)
                    for x, y in zip(a, b, strict=True)
                    for v, w in zip(a2, b2, strict=True)
                ),
                Fraction(0),
            )
            best = max(best, total)
    return float(best)


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("grown", [2, 20, 3000, 400_000_000])
@pytest.mark.parametrize("n", [2, 4, 7])
def test_certified_epsilon_covers_exact_rationals(mechanism: Mechanism, grown: int, n: int) -> None:
    local = math.log(grown)
    for delta in (1e-2, 1e-5, 1e-9):
        upper = exact_epsilon(n, mechanism, local, delta, noised=False).upper
        if upper >= float(mechanism.replacement_epsilon(Decimal(local))):
            continue
        ratio = Fraction(math.exp(upper))
        assert truth_in_rationals(n, grown, mechanism, ratio) <= delta * (1 + 1e-12)


# --- Bounded work --------------------------------------------------------------------------------

CPU_SECONDS = 1.5  # the largest seen is .8, on a machine that was busy


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("noised", [False, True])
@pytest.mark.parametrize("n", [10**7, 10**8, LARGEST])
def test_no_release_takes_long(mechanism: Mechanism, noised: bool, n: int) -> None:
    """A recipe that costs 43 s (cohort 1e7, delta 1e-9) or 240 s (1e-11) could stop a fleet."""
    for local in (0.001, 0.01, 0.5, 3.0, 20.0):
        for delta in (0.09, 1e-9, 1e-11, 1e-12, 1e-200):
            exact_epsilon.cache_clear()
            start = time.process_time()
            exact_epsilon(n, mechanism, local, delta, noised=noised)
            assert time.process_time() - start < CPU_SECONDS, (local, delta)


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("n", [300, 10**6, LARGEST])
def test_no_divergence_takes_long(mechanism: Mechanism, n: int) -> None:
    for local in (0.001, 1.0, 20.0):
        for order in (2, 64, 20_000):
            renyi_divergence.cache_clear()
            start = time.process_time()
            renyi_divergence(n, mechanism, local, order, noised=False)
            assert time.process_time() - start < 2 * CPU_SECONDS, (local, order)


def test_others_run_while_a_bound_is_computed() -> None:
    """The interpreter's lock is released."""

    def turns_meanwhile() -> int:
        with ThreadPoolExecutor(1) as pool:
            exact_epsilon.cache_clear()
            slow = pool.submit(exact_epsilon, LARGEST, ASYMMETRIC, 0.01, 1e-12, noised=False)
            turns = 0
            while not slow.done():
                time.sleep(0.001)
                turns += 1
        return turns

    # A busy machine may give this thread no turn during one computation, but not during all.
    assert any(turns_meanwhile() > 5 for _ in range(50))


# --- Arguments that make no sense ----------------------------------------------------------------

NONSENSE = [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300]


@pytest.mark.parametrize("bad", NONSENSE)
@pytest.mark.parametrize("noised", [False, True])
@pytest.mark.parametrize("mechanism", list(Mechanism))
def test_numbers_out_of_range_are_refused(bad: float, noised: bool, mechanism: Mechanism) -> None:
    with pytest.raises(InvalidInput, match="delta"):
        exact_epsilon(10, mechanism, 3.0, bad, noised=noised)
    with pytest.raises(InvalidInput, match="local_epsilon"):
        exact_epsilon(10, mechanism, bad, 1e-6, noised=noised)
    with pytest.raises(InvalidInput, match="local_epsilon"):
        renyi_divergence(10, mechanism, bad, 4, noised=noised)
    if bad not in (0.0, -1.0):
        with pytest.raises(InvalidInput, match="epsilon"):
            exact_delta(10, mechanism, 3.0, bad, noised=noised)


GOOD = {"q": 0.25, "not_q": 0.75, "h": 0.5, "not_h": 0.5, "gap": 0.25, "replacement": math.log(3)}


@pytest.mark.parametrize("bad", [*NONSENSE, 0.3])
@pytest.mark.parametrize("name", sorted(GOOD))
def test_chances_that_contradict_each_other_are_refused(bad: float, name: str) -> None:
    _native.Chances(**GOOD)
    with pytest.raises(InvalidInput, match="chances"):
        _native.Chances(**GOOD | {name: bad})


@pytest.mark.parametrize("cohort", [0, LARGEST + 1, 2**64 - 1])
def test_cohorts_out_of_range_are_refused(cohort: int) -> None:
    chances = _native.Chances(**GOOD)
    with pytest.raises(InvalidInput, match="cohort"):
        _native.exact_epsilon(cohort, chances, noised=False, delta=1e-6)
    with pytest.raises(InvalidInput, match="cohort"):
        _native.renyi_divergence(cohort, chances, noised=False, order=4)
    with pytest.raises(InvalidInput, match="hold a value"):
        native_composition_delta(10, ASYMMETRIC, 3.0, 0.1, held=10, instead=0)


def test_random_arguments_never_end_in_an_internal_error() -> None:
    rng = random.Random(17)
    for _ in range(300):
        n = rng.choice([1, 2, rng.randint(1, 500), round(10 ** rng.uniform(0, 7))])
        local = rng.choice([0.001, 20.0, rng.uniform(0.001, 20.0)])
        mechanism = rng.choice(list(Mechanism))
        noised = rng.random() < 0.5
        delta = 10.0 ** -rng.uniform(0.01, 260.0)
        try:
            found = exact_epsilon(n, mechanism, local, delta, noised=noised)
            back = exact_delta(n, mechanism, local, found.upper, noised=noised)
        except InternalError as error:
            raise AssertionError((n, mechanism, local, delta, noised)) from error
        assert 0.0 <= found.lower <= found.upper <= local * 2
        assert back.lower <= delta


def test_nothing_but_the_native_module_computes_what_a_device_enforces() -> None:
    """`certified` itself needs neither numpy nor scipy."""
    tree = ast.parse(Path(certified.__file__).read_text())
    names = {each.name for n in ast.walk(tree) if isinstance(n, ast.Import) for each in n.names}
    names |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert names & {"chorister", "math"}
    assert not {name.partition(".")[0] for name in names} & {"numpy", "scipy"}
