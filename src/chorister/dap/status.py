"""A recipe's progress, as a leader tells its collector: Chorister's own, beside DAP.

Below the minimum there are tenths only, for the whole recipe: exact live counts would tell when one
person's report arrived.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from chorister.canonical import culprit
from chorister.errors import Unreachable

__all__ = ["RecipeStatus", "Rejections"]

_Text = Annotated[str, StringConstraints(max_length=500, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
_Count = Annotated[int, Field(ge=0)]


class _Received(BaseModel):
    """A later leader may say more; what it says more does not matter here."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Rejections(_Received):
    """Reports that were not counted, by reason, at each aggregator."""

    leader: Mapping[_Text, _Count] = {}
    helper: Mapping[_Text, _Count] = {}


class RecipeStatus(_Received):
    """How far a recipe has come, and what it waits for."""

    tasks: _Count
    state: Literal["collecting", "ready", "collected", "expired"]
    filled: Annotated[float, Field(ge=0, le=1)] | None = None
    """Tenths of the minimum, over all tasks."""
    reports: _Count | None = None
    """The smallest task's verified reports, rounded down, once every task has the minimum."""
    waiting_for: _Text | None = None
    rejected: Rejections = Rejections()
    closes: int | None = None
    ends: int | None = None

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Parse a leader's answer."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            field, why = culprit(error)
            raise Unreachable(f"the leader's status can't be read: {field}: {why}") from None
