"""An algorithm over a study: planned, then run round by round, stopped and resumed at will."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import altair

    from chorister.analyst.cohorts import RoundsPlan
    from chorister.analyst.question import Question
    from chorister.analyst.result import Result

__all__ = ["Run", "Step"]

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One round as it came in."""

    number: int  # from 1
    question: Question
    result: Result
    draw: Callable[
        [], altair.LayerChart | altair.VConcatChart | altair.Chart
    ]  # what is known after this round

    @property
    def picture(self) -> Any:  # noqa: ANN401 (an Altair chart)
        """A chart of what is known after this round."""
        return self.draw()


class Run(Generic[T_co]):
    """Iterate it for its rounds, or take `result`, which runs to the end.

    Nothing is asked before the first of both. Each round is a question that the study keeps, so a
    run that was stopped, or whose process died, goes on where it was when it is started anew with
    the same arguments: a question that the study holds already is not asked again.
    """

    def __init__(self, plan: RoundsPlan, steps: Callable[[], Generator[Step, None, T_co]]) -> None:
        self.plan = plan
        """What every round will cost, stated before the first."""
        self._steps = steps()
        self._seen: list[Step] = []
        self._result: T_co | None = None

    def __iter__(self) -> Iterator[Step]:
        """The rounds so far, then those to come."""
        number = 0
        while number < len(self._seen) or self._advance():
            yield self._seen[number]
            number += 1

    def _advance(self) -> bool:
        if self._result is not None:
            return False
        try:
            self._seen.append(next(self._steps))
        except StopIteration as end:
            self._result = end.value
            return False
        return True

    @property
    def result(self) -> T_co:
        """What the algorithm found; asks whatever is still to be asked."""
        while self._advance():
            pass
        if self._result is None:
            raise RuntimeError("this run failed before; start it anew to go on")
        return self._result

    def __repr__(self) -> str:
        state = "finished" if self._result is not None else f"{len(self._seen)} asked"
        return f"<Run of {len(self.plan.rounds)} rounds: {state}>"
