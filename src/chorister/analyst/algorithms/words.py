"""Words that are on no list, found by their beginnings: a few characters more in every round.

A device cuts a word after so many characters (`substr`, with a sign for the end of the word) and
reports it as a category: one bin per candidate and one for everything else. The candidates follow
from earlier rounds and from a public model of how words are spelled; see `word_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.algorithms import word_pictures
from chorister.analyst.algorithms.algorithm_run import (
    AlgorithmResult,
    AlgorithmRun,
    Step,
    resumable,
)
from chorister.analyst.algorithms.character_model import END, CharacterModel
from chorister.analyst.algorithms.ngrams import deny_list, text_field
from chorister.analyst.algorithms.word_rules import (
    MAX_CHARACTERS,
    MAX_ROUNDS,
    Asked,
    Learned,
    first_round_tells,
    lengths,
    reported,
    round_shares,
)
from chorister.analyst.arguments import Real, as_texts
from chorister.analyst.cohorts import Cohorts, RoundsPlan, reports_allowed
from chorister.analyst.preflight import require_fitting
from chorister.analyst.question import Question
from chorister.analyst.result import Result
from chorister.analyst.study import Study
from chorister.encoding import Categories, canonical_texts
from chorister.errors import CohortTooSmall, InvalidInput
from chorister.policy import Crowd
from chorister.privacy import Mechanism
from chorister.privacy.randomizers import MAX_LENGTH, bits_per_bin

if TYPE_CHECKING:
    import altair

_COLUMN: Final = "beginning"
_WORD: Final = "word"
_ROUNDS: Final = 6  # the first is about two characters, which no model has to predict
_FEWER_ROUNDS: Final = (3, 2)  # for small fleets, whose rounds would be too small otherwise
_NUMBERS: Final = ("estimate", "std_error", "ci_low", "ci_high", "share")


@dataclass(frozen=True, kw_only=True, eq=False)
class Words(AlgorithmResult):
    """The words found above the noise.

    A word is reported if its sum exceeds what chance would give the whole words of its round, with
    one false discovery expected in all rounds together. Its estimate comes from that round alone,
    and its interval is simultaneous for all candidates of that round (Bonferroni): both stay valid
    although noise helped to select the reported ones.
    """

    FORMAT: ClassVar[str] = "chorister-words-1"
    NOUN: ClassVar[str] = "saved words"

    results: tuple[Result, ...]
    cohorts: Cohorts
    rounds: int
    """How many rounds were planned."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.results) <= self.rounds <= MAX_ROUNDS:
            raise InvalidInput(f"words need 1 to {MAX_ROUNDS} rounds, as many as planned or fewer")
        for number, result in enumerate(self.results, start=1):
            if len(result.features) != 1 or not isinstance(result.features[0], Categories):
                raise InvalidInput(f"round {number} is not about words")
            if result.recipe.group_by:
                raise InvalidInput("words can't be discovered by group")

    @cached_property
    def _columns(self) -> dict[str, Any]:
        words: list[str] = []
        rounds: list[int] = []
        parts: dict[str, list[NDArray[np.float64]]] = {name: [] for name in _NUMBERS}
        for number, result in enumerate(self.results, start=1):
            names = candidates_of(result)
            places = np.flatnonzero(found_in(result, self.rounds))
            rows = result.rows.take(places + 1)
            ends = rows.interval(
                result.confidence, candidates=len(names), step=result.recipe.randomizer.step
            )
            words.extend(names[i].removesuffix(END) for i in places.tolist())
            rounds.extend([number] * len(places))
            parts["estimate"].append(rows.value)
            parts["std_error"].append(rows.std_error)
            parts["ci_low"].append(np.clip(ends.low, 0.0, result.n_reports))
            parts["ci_high"].append(np.clip(ends.high, 0.0, result.n_reports))
            parts["share"].append(rows.value / result.n_reports)
        joined = {name: np.concatenate(parts[name]) for name in _NUMBERS}
        best = np.argsort(-joined["share"], kind="stable")
        return {
            "word": [words[i] for i in best.tolist()],
            "round": np.array(rounds, dtype=np.int64)[best],
            **{name: values[best] for name, values in joined.items()},
        }

    def columns(self) -> dict[str, Any]:
        """One row per word: devices that reported it in its round, with interval and share."""
        return dict(self._columns)

    def found(self) -> list[str]:
        """List the reported words, by their share of the reports of their round."""
        return list(self._columns["word"])

    def plot(self, *, top: int = 30) -> altair.LayerChart:
        """Draw the words with the largest shares, with their intervals."""
        return word_pictures.bars(self, top=top)

    def explain(self) -> str:
        lines: list[str] = []
        total = 0
        for result, length in zip(self.results, lengths(self.rounds), strict=False):
            names = candidates_of(result)
            found = int(found_in(result, self.rounds).sum())
            total += found
            what = "whole words" if length > MAX_CHARACTERS else f"up to {length} characters"
            lines.append(
                f"Round {len(lines) + 1} ({what}): {len(names):,} candidates, {found:,} words "
                f"found, from {result.n_reports:,} devices at epsilon {result.epsilon}; an empty "
                f"one reads 0 ± {result.noise_sigma:,.1f} devices, and "
                f"{self._elsewhere(result):.0%} of the devices held no candidate."
            )
        last = self.results[-1]
        lines.append(
            f"{total:,} words in all; at most one false one is expected. An estimate counts the "
            "devices that reported a word in its own round, where each device reports one of its "
            "words that were still asked about: it is not the number of devices that hold it. "
            f"With {last.confidence:.0%} confidence, all intervals of a round contain the truth."
        )
        lines.append(
            "Not found: words whose beginnings fell below the noise or were never candidates, "
            "which is likely for rare words spelled like no word of the character model; words "
            "with characters that it does not know, unless they are in ASCII; and words of more "
            f"than {MAX_CHARACTERS} characters."
        )
        return "\n".join(lines)

    @staticmethod
    def _elsewhere(result: Result) -> float:
        """The share of OOV in a round."""
        return float(np.clip(result.counts[0] / result.n_reports, 0.0, 1.0))

    def __repr__(self) -> str:
        return f"<Words: {len(self.found()):,} in {len(self.results)} rounds>"

    def _settings(self) -> dict[str, Any]:
        return {"rounds": self.rounds}

    @classmethod
    def _with_settings(cls, tree: dict[str, Any]) -> dict[str, Any]:
        return {"rounds": int(tree["rounds"])}


