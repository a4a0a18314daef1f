"""Phrases that many devices hold, found word by word: words, pairs, triples, ...

Each round asks about a list of candidates that the earlier rounds made likely; see `ngram_rules`.
A list is sent as categories, one bin a candidate and one for everything else: any list fits, where
prefixes times a vocabulary would spend a domain of 10,000 bins on a hundred prefixes. The first
round is a prefix tree with nothing but the root.
"""

from __future__ import annotations

import html as escaping
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from chorister.analyst import tables
from chorister.analyst.algorithms import ngram_pictures
from chorister.analyst.algorithms.keeping import Kept
from chorister.analyst.algorithms.ngram_rules import (
    KEPT,
    LEAST_ON_THE_WAY,
    Ranked,
    check_vocabulary,
    extend,
    heard,
    largest,
    worth_asking,
)
from chorister.analyst.algorithms.posterior import stratified_means
from chorister.analyst.algorithms.running import Run, Step
from chorister.analyst.cohorts import Cohorts
from chorister.analyst.features import Real
from chorister.analyst.question import Question
from chorister.analyst.result import Result
from chorister.analyst.study import Study
from chorister.encoding import Categories, DenyList, PrefixTree, canonical_texts
from chorister.errors import InvalidInput
from chorister.policy import Crowd
from chorister.privacy import Mechanism
from chorister.privacy.randomizers import MAX_LENGTH

if TYPE_CHECKING:
    import altair
    import polars

__all__ = ["Ngrams", "discover_ngrams", "round_shares"]

_LONGEST: Final = 8
_COLUMN: Final = "ngram"
_DISJOINT: Final = {1: (1.0,), 2: (0.2, 0.8), 3: (0.05, 0.35, 0.6), 4: (0.06, 0.22, 0.28, 0.44)}
_EVERYONE: Final = {1: (1.0,), 2: (0.1, 0.9), 3: (0.05, 0.35, 0.6), 4: (0.04, 0.16, 0.3, 0.5)}


def round_shares(rounds: int, cohorts: Cohorts) -> tuple[float, ...]:
    """How much each round gets: of the devices, or of 1/sigma^2 where everyone answers."""
    known = _DISJOINT if cohorts == "disjoint" else _EVERYONE
    if rounds in known:
        return known[rounds]
    growing = 1.6 ** np.arange(rounds)
    return tuple((growing / growing.sum()).tolist())


