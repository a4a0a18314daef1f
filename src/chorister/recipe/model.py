"""One question: the model of a recipe, with one canonical encoding, and its JSON Schema.

The paper's appendix B, plus what a device needs to decide on its own: the fields that are read, the
privacy that is asked for, the window and the pair of aggregators.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, Field, ValidationError, model_validator

from chorister.canonical import (
    FROZEN,
    WIRE,
    Bool,
    FieldError,
    Hex32,
    Int,
    Model,
    Number,
    first_error,
    loads,
    sha256,
)
from chorister.encoding import (
    MAX_DENIED_WORDS,
    MAX_DENY_LISTS,
    AnyFeature,
    DenyList,
    Encoding,
    Selection,
)
from chorister.errors import DecodeError, InvalidInput, RecipeError
from chorister.policy import Crowd, ReportKind
from chorister.policy.bounds import Claim
from chorister.policy.values import (
    URL,
    Delta,
    Epsilon,
    FieldRef,
    HonestFraction,
    Identifier,
    Name,
    Query,
    SQLName,
)
from chorister.privacy.certified import MAX_COHORT, noise_trials
from chorister.privacy.randomizers import (
    MAX_LENGTH,
    Mechanism,
    OneHotRandomizer,
    as_local_epsilon,
)
from chorister.privacy.weights import BOUND_DELTA

VERSION: Final = 1
MAX_RECIPE_BYTES: Final = 8_000_000
"""Enough for a vocabulary of 100,000 words; every device has to fetch this much."""


def _probability(value: Decimal) -> Decimal:
    if not 0 < value <= 1:
        raise ValueError(f"a probability must be above 0 and at most 1, not {value}")
    return value


_MAX_WINDOW_SECONDS: Final = 10 * 366 * 86_400
_Time = Annotated[Int, Field(ge=0, le=2**40)]


class Bucket(NamedTuple):
    """The `number`-th interval of `length` seconds since 1970: DAP's batch bucket."""

    number: int
    length: int

    @property
    def start(self) -> int:
        return self.number * self.length

    @property
    def end(self) -> int:
        """The first second after the bucket."""
        return self.start + self.length