def candidates_of(result: Result) -> tuple[str, ...]:
    """Return the beginnings that a round asked about; whole words end with `END`."""
    (feature,) = result.features
    if not isinstance(feature, Categories):
        raise InvalidInput("a round about words needs a list of categories")
    return tuple(str(value) for value in feature.values)


def found_in(result: Result, rounds: int) -> NDArray[np.bool_]:
    """Return which candidates of a round are reported as words."""
    return reported(
        candidates_of(result),
        result.parts[0].sums[1:],
        trials=bits_per_bin(result.n_reports, result.noise_trials),
        q=result.recipe.randomizer.q,
        rounds=rounds,
    )


@resumable
def discover_words(
    study: Study,
    *,
    field: str | None = None,
    values: bool = False,
    model: CharacterModel | None = None,
    deny: Iterable[str] = (),
    rounds: int | None = None,
    most_candidates: int | None = None,
    epsilon: Real | None = None,
    delta: Real | None = None,
    mechanism: Mechanism | str | None = None,
    crowd: Crowd | None = None,
    cohorts: Cohorts | None = None,
    devices: int | None = None,
    target: Real | None = None,
) -> AlgorithmRun[Words]:
    """Find words that many devices hold although they are on no list: slang, error codes, names.

    Nothing is asked until you iterate over the run or take its `result`; `run.plan` states the cost
    of every round beforehand. `field` is the text, as "stream.field"; its words are found, or with
    `values` its whole values, as they are written. A device reports one of its distinct words that
    are candidates. `model` ranks the candidates (default: the shipped model for English); name the
    language, or train one on public text like that on the devices, to find more. Words of
    `deny`, for example those you know already, are skipped by devices and never reported.

    If you do not say how many `rounds`, there are as many as pay for this policy and fleet; where
    none do, everyone is asked once about the model's most likely words, and `run.plan` says so. Up
    to eight `rounds` find more of what is spelled like no word of the model, such as codes, and
    fewer rare words that are.
    """
    ref = text_field(study, field)
    stream, _, name = ref.partition(".")
    reads = {stream: (name,)}
    query = word_query(stream, name, values=values, functions=study.terms.functions)
    require_fitting(study, (), query.format(length=1), reads)
    if rounds is not None:
        lengths(rounds)  # raises unless there can be so many
    most = min(most_candidates or MAX_LENGTH, study.terms.max_bins - 1, MAX_LENGTH - 1)
    if most < 2:
        raise InvalidInput("a round needs at least two candidates")
    known = as_texts(deny, "deny")
    denied = deny_list(_WORD, known)

    def planned(number: int) -> RoundsPlan:
        who = study.cohorts(number, reads=reads, wanted=cohorts)
        return study.plan_rounds(
            round_shares(number), reads=reads, epsilon=epsilon, delta=delta,
            mechanism=mechanism, crowd=crowd, cohorts=who, devices=devices, target=target,
        )  # fmt: skip

    most_rounds = _rounds_for(study, reads)
    plan = _best_plan(planned, most_rounds) if rounds is None else planned(rounds)
    chosen_rounds = len(plan.rounds)
    cuts = lengths(chosen_rounds)

    def ask(asked: Asked, number: int) -> Question:
        feature = Categories(column=_COLUMN, values=tuple(text for text, _ in asked))
        return study.histogram(
            feature,
            query=query.format(length=cuts[number]),
            reads=reads,
            deny=denied,
            **plan.rounds[number].settings,
        )

    def steps() -> Generator[Step, None, Words]:
        ranking, skip = model or CharacterModel.shipped(), known
        if not values:  # devices fold words, and report values as they are written
            ranking, skip = ranking.folded(), canonical_texts(known)
        learned = Learned(
            ranking.without(skip), chosen_rounds, frozenset(word + END for word in skip)
        )
        results: list[Result] = []
        for number, length in enumerate(cuts):
            asked = learned.ask(length, most)
            if not asked:
                break  # nothing is left to ask about
            question = ask(asked, number)
            result = study.ask(question, target=plan.rounds[number].target)
            results.append(result)
            learned.answer(
                asked, sums=result.parts[0].sums[1:], counts=result.counts[1:],
                sigma=result.noise_sigma, reports=result.n_reports,
                trials=bits_per_bin(result.n_reports, result.noise_trials),
                q=result.recipe.randomizer.q,
            )  # fmt: skip
            so_far = Words(results=tuple(results), cohorts=plan.cohorts, rounds=chosen_rounds)
            yield Step(number=number + 1, question=question, result=result, draw=so_far.plot)
        if not results:
            raise InvalidInput(
                f"the model finds no word likely enough for a list of {most}: ask in more rounds, "
                "or about more candidates"
            )
        return so_far

    return AlgorithmRun(plan, steps)


