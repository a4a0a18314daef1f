"""Words that are on no list: how many of the most widespread ones `discover_words` finds.

Devices are drawn with repetition from a file of messages (device,text). Nobody knows their words;
the shipped character model was trained on other texts. Metrics: which part of the 100 and of the
1,000 words that most devices hold is reported (`found_top_100`, `recall_top_1000`), with at most
one false word expected in a run (`false`).

`k1`: one report per device, rounds go to disjoint cohorts; `k3`: everybody answers three rounds.
Both cost any one device the same epsilon at delta 1e-6, by exact accounting. `static`: one question
to everybody about the words that the model finds most likely. `flat`: the same rounds with a model
that knows nothing but the alphabet. The keys without a suffix are those of k1 at the first epsilon.

The rules were chosen on messages of Ubuntu IRC (the default) and, as far as the number of rounds
is concerned, on the generated texts `--text codes` and `--text invented`, which no model knows.
`--data FILE` takes any text, and `--language` the language of the model.

    python benchmarks/accuracy_words.py [--json] [--data FILE] [--language en]
        [--text irc|codes|invented] [--seeds 5] [--quick]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import polars as pl

from _budgets import RoundNoise, rounds
from _phrases import Ints, messages
from _texts import GENERATED
from chorister.analyst.algorithms.character_model import END, CharacterModel
from chorister.analyst.algorithms.word_rules import Learned, lengths, round_shares

DEVICES = 1_000_000
EPSILONS = (0.5, 1.0)
CROWDS = ("honest", "noised")
BINS = 10_000
FIRST_SEED = 1_000
ROUNDS = {1: 6, 3: 3}  # by the number of reports

Score: TypeAlias = dict[str, float]


@dataclass(frozen=True, eq=False)
class WordHolders:
    """Which device of the file holds which word, each pair once."""

    words: list[str]
    owners: Ints  # increasing
    held: Ints  # index into `words`
    devices: int

    @classmethod
    def of(cls, rows: pl.DataFrame) -> WordHolders:
        rows = rows.select(pl.col("device").rank("dense").cast(pl.Int64) - 1, "word").unique()
        words, held = np.unique(rows["word"].to_numpy(), return_inverse=True)
        owners = rows["device"].to_numpy()
        order = np.lexsort((held, owners))
        owners, held = owners[order], held[order].astype(np.int64)
        return cls(words.tolist(), owners, held, int(owners.max()) + 1)

    def report(
        self, candidates: list[str], length: int, answering: Ints, rng: np.random.Generator
    ) -> Ints:
        """How many devices report each candidate; each any one of the words that match."""
        place = {text: i for i, text in enumerate(candidates)}
        cell = np.array([place.get((word + END)[:length], -1) for word in self.words])[self.held]
        matching = cell >= 0
        owners, cell = self.owners[matching], cell[matching]
        count = np.bincount(owners, minlength=self.devices)
        start = np.cumsum(count) - count
        some = answering[count[answering] > 0]
        step = (rng.random(len(some)) * count[some]).astype(np.int64)
        return np.bincount(cell[start[some] + step], minlength=len(candidates))


@dataclass(frozen=True, eq=False)
class WordTruth:
    """Of one population: who is there, and which words are the most widespread."""

    answering: Ints
    exists: frozenset[str]
    top: list[str]

    @classmethod
    def of(cls, population: WordHolders, seed: int) -> WordTruth:
        rng = np.random.default_rng([seed, 0])
        answering = rng.integers(0, population.devices, DEVICES)
        often = np.bincount(answering, minlength=population.devices)
        devices = np.bincount(population.held, often[population.owners], len(population.words))
        top = np.argsort(-devices, kind="stable")[:1000]
        return cls(
            answering,
            frozenset(population.words[i] for i in np.flatnonzero(devices)),
            [population.words[i] for i in top],
        )

    def score(self, found: set[str]) -> Score:
        return {
            "found_top_100": float(np.mean([word in found for word in self.top[:100]])),
            "recall_top_1000": float(np.mean([word in found for word in self.top])),
            "found": float(len(found & self.exists)),
            "false": float(len(found - self.exists)),
        }


def discovered(
    population: WordHolders,
    truth: WordTruth,
    plan: tuple[RoundNoise, ...],
    k: int,
    model: CharacterModel,
    rng: np.random.Generator,
    *,
    verbose: bool = False,
) -> Score:
    """All rounds, by the rules of `discover_words`."""
    ends = np.cumsum([each.reports for each in plan])
    cohorts = (
        np.split(truth.answering[: ends[-1]], ends[:-1]) if k == 1
        else [truth.answering] * len(plan)
    )  # fmt: skip
    learned = Learned(model, rounds=len(plan))
    for number, (length, round_) in enumerate(zip(lengths(len(plan)), plan, strict=True)):
        asked = learned.ask(length, BINS - 1)
        candidates = [text for text, _ in asked]
        sums = round_.draw(population.report(candidates, length, cohorts[number], rng), rng)
        learned.answer(
            asked, sums=sums, counts=round_.estimates(sums), sigma=round_.sigma,
            reports=round_.reports, trials=round_.trials, q=round_.randomizer.q,
        )  # fmt: skip
        if verbose:
            inside = set(candidates)
            gone = [
                word for word in truth.top
                if (word + END)[:length] not in inside and word + END not in learned.found
            ]  # fmt: skip
            print(f"  {length} characters: {len(asked)} asked, {len(learned.found)} found,", end="")
            print(f" {len(gone)} of the top 1,000 not asked about: {' '.join(gone[:30])}")
    return truth.score({text.removesuffix(END) for text in learned.found})


def flat_model() -> CharacterModel:
    """Every character of the usual alphabet is as likely as every other."""
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789'"
    return CharacterModel(dict.fromkeys(alphabet, 1.0))


def one_seed(
    population: WordHolders,
    seed: int,
    shipped: CharacterModel,
    *,
    quick: bool,
    verbose: bool,
) -> dict[str, Score]:
    truth = WordTruth.of(population, seed)
    flat = flat_model()
    scores: dict[str, Score] = {}
    for epsilon in EPSILONS:
        for crowd in CROWDS[:1] if quick else CROWDS:
            tail = "" if crowd == "honest" else "_noised"
            for k, number in ROUNDS.items():
                rng = np.random.default_rng([seed, k, round(1000 * epsilon), len(crowd)])
                shares = round_shares(number)
                plan = rounds(epsilon, crowd, DEVICES, shares, k)
                name = f"{epsilon:g}_k{k}{tail}"
                scores[name] = discovered(population, truth, plan, k, shipped, rng, verbose=verbose)
                if not quick:
                    scores[f"{name}_flat"] = discovered(population, truth, plan, k, flat, rng)
                if verbose:
                    print(seed, name, scores[name], flush=True)
            rng = np.random.default_rng([seed, 9, round(1000 * epsilon), len(crowd)])
            plan = rounds(epsilon, crowd, DEVICES, (1.0,), 1)
            scores[f"{epsilon:g}_static{tail}"] = discovered(
                population, truth, plan, 1, shipped, rng
            )
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="one flat object as the last line")
    parser.add_argument("--data", type=Path, help="a CSV file with the columns device,text")
    parser.add_argument("--language", default="en", help="of the shipped character model")
    parser.add_argument("--text", choices=("irc", *GENERATED), default="irc")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one seed, honest crowds only")
    parser.add_argument("--verbose", action="store_true", help="say what every round missed")
    options = parser.parse_args()
    begin = time.perf_counter()
    generated = options.text in GENERATED and options.data is None
    rows = GENERATED[options.text]() if generated else messages(options.data)
    population, model = WordHolders.of(rows), CharacterModel.shipped(options.language)
    seeds = 1 if options.quick else options.seeds
    runs = [
        one_seed(population, seed, model, quick=options.quick, verbose=options.verbose)
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
    ]
    found: dict[str, float] = {}
    for name in runs[0]:
        for metric in runs[0][name]:
            values = [run[name][metric] for run in runs]
            found[f"{metric}_{name}"] = float(np.mean(values))
            if len(values) > 1:
                found[f"{metric}_{name}_se"] = float(np.std(values, ddof=1)) / math.sqrt(len(runs))
    print(f"{'epsilon, reports':24}{'top 100':>9}{'top 1,000':>11}{'found':>8}{'false':>7}")
    for name in runs[0]:
        row = [found[f"{metric}_{name}"] for metric in runs[0][name]]
        print(f"{name:24}{row[0]:9.3f}{row[1]:11.3f}{row[2]:8.0f}{row[3]:7.2f}")
    for metric in ("found_top_100", "recall_top_1000"):
        found[metric] = found[f"{metric}_{EPSILONS[0]:g}_k1"]
    found["seconds"] = time.perf_counter() - begin
    print(f"{seeds} seeds in {found['seconds']:.0f} s")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
