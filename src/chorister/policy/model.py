"""What a device allows: the model behind a policy document (`document` reads its TOML).

Every class is frozen and refuses unknown keys. References between parts (an analysis that names a
field, a pair of aggregators) are checked here; `chorister.policy.contradictions` checks whether the
budgets make sense together.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args, get_type_hints

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from chorister.canonical import (
    FROZEN,
    Bool,
    FieldError,
    FieldErrors,
    FrozenDict,
    Hex32,
    Int,
    Model,
    PublicKey,
    all_errors,
    b64url_decode,
    find_noncanonical,
    sha256,
)
from chorister.errors import InvalidInput, PolicyError
from chorister.policy.document import parse_toml, read_document, with_stand_ins
from chorister.policy.values import (
    URL,
    Delta,
    Duration,
    Epsilon,
    FieldRef,
    HonestFraction,
    Identifier,
    LocalEpsilon,
    LogName,
    Name,
    Query,
    SQLName,
    duration_text,
)
from chorister.policy.witnesses import WitnessLines, WitnessPolicy, parse_witness_policy
from chorister.privacy.certified import MAX_COHORT, MAX_ORDER
from chorister.privacy.filters import BasicFilter, Filter, RenyiFilter
from chorister.privacy.randomizers import MAX_LENGTH, Mechanism

OTHER = "other"
"""The group of every value outside a closed list."""

Text: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=2000, strict=True)]
GroupValue: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=100, strict=True)]
Count: TypeAlias = Annotated[Int, Field(ge=1)]
Crowd: TypeAlias = Literal["noised", "honest"]
ReportKind: TypeAlias = Literal["bounded", "plain"]


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


def _integer(value: object) -> object:
    if type(value) is not int:  # True and 1.0 equal 1
        raise ValueError("must be an integer")
    return value


class Renyi(Model):
    """The Renyi filter at one order, or at several that share delta equally."""

    renyi: Annotated[
        tuple[Annotated[Int, Field(ge=2, le=MAX_ORDER)], ...],
        Field(min_length=1, max_length=8),
        BeforeValidator(_one_or_many),
    ]

    @model_validator(mode="after")
    def _increasing(self) -> Renyi:
        if list(self.renyi) != sorted(set(self.renyi)):
            raise FieldError("renyi", "list the orders in increasing order, each once")
        return self


Composition: TypeAlias = Literal["basic"] | Renyi


def empty_filter(composition: Composition, epsilon: Decimal, delta: Decimal) -> Filter:
    """Return a filter to which nothing is charged yet."""
    if isinstance(composition, Renyi):
        return RenyiFilter(epsilon=epsilon, delta=delta, orders=composition.renyi)
    return BasicFilter(epsilon=epsilon, delta=delta)


class DataField(Model):
    """A column of a stream or profile."""

    type: Literal["integer", "real", "text"]
    group_values: (
        Annotated[tuple[GroupValue, ...], Field(min_length=1, max_length=10_000)] | None
    ) = None
    """For a non-sensitive profile field: its closed list of values; anything else is `other`."""

    @model_validator(mode="after")
    def _closed_list(self) -> DataField:
        values = self.group_values or ()
        if len(set(values)) != len(values):
            raise FieldError("group_values", "a value occurs twice")
        if OTHER in values:
            raise FieldError("group_values", f"remove {OTHER!r}: it always exists")
        if values and self.type != "text":
            raise FieldError("group_values", "only text fields can form groups")
        return self


class DataTable(Model):
    """A stream (one row per event) or a profile (one row, replaced on donation)."""

    retention: Duration
    """How long to keep an event, or a profile that is not replaced."""
    fields: Annotated[dict[SQLName, DataField], Field(min_length=1, max_length=200), FROZEN]


class Aggregator(Model):
    """One of the two aggregators of a pair."""

    url: URL
    cosigning_keys: Annotated[tuple[PublicKey, ...], Field(min_length=1, max_length=16)]


class AggregatorPair(Model):
    """A leader and a helper; privacy holds if one of them is honest."""

    name: Name
    leader: Aggregator
    helper: Aggregator
    one_operator: Bool = False
    """The same operator runs both: there is no protection against that operator."""

    @model_validator(mode="after")
    def _two(self) -> AggregatorPair:
        if self.leader.url == self.helper.url:
            raise FieldError("helper.url", "leader and helper need different URLs")
        if set(self.leader.cosigning_keys) & set(self.helper.cosigning_keys):
            raise FieldError("helper.cosigning_keys", "leader and helper need different keys")
        return self


class Log(Model):
    """The public log."""

    origin: LogName
    """Its name, the first line of its checkpoints: one key may sign for several logs."""
    keys: Annotated[tuple[PublicKey, ...], Field(min_length=1, max_length=16)]
    checkpoint_max_age: Duration
    """A device is silent while its newest checkpoint is older."""
    witnesses: WitnessLines | None = None
    """Further witnesses that have to cosign, as c2sp.org/tlog-policy lines."""

    @property
    def witness_policy(self) -> WitnessPolicy | None:
        return None if self.witnesses is None else parse_witness_policy(self.witnesses)


class Budget(Model):
    """A budget that renews every `period`, if it has one."""

    epsilon: Epsilon
    delta: Delta
    reports: Count
    period: Duration | None = None
    composition: Composition = "basic"

    def filter(self) -> Filter:
        """Return the empty filter with which a ledger starts a period."""
        return empty_filter(self.composition, self.epsilon, self.delta)


class DeviceBudget(Budget):
    """What all analyses together may cost one device."""

    min_ledger_age: Duration
    """How long a new ledger is silent, so that deleting one does not renew the budget."""


class AnalysisBudget(Budget):
    """The paper's Table 1a, with delta and with the local epsilon of a single query."""

    local_epsilon: LocalEpsilon


