"""How the pages write numbers and times."""

from __future__ import annotations

from collections.abc import Callable
from decimal import ROUND_CEILING, Context, Decimal
from typing import Final

from chorister.clock import utc_text
from chorister.policy.explain import number_text
from chorister.policy.values import duration_text

__all__ = ["FILTERS"]


def count(value: float) -> str:
    """A number of things, in thousands."""
    return f"{value:,.0f}"


def rounded(value: float) -> str:
    """An estimate: whole above ten, one digit below, with a minus that is one."""
    text = f"{value:,.0f}" if abs(value) >= 10 else f"{value:,.1f}"
    return text.replace("-", "−")


def decimal(value: Decimal) -> str:
    """A limit as the policy has it, tiny ones as powers of ten."""
    return number_text(value) if value > 0 else "0"


def brief(value: Decimal) -> str:
    """Three digits, rounded up: what is spent is never more than this says."""
    return decimal(Context(prec=3, rounding=ROUND_CEILING).plus(value))


def counted(number: int, thing: str) -> str:
    """A number with what is counted: 1 round, 2 rounds."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def percent(value: float) -> str:
    """A share that may be negative, for a column of them."""
    return f"{100.0 * value:.2f} %".replace("-", "−")


def share(value: float) -> str:
    """A share in a sentence."""
    percent = 100.0 * value
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def time(posix: int) -> str:
    """A moment, to the minute."""
    return utc_text(posix, "%d %b %Y, %H:%M UTC")


FILTERS: Final[dict[str, Callable[..., str]]] = {
    "brief": brief,
    "count": count,
    "counted": counted,
    "decimal": decimal,
    "duration": duration_text,
    "percent": percent,
    "rounded": rounded,
    "share": share,
    "time": time,
}
"""For templates, by name."""