@dataclass(frozen=True, kw_only=True, eq=False)
class Ngrams(Kept):
    """The phrases that were heard above the noise, round by round.

    An n-gram is reported if it lies above what chance gives one of all candidates of its round, so
    at most one false one a round is expected. Its estimate comes from its own round alone, and its
    interval holds for all candidates of that round at once (Bonferroni): both stay honest although
    the reported ones were chosen by what was heard.
    """

    FORMAT: ClassVar[str] = "chorister-ngrams-1"
    NOUN: ClassVar[str] = "saved n-grams"

    results: tuple[Result, ...]
    cohorts: Cohorts
    drawn: int | None = None
    """In the last round a device drew so many n-grams and reported the least expected one."""

    def __post_init__(self) -> None:
        if not self.results:
            raise InvalidInput("n-grams need at least one round")
        for n, result in enumerate(self.results, start=1):
            kind = PrefixTree if n == 1 else Categories
            if len(result.features) != 1 or not isinstance(result.features[0], kind):
                raise InvalidInput(f"round {n} is not about {n}-grams")
            if result.recipe.group_by:
                raise InvalidInput("n-grams are discovered without groups")

    @property
    def depth(self) -> int:
        """The longest n-grams asked about."""
        return len(self.results)

    @cached_property
    def _columns(self) -> dict[str, Any]:
        parts: dict[str, list[Any]] = {
            name: [] for name in
            ("n", "ngram", "estimate", "std_error", "ci_low", "ci_high", "share")
        }  # fmt: skip
        for n, result in enumerate(self.results, start=1):
            names, first = candidates_of(result)
            mask = heard_in(result)
            order = np.flatnonzero(mask)
            rows = result.rows.take(first + order)
            ends = rows.interval(
                result.confidence, candidates=len(names), step=result.recipe.randomizer.step
            )
            best = np.argsort(-rows.value, kind="stable")
            parts["n"].extend([n] * len(order))
            parts["ngram"].extend(names[int(i)] for i in order[best])
            parts["estimate"].append(rows.value[best])
            parts["std_error"].append(rows.std_error[best])
            parts["ci_low"].append(np.clip(ends.low[best], 0.0, result.n_reports))
            parts["ci_high"].append(np.clip(ends.high[best], 0.0, result.n_reports))
            parts["share"].append(rows.value[best] / result.n_reports)
        joined: dict[str, Any] = {"n": np.array(parts["n"], dtype=np.int64)}
        joined["ngram"] = parts["ngram"]
        for name in ("estimate", "std_error", "ci_low", "ci_high", "share"):
            joined[name] = np.concatenate(parts[name])
        return joined

    def columns(self) -> dict[str, Any]:
        """n, ngram, devices of that round's cohort with their interval, and their share of it."""
        return dict(self._columns)

    def found(self, n: int | None = None) -> list[str]:
        """The reported n-grams of one length (default: the longest), heaviest first."""
        wanted = self.depth if n is None else n
        return [
            name
            for name, length in zip(self._columns["ngram"], self._columns["n"], strict=True)
            if length == wanted
        ]

    def to_polars(self) -> polars.DataFrame:
        """As a polars frame, one row an n-gram."""
        return tables.to_polars(self.columns())

    def plot(self, *, top: int = 30) -> altair.LayerChart:
        """A tree of the heaviest n-grams, word by word from left to right."""
        return ngram_pictures.tree(self, top=top)

    def explain(self) -> str:
        """In words."""
        lines = []
        for n, result in enumerate(self.results, start=1):
            asked = len(candidates_of(result)[0])
            lines.append(
                f"{n}-grams: {len(self.found(n)):,} heard of {asked:,} asked about, by "
                f"{result.n_reports:,} devices at epsilon {result.epsilon}; an empty one reads 0 ± "
                f"{result.noise_sigma:,.1f} devices, and at most one false one is expected."
            )
        if self.cohorts == "disjoint":
            lines.append("Every device answered one of the rounds at most.")
        if self.drawn is not None:
            lines.append(
                f"In the last round a device drew {self.drawn} of its {self.depth}-grams and "
                "reported the least expected one: more are found, but their numbers say how many "
                "devices reported them so, not how frequent they are."
            )
        lines.append(
            "Estimates are of devices that reported the n-gram in its own round; intervals "
            f"({self.results[-1].confidence:.0%}) are of the noise and hold for all candidates of "
            "a round at once."
        )
        return "\n".join(lines)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{len(self.found(n + 1)):,}" for n in range(self.depth))
        return f"<Ngrams: {sizes} of length 1 to {self.depth}>"

    def _repr_html_(self) -> str:
        words = "".join(f"<p>{escaping.escape(line)}</p>" for line in self.explain().split("\n"))
        return words + tables.html_table(self.columns())

    def _settings(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    @classmethod
    def _with_settings(cls, tree: dict[str, Any]) -> dict[str, Any]:
        return {"drawn": None if tree["drawn"] is None else int(tree["drawn"])}


def candidates_of(result: Result) -> tuple[tuple[str, ...], int]:
    """The n-grams that a round asked about, and the bin of the first of them."""
    (feature,) = result.features
    if isinstance(feature, PrefixTree):
        return feature.vocabulary, feature.size - len(feature.vocabulary)
    if not isinstance(feature, Categories):
        raise InvalidInput("a round about n-grams has a prefix tree or a list")
    return tuple(str(value) for value in feature.values), 1


def heard_in(result: Result) -> NDArray[np.bool_]:
    """Which candidates of a round are reported."""
    names, first = candidates_of(result)
    return heard(
        result.parts[0].sums[first : first + len(names)],
        trials=result.n_reports + 2 * result.noise_trials,
        q=result.recipe.randomizer.q,
        candidates=len(names),
    )


def discover_ngrams(
    study: Study,
    vocabulary: Iterable[str],
    *,
    max_n: int = 4,
    field: str | None = None,
    distinct: bool = False,
    drawn: int | None = None,
    deny: Iterable[str] = (),
    most_candidates: int | None = None,
    epsilon: Real | None = None,
    delta: Real | None = None,
    mechanism: Mechanism | str | None = None,
    crowd: Crowd | None = None,
    cohorts: Cohorts | None = None,
    devices: int | None = None,
) -> Run[Ngrams]:
    """Find the n-grams of known words that many devices hold, n = 1 .. `max_n`, one round each.

    Nothing is asked until the run is iterated or its `result` is taken; `run.plan` says before what
    every round costs. `field` is the text, as "stream.field"; a device reports one of its n-grams
    among the candidates: any of its rows, or with `distinct` any of its different n-grams, so that
    what somebody repeats weighs no more. With `drawn` (24, say) a device draws so many of its
    different n-grams in the last round and reports the least expected of these: that finds more,
    but estimates are then no frequencies. N-grams that contain a phrase of `deny` are left out on
    the devices, so that they offer something else.
    """
    if not 1 <= max_n <= _LONGEST:
        raise InvalidInput(f"max_n lies from 1 to {_LONGEST}, not {max_n}")
    if drawn is not None and drawn < 1:
        raise InvalidInput(f"drawn is at least 1, or None, not {drawn}")
    if drawn is not None and "random" not in study.terms.functions:
        raise InvalidInput("drawn needs the function `random`, which this analysis does not permit")
    words = _Words.of(vocabulary, max_n)
    ref = field or _only_text(study)
    stream, _, name = ref.partition(".")
    reads = {stream: (name,)}
    most = min(most_candidates or MAX_LENGTH, study.terms.max_bins - 1, MAX_LENGTH - 1)
    if len(words.names) + 2 > most:
        raise InvalidInput(
            f"{len(words.names):,} words and END, OOV, no text need more bins than {most + 1:,}: "
            "know fewer words"
        )
    denied = _deny_list(deny)

    chosen = study.cohorts(max_n, reads=reads, wanted=cohorts)
    plan = study.plan_rounds(
        round_shares(max_n, chosen), reads=reads, epsilon=epsilon, delta=delta,
        mechanism=mechanism, crowd=crowd, cohorts=chosen, devices=devices,
    )  # fmt: skip

    def ask(n: int, feature: PrefixTree | Categories, *, sampled: bool) -> Question:
        return study.histogram(
            feature,
            query=ngram_query(stream, name, n, distinct=distinct, drawn=drawn if sampled else None),
            reads=reads,
            selection="first" if sampled else "uniform",
            deny=denied,
            **plan.rounds[n - 1].settings,
        )

    def steps() -> Generator[Step, None, Ngrams]:
        results: list[Result] = []
        known: Ranked | None = None
        for n, planned in enumerate(plan.rounds, start=1):
            last = n == max_n
            feature: PrefixTree | Categories
            asked: Ranked
            if known is None:
                feature = PrefixTree(column=_COLUMN, prefixes=("",), vocabulary=words.names)
                every = np.arange(len(words.names))
                asked = Ranked(every, np.ones(len(every)))
            else:
                asked = worth_asking(
                    extend(known, len(words.names), n - 1, most),
                    reports=planned.expected_reports,
                    sigma=planned.std_error,
                    most=most,
                    **({} if last else {"least": LEAST_ON_THE_WAY}),
                ).rarest_first()
                if not len(asked):
                    break  # nothing overlaps: there is no longer phrase to ask about
                feature = Categories(column=_COLUMN, values=words.labels(asked.codes, n))
            question = ask(n, feature, sampled=last and drawn is not None and n > 1)
            results.append(study.ask(question))
            known = _learned(results[-1], asked)
            so_far = Ngrams(
                results=tuple(results), cohorts=plan.cohorts, drawn=drawn if last else None
            )
            yield Step(number=n, question=question, result=results[-1], draw=so_far.plot)
        return so_far

    return Run(plan, steps)


def ngram_query(
    stream: str, field: str, n: int, *, distinct: bool = False, drawn: int | None = None
) -> str:
    """The n-grams of a text field, as devices cut them: all, the different ones, or some drawn."""
    source = f'"{stream}", ngrams("{stream}"."{field}", {n})'
    if drawn is not None:
        inner = f"SELECT DISTINCT ngrams.ngram AS {_COLUMN} FROM {source}"  # noqa: S608 (names)
        return f"SELECT {_COLUMN} FROM ({inner}) ORDER BY random() LIMIT {drawn}"  # noqa: S608
    kind = "SELECT DISTINCT" if distinct else "SELECT"
    return f"{kind} ngrams.ngram AS {_COLUMN} FROM {source}"


def _learned(result: Result, asked: Ranked) -> Ranked:
    """The n-grams worth extending, with the share of reports that each is expected to have."""
    names, first = candidates_of(result)
    seen = result.counts[first : first + len(names)]
    means = stratified_means(seen, result.noise_sigma, asked.shares)
    return largest(Ranked(asked.codes, means / result.n_reports), KEPT)


def _only_text(study: Study) -> str:
    """The one text field of the analysis that belongs to a stream."""
    policy = study.fleet.policy
    texts = [
        ref
        for ref in study.terms.fields
        if policy.fields[ref].type == "text" and ref.partition(".")[0] in policy.streams
    ]
    if len(texts) != 1:
        listed = ", ".join(texts) or "none"
        raise InvalidInput(f'say which field holds the text, field="stream.field": {listed}')
    return texts[0]


def _deny_list(phrases: Iterable[str]) -> tuple[DenyList, ...]:
    found = tuple(dict.fromkeys(canonical_texts(list(phrases))))
    return (DenyList(column=_COLUMN, phrases=found),) if found else ()


@dataclass(frozen=True, slots=True)
class _Words:
    """The known words, by number."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, vocabulary: Iterable[str], depth: int) -> _Words:
        given = list(vocabulary)
        names = canonical_texts(given)
        for word, name in zip(given, names, strict=True):
            if not name or " " in name:
                raise InvalidInput(f"{word!r} is not one word")
        unique = tuple(dict.fromkeys(names))
        check_vocabulary(len(unique), depth)
        return cls(unique)

    def labels(self, codes: NDArray[np.int64], n: int) -> tuple[str, ...]:
        size = len(self.names)
        digits = [(codes // size**i % size).tolist() for i in range(n - 1, -1, -1)]
        return tuple(" ".join(self.names[at] for at in gram) for gram in zip(*digits, strict=True))