def word_query(stream: str, field: str, *, values: bool, functions: Iterable[str]) -> str:
    """Write a query for the first `{length}` characters of a field's distinct words or values."""
    allowed = set(functions)
    words = "words" if "words" in allowed else "ngrams"
    missing = [name for name in ("substr", *(() if values else (words,))) if name not in allowed]
    if missing:
        raise InvalidInput(
            f"discover_words needs the function {missing[0]!r}, which this analysis does not "
            "permit: let the policy list `substr` and `words`"
        )
    text = f'"{stream}"."{field}"'
    source, word = f'"{stream}"', text
    if not values and words == "words":
        source, word = f'"{stream}", words({text})', "words.word"
    elif not values:
        source, word = f'"{stream}", ngrams({text}, 1)', "ngrams.ngram"
    cut = f"substr({word} || '{END}', 1, {{length}})"
    return f"SELECT DISTINCT {word} AS {_WORD}, {cut} AS {_COLUMN} FROM {source}"  # noqa: S608 (names)


def _rounds_for(study: Study, reads: Mapping[str, tuple[str, ...]]) -> int:
    """As many rounds as everyone may answer, if these are 3 or more; otherwise six."""
    allowed = reports_allowed(study, reads)
    return allowed if 3 <= allowed < _ROUNDS else _ROUNDS


def _best_plan(planned: Callable[[int], RoundsPlan], most: int) -> RoundsPlan:
    """Plan as many rounds as pay, `most` at most, and one question to everyone where none do."""
    why = "cohorts would be smaller than the policy allows"
    for number in (most, *(fewer for fewer in _FEWER_ROUNDS if fewer < most)):
        with suppress(CohortTooSmall):
            plan = planned(number)
            first = plan.rounds[0]
            if first_round_tells(first.expected_reports, first.std_error):
                note = (
                    "Several rounds pay off: later ones ask only about words whose beginnings are "
                    "held."
                )
                return replace(plan, note=note)
            why = "the beginnings of words would be lost in the noise of a first round"
    note = f"Everyone is asked once about the words that the model expects most, because {why}."
    return replace(planned(1), note=note)
