"""One question: the model of a recipe, with one canonical encoding.

The paper's appendix B, plus what a device needs in order to decide by itself: the fields that are
read, the privacy that is asked for, the window and the pair of aggregators.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, Field, StringConstraints, ValidationError, model_validator

from chorister.canonical import (
    FROZEN,
    WIRE,
    Bool,
    Complaint,
    Hex32,
    Int,
    Model,
    Number,
    culprit,
    loads,
    sha256,
)
from chorister.encoding import AnyFeature, DenyList, Encoding, Selection
from chorister.errors import DecodeError, InvalidInput, RecipeError
from chorister.policy import Crowd, ReportKind
from chorister.policy.certify import Claim
from chorister.policy.values import (
    URL,
    Delta,
    Epsilon,
    FieldRef,
    HonestFraction,
    Identifier,
    Name,
    SQLName,
)
from chorister.privacy.randomizers import (
    MAX_LENGTH,
    Mechanism,
    OneHotRandomizer,
    as_local_epsilon,
)
from chorister.privacy.settings import MAX_COHORT
from chorister.privacy.weights import BOUND_DELTA
from chorister.recipe.window import Window

__all__ = [
    "MAX_BYTES",
    "VERSION",
    "Aggregators",
    "Arm",
    "Participation",
    "Privacy",
    "Recipe",
]

VERSION: Final = 1
MAX_BYTES: Final = 8_000_000
"""A vocabulary of 100,000 words fits; what every device must fetch should stay below."""


def _probability(value: Decimal) -> Decimal:
    if not 0 < value <= 1:
        raise ValueError(f"a probability is above 0 and at most 1, not {value}")
    return value


def _printable(text: str) -> str:
    if any(character < " " and character not in "\t\n" for character in text):
        raise ValueError("no control characters but tab and newline")  # NUL ends SQL early
    if not text.strip():
        raise ValueError("a query is not blank")
    return text


_SQL: TypeAlias = Annotated[
    str,
    StringConstraints(min_length=1, max_length=20_000, strict=True),
    AfterValidator(_printable),
]


class Privacy(Model):
    """What the recipe asks for, and what it promises for it."""

    mechanism: Mechanism
    local_epsilon: Annotated[Number, AfterValidator(as_local_epsilon)]
    """The mechanism's parameter eps0. Policies limit its replacement value (symmetric: 2 eps0)."""
    epsilon: Epsilon
    """What the device is charged, and what check 3 certifies for the aggregate of min_cohort."""
    delta: Delta
    min_cohort: Annotated[Int, Field(ge=2, le=MAX_COHORT)]
    crowd: Crowd
    honest_fraction: HonestFraction | None = None
    """With `crowd` honest: the share of every released batch that is assumed honest."""
    report: ReportKind

    @model_validator(mode="after")
    def _consistent(self) -> Privacy:
        if (self.crowd == "honest") != (self.honest_fraction is not None):
            raise Complaint("honest_fraction", "given if, and only if, the crowd is honest")
        if self.report == "bounded" and self.delta <= BOUND_DELTA:
            raise Complaint("delta", f"bounded reports use {BOUND_DELTA} of delta: ask for more")
        try:
            _ = self.claim.setting
        except InvalidInput as error:
            raise Complaint("crowd", str(error)) from None
        return self

    @property
    def claim(self) -> Claim:
        """What check 3 has to certify for min_cohort."""
        return Claim(
            mechanism=self.mechanism,
            local_epsilon=self.local_epsilon,
            epsilon=self.epsilon,
            delta=self.delta,
            crowd=self.crowd,
            honest_fraction=self.honest_fraction,
            report=self.report,
        )


class Participation(Model):
    """Which devices answer."""

    probability: Annotated[Number, AfterValidator(_probability)]
    """With what probability a device takes part; it draws once, and remembers."""
    once_per_study: Bool
    """Only devices that answered no earlier recipe of the same study take part."""


class Arm(Model):
    """One arm of an experiment. The device draws its arm itself, in proportion to the weights."""

    name: Name
    weight: Annotated[Int, Field(ge=1, le=1_000_000)]


class Aggregators(Model):
    """The pair, by URL."""

    leader: URL
    helper: URL


