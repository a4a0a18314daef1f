"""Rules of n-gram discovery, on trees that are known."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from chorister.analyst.algorithms.ngram_rules import (
    Ranked,
    above_noise,
    check_vocabulary,
    extend,
    largest,
    posterior_means,
    stratified_means,
    worth_asking,
)
from chorister.errors import InvalidInput

WORDS = 10


def ranked(shares: dict[int, float]) -> Ranked:
    return Ranked(np.array(list(shares)), np.array(list(shares.values())))


def as_dict(found: Ranked) -> dict[int, float]:
    return dict(zip(found.codes.tolist(), found.shares.tolist(), strict=True))


def test_pairs_of_rare_words_are_expected_more_often_than_the_product_says() -> None:
    found = as_dict(extend(ranked({1: 0.5, 2: 0.3, 3: 0.2}), WORDS, 1, 100))
    assert len(found) == 9
    assert sum(found.values()) == pytest.approx(1.0)  # as the products do
    assert found[12] / found[32] == pytest.approx(0.3 * 0.5**0.5 / (0.2 * 0.3**0.5))
    assert found[33] > 0.2 * 0.2
    assert found[11] < 0.5 * 0.5


def test_overlapping_pairs_make_triples_as_a_markov_chain_does() -> None:
    found = as_dict(extend(ranked({12: 0.4, 23: 0.3, 24: 0.1, 51: 0.2}), WORDS, 2, 100))
    assert set(found) == {123, 124, 512}
    assert found[123] == pytest.approx(0.4 * 0.3 / 0.4)
    assert found[124] == pytest.approx(0.4 * 0.1 / 0.4)
    assert found[512] == pytest.approx(0.2 * 0.4 / 0.4)


def test_triples_overlap_in_two_words() -> None:
    found = as_dict(extend(ranked({123: 0.5, 234: 0.25, 235: 0.25, 934: 0.1}), WORDS, 3, 100))
    assert found == pytest.approx({1234: 0.25, 1235: 0.25})


@given(
    st.dictionaries(st.integers(0, 99), st.floats(0.001, 1.0), min_size=1, max_size=40),
    st.integers(1, 30),
)
def test_a_cap_keeps_the_best_that_there_are(shares: dict[int, float], most: int) -> None:
    everything = np.sort(extend(ranked(shares), WORDS, 2, 10**6).shares)[::-1]
    capped = np.sort(extend(ranked(shares), WORDS, 2, most).shares)[::-1]
    assert capped == pytest.approx(everything[:most])


def test_nothing_is_made_of_nothing() -> None:
    assert len(extend(ranked({}), WORDS, 2, 10)) == 0
    assert len(extend(ranked({12: 0.0, 23: -1.0}), WORDS, 2, 10)) == 0


def test_only_what_may_be_heard_is_asked_about() -> None:
    candidates = ranked({1: 0.5, 2: 0.01, 3: 1e-6})
    asked = worth_asking(candidates, reports=1_000, sigma=10.0, most=10)
    assert sorted(asked.codes.tolist()) == [1, 2]
    assert worth_asking(candidates, reports=1_000, sigma=10.0, most=1).codes.tolist() == [1]


def test_the_best_is_asked_about_where_nothing_promises_anything() -> None:
    asked = worth_asking(ranked({1: 1e-9, 2: 2e-9}), reports=10, sigma=10.0, most=1)
    assert asked.codes.tolist() == [2]


def test_rarest_first_does_not_depend_on_the_order_given() -> None:
    a, b = ranked({7: 0.2, 3: 0.1, 5: 0.1}), ranked({5: 0.1, 7: 0.2, 3: 0.1})
    assert a.rarest_first().codes.tolist() == b.rarest_first().codes.tolist() == [3, 5, 7]


def test_largest_keeps_all_if_there_are_few() -> None:
    some = ranked({1: 0.1, 2: 0.2})
    assert largest(some, 2) is some


def test_at_most_one_false_report_is_expected() -> None:
    """Exactly, by the binomial tail, for many numbers of candidates."""
    trials, q = 20_000, 0.02
    for candidates in (1, 2, 10, 1_000, 10**6, 10**9):
        sums = np.arange(trials + 1)
        mask = above_noise(sums, trials=trials, q=q, candidates=candidates)
        least = int(np.flatnonzero(mask)[0])
        expected = candidates * float(binom.sf(least - 1, trials, q))
        assert expected <= 1.0
        if candidates > 1:  # and not one candidate more is given away
            assert candidates * float(binom.sf(least - 2, trials, q)) > 1.0


def test_the_algorithms_do_not_load_what_takes_a_second() -> None:
    names = ("crosstab", "distribution", "heatmap", "ngrams", "words")
    modules = ", ".join(f"chorister.analyst.algorithms.{name}" for name in names)
    code = f"import sys, {modules}; sys.exit('scipy.stats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_false_reports_stay_below_one_in_simulation() -> None:
    """400 empty rounds of 1,000 cells: the number reported is Poisson with mean at most 400.

    Above 400 + 5 x 20 with a chance below 1e-6.
    """
    rng = np.random.default_rng(11)
    sums = rng.binomial(5_000, 0.03, size=(400, 1_000))
    assert above_noise(sums, trials=5_000, q=0.03, candidates=1_000).sum() <= 500


@pytest.mark.parametrize(("words", "depth"), [(1, 3), (10**5, 4)])
def test_vocabularies_that_can_not_be_numbered_are_refused(words: int, depth: int) -> None:
    with pytest.raises(InvalidInput):
        check_vocabulary(words, depth)


def test_a_lone_heavy_cell_stays_heavy_and_the_others_go() -> None:
    rng = np.random.default_rng(3)
    seen = rng.normal(0.0, 10.0, 5_000)
    seen[17] = 120.0
    means = posterior_means(seen, 10.0)
    assert means[17] > 80.0
    assert np.delete(means, 17).max() < 25.0
    assert means.min() >= 0.0


def test_posterior_means_err_less_than_what_was_seen() -> None:
    rng = np.random.default_rng(4)
    truth = np.where(rng.random(4_000) < 0.1, rng.gamma(2.0, 30.0, 4_000), 0.0)
    seen = truth + rng.normal(0.0, np.sqrt(100.0 + truth))
    better = np.mean((posterior_means(seen, 10.0) - truth) ** 2)
    assert better < 0.5 * np.mean((seen - truth) ** 2)


def test_strata_know_where_to_expect_something() -> None:
    rng = np.random.default_rng(5)
    expected = np.concatenate([np.full(400, 1.0), np.full(4_000, 0.01)])
    truth = np.concatenate([np.full(400, 25.0), np.zeros(4_000)])
    seen = truth + rng.normal(0.0, 10.0, 4_400)
    together = np.mean((posterior_means(seen, 10.0) - truth) ** 2)
    apart = np.mean((stratified_means(seen, 10.0, expected) - truth) ** 2)
    assert apart < 0.8 * together


def test_noise_without_a_scale_is_refused() -> None:
    with pytest.raises(InvalidInput):
        posterior_means(np.zeros(3), 0.0)
    with pytest.raises(InvalidInput):
        stratified_means(np.zeros(3), 1.0, np.zeros(2))
    assert posterior_means(np.zeros(0), 1.0).size == 0
