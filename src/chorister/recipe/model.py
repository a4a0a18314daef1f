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
from chorister.privacy.filters import Release, StatedCost
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
MAX_WINDOWS: Final = 1000
_Seconds = Annotated[Int, Field(ge=1, le=_MAX_WINDOW_SECONDS)]
_MAX_TIME: Final = 2**40
_Time = Annotated[Int, Field(ge=0, le=_MAX_TIME)]


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

    def moved(self, seconds: int) -> Window:
        """Return the same window, that much later."""
        return Window(
            opens=self.opens + seconds, closes=self.closes + seconds, ends=self.ends + seconds
        )


class Series(Model):
    """One question, asked in many windows: `Recipe.window` is the first of them."""

    windows: Annotated[Int, Field(ge=2, le=MAX_WINDOWS)]
    every: _Seconds
    """The time from one opening to the next."""
    answers: Annotated[Int, Field(ge=1, le=MAX_WINDOWS)]
    """In how many of the windows one device may answer. It draws which, once."""

    @model_validator(mode="after")
    def _ordered(self) -> Series:
        if self.answers > self.windows:
            raise FieldError("answers", f"must not exceed the number of windows, {self.windows}")
        return self


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
    def stated_cost(self) -> StatedCost:
        """What one answer costs, in the form that filters add up."""
        release = Release(setting=self.claim.setting, cohort=self.min_cohort)
        return StatedCost(release=release, epsilon=self.epsilon, delta=self.delta)

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
    series: Series | None = None
    """Further windows; without it the recipe has one."""
    periods: Annotated[dict[SQLName, _Seconds], Field(min_length=1), FROZEN] | None = None
    """For each stream that is limited: how long before a window opens its events still count.

    Without it, a query sees all events that the device keeps.
    """
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

    @property
    def window_count(self) -> int:
        return 1 if self.series is None else self.series.windows

    @property
    def answers(self) -> int:
        """In how many windows one device may answer."""
        return 1 if self.series is None else self.series.answers

    @property
    def closes(self) -> int:
        """When the last window closes: from then on nothing is answered."""
        return self.window.closes + (self.window_count - 1) * self._every

    def window_at(self, number: int) -> Window:
        """Return a window by its number: 0 is the first, and a single question's only one."""
        if not 0 <= number < self.window_count:
            last = self.window_count - 1
            raise InvalidInput(f"the recipe has the windows 0 to {last}, not {number}")
        return self.window.moved(number * self._every) if number else self.window

    def window_open(self, now: int) -> int | None:
        """Return the number of the window that is open; None if none is. They never overlap."""
        number, inside = divmod(now - self.window.opens, self._every)
        within = 0 <= number < self.window_count and inside < self.window.answer_seconds
        return number if within else None

    def next_opening(self, now: int) -> int | None:
        """Return when the first window that is still to come opens; None if none is."""
        number = max(0, (now - self.window.opens) // self._every + 1)
        return self.window_at(number).opens if number < self.window_count else None

    def answer_id(self, number: int) -> bytes:
        """Return what identifies one device's answer: the digest, and a series' window."""
        return self.digest if self.series is None else self.digest + number.to_bytes(4)

    def events(self, number: int) -> dict[str, range]:
        """Return the donation times of the events that count in a window, by limited stream."""
        opens = self.window_at(number).opens
        return {name: range(opens - span, opens) for name, span in (self.periods or {}).items()}

    @property
    def _every(self) -> int:
        return self.window.answer_seconds if self.series is None else self.series.every

    def draw_windows(
        self, *, randbelow: Callable[[int], int] = secrets.randbelow
    ) -> tuple[int, ...]:
        """Draw in which windows one device answers: each subset of that size is equally likely.

        Of all windows, those that are over among them, so that no window gets more than its share.
        """
        if self.series is None:
            return (0,)
        numbers = list(range(self.window_count))
        for place in range(self.answers):
            other = place + randbelow(len(numbers) - place)
            numbers[place], numbers[other] = numbers[other], numbers[place]
        return tuple(sorted(numbers[: self.answers]))

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
        if self.series is not None:
            if self.series.every < self.window.answer_seconds:
                why = "must be at least as long as the window: answer periods never overlap"
                raise FieldError("series.every", why)
            whole = (self.series.windows - 1) * self.series.every
            if self.window.ends - self.window.opens + whole > _MAX_WINDOW_SECONDS:
                raise FieldError("series.windows", "a series must not exceed ten years")
            if self.window.ends + whole > _MAX_TIME:
                raise FieldError("series.windows", "the last window is beyond all times")
        for stream in self.periods or ():
            if stream not in self.reads:
                raise FieldError(f"periods.{stream}", "the recipe does not read this stream")
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
