"""What the demo can show: for each algorithm, its people, its questions, and the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from chorister.encoding import Grid, split_words
from chorister.errors import CohortTooSmall
from chorister.fleet.people import AREAS, COMMUTES, VOCABULARY, Person
from chorister.recipe import Recipe

if TYPE_CHECKING:
    from chorister.analyst.algorithms.algorithm_run import AlgorithmRun, Step
    from chorister.analyst.result import Result
    from chorister.analyst.study import Study
    from chorister.analyst.trend import Trend


class DemoAlgorithm(StrEnum):
    """What `chorister demo --algorithm` accepts."""

    NGRAMS = "ngrams"
    WORDS = "words"
    HEATMAP = "heatmap"
    DISTRIBUTION = "distribution"
    CROSSTAB = "crosstab"
    TREND = "trend"


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """One row of the result, next to the truth, which only a simulation knows."""

    label: str
    round: int
    estimate: float
    std_error: float
    ci_low: float
    ci_high: float
    truth: float

    @property
    def covered(self) -> bool:
        """Whether the interval contains the truth."""
        return self.ci_low <= self.truth <= self.ci_high


@dataclass(frozen=True, kw_only=True, eq=False)
class ScenarioRound:
    """One round with the people who answered it."""

    result: Result
    people: Sequence[Person]

    def truth(self) -> NDArray[np.float64]:
        """How many of these people are in each bin.

        A person with several rows reports one of them at random, so they count as fractions that
        add up to one.
        """
        recipe = self.result.recipe
        encoding, rows_of = recipe.encoding, reader(recipe)
        counted = np.zeros(encoding.size)
        for person in self.people:
            bins = np.array(encoding.find(rows_of(person)), dtype=np.int64)
            if len(bins):
                hits = bins[bins > 0] if (bins > 0).any() else bins
                np.add.at(counted, hits, 1.0 / len(hits))
            else:
                counted[0] += 1.0
        return counted


def reader(recipe: Recipe) -> Callable[[Person], dict[str, list[Any]]]:
    """Return a function from a person to the rows of the query, which is simple in the demo."""
    wanted = recipe.encoding.columns
    if wanted == ("ngram",):
        length = max(len(split_words(label)) for label in _texts(recipe))
        return lambda person: {"ngram": _grams(person, length)}
    if wanted == ("beginning",):
        length = max(map(len, _texts(recipe)))
        return lambda person: {"beginning": _beginnings(person, length)}
    return lambda person: _fields(person, wanted)


def _grams(person: Person, length: int) -> list[Any]:
    grams: list[Any] = []
    for row in person.streams["keyboard"]:
        words = split_words(str(row["text"]))
        grams += [" ".join(words[i : i + length]) for i in range(len(words) - length + 1)]
    return grams


def _beginnings(person: Person, length: int) -> list[Any]:
    from chorister.analyst.algorithms.character_model import END

    typed = " ".join(str(row["text"]) for row in person.streams["keyboard"])
    return [(word + END)[:length] for word in sorted(set(split_words(typed)))]


def _fields(person: Person, wanted: Sequence[str]) -> dict[str, list[Any]]:
    tables = [*person.streams.values(), *((row,) for row in person.profiles.values())]
    rows = next(rows for rows in tables if set(wanted) <= set(rows[0]))
    return {column: [row[column] for row in rows] for column in wanted}


def _texts(recipe: Recipe) -> Sequence[str]:
    feature: Any = recipe.features[0]
    return [str(text) for text in getattr(feature, "values", None) or feature.vocabulary]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """How the demo shows one algorithm."""

    question: str
    people: str
    analysis: str
    least_devices: int
    run: Callable[[Study, int], AlgorithmRun[Any] | TrendRun]
    rows: Callable[[Any, Sequence[ScenarioRound]], list[Estimate]]
    staged: bool = False  # whether earlier rounds only lead to what is asked last


def _ngrams(study: Study, devices: int) -> AlgorithmRun[Any]:
    from chorister.analyst.algorithms.ngrams import discover_ngrams

    # With three rounds, the first cohort is a small share of all, and must still hide everybody.
    depth = 3 if devices >= 1200 else 2
    return discover_ngrams(study, VOCABULARY, max_n=depth, cohorts="disjoint")


def _ngram_rows(found: Any, rounds: Sequence[ScenarioRound]) -> list[Estimate]:  # noqa: ANN401 (`Ngrams`)
    columns = found.columns()
    truths = [
        dict(zip(_bin_labels(each.result), each.truth().tolist(), strict=True)) for each in rounds
    ]
    return [
        Estimate(
            label=str(label),
            round=int(columns["n"][i]),
            truth=truths[int(columns["n"][i]) - 1][str(label)],
            **{name: float(columns[name][i]) for name in _NUMBERS},
        )
        for i, label in enumerate(columns["ngram"])
    ]


def _words(study: Study, devices: int) -> AlgorithmRun[Any]:
    from chorister.analyst.algorithms.words import discover_words

    rounds = 3 if devices >= 1200 else 2
    return discover_words(study, rounds=rounds, most_candidates=2_000, cohorts="disjoint")


def _word_rows(found: Any, rounds: Sequence[ScenarioRound]) -> list[Estimate]:  # noqa: ANN401 (`Words`)
    from chorister.analyst.algorithms.character_model import END

    columns = found.columns()
    truths = [
        dict(zip(_bin_labels(each.result), each.truth().tolist(), strict=True)) for each in rounds
    ]
    return [
        Estimate(
            label=word,
            round=int(columns["round"][i]),
            truth=truths[int(columns["round"][i]) - 1][word + END],
            **{name: float(columns[name][i]) for name in _NUMBERS},
        )
        for i, word in enumerate(columns["word"])
    ]


_NUMBERS: Final = ("estimate", "std_error", "ci_low", "ci_high")


def _bin_labels(result: Result) -> list[str]:
    feature = result.recipe.features[0]
    if isinstance(feature, Grid):  # coordinates say more than the number of a cell
        return [feature.label(0), *(_place(feature, i) for i in range(1, feature.size))]
    labels = [" · ".join(each) for each in zip(*result.labels.values(), strict=True)]
    return [label.strip() for label in labels]


def _place(grid: Grid, index: int) -> str:
    x0, y0, x1, y1 = grid.rectangle(index)
    return f"{x0:.2f} – {x1:.2f}, {y0:.2f} – {y1:.2f}"


def _last_round(_: Any, rounds: Sequence[ScenarioRound]) -> list[Estimate]:  # noqa: ANN401
    """Every cell of the last round, as released."""
    last = rounds[-1]
    columns, truth = last.result.columns(), last.truth()
    return [
        Estimate(
            label=label,
            round=len(rounds),
            truth=float(truth[i]),
            **{name: float(columns[name][i]) for name in _NUMBERS},
        )
        for i, label in enumerate(_bin_labels(last.result))
    ]


def _heatmap(study: Study, _: int) -> AlgorithmRun[Any]:
    from chorister.analyst.algorithms.heatmap import heatmap

    return heatmap(study, ("longitude", "latitude"), (-5, 42, 9, 52), depth=5, cohorts="disjoint")


def _distribution(study: Study, _: int) -> AlgorithmRun[Any]:
    from chorister.analyst.algorithms.distribution import distribution

    return distribution(study, "score", 0, 100, cohorts="disjoint")


def _crosstab(study: Study, _: int) -> AlgorithmRun[Any]:
    from chorister.analyst.algorithms.crosstab import crosstab
    from chorister.analyst.request import categories

    rows, columns = categories("area", AREAS), categories("commute", COMMUTES)
    return crosstab(study, rows, columns, cohorts="disjoint")


class TrendRun:
    """One question in a few windows: iterate over them like over an algorithm's rounds."""

    def __init__(self, study: Study, devices: int) -> None:
        from chorister.analyst.request import categories

        # Each window is as long as all devices need to poll.
        every = max(_SHORTEST_WINDOW_SECONDS, devices // 40)
        feature = categories("commute", COMMUTES)
        self._plan = study.track(feature, every=every, windows=_WINDOWS, grace="10m")
        self.result: Trend | None = None

    def __iter__(self) -> Iterator[Step]:
        from chorister.analyst.algorithms.algorithm_run import Step

        track = self._plan.ask()
        for number in range(_WINDOWS):
            self.result = trend = track.collect(up_to=number + 1, bar=False)
            if number not in trend.results:
                least = self._plan.question.privacy.min_cohort
                why = trend.failed.get(number, f"window {number} has no result")
                raise CohortTooSmall(why, reports=None, needed=least)
            yield Step(
                number=number + 1, question=self._plan.question, result=trend.results[number],
                draw=trend.plot,
            )  # fmt: skip


def _trend_rows(_: Any, rounds: Sequence[ScenarioRound]) -> list[Estimate]:  # noqa: ANN401 (`Trend`)
    """How many went by bike, window by window."""
    found = []
    for number, each in enumerate(rounds):
        at = _bin_labels(each.result).index("bike")
        columns = each.result.columns()
        found.append(
            Estimate(
                label=f"bike, window {number}",
                round=number + 1,
                truth=float(each.truth()[at]),
                **{name: float(columns[name][at]) for name in _NUMBERS},
            )
        )
    return found


_WINDOWS: Final = 4
_SHORTEST_WINDOW_SECONDS: Final = 40

SCENARIOS: Final[Mapping[DemoAlgorithm, Scenario]] = {
    DemoAlgorithm.NGRAMS: Scenario(
        question="Which phrases do many people type?",
        people="phrases",
        analysis="keyboard.phrases",
        least_devices=500,
        run=_ngrams,
        rows=_ngram_rows,
        staged=True,
    ),
    DemoAlgorithm.WORDS: Scenario(
        question="Which words do many people type that are on no list?",
        people="phrases",
        analysis="keyboard.phrases",
        least_devices=500,
        run=_words,
        rows=_word_rows,
    ),
    DemoAlgorithm.HEATMAP: Scenario(
        question="Where are many people?",
        people="places",
        analysis="visits.map",
        least_devices=1200,
        run=_heatmap,
        rows=_last_round,
    ),
    DemoAlgorithm.DISTRIBUTION: Scenario(
        question="How are scores distributed?",
        people="profiles",
        analysis="user.profile",
        least_devices=500,
        run=_distribution,
        rows=_last_round,
    ),
    DemoAlgorithm.CROSSTAB: Scenario(
        question="How do people get to work, by where they live?",
        people="profiles",
        analysis="user.profile",
        least_devices=400,
        run=_crosstab,
        rows=_last_round,
    ),
    DemoAlgorithm.TREND: Scenario(
        question="How many people go to work by bike, window by window?",
        people="profiles",
        analysis="user.profile",
        least_devices=400,
        run=TrendRun,
        rows=_trend_rows,
    ),
}
