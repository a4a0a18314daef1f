"""n-grams of known words: one static question against rounds that follow what was found.

Devices are drawn with repetition from a file of messages (device,text). The analyst knows 1,000
words and wants 3-grams. Metrics: how many true 3-grams are reported, with at most one false one
expected (`found`), and how many of the 100 that most devices hold are among them (`recall`).

Static: every device reports one of its 3-grams over all words^3 cells, which nobody could send; and
the best of smaller vocabularies, chosen with hindsight (`static`), and the same read with the fit
(`static_fit`). Interactive: words, pairs, 3-grams; see
`chorister.analyst.algorithms.ngram_rules`. Both cost any one device the same epsilon at delta 1e-6,
by exact accounting: `k1` one report per device (disjoint cohorts), `k3` three. `limit` is a domain
of 10,000 bins; `lists` deals the pairs as four lists under it, each to other devices.
In the last round a device either reports any one of the candidates that it holds
(`uniform`) or draws some of its n-grams and reports the least expected of them (`selection first`
in the recipe's order); the keys without a word are of the former, `_first` of the latter.

    python benchmarks/accuracy_ngrams.py [--json] [--data FILE] [--seeds 20] [--pictures FOLDER]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, poisson

from _budgets import RoundNoise, one_question, rounds
from _phrases import Corpus, Ints, messages, report
from chorister.analyst.algorithms.ngram_rules import (
    LEAST_BEFORE_LAST,
    MAX_EXTENDED,
    Ranked,
    above_noise,
    dealt_shares,
    extend,
    largest,
    lists_by_length,
    posterior_means,
    stratified_means,
    worth_asking,
)
from chorister.analyst.algorithms.ngrams import round_shares

WORDS = 1_000
DEVICES = 1_000_000
EPSILONS = (0.15, 0.5)
CROWDS = ("honest", "noised")
LIMIT = 10_000
LISTS = 4  # for different devices, of so many bins each
FIRST_SEED = 1_000  # rules were chosen on seeds below
MOST = 999_999  # candidates where there is no limit: what one report can encode
LIKELY_WORDS = 100  # of each place, when a static question is read with the fit
TRIPLES = 30_000  # and in the last round, where more of them only take reports away
DRAWN = 24  # n-grams that a device draws in the last round
GRIDS = (12, 16, 21, 50, 100, 150, 200, 300, 1_000)  # words of static grids

Score: TypeAlias = dict[str, float]


@dataclass(frozen=True, eq=False)
class NgramTruth:
    """Of one population: who is there, which 3-grams exist, which are the most widespread."""

    answering: Ints
    exists: Ints
    top: Ints

    @classmethod
    def of(cls, corpus: Corpus, seed: int) -> NgramTruth:
        answering = corpus.resampled(DEVICES, np.random.default_rng([seed, 0]))
        held = corpus.held[3]
        often = np.bincount(answering, minlength=corpus.devices)
        devices = np.bincount(held.grams, often[held.owners], len(held.codes))
        top = np.argsort(-devices, kind="stable")[:100]
        return cls(answering, held.codes[devices > 0], held.codes[top])

    def score(self, found: Ints) -> Score:
        at = np.minimum(np.searchsorted(self.exists, found), len(self.exists) - 1)
        true = float((self.exists[at] == found).sum())
        return {
            "found": true,
            "false": len(found) - true,
            "recall": float(np.isin(self.top, found).mean()),
        }


def grid(
    corpus: Corpus, truth: NgramTruth, words: int, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """The 3-grams of the most widespread words, and how many devices report each."""
    held = corpus.held[3]
    all_ = len(corpus.vocabulary)
    codes = held.codes
    inside = (codes // all_**2 < words) & (codes // all_ % all_ < words) & (codes % all_ < words)
    cells = codes[inside]
    counts = report(held, cells, truth.answering, rng)
    return cells[counts > 0], counts[counts > 0]


def static(
    truth: NgramTruth,
    round_: RoundNoise,
    words: int,
    held: tuple[Ints, Ints],
    rng: np.random.Generator,
) -> Score:
    """One question to everybody about all 3-grams of some words."""
    cells, counts = held
    sums = round_.draw(counts, rng)
    candidates = words**3
    found = cells[
        above_noise(sums, trials=round_.trials, q=round_.randomizer.q, candidates=candidates)
    ]
    score = truth.score(found)
    # Cells that nobody reported are too many to draw one by one.
    tail = float(binom.sf(binom.isf(1.0 / candidates, round_.trials, round_.randomizer.q),
                          round_.trials, round_.randomizer.q))  # fmt: skip
    score["false"] += float(rng.poisson((candidates - len(cells)) * tail))
    return score


def static_fitted(
    corpus: Corpus,
    truth: NgramTruth,
    round_: RoundNoise,
    words: int,
    held: tuple[Ints, Ints],
    rng: np.random.Generator,
) -> Score:
    """The same question, read with the fit: likely cells are held to a lower bar.

    Every place's words have totals of their own in the same answers; their posterior means say
    which cells are likely, as the rounds do. Half of the one false discovery that is allowed goes
    to these cells, half to all. A cell's own share of its words' totals is neglected, which favours
    this competitor.
    """
    cells, counts = held
    all_ = len(corpus.vocabulary)
    digits = [cells // all_ ** (2 - place) % all_ for place in range(3)]
    spread = round_.sigma * words
    shares, chosen = [], []
    for digit in digits:
        totals = np.bincount(digit, counts, words) + spread * rng.standard_normal(words)
        means = posterior_means(totals, spread)
        best = np.argsort(-means, kind="stable")[:LIKELY_WORDS]
        chosen.append(best)
        shares.append(means[best])
    products = (shares[0][:, None, None] * shares[1][:, None] * shares[2]).ravel()
    size = min(TRIPLES, len(products))
    at = np.unravel_index(
        np.argpartition(-products, size - 1)[:size], tuple(map(len, chosen))
    )  # fmt: skip
    likely = (chosen[0][at[0]] * all_ + chosen[1][at[1]]) * all_ + chosen[2][at[2]]
    sums = round_.draw(counts, rng)
    inside = np.isin(cells, likely)

    def above(candidates: int) -> NDArray[np.bool_]:
        return above_noise(sums, trials=round_.trials, q=round_.randomizer.q, candidates=candidates)

    found = np.where(inside, above(2 * size), above(2 * words**3))
    return truth.score(cells[found])


def interactive(
    corpus: Corpus,
    truth: NgramTruth,
    plan: tuple[RoundNoise, ...],
    k: int,
    limit: int | None,
    rng: np.random.Generator,
    lists: int = 1,
) -> dict[str, Score]:
    """Three rounds; the last one in both ways, after the same first two.

    With several `lists`, `plan` has as many rounds for pairs, each for other devices.
    """
    if lists > 1:
        return {"uniform": dealt(corpus, truth, plan, limit or MOST, rng, lists)}
    words = len(corpus.vocabulary)
    ends = np.cumsum([each.reports for each in plan])
    cohorts = np.split(truth.answering[: ends[-1]], ends[:-1]) if k == 1 else [truth.answering] * 3
    first, second, third = plan
    most_pairs, most_triples = (limit - 1, limit - 1) if limit else (MOST, TRIPLES)

    asked = np.arange(words)
    seen = first.estimates(first.draw(report(corpus.held[1], asked, cohorts[0], rng), rng))
    known = Ranked(asked, posterior_means(seen, first.sigma) / first.reports)

    pairs = worth_asking(
        extend(known, words, 1, most_pairs), reports=second.reports, sigma=second.sigma,
        most=most_pairs, least=LEAST_BEFORE_LAST,
    )  # fmt: skip
    seen = second.estimates(second.draw(report(corpus.held[2], pairs.codes, cohorts[1], rng), rng))
    shares = stratified_means(seen, second.sigma, pairs.shares) / second.reports
    known = largest(Ranked(pairs.codes, shares), MAX_EXTENDED)

    triples = extend(known, words, 2, most_triples)
    triples = worth_asking(
        triples, reports=third.reports, sigma=third.sigma, most=most_triples
    ).rarest_first()
    scores = {}
    for name, drawn in (("first", DRAWN), ("uniform", None)):
        sums = third.draw(report(corpus.held[3], triples.codes, cohorts[2], rng, drawn=drawn), rng)
        found = above_noise(
            sums, trials=third.trials, q=third.randomizer.q, candidates=len(triples)
        )
        scores[name] = truth.score(triples.codes[found])
    return scores


def dealt(
    corpus: Corpus,
    truth: NgramTruth,
    plan: tuple[RoundNoise, ...],
    limit: int,
    rng: np.random.Generator,
    lists: int,
) -> Score:
    """Pairs as several lists, each of at most `limit` bins, to different devices."""
    words = len(corpus.vocabulary)
    ends = np.cumsum([each.reports for each in plan])
    cohorts = np.split(truth.answering[: ends[-1]], ends[:-1])
    asked = np.arange(words)
    seen = plan[0].estimates(plan[0].draw(report(corpus.held[1], asked, cohorts[0], rng), rng))
    known = Ranked(asked, posterior_means(seen, plan[0].sigma) / plan[0].reports)
    found: list[Ints] = []
    for n, number, first in ((2, lists, 1), (3, 1, 1 + lists)):
        least = {"least": LEAST_BEFORE_LAST} if n == 2 else {}
        candidates = worth_asking(
            extend(known, words, n - 1, number * (limit - 1)), reports=plan[first].reports,
            sigma=plan[first].sigma, most=number * (limit - 1), **least,
        ).rarest_first()  # fmt: skip
        parts = [candidates.take(np.arange(i, len(candidates), number)) for i in range(number)]
        shares = []
        for i, part in enumerate(parts):
            round_ = plan[first + i]
            sums = round_.draw(report(corpus.held[n], part.codes, cohorts[first + i], rng), rng)
            means = stratified_means(round_.estimates(sums), round_.sigma, part.shares)
            shares.append(means / round_.reports)
            if n == 3:
                above = above_noise(
                    sums, trials=round_.trials, q=round_.randomizer.q, candidates=len(candidates)
                )
                found.append(part.codes[above])
        codes = np.concatenate([part.codes for part in parts])
        known = largest(Ranked(codes, np.concatenate(shares)), MAX_EXTENDED)
    return truth.score(np.concatenate(found))


def one_seed(corpus: Corpus, seed: int) -> dict[str, Score]:
    """Every column of the table, on one population."""
    truth = NgramTruth.of(corpus, seed)
    scores: dict[str, Score] = {}
    rng = np.random.default_rng([seed, 2])
    grids = {
        words: grid(corpus, truth, words, rng) for words in GRIDS if words <= len(corpus.vocabulary)
    }
    for epsilon in EPSILONS:
        for crowd in CROWDS:
            rng = np.random.default_rng([seed, 1, round(1000 * epsilon), len(crowd)])
            once = one_question(epsilon, crowd, DEVICES)
            for words, held in grids.items():
                scores[f"static{words} {crowd} {epsilon}"] = static(truth, once, words, held, rng)
                scores[f"fitted{words} {crowd} {epsilon}"] = static_fitted(
                    corpus, truth, once, words, held, rng
                )
            for k in (1, 3):
                shares = round_shares(3, "disjoint" if k == 1 else "everyone")
                plan = rounds(epsilon, crowd, DEVICES, shares, k)
                for limit in (None, LIMIT):
                    both = interactive(corpus, truth, plan, k, limit, rng)
                    for way, score in both.items():
                        tail = " limit" if limit else ""
                        scores[f"{way} k{k} {crowd}{tail} {epsilon}"] = score
            shares = dealt_shares(round_shares(3, "disjoint"), lists_by_length(3, LISTS))
            plan = rounds(epsilon, crowd, DEVICES, shares, 1)
            score = interactive(corpus, truth, plan, 1, LIMIT, rng, LISTS)["uniform"]
            scores[f"uniform k1 {crowd} limit lists {epsilon}"] = score
    return scores


_CORPUS: list[Corpus] = []


def _load(path: Path | None, split: str) -> None:
    _CORPUS[:] = [Corpus.of(messages(path, split), WORDS, 3)]


def _run(seed: int) -> dict[str, Score]:
    return one_seed(_CORPUS[0], seed)


class Table:
    """Means and standard errors over the seeds."""

    def __init__(self, runs: Iterable[dict[str, Score]]) -> None:
        self.runs = list(runs)

    def mean(self, name: str, metric: str) -> float:
        return float(np.mean([run[name][metric] for run in self.runs]))

    def error(self, name: str, metric: str) -> float:
        values = [run[name][metric] for run in self.runs]
        return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0

    def best_static(
        self, metric: str, crowd: str, epsilon: float, limit: int | None, kind: str = "static"
    ) -> str:
        names = [
            name
            for words in GRIDS
            if (limit is None or words**3 <= limit)
            and (name := f"{kind}{words} {crowd} {epsilon}") in self.runs[0]
        ]
        return max(names, key=lambda name: self.mean(name, metric))


def keys(table: Table) -> dict[str, float]:
    """The flat object of numbers."""
    found: dict[str, float] = {}
    for epsilon in EPSILONS:
        eps = f"{epsilon:g}"
        for crowd in CROWDS:
            crowded = "" if crowd == "honest" else "_noised"
            for limit, limited in ((None, ""), (LIMIT, "_limit")):
                for metric in ("found", "recall"):
                    for kind, fit in (("static", ""), ("fitted", "_fit")):
                        best = table.best_static(metric, crowd, epsilon, limit, kind)
                        key = f"static{fit}_{metric}_{eps}{crowded}{limited}"
                        found[key] = table.mean(best, metric)
                        found[f"{key}_se"] = table.error(best, metric)
                    for k in (1, 3):
                        tail = f"k{k} {crowd}{' limit' if limit else ''} {epsilon}"
                        for way, suffix in (("uniform", ""), ("first", "_first")):
                            key = f"interactive_{metric}_{eps}_k{k}{crowded}{limited}{suffix}"
                            found[key] = table.mean(f"{way} {tail}", metric)
                            found[f"{key}_se"] = table.error(f"{way} {tail}", metric)
            name = f"uniform k1 {crowd} limit lists {epsilon}"
            for metric in ("found", "recall"):
                key = f"lists_{metric}_{eps}_k1{crowded}_limit"
                found[key] = table.mean(name, metric)
                found[f"{key}_se"] = table.error(name, metric)
            whole = f"static{WORDS} {crowd} {epsilon}"
            if whole in table.runs[0]:
                for metric in ("found", "recall"):
                    found[f"static_{metric}_{eps}{crowded}_all_words"] = table.mean(whole, metric)
    return found


def show(table: Table, found: dict[str, float]) -> None:
    """The table for people."""
    print(f"{'':34}" + "".join(f"{f'eps {e:g}: found':>18}{'recall':>9}" for e in EPSILONS))

    def line(title: str, name: str) -> None:
        cells = ""
        for epsilon in EPSILONS:
            at = name.format(eps=epsilon)
            cells += f"{table.mean(at, 'found'):12.0f} ± {table.error(at, 'found'):3.0f}"
            cells += f"{table.mean(at, 'recall'):9.3f}"
        print(f"{title:34}{cells}")

    for crowd in CROWDS:
        print(f"{crowd} crowd")
        if f"static{WORDS} {crowd} {EPSILONS[0]}" in table.runs[0]:
            line(f"  static, {WORDS}^3 cells", f"static{WORDS} {crowd} {{eps}}")
        for limit, title in ((None, "any domain"), (LIMIT, f"at most {LIMIT:,} bins")):
            for fit, how in (("", "best grid"), ("_fit", "with fit")):
                cells = ""
                for epsilon in EPSILONS:
                    eps = f"{epsilon:g}" + ("" if crowd == "honest" else "_noised")
                    eps += "_limit" if limit else ""
                    cells += f"{found[f'static{fit}_found_{eps}']:12.0f}      "
                    cells += f"{found[f'static{fit}_recall_{eps}']:9.3f}"
                print(f"{f'  static, {how}, {title}':34}{cells}")
            for k in (1, 3):
                for way in ("uniform", "first"):
                    tail = " limit" if limit else ""
                    line(f"  k={k}, {way}, {title}", f"{way} k{k} {crowd}{tail} {{eps}}")
        line(f"  k=1, {LISTS} lists of pairs", f"uniform k1 {crowd} limit lists {{eps}}")
    show_false(table)
    for epsilon in EPSILONS:
        for k in (1, 3):
            a, b = (
                found[f"interactive_recall_{epsilon:g}_k{k}{limit}"] for limit in ("", "_limit")
            )
            print(f"eps {epsilon:g}, k={k}: the limit of {LIMIT:,} bins costs {a - b:.3f} recall")
    lost = []
    for key, value in found.items():
        if not key.startswith("interactive_") or key.endswith("_se"):
            continue
        metric, eps, _, *rest = key.removeprefix("interactive_").split("_")
        tail = "".join(f"_{each}" for each in rest if each != "first")
        for fit in ("", "_fit"):
            static_ = f"static{fit}_{metric}_{eps}{tail}"
            error = math.hypot(found[f"{key}_se"], found[f"{static_}_se"])
            if value <= found[static_] + 2.0 * error:
                lost.append(f"{key} {value:.3f} against {static_} {found[static_]:.3f}")
    print("not beaten by two standard errors: " + ("; ".join(lost) if lost else "nothing"))


def show_false(table: Table) -> None:
    """At most one is expected in a run; the worst of many columns has more, by chance."""
    seeds = len(table.runs)
    means = [
        table.mean(name, "false") for name in table.runs[0] if not name.startswith("fitted")
    ]  # of fitted grids only cells that somebody holds are drawn
    limit = float(poisson.isf(0.01 / len(means), seeds)) / seeds
    print(
        f"false 3-grams per run: {np.mean(means):.2f} on average over {len(means)} columns, "
        f"{max(means):.2f} in the worst; of so many columns with one each on average, the worst "
        f"stays below {limit:.2f} in 99 of 100 cases"
    )


def picture(found: dict[str, float], folder: Path) -> None:
    """Bars: found 3-grams, static and interactive."""
    import altair as alt

    rows = [
        {"epsilon": f"epsilon {e:g}", "how": title, "found": found[key.format(f"{e:g}")]}
        for e in EPSILONS
        for title, key in (
            ("static, best grid", "static_found_{}"),
            ("k = 1, uniform", "interactive_found_{}_k1"),
            ("k = 1, least expected first", "interactive_found_{}_k1_first"),
            ("k = 3, uniform", "interactive_found_{}_k3"),
            ("k = 3, least expected first", "interactive_found_{}_k3_first"),
        )
    ]
    bars = alt.Chart(alt.InlineData(values=rows)).encode(
        y=alt.Y("how:N", sort=None, title=None),
        x=alt.X("found:Q", title="3-grams found (at most one false expected)"),
    )
    chart = alt.layer(
        bars.mark_bar().encode(color=alt.Color("how:N", sort=None, legend=None)),
        bars.mark_text(align="left", dx=4).encode(text=alt.Text("found:Q", format=",.0f")),
    ).properties(width=360).facet(row=alt.Row("epsilon:N", title=None))  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    chart.save(folder / "accuracy_ngrams.png", scale_factor=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="one flat object as the last line")
    parser.add_argument("--data", type=Path, help="a CSV file with the columns device,text")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--pictures", type=Path, help="a folder for pictures")
    parser.add_argument(
        "--split", choices=("words", "whitespace"), default="words",
        help="how text is cut: as devices do (tokenisation 1), or at white space",
    )  # fmt: skip
    options = parser.parse_args()
    begin = time.perf_counter()
    with ProcessPoolExecutor(2, initializer=_load, initargs=(options.data, options.split)) as pool:
        table = Table(pool.map(_run, range(FIRST_SEED, FIRST_SEED + options.seeds)))
    found = keys(table)
    show(table, found)
    found["seconds"] = time.perf_counter() - begin
    print(f"{options.seeds} seeds in {found['seconds']:.0f} s")
    if options.pictures:
        picture(found, options.pictures)
    if options.json:
        # Three reports per device are the headline: `interactive_METRIC_EPS`.
        headline = {key.replace("_k3", ""): value for key, value in found.items() if "_k3" in key}
        print(json.dumps(found | headline))


if __name__ == "__main__":
    main()
