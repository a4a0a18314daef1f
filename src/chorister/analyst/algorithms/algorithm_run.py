"""What all algorithms share: runs round by round, results on disk, and rounds on one scale."""

from __future__ import annotations

import inspect
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
)

import numpy as np

from chorister.analyst import report
from chorister.analyst.allowance import basis_now, planning_by, require_affordable
from chorister.analyst.cohorts import Cohorts, RoundsPlan
from chorister.analyst.estimate import Estimates
from chorister.analyst.json_files import require_format, write_atomically
from chorister.analyst.question import Question
from chorister.analyst.result import Result
from chorister.analyst.tables import Tabular, html_table, paragraphs
from chorister.canonical import sha256
from chorister.errors import DecodeError, InvalidInput, StudyError

if TYPE_CHECKING:
    import altair

    from chorister.analyst.study import Study

P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One finished round of a run."""

    number: int  # from 1
    question: Question
    result: Result
    draw: Callable[[], altair.TopLevelMixin]

    @property
    def picture(self) -> Any:  # noqa: ANN401 (an Altair chart)
        """A chart of what is known after this round."""
        return self.draw()


class AlgorithmRun(Generic[T_co]):
    """An algorithm that asks round by round: iterate over its rounds, or take `result`.

    Nothing is asked before you do one of the two. Each round is a question that the study keeps. So
    a run that was stopped, or whose process died, resumes when you start it again with the same
    arguments: questions that the study has already asked are not asked again.
    """

    def __init__(self, plan: RoundsPlan, steps: Callable[[], Generator[Step, None, T_co]]) -> None:
        self.plan = plan
        """What every round will cost."""
        self._steps = steps()
        self._begin: Callable[[], None] | None = None
        self._seen: list[Step] = []
        self._result: T_co | None = None

    def __iter__(self) -> Iterator[Step]:
        number = 0
        while number < len(self._seen) or self._advance():
            yield self._seen[number]
            number += 1

    def _advance(self) -> bool:
        if self._result is not None:
            return False
        if self._begin is not None:
            self._begin()
            self._begin = None
        try:
            self._seen.append(next(self._steps))
        except StopIteration as end:
            self._result = end.value
            return False
        return True

    @property
    def result(self) -> T_co:
        """What the algorithm found, after asking all remaining rounds."""
        while self._advance():
            pass
        if self._result is None:
            raise StudyError("this run failed earlier: start it again to resume")
        return self._result

    def _repr_html_(self) -> str:
        return f"<div>{paragraphs(repr(self))}{self.plan._repr_html_()}</div>"

    def __repr__(self) -> str:
        state = "finished" if self._result is not None else f"{len(self._seen)} asked"
        return f"<AlgorithmRun of {len(self.plan.rounds)} rounds: {state}>"


def resumable(
    algorithm: Callable[Concatenate[Study, P], AlgorithmRun[T_co]],
) -> Callable[Concatenate[Study, P], AlgorithmRun[T_co]]:
    """Plan a run that has begun by what was spent when it began, not by its own rounds.

    A run is recognized by its algorithm and arguments. Before its first round is asked, all of them
    are checked against the budgets again, and what the plan counted is stored in the study.
    """

    @wraps(algorithm)
    def planned(study: Study, /, *args: P.args, **options: P.kwargs) -> AlgorithmRun[T_co]:
        archive = study.fleet.archive
        given = inspect.signature(algorithm).bind(study, *args, **options).arguments
        text = repr([algorithm.__name__, *((k, _text(v)) for k, v in list(given.items())[1:])])
        key = sha256(text.encode("utf-8", "surrogatepass")).hex()
        known = archive.plan_basis(study.name, key)
        basis = known or basis_now(study.fleet)
        with planning_by(basis):
            run = algorithm(study, *args, **options)

        def begin() -> None:
            plan = run.plan
            if archive.plan_basis(study.name, key) is None:
                require_affordable(study, plan.fields, plan.rounds, plan.devices)
                archive.keep_plan_basis(study.name, key, basis)

        run._begin = begin
        return run

    return planned


def _text(value: object) -> str:
    """The same text for the same argument, in every process."""
    if isinstance(value, Mapping):
        return repr([(_text(key), _text(each)) for key, each in value.items()])
    if isinstance(value, list | tuple):
        return repr([_text(each) for each in value])
    if isinstance(value, set | frozenset):
        return repr(sorted(_text(each) for each in value))
    for name in ("tolist", "to_list"):  # arrays and series, whose text leaves out most of them
        if callable(listed := getattr(value, name, None)):
            return _text(listed())
    if type(value).__repr__ is object.__repr__ or isinstance(value, Iterator):
        return type(value).__qualname__  # its address would differ
    return str(value)


class AlgorithmResult(Tabular):
    """What an algorithm found, saved as its rounds and settings; all else follows from them."""

    FORMAT: ClassVar[str]
    NOUN: ClassVar[str]  # for error messages
    results: Any  # a tuple of `Result`, for some algorithms of fixed length
    cohorts: Cohorts

    def _settings(self) -> dict[str, Any]:
        """Settings beyond the rounds, as JSON values."""
        return {}

    @classmethod
    def _with_settings(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Arguments from what `_settings` returned."""
        del tree
        return {}

    def to_json(self) -> str:
        document = {
            "format": self.FORMAT,
            "cohorts": self.cohorts,
            **self._settings(),
            "results": [json.loads(result.to_json()) for result in self.results],
        }
        return json.dumps(document, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote; raise `DecodeError` for anything else."""
        try:
            tree = json.loads(text)
            require_format(tree, cls.FORMAT)
            arguments: dict[str, Any] = {
                "results": tuple(Result.from_tree(each) for each in tree["results"]),
                "cohorts": _as_cohorts(tree["cohorts"]),
                **cls._with_settings(tree),
            }
            return cls(**arguments)
        except DecodeError:
            raise
        except (
            ArithmeticError, InvalidInput, KeyError, RecursionError, TypeError, ValueError,
        ) as error:  # fmt: skip
            raise DecodeError(f"not {cls.NOUN}: {error}") from None

    def to_html(self, path: str | os.PathLike[str] | None = None, *, title: str = "") -> str | None:
        """Write a report in one HTML file that needs nothing else, or return it as text."""
        recipe = self.results[0].recipe
        return report.written(
            path, title=title or f"{recipe.study}, {recipe.analysis}", words=self.explain(),
            columns=self.columns(), results=self.results, chart=self.plot().to_dict(),
        )  # fmt: skip

    @abstractmethod
    def explain(self) -> str:
        """In words."""

    @abstractmethod
    def plot(self) -> Any:  # noqa: ANN401 (an Altair chart)
        """A chart of what was found."""

    def _notebook_columns(self) -> dict[str, Any]:
        """What a notebook shows as a table."""
        return self.columns()

    def _repr_html_(self) -> str:
        chart, words = report.inline_chart(self.plot), paragraphs(self.explain())
        return f"<div>{chart}{words}{html_table(self._notebook_columns())}</div>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file, atomically."""
        write_atomically(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote."""
        try:
            return cls.from_json(Path(path).read_bytes())
        except OSError as error:
            raise InvalidInput(f"can't read {path}: {error.strerror}") from None


def _as_cohorts(value: object) -> Cohorts:
    if value == "everyone":
        return "everyone"
    if value == "disjoint":
        return "disjoint"
    raise DecodeError("cohorts must be everyone or disjoint", field="cohorts")


def devices_of(results: Sequence[Result], cohorts: Cohorts) -> int:
    """How many devices answered any of the rounds."""
    reports = [result.n_reports for result in results]
    if not reports:
        raise InvalidInput("there is no round yet")
    return sum(reports) if cohorts == "disjoint" else max(reports)


def answered_by(results: Sequence[Result], cohorts: Cohorts) -> str:
    """How many devices answered, and how often, in words."""
    reports = [result.n_reports for result in results]
    if cohorts == "disjoint":
        return f"{sum(reports):,} devices answered one round each"
    least, most = min(reports), max(reports)
    if least == most:
        return f"{most:,} devices answered every round"
    return f"{least:,} to {most:,} devices answered each round"


def scaled(result: Result, devices: int) -> Estimates:
    """Scale the bins of a round to all `devices`, with the distribution of their error.

    A cohort of n is a sample of the N devices: a bin that f of N hold is held by about f n/N of the
    cohort. So the estimate times N/n has the variance of the noise times (N/n)^2, plus that of the
    sample, f (N/n - 1). Both are linear in f, like that of the noise.
    """
    rows = result.rows
    factor = max(devices / result.n_reports, 1.0)
    return Estimates(
        value=rows.value * factor,
        base=rows.base * factor**2,
        slope=rows.slope * factor + (factor - 1.0),
        reports=np.full(len(rows), devices, dtype=np.int64),
    )
