"""What a device allows: the model behind a policy document.

Every class is frozen and refuses unknown keys. References between parts (an analysis that names a
field, a pair of aggregators) are checked here; whether the budgets make sense together is the
business of `chorister.policy.contradictions`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, StringConstraints, ValidationError, model_validator

from chorister.canonical import (
    FROZEN,
    Bool,
    Complaint,
    FrozenDict,
    Hex32,
    Int,
    Model,
    PublicKey,
    b64url_decode,
    culprit,
    fault,
    key_id,
    sha256,
)
from chorister.errors import InvalidInput, PolicyError
from chorister.policy.document import parse
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
    SQLName,
)
from chorister.privacy.filters import BasicFilter, Filter, RenyiFilter
from chorister.privacy.randomizers import MAX_LENGTH, Mechanism
from chorister.privacy.renyi import MAX_ORDER
from chorister.privacy.settings import MAX_COHORT

__all__ = [
    "OTHER",
    "Aggregator",
    "AggregatorPair",
    "Analysis",
    "AnalysisBudget",
    "Composition",
    "Crowd",
    "DataField",
    "DeviceBudget",
    "FieldBudget",
    "Policy",
    "Renyi",
    "ReportKind",
    "Table",
]

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
        raise ValueError("an integer")
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
            raise Complaint("renyi", "orders increase, each given once")
        return self


Composition: TypeAlias = Literal["basic"] | Renyi


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
            raise Complaint("group_values", "a value occurs twice")
        if OTHER in values:
            raise Complaint("group_values", f"{OTHER!r} is always there and is not listed")
        if values and self.type != "text":
            raise Complaint("group_values", "only text fields form groups")
        return self


class Table(Model):
    """A stream (many rows, one an event) or a profile (one row, replaced on donation)."""

    retention: Duration
    """How long an event, or a profile that is not renewed, is kept."""
    fields: Annotated[dict[SQLName, DataField], Field(min_length=1, max_length=200), FROZEN]


class Aggregator(Model):
    """One of the two aggregators of a pair."""

    url: URL
    cosigning_keys: Annotated[tuple[PublicKey, ...], Field(min_length=1, max_length=16)]


class AggregatorPair(Model):
    """A leader and a helper. Privacy holds if one of them is honest."""

    name: Name
    leader: Aggregator
    helper: Aggregator
    one_operator: Bool = False
    """Both are run by the same operator: there is no protection against that operator."""

    @model_validator(mode="after")
    def _two(self) -> AggregatorPair:
        if self.leader.url == self.helper.url:
            raise Complaint("helper.url", "leader and helper share one URL")
        if set(self.leader.cosigning_keys) & set(self.helper.cosigning_keys):
            raise Complaint("helper.cosigning_keys", "leader and helper share a key")
        return self


class Log(Model):
    """The public log."""

    origin: LogName
    """Its name, as the first line of its checkpoints has it: one key may sign for several logs."""
    keys: Annotated[tuple[PublicKey, ...], Field(min_length=1, max_length=16)]
    checkpoint_max_age: Duration
    """How old the newest checkpoint may be before a device stays silent."""


class Budget(Model):
    """A budget that renews every `period`, if it has one."""

    epsilon: Epsilon
    delta: Delta
    reports: Count
    period: Duration | None = None
    composition: Composition = "basic"

    def filter(self) -> Filter:
        """The empty filter that a ledger starts a period with."""
        if isinstance(self.composition, Renyi):
            orders = self.composition.renyi
            return RenyiFilter(epsilon=self.epsilon, delta=self.delta, orders=orders)
        return BasicFilter(epsilon=self.epsilon, delta=self.delta)


class DeviceBudget(Budget):
    """What all analyses together may cost one device."""

    min_ledger_age: Duration
    """Silence after a ledger was created, so that deleting it does not renew the budget at once."""


class AnalysisBudget(Budget):
    """The paper's Table 1a, with delta, and with the local epsilon of any one query."""

    local_epsilon: LocalEpsilon


class FieldBudget(Model):
    """The paper's Table 1b, with delta; renews with its analysis' budget."""

    local_epsilon: LocalEpsilon
    epsilon: Epsilon
    delta: Delta
    reports: Count


class WindowLimits(Model):
    """How long a recipe may be answered, and how long afterwards collected."""

    shortest: Duration
    longest: Duration
    longest_grace: Duration


class CohortLimits(Model):
    """Between what bounds a recipe's min_cohort lies."""

    smallest: Annotated[Int, Field(ge=2)]
    largest: Annotated[Int, Field(ge=2, le=MAX_COHORT)]


