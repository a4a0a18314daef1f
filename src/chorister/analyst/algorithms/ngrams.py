"""Phrases that many devices hold, found word by word: words, pairs, triples, ...

Each round asks about candidates that earlier rounds made likely; see `ngram_rules`. They are sent
as categories, one bin per candidate and one for everything else. That fits any list, whereas
prefixes times a vocabulary would spend a domain of 10,000 bins on a hundred prefixes. The first
round is a prefix tree with only its root.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.algorithms import ngram_pictures
from chorister.analyst.algorithms.algorithm_run import (
    AlgorithmResult,
    AlgorithmRun,
    Step,
    resumable,
)
from chorister.analyst.algorithms.ngram_rules import (
    LEAST_BEFORE_LAST,
    MAX_EXTENDED,
    MAX_LISTS,
    Ranked,
    above_noise,
    check_vocabulary,
    dealt_shares,
    extend,
    largest,
    lists_by_length,
    number_of_lists,
    stratified_means,
    worth_asking,
)
from chorister.analyst.arguments import Real, as_texts
from chorister.analyst.cohorts import Cohorts, RoundsPlan
from chorister.analyst.preflight import require_fitting
from chorister.analyst.question import Question
from chorister.analyst.result import Result
from chorister.analyst.study import Study
from chorister.encoding import Categories, DenyList, PrefixTree, canonical_texts
from chorister.errors import CohortTooSmall, InvalidInput
from chorister.policy import Crowd
from chorister.privacy import Mechanism
from chorister.privacy.randomizers import MAX_LENGTH, bits_per_bin

if TYPE_CHECKING:
    import altair


_MAX_N: Final = 8
_COLUMN: Final = "ngram"
_DISJOINT: Final = {1: (1.0,), 2: (0.2, 0.8), 3: (0.05, 0.35, 0.6), 4: (0.06, 0.22, 0.28, 0.44)}
_EVERYONE: Final = {1: (1.0,), 2: (0.1, 0.9), 3: (0.05, 0.35, 0.6), 4: (0.04, 0.16, 0.3, 0.5)}


def round_shares(rounds: int, cohorts: Cohorts) -> tuple[float, ...]:
    """The share of each round: of the devices, or of 1/sigma^2 if everyone answers."""
    known = _DISJOINT if cohorts == "disjoint" else _EVERYONE
    if rounds in known:
        return known[rounds]
    growing = 1.6 ** np.arange(rounds)
    return tuple((growing / growing.sum()).tolist())


@dataclass(frozen=True, kw_only=True, eq=False)
class Ngrams(AlgorithmResult):
    """The phrases found above the noise, round by round.

    An n-gram is reported if its sum exceeds what chance would give one of all candidates of its
    round, so at most one false discovery per round is expected. Its estimate comes from its own
    round alone, and its interval is simultaneous for all candidates of that round (Bonferroni):
    both stay valid although noise helped to select the reported ones.
    """

    FORMAT: ClassVar[str] = "chorister-ngrams-1"
    NOUN: ClassVar[str] = "saved n-grams"

    results: tuple[Result, ...]
    cohorts: Cohorts
    drawn: int | None = None
    """How many n-grams a device drew in the last round, to report the least expected one."""
    lists: tuple[int, ...] = ()
    """As how many lists, for different devices, n-grams of each length were asked; (): as one.

    Zeros and a final one: everyone was asked once, about the longest n-grams alone.
    """

    def __post_init__(self) -> None:
        counts = self._counts
        once = counts[-1:] == (1,) and not any(counts[:-1])
        if sum(counts) != len(self.results) or (min(counts, default=0) < 1 and not once):
            raise InvalidInput("n-grams need at least one round, and all lists of each")
        for n, result in self._numbered():
            kind = PrefixTree if n == 1 else Categories
            if len(result.features) != 1 or not isinstance(result.features[0], kind):
                raise InvalidInput(f"round {n} is not about {n}-grams")
            if result.recipe.group_by:
                raise InvalidInput("n-grams can't be discovered by group")

    @property
    def _counts(self) -> tuple[int, ...]:
        return self.lists or (1,) * len(self.results)

    @property
    def depth(self) -> int:
        """The length of the longest n-grams asked about."""
        return len(self._counts)

    def of_length(self, n: int) -> tuple[Result, ...]:
        """Return the results about n-grams of one length, one per list."""
        begin = sum(self._counts[: n - 1])
        return self.results[begin : begin + self._counts[n - 1]]

    def _numbered(self) -> list[tuple[int, Result]]:
        """All results, each with the length of its n-grams."""
        lengths = range(1, self.depth + 1)
        return [(n, result) for n in lengths for result in self.of_length(n)]

    def _asked(self, n: int) -> int:
        """The number of candidates of one length, in all lists."""
        return sum(len(candidates_of(result)[0]) for result in self.of_length(n))

    @cached_property
    def _columns(self) -> dict[str, Any]:
        parts: dict[str, list[Any]] = {
            name: [] for name in
            ("n", "ngram", "estimate", "std_error", "ci_low", "ci_high", "share")
        }  # fmt: skip
        for n, result in self._numbered():
            names, first = candidates_of(result)
            asked = self._asked(n)
            order = np.flatnonzero(found_in(result, asked))
            rows = result.rows.take(first + order)
            ends = rows.interval(
                result.confidence, candidates=asked, step=result.recipe.randomizer.step
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
        if max(self._counts) == 1:  # each length is in order already
            return joined
        best = np.lexsort((-joined["share"], joined["n"]))
        joined["ngram"] = [joined["ngram"][i] for i in best.tolist()]
        return {
            name: column if name == "ngram" else column[best] for name, column in joined.items()
        }

    def columns(self) -> dict[str, Any]:
        """One row per n-gram: devices in its round with their interval, and their share."""
        return dict(self._columns)

    def found(self, n: int | None = None) -> list[str]:
        """List the reported n-grams of one length (default: the longest), most frequent first."""
        wanted = self.depth if n is None else n
        return [
            name
            for name, length in zip(self._columns["ngram"], self._columns["n"], strict=True)
            if length == wanted
        ]

    def plot(self, *, top: int = 30) -> altair.LayerChart:
        """Draw a tree of the most frequent n-grams, word by word from left to right."""
        return ngram_pictures.tree(self, top=top)

    def explain(self) -> str:
        lines = []
        for n in range(1, self.depth + 1):
            results = self.of_length(n)
            if not results:
                continue
            parts = "" if len(results) == 1 else f" in {len(results)} lists for different devices"
            lines.append(
                f"{n}-grams: found {len(self.found(n)):,} of {self._asked(n):,} candidates{parts}, "
                f"from {sum(result.n_reports for result in results):,} devices at epsilon "
                f"{results[0].epsilon}; an empty one reads 0 ± {results[0].noise_sigma:,.1f} "
                "devices, and at most one false one is expected."
            )
        if self.cohorts == "disjoint" and len(self.results) > 1:
            lines.append("Every device answered at most one of the rounds.")
        if self.drawn is not None:
            lines.append(
                f"In the last round each device drew {self.drawn} of its {self.depth}-grams and "
                "reported the least expected one. That favours rare n-grams over widespread ones, "
                "and the numbers say how many devices reported them, not how frequent they are."
            )
        lines.append(
            "Estimates count the devices that reported an n-gram in its own round. Intervals "
            f"reflect the noise: with {self.results[-1].confidence:.0%} confidence, all "
            "of a round contain the truth."
        )
        return "\n".join(lines)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{len(self.found(n + 1)):,}" for n in range(self.depth))
        return f"<Ngrams: {sizes} of length 1 to {self.depth}>"

    def _settings(self) -> dict[str, Any]:
        return {"drawn": self.drawn, **({"lists": list(self.lists)} if self.lists else {})}

    @classmethod
    def _with_settings(cls, tree: dict[str, Any]) -> dict[str, Any]:
        drawn = None if tree["drawn"] is None else int(tree["drawn"])
        return {"drawn": drawn, "lists": tuple(int(each) for each in tree.get("lists", ()))}


def candidates_of(result: Result) -> tuple[tuple[str, ...], int]:
    """Return the n-grams that a round asked about, and the bin of the first one."""
    (feature,) = result.features
    if isinstance(feature, PrefixTree):
        return feature.vocabulary, feature.size - len(feature.vocabulary)
    if not isinstance(feature, Categories):
        raise InvalidInput("a round about n-grams needs a prefix tree or a list of categories")
    return tuple(str(value) for value in feature.values), 1


def found_in(result: Result, asked: int) -> NDArray[np.bool_]:
    """Return which candidates of a list are reported, of all that were `asked` about."""
    names, first = candidates_of(result)
    return above_noise(
        result.parts[0].sums[first : first + len(names)],
        trials=bits_per_bin(result.n_reports, result.noise_trials),
        q=result.recipe.randomizer.q,
        candidates=asked,
    )


@resumable
def discover_ngrams(
    study: Study,
    vocabulary: Iterable[str],
    *,
    max_n: int = 4,
    field: str | None = None,
    distinct: bool = False,
    drawn: int | None = None,
    deny: Iterable[str] = (),
    lists: int | None = None,
    most_candidates: int | None = None,
    epsilon: Real | None = None,
    delta: Real | None = None,
    mechanism: Mechanism | str | None = None,
    crowd: Crowd | None = None,
    cohorts: Cohorts | None = None,
    devices: int | None = None,
    target: Real | None = None,
) -> AlgorithmRun[Ngrams]:
    """Find n-grams of known words that many devices hold, for n = 1 .. `max_n`, one round each.

    Nothing is asked until you iterate over the run or take its `result`; `run.plan` states the cost
    of every round beforehand. `field` is the text, as "stream.field". A device reports one of its
    n-grams among the candidates: one of its rows, or with `distinct` one of its distinct n-grams,
    so that repetition adds no weight. With `drawn` (for example 24), a device draws that many of
    its distinct n-grams in the last round and reports the least expected one: that favours rare
    n-grams, finds more on some data and fewer on other, and estimates are then not frequencies.
    Devices skip n-grams that contain a phrase of `deny`.

    Where more candidates are likely than the policy's largest domain has bins, they can be dealt as
    several `lists` to different devices, each of which answers one of them. That needs disjoint
    cohorts, and is done in all rounds but the first and the last, in which noise matters more
    (default: 4 lists if there are many more pairs of words than bins and at least 1,000,000
    devices, otherwise 1).

    Where there are too few devices for rounds, everyone is asked once about all n-grams of length
    `max_n`, if these fit into one question; `run.plan` says so. Choose `cohorts` to insist on
    rounds.
    """
    if not 1 <= max_n <= _MAX_N:
        raise InvalidInput(f"max_n must be from 1 to {_MAX_N}, not {max_n}")
    if drawn is not None and drawn < 1:
        raise InvalidInput(f"drawn must be at least 1, or None, not {drawn}")
    if drawn is not None and "random" not in study.terms.functions:
        raise InvalidInput("drawn needs the function `random`, which this analysis does not permit")
    words = _Words.of(vocabulary, max_n)
    ref = text_field(study, field)
    stream, _, name = ref.partition(".")
    reads = {stream: (name,)}
    most = min(most_candidates or MAX_LENGTH, study.terms.max_bins - 1, MAX_LENGTH - 1)
    if len(words.names) + 2 > most:
        raise InvalidInput(
            f"{len(words.names):,} words plus END, OOV and no text need more than {most + 1:,} "
            "bins: use a smaller vocabulary"
        )
    denied = deny_list(_COLUMN, as_texts(deny, "deny"))
    require_fitting(
        study, (), ngram_query(stream, name, max_n, distinct=distinct, drawn=drawn), reads
    )

    chosen = study.cohorts(max_n, reads=reads, wanted=cohorts)
    if lists is None:
        known_devices = devices if devices is not None else study.fleet.devices
        lists = number_of_lists(len(words.names), most, chosen, known_devices)
    elif not 1 <= lists <= MAX_LISTS or (lists > 1 and chosen != "disjoint"):
        raise InvalidInput(
            f"lists must be from 1 to {MAX_LISTS}, and 1 unless each round asks different devices"
        )
    counts = lists_by_length(max_n, lists)

    def planned(shares: Sequence[float], who: Cohorts) -> RoundsPlan:
        return study.plan_rounds(
            shares, reads=reads, epsilon=epsilon, delta=delta, mechanism=mechanism, crowd=crowd,
            cohorts=who, devices=devices, target=target,
        )  # fmt: skip

    grams = len(words.names) ** max_n
    try:
        plan = planned(dealt_shares(round_shares(max_n, chosen), counts), chosen)
        plan = replace(plan, note=_why_rounds(max_n, grams, most))
    except CohortTooSmall:
        if cohorts is not None or drawn is not None or max_n == 1 or grams > most:
            raise
        counts = (*(0,) * (max_n - 1), 1)
        what = f"all {grams:,} {max_n}-grams"
        note = f"Everyone is asked once about {what}: there are too few devices for rounds."
        plan = replace(planned((1.0,), "disjoint"), note=note)
    asked_once = not counts[0]

    def ask(number: int, n: int, feature: PrefixTree | Categories, *, sampled: bool) -> Question:
        return study.histogram(
            feature,
            query=ngram_query(stream, name, n, distinct=distinct, drawn=drawn if sampled else None),
            reads=reads,
            selection="first" if sampled else "uniform",
            deny=denied,
            **plan.rounds[number].settings,
        )

    def steps() -> Generator[Step, None, Ngrams]:
        first = PrefixTree(column=_COLUMN, prefixes=("",), vocabulary=words.names)
        every = np.arange(len(words.names))
        results: list[Result] = []
        known = Ranked(every, np.ones(len(every)))
        for n in range(1, max_n + 1):
            last, parts = n == max_n, counts[n - 1]
            if not parts:
                continue
            features: list[PrefixTree | Categories] = [first]
            dealt = [known]
            if n > 1:
                next_round = plan.rounds[len(results)]
                asked = (
                    Ranked(np.arange(grams), np.ones(grams))
                    if asked_once
                    else worth_asking(
                        extend(known, len(words.names), n - 1, parts * most),
                        reports=next_round.expected_reports,
                        sigma=next_round.std_error,
                        most=parts * most,
                        **({} if last else {"least": LEAST_BEFORE_LAST}),
                    ).rarest_first()
                )
                if len(asked) < parts:
                    break  # no two n-grams overlap: there is nothing longer to ask about
                dealt = [asked.take(np.arange(i, len(asked), parts)) for i in range(parts)]
                features = [
                    Categories(column=_COLUMN, values=words.labels(each.codes, n)) for each in dealt
                ]
            sampled = last and drawn is not None and n > 1
            questions = [
                ask(len(results) + i, n, feature, sampled=sampled)
                for i, feature in enumerate(features)
            ]
            # All lists are asked at once; a device answers the first one that its coin chooses.
            posted = [
                study.post(question, target=plan.rounds[len(results) + i].target)
                for i, question in enumerate(questions)
            ]
            answers = [study.wait(round_) for round_ in posted]
            known = _learned(answers, dealt)
            results += answers
            so_far = Ngrams(
                results=tuple(results), cohorts=plan.cohorts, drawn=drawn if last else None,
                lists=counts[:n] if lists > 1 or asked_once else (),
            )  # fmt: skip
            number = 1 if asked_once else n
            yield Step(number=number, question=questions[-1], result=answers[-1], draw=so_far.plot)
        return so_far

    return AlgorithmRun(plan, steps)


def _why_rounds(max_n: int, grams: int, most: int) -> str:
    """Say whether rounds pay against one question about all n-grams of the longest length."""
    if max_n == 1:
        return "Everyone is asked once, about single words."
    if grams > most:
        return (
            f"Several rounds pay off: one question has room for {most:,} n-grams, and there are "
            f"{grams:,} of length {max_n}."
        )
    return (
        "Several rounds pay off for shorter n-grams: one question could ask everyone about all "
        f"{grams:,} of length {max_n}, and would say nothing about others."
    )


def ngram_query(
    stream: str, field: str, n: int, *, distinct: bool = False, drawn: int | None = None
) -> str:
    """Write a query for the n-grams of a text field: all, the distinct ones, or a random few."""
    source = f'"{stream}", ngrams("{stream}"."{field}", {n})'
    if drawn is not None:
        inner = f"SELECT DISTINCT ngrams.ngram AS {_COLUMN} FROM {source}"  # noqa: S608 (names)
        return f"SELECT {_COLUMN} FROM ({inner}) ORDER BY random() LIMIT {drawn}"  # noqa: S608
    kind = "SELECT DISTINCT" if distinct else "SELECT"
    return f"{kind} ngrams.ngram AS {_COLUMN} FROM {source}"


def _learned(results: Sequence[Result], dealt: Sequence[Ranked]) -> Ranked:
    """Return the n-grams worth extending, with their expected shares of a list's reports."""
    codes, shares = [], []
    for result, asked in zip(results, dealt, strict=True):
        names, first = candidates_of(result)
        seen = result.counts[first : first + len(names)]
        means = stratified_means(seen, result.noise_sigma, asked.shares)
        codes.append(asked.codes)
        shares.append(means / result.n_reports)
    return largest(Ranked(np.concatenate(codes), np.concatenate(shares)), MAX_EXTENDED)


