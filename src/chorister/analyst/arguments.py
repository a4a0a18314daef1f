"""Reads what an analyst passes: it is converted, or refused with what to pass instead."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, Final, SupportsIndex, TypeAlias, TypeVar

from pydantic import ValidationError

from chorister.canonical import first_error
from chorister.encoding import AnyFeature, DenyList, Feature
from chorister.errors import InvalidInput
from chorister.policy.values import parse_duration
from chorister.privacy.decimals import DOWN, as_decimal
from chorister.recipe import Arm, Participation

Real: TypeAlias = int | float | str | Decimal
Item = TypeVar("Item")
MAX_COUNT: Final = 10**18  # of devices; with more, floating-point numbers end
_LEAST_PROBABILITY: Final = Decimal("1e-12")
_EVERYONE: Final = Participation(probability=Decimal(1), once_per_study=False)


def as_exact(value: Real, name: str = "") -> Decimal:
    """Convert a number to the decimal that it prints as; `name` is what it is given as."""
    try:
        exact = as_decimal(value)
    except (ArithmeticError, TypeError, ValueError):
        exact = None
    if exact is None or isinstance(value, bool) or not exact.is_finite():
        prefix = f"{name}: " if name else ""
        raise InvalidInput(f"{prefix}{value!r} is not a number", field=name or None)
    return exact


def as_positive(value: Real, name: str) -> Decimal:
    """Convert a number above 0 to the decimal that it prints as."""
    exact = as_exact(value, name)
    if exact <= 0:
        raise InvalidInput(f"{name} must be above 0, not {value}", field=name)
    return exact


def as_list(value: Iterable[Item], name: str, example: str) -> list[Item]:
    """Read a list. A text is not one: its letters are never meant."""
    items = None if isinstance(value, str | bytes) else _items(value)
    if items is None:
        raise InvalidInput(f"{name} is a list such as {example}, not {value!r}", field=name)
    return list(items)


def _items(value: object) -> tuple[Any, ...] | None:
    """What something holds; None if it is nothing to iterate over, such as an array of a number."""
    try:
        return tuple(value) if isinstance(value, Iterable) else None
    except TypeError:
        return None


def as_features(value: object) -> tuple[AnyFeature, ...]:
    """Read features: one, or several."""
    chosen: Sequence[Any] = value if isinstance(value, list | tuple) else (value,)
    for each in chosen:
        if not isinstance(each, Feature):
            raise InvalidInput(
                "say how to count: ch.intervals(column, edges), ch.categories(column, values), "
                f"ch.prefix_tree(...) or ch.grid(...), not {each!r}",
                field="features",
            )
    return tuple(chosen)


def as_reads(value: object) -> dict[str, tuple[str, ...]]:
    """Read which fields of which streams and profiles a query reads."""
    if not isinstance(value, Mapping):
        raise InvalidInput(f"reads is {{stream: [field, ...]}}, not {value!r}", field="reads")
    return {table: as_names(names) for table, names in value.items()}


@contextmanager
def valid_input(prefix: str = "") -> Iterator[None]:
    """Raise `InvalidInput` where pydantic finds that something given is invalid."""
    try:
        yield
    except ValidationError as error:
        field, message = first_error(error)
        text = f"{prefix}{field}: {message}" if field else message
        raise InvalidInput(text, field=field) from None


def as_seconds(value: int | str, name: str) -> int:
    """Read a duration: seconds, or text such as "12h"."""
    try:
        return parse_duration(value)
    except ValueError as error:
        raise InvalidInput(f"{name}: {error}, or a number of seconds", field=name) from None


def as_periods(
    value: int | str | Mapping[str, int | str] | None, streams: Sequence[str]
) -> dict[str, int] | None:
    """Read for how long events count: the same for all of these streams, or each on its own."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return dict.fromkeys(streams, as_seconds(value, "period")) or None
    unknown = [name for name in value if name not in streams]
    if unknown:
        raise InvalidInput(f"period: {unknown[0]!r} is not a stream in `reads`", field="period")
    return {name: as_seconds(each, "period") for name, each in value.items()} or None


def as_count(value: int | None, name: str) -> int | None:
    """Read a whole number of devices, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise InvalidInput(f"{name} is a whole number, not {value!r}", field=name)
    try:
        number = operator.index(value)
    except TypeError:  # an array of several
        raise InvalidInput(f"{name} is a whole number, not {value!r}", field=name) from None
    if abs(number) > MAX_COUNT:
        raise InvalidInput(f"{name} must be at most {MAX_COUNT:,}", field=name)
    return number


def as_names(value: Iterable[str] | str) -> tuple[str, ...]:
    """Read names: one, or several."""
    names = (value,) if isinstance(value, str) else _items(value)
    if names is None or any(not isinstance(name, str) for name in names):
        raise InvalidInput(f"names are text, or a list of texts, not {value!r}")
    return names


def as_deny_lists(value: DenyList | Sequence[DenyList]) -> tuple[DenyList, ...]:
    """Read deny lists: one, or several."""
    given: object = (value,) if isinstance(value, DenyList) else value
    lists = _items(given)
    if lists is None or any(not isinstance(each, DenyList) for each in lists):
        raise InvalidInput(
            "deny takes lists such as chorister.encoding.DenyList(column=..., phrases=...)",
            field="deny",
        )
    return lists


def as_column(value: str) -> str:
    """Read the name of a column of a query's result."""
    own = str(value).rpartition(".")[2]
    if own != str(value):
        raise InvalidInput(
            f"{value!r} is not a column: write {own!r}, without its stream or profile",
            field="column",
        )
    return value


def as_texts(value: Iterable[Any], name: str) -> list[str]:
    """Read a list of texts."""
    texts = as_list(value, name, '["good", "morning"]')
    if wrong := [each for each in texts if not isinstance(each, str)]:
        raise InvalidInput(f"{name} lists texts, not {wrong[0]!r}", field=name)
    return texts


def as_participation(value: Participation | Real | str | None) -> Participation:
    """Read who answers: "everyone", or a share of those new to the study."""
    if value is None or value == "everyone":
        return _EVERYONE
    if isinstance(value, Participation):
        return value
    share = as_exact(value, "participation")
    if not 0 < share <= 1:
        raise InvalidInput(f'participation is "everyone" or a share in (0, 1], not {value!r}')
    probability = share.quantize(_LEAST_PROBABILITY, context=DOWN).normalize(DOWN)
    if not probability:
        raise InvalidInput(
            f"participation must be at least {_LEAST_PROBABILITY}", field="participation"
        )
    return Participation(probability=probability, once_per_study=True)


def as_arms(value: Mapping[str, int] | Sequence[str]) -> tuple[Arm, ...]:
    """Read the arms of an experiment: names with weights, or names of equal weight."""
    names = tuple(value) if isinstance(value, Mapping) else as_names(value)
    weights = value if isinstance(value, Mapping) else dict.fromkeys(names, 1)
    if isinstance(value, str) or len(weights) != len(names) or len(weights) == 1:
        raise InvalidInput("an experiment needs two or more arms with different names")
    with valid_input("arms: "):
        return tuple(Arm(name=name, weight=weight) for name, weight in weights.items())
