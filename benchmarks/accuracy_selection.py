"""What deny lists, the vocabulary and the choice among several data points gain, one by one.

The study is that of `accuracy_ngrams.py` (k = 3, honest crowd): words, pairs, 3-grams. `found`
counts true 3-grams with at most one false one expected; `new` those that were not known before.

- **deny**: a first study knew its 100 heaviest 3-grams beforehand; a device that leaves these out
  (`deny` of the recipe) reports something else.
- **vocabulary**: known words, from 250 to 2,000: fewer words miss phrases, more words dilute.
- **several data points**: which of its candidates a device reports. `row`: any row, so what is
  repeated weighs more; `distinct`: any of its different n-grams; `first`: with the recipe's order,
  least expected first, among all that it holds, or among 24 that it draws.

    python benchmarks/accuracy_selection.py [--json] [--data FILE] [--seeds 20]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import accuracy_ngrams as study
from _budgets import rounds
from _phrases import Corpus, Held, Ints, messages, report
from chorister.analyst.algorithms.ngram_rules import (
    LEAST_BEFORE_LAST,
    MAX_EXTENDED,
    Ranked,
    above_noise,
    extend,
    largest,
    posterior_means,
    stratified_means,
    worth_asking,
)
from chorister.analyst.algorithms.ngrams import round_shares

EPSILONS = (0.15, 0.5)
VOCABULARIES = (250, 500, 1_000, 2_000)
DENIED = 100
FIRST_SEED = 1_000  # rules were chosen on seeds below
DRAWN = 24
EVERY = 1_000_000  # more n-grams than anybody holds


@dataclass(frozen=True)
class Way:
    """One way to ask."""

    words: int = 1_000
    distinct: bool = True
    drawn: int | None = None  # selection first, among so many n-grams
    deny: bool = False


WAYS = {
    "row": Way(distinct=False),
    "distinct": Way(),
    "first_of_all": Way(drawn=EVERY),
    "first_of_24": Way(drawn=DRAWN),
    "deny": Way(deny=True),
    **{f"words_{words}": Way(words=words) for words in VOCABULARIES},
}


def without(held: Held, denied: Ints) -> Held:
    """What is left on the devices when some n-grams are denied."""
    gone = np.isin(held.codes, denied)[held.grams]
    left = held.sizes - np.bincount(held.owners[gone], minlength=held.devices)
    return Held(held.owners[~gone], held.grams[~gone], held.codes, left)


def discover(
    corpus: Corpus, answering: Ints, epsilon: float, way: Way, known3: Ints, seed: int
) -> Ints:
    """The 3-grams that three rounds report, everybody answering all of them."""
    rng = np.random.default_rng([seed, 3])
    words = len(corpus.vocabulary)
    shares = round_shares(3, "everyone")
    first, second, third = rounds(epsilon, "honest", len(answering), shares, 3)
    asked = np.arange(words)
    seen = first.estimates(first.draw(report(corpus.held[1], asked, answering, rng), rng))
    known = Ranked(asked, posterior_means(seen, first.sigma) / first.reports)
    pairs = worth_asking(
        extend(known, words, 1, study.MOST), reports=second.reports, sigma=second.sigma,
        most=study.MOST, least=LEAST_BEFORE_LAST,
    )  # fmt: skip
    seen = second.estimates(second.draw(report(corpus.held[2], pairs.codes, answering, rng), rng))
    means = stratified_means(seen, second.sigma, pairs.shares) / second.reports
    known = largest(Ranked(pairs.codes, means), MAX_EXTENDED)
    triples = extend(known, words, 2, study.TRIPLES + DENIED)
    held = corpus.held[3]
    if way.deny:
        triples = triples.take(~np.isin(triples.codes, known3))
        held = without(held, known3)
    triples = worth_asking(
        triples, reports=third.reports, sigma=third.sigma, most=study.TRIPLES
    ).rarest_first()
    counts = report(held, triples.codes, answering, rng, drawn=way.drawn)
    found = above_noise(
        third.draw(counts, rng), trials=third.trials, q=third.randomizer.q,
        candidates=len(triples),
    )  # fmt: skip
    return triples.codes[found]


_CORPORA: dict[tuple[int, bool], Corpus] = {}


def _load(path: Path | None) -> None:
    rows = messages(path)
    for way in WAYS.values():
        key = (way.words, way.distinct)
        if key not in _CORPORA:
            _CORPORA[key] = Corpus.of(rows, way.words, 3, distinct=way.distinct)


def _labels(corpus: Corpus, codes: Ints) -> set[str]:
    return {corpus.label(int(code), 3) for code in codes}


def _run(seed: int) -> dict[str, dict[str, float]]:
    usual = _CORPORA[1_000, True]
    truth = study.NgramTruth.of(usual, seed)
    # What the analyst knows beforehand is what most devices hold.
    known3 = truth.top[:DENIED]
    top, old = _labels(usual, truth.top), _labels(usual, known3)
    scores: dict[str, dict[str, float]] = {}
    for epsilon in EPSILONS:
        for name, way in WAYS.items():
            corpus = _CORPORA[way.words, way.distinct]
            codes = discover(corpus, truth.answering, epsilon, way, known3, seed)
            held = corpus.held[3].codes
            at = np.minimum(np.searchsorted(held, codes), len(held) - 1)
            found = _labels(corpus, codes[held[at] == codes])
            scores[f"{name} {epsilon}"] = {
                "found": float(len(found)),
                "new": float(len(found - old)),
                "recall": len(top & found) / len(top),
            }
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="one flat object as the last line")
    parser.add_argument("--data", type=Path, help="a CSV file with the columns device,text")
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    begin = time.perf_counter()
    with ProcessPoolExecutor(2, initializer=_load, initargs=(options.data,)) as pool:
        runs = list(pool.map(_run, range(FIRST_SEED, FIRST_SEED + options.seeds)))
    found: dict[str, float] = {}
    print(
        f"{'':16}" + "".join(f"{f'eps {e:g}: found':>20}{'new':>8}{'recall':>9}" for e in EPSILONS)
    )
    for name in WAYS:
        line = ""
        for epsilon in EPSILONS:
            for metric in ("found", "new", "recall"):
                values = [run[f"{name} {epsilon}"][metric] for run in runs]
                key = f"{name}_{metric}_{epsilon:g}"
                found[key] = float(np.mean(values))
                spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
                found[f"{key}_se"] = spread / math.sqrt(len(values))
            mean, error, new, recall = (
                found[f"{name}_{metric}_{epsilon:g}{tail}"]
                for metric, tail in (("found", ""), ("found", "_se"), ("new", ""), ("recall", ""))
            )
            line += f"{mean:14.0f} ± {error:3.0f}{new:8.0f}{recall:9.3f}"
        print(f"{name:16}{line}")
    found["seconds"] = time.perf_counter() - begin
    print(f"{options.seeds} seeds in {found['seconds']:.0f} s")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