class Recipe(Model):
    """A question as devices get it. On the wire every field is present, optional ones excepted."""

    version: Literal[1]
    id: Identifier
    study: Identifier
    analysis: Identifier
    collector: Hex32
    """SHA-256 of the HPKE configuration that the aggregate shares are sealed to."""
    query: _SQL
    reads: Annotated[
        dict[SQLName, Annotated[tuple[SQLName, ...], Field(min_length=1)]],
        Field(min_length=1),
        FROZEN,
    ]
    """The fields that the query reads, stream by stream; nothing else exists when it runs."""
    group_by: tuple[FieldRef, ...]
    arms: Annotated[tuple[Arm, ...], Field(max_length=1000)]
    features: Annotated[tuple[AnyFeature, ...], Field(min_length=1, max_length=8)]
    selection: Selection
    deny: tuple[DenyList, ...]
    privacy: Privacy
    window: Window
    participation: Participation
    aggregators: Aggregators

    @classmethod
    def parse(cls, payload: bytes) -> Recipe:
        """The recipe in a canonical payload; anything else raises `RecipeError`."""
        return cls._from_json(payload, canonical=True)

    @classmethod
    def draft(cls, text: bytes) -> Recipe:
        """A recipe that a person wrote: any layout of the JSON, but otherwise as strict."""
        return cls._from_json(text, canonical=False)

    @classmethod
    def _from_json(cls, data: bytes, *, canonical: bool) -> Recipe:
        try:
            value: Any = loads(data, max_bytes=MAX_BYTES, canonical=canonical)
        except DecodeError as error:
            raise RecipeError(error.why, field=error.field) from None
        if not isinstance(value, dict):
            raise RecipeError("a recipe is a JSON object")
        version = value.get("version")
        if type(version) is not int or version != VERSION:
            known = f"this software knows version {VERSION}"
            raise RecipeError(f"{str(version)[:40]}: {known}", field="version")
        try:
            recipe = cls.model_validate(value, context=WIRE)
        except ValidationError as error:
            field, message = culprit(error)
            raise RecipeError(message, field=field) from None
        # Optional fields that were spelled out, say: one recipe, one byte string.
        if canonical and recipe.canonical() != data:
            raise RecipeError("not in canonical form; sign it with `chorister recipe sign`")
        return recipe

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON."""
        return sha256(self.canonical())

    @cached_property
    def encoding(self) -> Encoding:
        """Its features as one encoding."""
        return Encoding(self.features, self.deny)

    @cached_property
    def randomizer(self) -> OneHotRandomizer:
        """What each device applies to its one-hot vector."""
        return OneHotRandomizer(
            mechanism=self.privacy.mechanism,
            local_epsilon=self.privacy.local_epsilon,
            length=self.encoding.size,
        )

    @property
    def fields_read(self) -> tuple[str, ...]:
        """Every field that is read, as "stream.field"."""
        return tuple(f"{table}.{field}" for table, names in self.reads.items() for field in names)

    def draw_arm(self, *, randbelow: Callable[[int], int] = secrets.randbelow) -> str | None:
        """The arm of one device, drawn in proportion to the weights; None without an experiment."""
        if not self.arms:
            return None
        ticket = randbelow(sum(arm.weight for arm in self.arms))
        for arm in self.arms:
            ticket -= arm.weight
            if ticket < 0:
                return arm.name
        raise InvalidInput("randbelow(n) must return 0..n-1")

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        names = [arm.name for arm in self.arms]
        if len(set(names)) != len(names) or len(names) == 1:
            raise Complaint("arms", "an experiment has two or more arms with different names")
        if len(set(self.group_by)) != len(self.group_by):
            raise Complaint("group_by", "a field occurs twice")
        for table, fields in self.reads.items():
            if len(set(fields)) != len(fields):
                raise Complaint(f"reads.{table}", "a field occurs twice")
        if self.aggregators.leader == self.aggregators.helper:
            raise Complaint("aggregators.helper", "leader and helper are one and the same")
        try:
            size = self.encoding.size
        except InvalidInput as error:
            raise Complaint("features", str(error)) from None
        if not 2 <= size <= MAX_LENGTH:
            raise Complaint("features", f"{size:,} bins, where 2 to {MAX_LENGTH:,} can be reported")
        # Whatever parses may be logged, so everything that others derive from it must exist. The
        # rest needs no trial: a randomizer has a weight bound, of at most `size`, and a VDAF has
        # room for both.
        try:
            _ = self.randomizer
        except InvalidInput as error:
            raise Complaint("privacy", str(error)) from None
        return self