class Window(Model):
    """When devices answer a recipe and its result is collected, in POSIX seconds."""

    opens: _Time
    """When devices start to answer."""
    closes: _Time
    """When the answer period ends: from then on aggregators refuse uploads, by their own clock."""
    ends: _Time
    """When the grace period ends in which the result can be collected."""

    @model_validator(mode="after")
    def _ordered(self) -> Window:
        if not self.opens < self.closes:
            raise FieldError("closes", "must be after opens")
        if not self.closes <= self.ends:
            raise FieldError("ends", "must not be before closes")
        if self.ends - self.opens > _MAX_WINDOW_SECONDS:
            raise FieldError("ends", "window and grace period together must not exceed ten years")
        return self

    @property
    def answer_seconds(self) -> int:
        return self.closes - self.opens

    @property
    def grace_seconds(self) -> int:
        return self.ends - self.closes

    @property
    def bucket(self) -> Bucket:
        """The shortest bucket that holds everything from `opens` to `ends`.

        DAP divides time into buckets of `time_precision`; any window fits into one bucket if the
        precision is chosen for it. Bucket k of length L holds the window if k L <= opens and
        ends <= (k + 1) L; so for each k, from the largest possible down, the least L is
        ceil(ends / (k + 1)), and the first k for which it also meets k L <= opens is the answer.
        """
        number = self.opens // (self.ends - self.opens)
        while True:
            length = -(-self.ends // (number + 1))
            if number * length <= self.opens:
                return Bucket(number, length)
            # The next k whose least L can be small enough; at k = 0 the loop always ends.
            number = min(number - 1, self.opens // length)


class Privacy(Model):
    """The privacy that a recipe asks for and promises."""

    mechanism: Mechanism
    local_epsilon: Annotated[Number, AfterValidator(as_local_epsilon)]
    """The mechanism's parameter eps0. Policies limit the replacement value that follows from it."""
    epsilon: Epsilon
    """The charge to the device; check 3 certifies it for the aggregate of min_cohort."""
    delta: Delta
    min_cohort: Annotated[Int, Field(ge=2, le=MAX_COHORT)]
    crowd: Crowd
    honest_fraction: HonestFraction | None = None
    """With an honest `crowd`: the share of every released batch that is assumed honest."""
    report: ReportKind

    @model_validator(mode="after")
    def _consistent(self) -> Privacy:
        if (self.crowd == "honest") != (self.honest_fraction is not None):
            raise FieldError("honest_fraction", "required if, and only if, the crowd is honest")
        if self.report == "bounded" and self.delta <= BOUND_DELTA:
            raise FieldError(
                "delta", f"bounded reports use {BOUND_DELTA} of delta: ask for more than that"
            )
        try:
            _ = self.claim.setting
        except InvalidInput as error:
            raise FieldError("crowd", str(error)) from None
        return self

    @property
    def noise_trials(self) -> int:
        """M, where each aggregator adds Bin(M, q) to every bin; 0 where none adds noise."""
        return noise_trials(self.crowd, self.min_cohort)

    @property
    def replacement_epsilon(self) -> Decimal:
        """The local epsilon that policies limit: what one report costs to both aggregators."""
        return self.mechanism.replacement_epsilon(self.local_epsilon)

    @property
    def claim(self) -> Claim:
        """The claim that check 3 has to certify for min_cohort."""
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
    """The probability that a device takes part; it draws once and remembers."""
    once_per_study: Bool
    """Only devices that have not answered another recipe of the same study take part."""


class Arm(Model):
    """One arm of an experiment. Each device draws its own arm, in proportion to the weights."""

    name: Name
    weight: Annotated[Int, Field(ge=1, le=1_000_000)]


class Aggregators(Model):
    """The pair, by URL."""

    leader: URL
    helper: URL


class Recipe(Model):
    """A question as devices receive it. On the wire only optional fields may be absent."""

    version: Literal[1]
    id: Identifier
    study: Identifier
    analysis: Identifier
    collector: Hex32
    """SHA-256 of the HPKE configuration to which the aggregate shares are sealed."""
    query: Query
    reads: Annotated[
        dict[SQLName, Annotated[tuple[SQLName, ...], Field(min_length=1)]],
        Field(min_length=1),
        FROZEN,
    ]
    """The fields that the query reads, by stream; nothing else exists when it runs."""
    group_by: tuple[FieldRef, ...]
    arms: Annotated[tuple[Arm, ...], Field(max_length=1000)]
    features: Annotated[tuple[AnyFeature, ...], Field(min_length=1, max_length=8)]
    selection: Selection
    deny: Annotated[tuple[DenyList, ...], Field(max_length=MAX_DENY_LISTS)]
    privacy: Privacy
    window: Window
    participation: Participation
    aggregators: Aggregators

    @classmethod
    def parse(cls, payload: bytes) -> Recipe:
        """Parse a canonical payload; raise `RecipeError` for anything else."""
        return cls._from_json(payload, canonical=True)

    @classmethod
    def draft(cls, text: bytes) -> Recipe:
        """Parse a recipe that a person wrote: any layout of the JSON, but otherwise as strict."""
        return cls._from_json(text, canonical=False)

    @classmethod
    def _from_json(cls, data: bytes, *, canonical: bool) -> Recipe:
        try:
            value: Any = loads(data, max_bytes=MAX_RECIPE_BYTES, canonical=canonical)
        except DecodeError as error:
            raise RecipeError(error.why, field=error.field) from None
        if not isinstance(value, dict):
            raise RecipeError("a recipe must be a JSON object")
        version = value.get("version")
        if type(version) is not int or version != VERSION:
            known = f"this software knows version {VERSION}"
            raise RecipeError(f"{str(version)[:40]}: {known}", field="version")
        try:
            recipe = cls.model_validate(value, context=WIRE)
        except ValidationError as error:
            field, message = first_error(error)
            raise RecipeError(message, field=field) from None
        # One recipe, one byte string: for example, defaults of optional fields are not spelled out.
        if canonical and recipe.canonical() != data:
            raise RecipeError("not in canonical form; sign it with `chorister recipe sign`")
        return recipe

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON, which identifies the recipe."""
        return sha256(self.canonical())

    @cached_property
    def encoding(self) -> Encoding:
        """The features and deny lists as one encoding."""
        return Encoding(self.features, self.deny)

    @cached_property
    def randomizer(self) -> OneHotRandomizer:
        """The randomizer that each device applies to its one-hot vector."""
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
        """Draw the arm of one device in proportion to the weights; None without an experiment."""
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
            raise FieldError("arms", "an experiment has two or more arms with different names")
        if len(set(self.group_by)) != len(self.group_by):
            raise FieldError("group_by", "a field occurs twice")
        for table, fields in self.reads.items():
            if len(set(fields)) != len(fields):
                raise FieldError(f"reads.{table}", "a field occurs twice")
        if self.aggregators.leader == self.aggregators.helper:
            raise FieldError("aggregators.helper", "leader and helper must be different")
        try:
            size = self.encoding.size
        except InvalidInput as error:
            raise FieldError("features", str(error)) from None
        words = sum(each.words for each in self.deny)
        if words > MAX_DENIED_WORDS:
            raise FieldError(
                "deny", f"{words:,} words, but at most {MAX_DENIED_WORDS:,} can be denied"
            )
        if not 2 <= size <= MAX_LENGTH:
            raise FieldError("features", f"{size:,} bins, not 2 to {MAX_LENGTH:,}")
        # Whatever parses may be logged, so everything derived from it must exist. The rest needs no
        # check: a randomizer has a weight bound of at most `size`, and a VDAF has room for both.
        try:
            _ = self.randomizer
        except InvalidInput as error:
            raise FieldError("privacy", str(error)) from None
        return self


def json_schema() -> dict[str, Any]:
    """Return the schema of a signed recipe's payload, draft 2020-12.

    It is published as docs/reference/recipe.schema.json, for tools and other implementations. What
    it can't express (canonical form, order of edges, leaves of a prefix tree, times in order) is
    checked by `Recipe.parse`.
    """
    schema = Recipe.model_json_schema(mode="serialization")
    for definition in [schema, *schema.get("$defs", {}).values()]:
        _as_on_the_wire(definition)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:chorister:recipe:{VERSION}",
        **schema,
    }


def _as_on_the_wire(definition: dict[str, Any]) -> None:
    """Make absent fields optional, never null, and require all others, even with defaults."""
    required = []
    for name, field in definition.get("properties", {}).items():
        if {"type": "null"} in field.get("anyOf", []):
            (choice,) = (c for c in field.pop("anyOf") if c != {"type": "null"})
            field.update(choice)
        else:
            required.append(name)
        field.pop("default", None)
    if required:
        definition["required"] = required
