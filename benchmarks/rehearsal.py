"""How long a rehearsal takes, against counting the truth alone.

`result_over_polars_counts`: events of 1e6 devices in, the n-grams up to 4 words that
`discover_ngrams` finds out, in one run; over what polars needs to count all n-grams in the same
events, the best of three turns each. The devices are drawn from a file of messages (device,text),
one message each.
`devices_1e8_over_1e4`: one question from given counts, 1e8 over 1e4 devices.

    python benchmarks/rehearsal.py [--json] [--data FILE] [--devices N]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import chorister as ch
from chorister.analyst.algorithms.ngrams import discover_ngrams
from chorister.policy import Policy

DATA = Path(__file__).parents[2] / "shared" / "data" / "irc_messages.csv.gz"
POLICY = Path(__file__).parents[1] / "examples" / "keyboard" / "policy.toml"
ANALYSIS = "keyboard.next-word"
KNOWN_WORDS = 1_000
LONGEST = 4
REPEATS = 15
TURNS = 3
WORD = "[a-z0-9]+(?:'[a-z0-9]+)*"


def policy() -> Policy:
    """The keyboard's, without a limit that a benchmark would meet."""
    given = Policy.load(POLICY)
    analysis = given.analyses[ANALYSIS]
    wide = analysis.model_copy(
        update={"max_bins": 100_000, "functions": ("ngrams",), "max_cells": 10}
    )
    return given.model_copy(update={"analyses": {ANALYSIS: wide}})


def messages(path: Path) -> pl.DataFrame:
    """A file of messages, or generated ones where there is none."""
    if path.exists():
        return pl.read_csv(path).drop_nulls().select("text")
    print(f"{path} is not there: messages are generated")
    rng = random.Random(1)  # noqa: S311 (synthetic data)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 8))) for _ in range(20_000)]
    weights = [1 / (rank + 5) for rank in range(len(words))]
    return pl.DataFrame(
        {
            "text": [
                " ".join(rng.choices(words, weights, k=rng.randint(1, 20))) for _ in range(10**5)
            ]
        }
    )


def polars_counts(events: pl.DataFrame) -> list[pl.DataFrame]:
    """The true counts of all n-grams, n = 1 to 4, straight from the events."""
    words = (
        events.lazy()
        .select(pl.col("ngram").str.to_lowercase().str.extract_all(WORD).alias("w0"))
        .with_row_index("row")
        .explode("w0")
        .drop_nulls()
        .collect()
    )
    found = []
    for n in range(1, LONGEST + 1):
        names = [f"w{i}" for i in range(n)]
        shifted = [pl.col("w0").shift(-i).alias(f"w{i}") for i in range(1, n)]
        found.append(
            words.lazy()
            .with_columns(*shifted, last=pl.col("row").shift(1 - n))
            .filter(pl.col("row") == pl.col("last"))
            .group_by(names)
            .len()
            .collect()
        )
    return found


def events_to_result(events: pl.DataFrame, vocabulary: list[str]) -> dict[str, float]:
    """Seconds of every part of one run."""
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    fleet = ch.rehearse(events, policy(), seed=1)
    study = fleet.study("speed", analysis=ANALYSIS)
    seconds["population"] = time.perf_counter() - start
    last = time.perf_counter()
    run = discover_ngrams(study, vocabulary, max_n=LONGEST, field="keyboard.ngram")
    for step in run:
        seconds[f"round {step.number}"] = time.perf_counter() - last
        last = time.perf_counter()
    found = run.result
    seconds["result"] = time.perf_counter() - last
    seconds["all"] = time.perf_counter() - start
    sizes = [len(found.found(n)) for n in range(1, found.depth + 1)]
    print(f"{found.depth} rounds, n-grams found: {sizes}")
    return seconds


def n_grams(data: Path, devices: int) -> dict[str, float]:
    rng = np.random.default_rng(1)
    texts = messages(data)
    chosen = texts[rng.integers(0, len(texts), devices)]
    events = chosen.select(pl.int_range(pl.len()).alias("device"), pl.col("text").alias("ngram"))
    # Warm both: imports and first calls are nobody's work.
    polars_counts(events[:1000])
    small = ch.rehearse({"ngram": ["a b"], "count": [10**6]}, policy()).study("warm")
    discover_ngrams(small, ["a", "b"], max_n=2, field="keyboard.ngram").result.found()
    counting, runs = [], []
    for _ in range(TURNS):  # in turns: what disturbs one disturbs the other
        start = time.perf_counter()
        truth = polars_counts(events)
        counting.append(time.perf_counter() - start)
        words = truth[0].sort("len", descending=True)["w0"].head(KNOWN_WORDS).to_list()
        runs.append(events_to_result(events, words))
    truth_seconds, seconds = min(counting), min(runs, key=lambda run: run["all"])
    print(f"{devices:,} devices; polars counts 1- to 4-grams in {truth_seconds:.2f} s")
    for part, taken in seconds.items():
        print(f"  {part:12} {taken:8.2f} s   {taken / truth_seconds:6.2f}")
    return {"result_over_polars_counts": round(seconds["all"] / truth_seconds, 3)}


def from_counts() -> dict[str, float]:
    """One question of 1,000 bins: the numbers of devices differ, and nothing else."""
    ages = np.arange(1000)
    shares = 1 / (ages + 10)
    studies: dict[int, ch.Study] = {}
    for devices in (10**4, 10**8):
        counts = np.maximum(1, np.round(shares / shares.sum() * devices)).astype(np.int64)
        fleet = ch.rehearse({"age": ages, "count": counts}, policy(), seed=1)
        studies[devices] = fleet.study("counts")
    times: dict[int, list[float]] = {devices: [] for devices in studies}
    settings: dict[str, Any] = {"local_epsilon": 2, "epsilon": Decimal("0.3"), "min_cohort": 1000}
    for number in range(REPEATS):
        for devices, study in studies.items():
            # A fresh fleet each time: its population, and so its true counts, are known.
            fleet = ch.rehearse(study.fleet.population, policy(), seed=number)  # type: ignore[attr-defined]
            question = fleet.study("counts").histogram(ch.intervals("age", range(1000)), **settings)
            start = time.perf_counter()
            question.run()
            times[devices].append(time.perf_counter() - start)
    small, large = (statistics.median(times[devices]) for devices in (10**4, 10**8))
    print(f"one question from counts: {small * 1e3:.1f} ms for 1e4 devices, {large * 1e3:.1f} ms "
          f"for 1e8: {large / small:.2f}")  # fmt: skip
    return {"devices_1e8_over_1e4": round(large / small, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--devices", type=int, default=10**6)
    arguments = parser.parse_args()
    result = from_counts() | n_grams(arguments.data, arguments.devices)
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