class FieldBudget(Model):
    """The paper's Table 1b, with delta; renews with its analysis' budget."""

    local_epsilon: LocalEpsilon
    epsilon: Epsilon
    delta: Delta
    reports: Count


class WindowLimits(Model):
    """How long devices may answer a recipe, and how long its result may then be collected."""

    shortest: Duration
    longest: Duration
    longest_grace: Duration


class SeriesLimits(Model):
    """The limits of recipes that ask in many windows."""

    windows: Annotated[Int, Field(ge=2)]
    """The largest number of windows."""
    longest: Duration
    """The longest time from the first opening to the last closing."""
    answers: Count
    """In how many windows one device answers at most."""
    cells: Annotated[Int, Field(ge=2)]
    """The largest number of windows times groups times arms: each is a task of the aggregators."""


class CohortLimits(Model):
    """The limits of a recipe's min_cohort."""

    smallest: Annotated[Int, Field(ge=2)]
    largest: Annotated[Int, Field(ge=2, le=MAX_COHORT)]


class Analysis(Model):
    """One purpose, and everything that may be asked for it."""

    purpose: Text
    author_keys: Annotated[tuple[PublicKey, ...], Field(min_length=1, max_length=64)]
    collectors: Annotated[tuple[Hex32, ...], Field(min_length=1, max_length=64)]
    """SHA-256 of the collectors' HPKE configurations."""
    aggregators: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """Names of the permitted pairs; by default all of the policy's."""
    query_class: Literal["exact", "fields"]
    queries: tuple[Annotated[Query, Field(max_length=2000)], ...] = ()
    """With `exact`: the permitted queries, verbatim."""
    functions: tuple[SQLName, ...] = ()
    """With `fields`: the SQL functions that a query may call."""
    budget: AnalysisBudget
    fields: Annotated[dict[FieldRef, FieldBudget], Field(min_length=1), FROZEN]
    """The fields that may be read, each with its own budget."""
    max_bins: Annotated[Int, Field(ge=2, le=MAX_LENGTH)]
    window: WindowLimits
    series: SeriesLimits | None = None
    """Without it no recipe may have more than one window."""
    cohort: CohortLimits
    mechanisms: Annotated[tuple[Mechanism, ...], Field(min_length=1)] = (Mechanism.ASYMMETRIC,)
    report_kinds: Annotated[tuple[ReportKind, ...], Field(min_length=1)] = ("bounded",)
    crowds: Annotated[tuple[Crowd, ...], Field(min_length=1)] = ("noised",)
    honest_fraction: HonestFraction | None = None
    """The share of a cohort that is assumed to be honest, if `crowds` has `honest`."""
    group_by: tuple[FieldRef, ...] = ()
    max_cells: Count = 1
    """The largest number of parts (groups times arms) that a recipe may split the fleet into."""
    hashed_prefixes: Bool = False

    @property
    def longest_open(self) -> int:
        """The longest time for which a recipe can be answered, in seconds."""
        return max(self.window.longest, 0 if self.series is None else self.series.longest)

    @model_validator(mode="after")
    def _consistent(self) -> Analysis:
        if found := list(self._problems()):
            raise FieldErrors(found)
        return self

    def _problems(self) -> Iterator[tuple[str, str]]:
        exact = self.query_class == "exact"
        if exact != bool(self.queries):
            yield "queries", "list queries if, and only if, query_class is exact"
        if exact and self.functions:
            yield "functions", "allowed only if query_class is fields"
        if ("honest" in self.crowds) != (self.honest_fraction is not None):
            yield "honest_fraction", "required if, and only if, crowds has honest"
        for field in ("author_keys", "collectors", "mechanisms", "report_kinds", "crowds",
                      "group_by", "queries", "functions"):  # fmt: skip
            values = getattr(self, field)
            if len(set(values)) != len(values):
                yield field, "an entry occurs twice"


