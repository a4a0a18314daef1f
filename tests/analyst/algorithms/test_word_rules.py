"""The character model, the choice of candidates, and the threshold of words."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from scipy.stats import binom

from chorister.analyst.algorithms.character_model import END, CharacterModel
from chorister.analyst.algorithms.word_rules import (
    MAX_CHARACTERS,
    MAX_ROUNDS,
    Beginning,
    Learned,
    lengths,
    likely,
    measured,
    reported,
    round_shares,
)
from chorister.analyst.estimate import estimate
from chorister.errors import InvalidInput
from chorister.privacy import OneHotRandomizer

WORDS = {"the": 50.0, "then": 10.0, "there": 8.0, "cat": 5.0, "cats": 3.0, "да": 1.0}
MODEL = CharacterModel(WORDS)


def test_probabilities_add_up() -> None:
    for begin in ("", "t", "th", "the", "q", "ca", "д", "zzz", "9"):
        for chances in (MODEL.following(begin), MODEL.following_unfamiliar(begin)):
            assert 0.99 < sum(chances.values()) <= 1.0 + 1e-9
            assert min(chances.values()) >= 0.0


def test_frequent_words_and_spellings_are_likely() -> None:
    assert MODEL.chance("the" + END) > MODEL.chance("then" + END) > MODEL.chance("thc" + END)
    assert MODEL.chance("cathe" + END) > MODEL.chance("chtae" + END)


def test_an_unfamiliar_word_goes_on_in_its_script() -> None:
    assert MODEL.following_unfamiliar("д")["а"] > MODEL.following_unfamiliar("t").get("а", 0.0)
    digits = MODEL.following_unfamiliar("e4")
    assert min(digits[each] for each in "0123456789") > 0.05


def test_denied_words_are_not_expected() -> None:
    without = MODEL.without(["the", "unknown"])
    assert without.chance("the" + END) < MODEL.chance("the" + END) / 2
    assert without.chance("then" + END) > 0.0
    assert MODEL.without(["unknown"]) is MODEL


@pytest.mark.parametrize(
    "words",
    [{}, {"": 1.0}, {"a": 0.0}, {"a": float("nan")}, {END: 1.0}, {"\ud800": 1.0}],
)
def test_bad_words_are_refused(words: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        CharacterModel(words)


def test_a_model_of_words_as_they_occur() -> None:
    assert CharacterModel.train(["a", "b", "a"]).chance("a") > 0.4


def test_the_shipped_model_knows_many_languages() -> None:
    shipped = CharacterModel.shipped()
    assert shipped.chance("the" + END) > 0.01
    assert shipped.chance("привет") > 0.0
    assert CharacterModel.shipped() is shipped
    assert CharacterModel.shipped("de").chance("und" + END) > 20 * shipped.chance("und" + END)
    with pytest.raises(InvalidInput, match="en, ar"):
        CharacterModel.shipped("tlh")


def test_candidates_are_the_most_likely_ones() -> None:
    found = likely(MODEL, [Beginning("", 1.0)], 3, 50)
    texts = [text for text, _ in found]
    assert len(set(texts)) == len(texts) == 50
    assert texts[0] == "the"
    assert [share for _, share in found] == sorted((share for _, share in found), reverse=True)
    assert all(len(text) == 3 or text.endswith(END) for text in texts)
    assert END not in texts
    assert sum(share for _, share in found) <= 1.0


@pytest.mark.parametrize("language", ["ar", "vi"])
def test_candidates_are_text_that_a_recipe_can_hold(language: str) -> None:
    asked = likely(CharacterModel.shipped(language), [Beginning("", 1.0)], 2, 9_999)
    assert all(unicodedata.is_normalized("NFC", text) for text, _ in asked)


def test_what_is_skipped_is_not_listed() -> None:
    whole = MAX_CHARACTERS + 1
    texts = [text for text, _ in likely(MODEL, [Beginning("", 1.0)], whole, 20, {"the" + END})]
    assert "the" + END not in texts
    assert "then" + END in texts


def test_a_surprising_beginning_is_extended_more_evenly() -> None:
    assert measured(MODEL, "the", MODEL.chance("the")).unfamiliar < 0.3
    surprising = measured(MODEL, "tzq", 0.1)
    assert surprising.unfamiliar > 0.9
    texts = [text for text, _ in likely(MODEL, [surprising], 4, 30)]
    assert {"tzq0", "tzqt", "tzq" + END} <= set(texts)


def test_rounds_have_lengths_and_shares() -> None:
    for rounds in range(1, MAX_ROUNDS + 1):
        assert len(lengths(rounds)) == len(round_shares(rounds)) == rounds
        assert list(lengths(rounds)) == sorted(set(lengths(rounds)))
        assert lengths(rounds)[-1] == MAX_CHARACTERS + 1
        assert sum(round_shares(rounds)) == pytest.approx(1.0)
        assert list(round_shares(rounds)) == sorted(round_shares(rounds))
    with pytest.raises(InvalidInput, match="rounds"):
        lengths(MAX_ROUNDS + 1)


def test_at_most_one_false_word_is_expected_in_all_rounds() -> None:
    """Four rounds of empty cells, half of them whole words: the mean stays below 1."""
    rng, rounds, runs = np.random.default_rng(8), 4, 300
    names = [f"w{i}" + (END if i % 2 else "") for i in range(1_000)]
    law = OneHotRandomizer(mechanism="asymmetric", local_epsilon=5, length=1_001)
    false = 0
    for _ in range(runs * rounds):
        sums = rng.binomial(20_000, law.q, len(names))
        above = reported(names, sums, trials=20_000, q=law.q, rounds=rounds)
        assert not above[::2].any()
        false += int(above.sum())
    assert false / runs < 1.0 + 3.0 / np.sqrt(runs)
    assert false > 0


@pytest.mark.parametrize("rounds", range(1, MAX_ROUNDS + 1))
@pytest.mark.parametrize("words", [300, 9_999])
def test_the_expected_number_of_false_words_is_at_most_one(rounds: int, words: int) -> None:
    """Exactly, from the law of an empty cell: no sum that is reported may be likelier."""
    names = [f"w{i}{END}" for i in range(words)]
    for trials, q in ((500, 0.004), (50_000, 0.0005), (600_000, 0.001)):
        sums = int(trials * q) + np.arange(words) % 300
        above = reported(names, sums, trials=trials, q=q, rounds=rounds)
        assert rounds * words * binom.sf(sums[above].min() - 1, trials, q) <= 1.0


def test_intervals_of_found_words_cover_at_once() -> None:
    """Simulated rounds with words of all sizes: all reported ones are covered at once in 95%."""
    rng, runs, reports = np.random.default_rng(9), 400, 50_000
    law = OneHotRandomizer(mechanism="asymmetric", local_epsilon=4, length=501)
    truth = np.concatenate([np.geomspace(3_000, 20, 60).astype(np.int64), np.zeros(440, np.int64)])
    names = [f"w{i}{END}" for i in range(len(truth))]
    covered = 0
    for _ in range(runs):
        sums = rng.binomial(reports - truth, law.q) + rng.binomial(truth, law.h)
        above = reported(names, sums, trials=reports, q=law.q, rounds=4)
        found = estimate(law, sums[above], reports)
        ends = found.interval(1.0 - 0.05 / len(truth), step=law.step)
        inside = (ends.low <= truth[above]) & (truth[above] <= ends.high)
        covered += bool(inside.all())
    assert covered / runs > 0.95 - 3.0 * np.sqrt(0.05 * 0.95 / runs)


def test_what_was_found_is_not_asked_again() -> None:
    learned = Learned(MODEL, rounds=2)
    asked = learned.ask(4, 40)
    sums = np.array([900 if text == "the" + END else 100 for text, _ in asked])
    counts = np.array([800.0 if text == "the" + END else 0.0 for text, _ in asked])
    counts[[text for text, _ in asked].index("cats")] = 300.0
    learned.answer(asked, sums=sums, counts=counts, sigma=12.0, reports=1000, trials=1000, q=0.1)
    assert learned.found == {"the" + END}
    texts = [text for text, _ in learned.ask(MAX_CHARACTERS + 1, 40)]
    assert "the" + END not in texts
    assert "cats" + END in texts