def text_field(study: Study, given: str | None) -> str:
    """Return the given field, which has to hold text, or the only one that the analysis may read.

    That one is in a stream.
    """
    policy = study.fleet.policy
    if given:
        name: object = given
        known = policy.fields.get(given) if isinstance(name, str) else None
        if known is None:
            raise InvalidInput(
                f"{given!r} is not a field: give one of {', '.join(study.terms.fields)}",
                field="field",
            )
        if known.type != "text":
            raise InvalidInput(f"{given} holds numbers; words are found in a field that holds text")
        return given
    texts = [
        ref
        for ref in study.terms.fields
        if policy.fields[ref].type == "text" and ref.partition(".")[0] in policy.streams
    ]
    if len(texts) != 1:
        listed = ", ".join(texts) or "none"
        raise InvalidInput(f'pass the field that holds the text, field="stream.field": {listed}')
    return texts[0]


def deny_list(column: str, phrases: Sequence[str]) -> tuple[DenyList, ...]:
    """Skip rows whose text in `column` contains one of the phrases, of which some may be empty."""
    found = tuple(dict.fromkeys(text for text in canonical_texts(phrases) if text))
    return (DenyList(column=column, phrases=found),) if found else ()


@dataclass(frozen=True, slots=True)
class _Words:
    """The numbered words of a vocabulary."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, vocabulary: Iterable[str], depth: int) -> _Words:
        given = as_texts(vocabulary, "vocabulary")
        names = canonical_texts(given)
        for word, name in zip(given, names, strict=True):
            if not name or " " in name:
                raise InvalidInput(f"{word!r} is not a single word")
        unique = tuple(dict.fromkeys(names))
        check_vocabulary(len(unique), depth)
        return cls(unique)

    def labels(self, codes: NDArray[np.int64], n: int) -> tuple[str, ...]:
        size = len(self.names)
        digits = [(codes // size**i % size).tolist() for i in range(n - 1, -1, -1)]
        return tuple(" ".join(self.names[at] for at in gram) for gram in zip(*digits, strict=True))