class Policy(Model):
    """What a device allows."""

    version: Annotated[Literal[1], BeforeValidator(_integer)]
    name: Name
    log: Log
    aggregators: Annotated[tuple[AggregatorPair, ...], Field(min_length=1, max_length=64)]
    device: DeviceBudget
    streams: Annotated[dict[SQLName, DataTable], FROZEN] = Field(default_factory=FrozenDict)
    profiles: Annotated[dict[SQLName, DataTable], FROZEN] = Field(default_factory=FrozenDict)
    analyses: Annotated[dict[Identifier, Analysis], Field(min_length=1), FROZEN]

    @classmethod
    def load(cls, source: bytes | str | os.PathLike[str]) -> Policy:
        """Read a policy from a TOML document (bytes) or from a file (a path)."""
        return cls._validated(parse_toml(read_document(source)))

    @classmethod
    def load_rehearsal(cls, source: bytes | str | os.PathLike[str]) -> Policy:
        """Read a policy that may lack what a rehearsal does not use: log, aggregators and keys.

        They are replaced by stand-ins that no device and no server could use.
        """
        return cls._validated(with_stand_ins(parse_toml(read_document(source))))

    @classmethod
    def _validated(cls, tree: dict[str, Any]) -> Policy:
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            found = [(field or "", message) for field, message in all_errors(error)]
            field, message = found[0]
            raise PolicyError(message, field=field or None, problems=tuple(found)) from None

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the model's canonical JSON: comments and layout don't matter."""
        return sha256(self.canonical())

    @property
    def log_keys(self) -> tuple[str, ...]:
        """The log's public keys, as base64url."""
        return self.log.keys

    @property
    def checkpoint_max_age(self) -> int:
        """In seconds."""
        return self.log.checkpoint_max_age

    @cached_property
    def fields(self) -> Mapping[str, DataField]:
        """Every field as "table.field"."""
        tables = {**self.streams, **self.profiles}
        return FrozenDict(
            {
                f"{name}.{field}": model
                for name, table in tables.items()
                for field, model in table.fields.items()
            }
        )

    def pairs(self, analysis: Analysis) -> Iterator[AggregatorPair]:
        """Iterate over the pairs of aggregators that an analysis may use."""
        for pair in self.aggregators:
            if analysis.aggregators is None or pair.name in analysis.aggregators:
                yield pair

    def group_values(self, field: str) -> tuple[str, ...]:
        """Return the closed list of a group field, with `other` at the end."""
        known = self.fields.get(field)
        if known is None or known.group_values is None:
            raise InvalidInput(f"{field}: not a non-sensitive field of policy {self.name}")
        return (*known.group_values, OTHER)

    def group_value(self, field: str, value: object) -> str:
        """Return the group of a device's value: the value itself if listed, else `other`."""
        values = self.group_values(field)
        return value if isinstance(value, str) and value in values else OTHER

    def cells(self, group_by: tuple[str, ...], arms: int) -> int:
        """Return the number of parts into which a recipe splits the fleet."""
        return max(arms, 1) * math.prod(len(self.group_values(field)) for field in group_by)

    @model_validator(mode="after")
    def _consistent(self) -> Policy:
        if found := [*self._references(), *self._periods(), *self._witnesses()]:
            raise FieldErrors(found)
        return self

    def _witnesses(self) -> Iterator[tuple[str, str]]:
        """Whoever already has to cosign adds nothing as a witness."""
        sides = [side for pair in self.aggregators for side in (pair.leader, pair.helper)]
        keys = {key for side in sides for key in side.cosigning_keys} | set(self.log.keys)
        if (witnesses := self.log.witness_policy) is not None:
            for name in witnesses.with_keys({b64url_decode(key) for key in keys}):
                yield "log.witnesses", f"{name} has the key of the log or of an aggregator"

    def _references(self) -> Iterator[tuple[str, str]]:
        for name in sorted(set(self.streams) & set(self.profiles)):
            yield f"profiles.{name}", "a stream already has this name"
        for name, table in self.streams.items():
            for field, model in table.fields.items():
                if model.group_values is not None:
                    where = f"streams.{name}.fields.{field}.group_values"
                    yield where, "only profile fields can form groups"
        pairs = [pair.name for pair in self.aggregators]
        if len(set(pairs)) != len(pairs):
            yield "aggregators", "two pairs have the same name"
        for name, analysis in self.analyses.items():
            yield from self._check_analysis(f"analyses.{name}", analysis, set(pairs))

    def _periods(self) -> Iterator[tuple[str, str]]:
        budgets: dict[str, Budget] = {"device": self.device}
        budgets |= {f"analyses.{name}.budget": each.budget for name, each in self.analyses.items()}
        for where, budget in budgets.items():
            if budget.period is not None and budget.period < self.checkpoint_max_age:
                # A clock may be off by this much: several periods could then renew at once.
                age = duration_text(self.checkpoint_max_age)
                yield f"{where}.period", f"must be at least log.checkpoint_max_age, {age}"

    @model_validator(mode="after")
    def _has_a_digest(self) -> Policy:
        if found := find_noncanonical(self.model_dump(mode="json", exclude_none=True)):
            raise FieldError(*found)
        return self

    def _check_analysis(
        self, where: str, analysis: Analysis, pairs: set[str]
    ) -> Iterator[tuple[str, str]]:
        for pair in analysis.aggregators or ():
            if pair not in pairs:
                yield f"{where}.aggregators", f"the policy has no pair {pair!r}"
        for ref in analysis.fields:
            if ref not in self.fields:
                yield f"{where}.fields.{ref}", "no stream or profile has this field"
        for ref in analysis.group_by:
            if ref not in self.fields:
                yield f"{where}.group_by", f"no profile has the field {ref!r}"
            elif self.fields[ref].group_values is None:
                yield f"{where}.group_by", f"{ref!r} is sensitive: it has no group_values"


def _duration_fields() -> frozenset[str]:
    models = [Policy, *Model.__subclasses__(), *Budget.__subclasses__()]
    return frozenset(
        name
        for model in models
        if model.__module__ == __name__
        for name, hint in get_type_hints(model, include_extras=True).items()
        if Duration in (hint, *get_args(hint))
    )


DURATION_FIELDS: Final = _duration_fields()
"""The keys of a policy whose values are durations: seconds in the model, "30d" in TOML."""