class Analysis(Model):
    """One purpose, with everything that may be asked for it."""

    purpose: Text
    author_keys: Annotated[tuple[PublicKey, ...], Field(min_length=1, max_length=64)]
    collectors: Annotated[tuple[Hex32, ...], Field(min_length=1, max_length=64)]
    """SHA-256 of the collectors' HPKE configurations."""
    aggregators: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """Names of the permitted pairs; all of the policy's if left out."""
    query_class: Literal["exact", "fields"]
    queries: tuple[Text, ...] = ()
    """For `exact`: the permitted queries, to the letter."""
    functions: tuple[SQLName, ...] = ()
    """For `fields`: the SQL functions that a query may call."""
    budget: AnalysisBudget
    fields: Annotated[dict[FieldRef, FieldBudget], Field(min_length=1), FROZEN]
    """What may be read, and each field's own budget."""
    max_bins: Annotated[Int, Field(ge=2, le=MAX_LENGTH)]
    window: WindowLimits
    cohort: CohortLimits
    mechanisms: Annotated[tuple[Mechanism, ...], Field(min_length=1)] = (Mechanism.ASYMMETRIC,)
    report_kinds: Annotated[tuple[ReportKind, ...], Field(min_length=1)] = ("bounded",)
    crowds: Annotated[tuple[Crowd, ...], Field(min_length=1)] = ("noised",)
    honest_fraction: HonestFraction | None = None
    """The share of a cohort that is assumed honest, where `honest` is among the crowds."""
    group_by: tuple[FieldRef, ...] = ()
    max_cells: Count = 1
    """The largest number of parts (groups times arms) that a recipe may split the fleet into."""
    hashed_prefixes: Bool = False

    @cached_property
    def author_key_ids(self) -> Mapping[str, str]:
        """Key id -> public key."""
        return FrozenDict({key_id(b64url_decode(key)): key for key in self.author_keys})

    @model_validator(mode="after")
    def _consistent(self) -> Analysis:
        exact = self.query_class == "exact"
        if exact != bool(self.queries):
            raise Complaint("queries", "listed if, and only if, query_class is exact")
        if exact and self.functions:
            raise Complaint("functions", "only where query_class is fields")
        if ("honest" in self.crowds) != (self.honest_fraction is not None):
            raise Complaint("honest_fraction", "given if, and only if, crowds has honest")
        for field in ("author_keys", "collectors", "mechanisms", "report_kinds", "crowds",
                      "group_by", "queries", "functions"):  # fmt: skip
            values = getattr(self, field)
            if len(set(values)) != len(values):
                raise Complaint(field, "an entry occurs twice")
        return self


class Policy(Model):
    """A policy document."""

    version: Annotated[Literal[1], BeforeValidator(_integer)]
    name: Name
    log: Log
    aggregators: Annotated[tuple[AggregatorPair, ...], Field(min_length=1, max_length=64)]
    device: DeviceBudget
    streams: Annotated[dict[SQLName, Table], FROZEN] = Field(default_factory=FrozenDict)
    profiles: Annotated[dict[SQLName, Table], FROZEN] = Field(default_factory=FrozenDict)
    analyses: Annotated[dict[Identifier, Analysis], Field(min_length=1), FROZEN]

    @classmethod
    def load(cls, source: bytes | str | os.PathLike[str]) -> Policy:
        """Read a policy from a TOML document (bytes) or from the file at a path."""
        data = source if isinstance(source, bytes) else _read(Path(source))
        try:
            return cls.model_validate(parse(data))
        except ValidationError as error:
            field, message = culprit(error)
            raise PolicyError(message, field=field) from None

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON of the model: comments and layout do not matter."""
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
        """The pairs of aggregators that an analysis may use."""
        for pair in self.aggregators:
            if analysis.aggregators is None or pair.name in analysis.aggregators:
                yield pair

    def group_values(self, field: str) -> tuple[str, ...]:
        """The closed list of a group field, `other` last."""
        known = self.fields.get(field)
        if known is None or known.group_values is None:
            raise InvalidInput(f"{field}: not a non-sensitive field of policy {self.name}")
        return (*known.group_values, OTHER)

    def group_value(self, field: str, value: object) -> str:
        """The group that a device's value belongs to: itself if listed, else `other`."""
        values = self.group_values(field)
        return value if isinstance(value, str) and value in values else OTHER

    def cells(self, group_by: tuple[str, ...], arms: int) -> int:
        """How many parts a recipe splits the fleet into."""
        return max(arms, 1) * math.prod(len(self.group_values(field)) for field in group_by)

    @model_validator(mode="after")
    def _references(self) -> Policy:
        if both := set(self.streams) & set(self.profiles):
            raise Complaint(f"profiles.{min(both)}", "a stream has this name already")
        for name, table in self.streams.items():
            for field, model in table.fields.items():
                if model.group_values is not None:
                    where = f"streams.{name}.fields.{field}.group_values"
                    raise Complaint(where, "only profile fields form groups")
        pairs = [pair.name for pair in self.aggregators]
        if len(set(pairs)) != len(pairs):
            raise Complaint("aggregators", "two pairs share a name")
        for name, analysis in self.analyses.items():
            self._check_analysis(f"analyses.{name}", analysis, set(pairs))
        return self

    @model_validator(mode="after")
    def _has_a_digest(self) -> Policy:
        if found := fault(self.model_dump(mode="json", exclude_none=True)):
            raise Complaint(*found)
        return self

    def _check_analysis(self, where: str, analysis: Analysis, pairs: set[str]) -> None:
        for pair in analysis.aggregators or ():
            if pair not in pairs:
                raise Complaint(f"{where}.aggregators", f"there is no pair {pair!r}")
        for ref in analysis.fields:
            if ref not in self.fields:
                raise Complaint(f"{where}.fields.{ref}", "no stream or profile has this field")
        for ref in analysis.group_by:
            if ref not in self.fields:
                raise Complaint(f"{where}.group_by", f"no profile has the field {ref!r}")
            if self.fields[ref].group_values is None:
                raise Complaint(
                    f"{where}.group_by", f"{ref!r} has no group_values: it is sensitive"
                )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PolicyError(f"can't read {path}: {error.strerror}") from None
