"""A question before it is asked: it has a cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from chorister.analyst.cost import QuestionCost, price
from chorister.canonical import dumps, sha256
from chorister.encoding import AnyFeature, DenyList, Encoding, Selection
from chorister.errors import InvalidInput
from chorister.recipe import Aggregators, Arm, Participation, Privacy, Recipe, Window

if TYPE_CHECKING:
    from chorister.analyst.result import Result
    from chorister.analyst.study import Study

__all__ = ["Question"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """A histogram over features, groups and arms, as devices would be asked for it."""

    study: Study = field(repr=False)
    features: tuple[AnyFeature, ...]
    query: str
    reads: Mapping[str, tuple[str, ...]]
    group_by: tuple[str, ...]
    arms: tuple[Arm, ...]
    selection: Selection
    deny: tuple[DenyList, ...]
    privacy: Privacy
    participation: Participation
    answer_seconds: int  # how long devices answer
    grace_seconds: int  # how long afterwards the result can be collected
    repeat: int = 0  # tells apart two askings of one and the same question

    @cached_property
    def encoding(self) -> Encoding:
        """The features as one encoding."""
        return Encoding(self.features, self.deny)

    @property
    def size(self) -> int:
        """The number of bins."""
        return self.encoding.size

    @cached_property
    def digest(self) -> str:
        """What makes it this question and no other; the time at which it is asked does not."""
        return sha256(
            dumps(
                {
                    **self._content(),
                    "study": self.study.name,
                    "repeat": self.repeat,
                    "window": [self.answer_seconds, self.grace_seconds],
                }
            )
        ).hex()

    def _content(self) -> dict[str, Any]:
        return {
            "features": [_dump(feature) for feature in self.features],
            "query": self.query,
            "reads": {table: list(names) for table, names in self.reads.items()},
            "group_by": list(self.group_by),
            **({"arms": [_dump(arm) for arm in self.arms]} if self.arms else {}),
            "selection": self.selection,
            "deny": [_dump(deny) for deny in self.deny],
            "privacy": _dump(self.privacy),
            "participation": _dump(self.participation),
        }

    def recipe(self, *, number: int, opens: int) -> Recipe:
        """The question as devices get it."""
        study = self.study
        closes = opens + self.answer_seconds
        pair = next(study.fleet.policy.pairs(study.terms))
        return Recipe(
            version=1,
            id=f"{study.name[:80]}.{number}",
            study=study.name,
            analysis=study.analysis,
            collector=study.fleet.collector(study.analysis),
            query=self.query,
            reads=dict(self.reads),
            group_by=self.group_by,
            arms=self.arms,
            features=self.features,
            selection=self.selection,
            deny=self.deny,
            privacy=self.privacy,
            window=Window(opens=opens, closes=closes, ends=closes + self.grace_seconds),
            participation=self.participation,
            aggregators=Aggregators(leader=pair.leader.url, helper=pair.helper.url),
        )

    def again(self) -> Question:
        """The same question, to be asked once more: asking an equal one twice costs nothing."""
        return replace(self, repeat=self.repeat + 1)

    def cost(self, *, reports: int | None = None) -> QuestionCost:
        """What it would spend, the cohort it needs, the error to expect, how many more are left.

        `reports` is how many to expect, where the study does not know its fleet's size.
        """
        return price(self, reports)

    def run(self, target: int | None = None, *, bar: bool | None = None) -> Result:
        """Ask it: collects at `target` reports, or at the window's end if there are enough."""
        return self.study.ask(self, target=target, bar=bar)


def _dump(model: Any) -> Any:  # noqa: ANN401 (a model, and its JSON)
    return model.model_dump(mode="json", exclude_none=True)


def check_target(question: Question, target: int | None) -> None:
    """A target below the minimum cohort would be reached before anything may be released."""
    least = question.privacy.min_cohort
    if target is not None and target < least:
        raise InvalidInput(
            f"target {target:,} is below the minimum cohort, {least:,}: leave it out, or raise it"
        )
