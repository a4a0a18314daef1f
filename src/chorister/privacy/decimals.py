"""Decimal arithmetic that does not depend on the host's context.

A host may have set any precision, rounding or traps for its own sums; what is enforced must not
follow them. So every operation names its direction: losses are rounded :data:`UP`, what is left of
a budget :data:`DOWN`. At 80 digits numbers as people write them come out exact either way.
"""

from __future__ import annotations

import math
from decimal import (
    MAX_EMAX,
    MIN_EMIN,
    ROUND_CEILING,
    ROUND_FLOOR,
    ROUND_HALF_EVEN,
    Context,
    Decimal,
    DivisionByZero,
    InvalidOperation,
    Overflow,
)
from typing import TypeAlias

__all__ = ["DOWN", "NEAREST", "UP", "Number", "as_decimal", "float_above", "rounded_up"]

Number: TypeAlias = Decimal | int | str | float


def _context(rounding: str) -> Context:
    # Every field is given: whatever is not would come from a default that the host can change.
    return Context(
        prec=80,
        rounding=rounding,
        Emin=MIN_EMIN,
        Emax=MAX_EMAX,
        capitals=1,
        clamp=0,
        flags=[],
        traps=[InvalidOperation, DivisionByZero, Overflow],
    )


UP = _context(ROUND_CEILING)
DOWN = _context(ROUND_FLOOR)
NEAREST = _context(ROUND_HALF_EVEN)


def as_decimal(value: Number) -> Decimal:
    """Read a number exactly: a float, NumPy's included, means the decimal that it prints as."""
    if isinstance(value, float):
        return Decimal(repr(float(value)))
    return Decimal(value)


def rounded_up(value: float, unit: Decimal) -> Decimal:
    """The least multiple of `unit` that is not below a float."""
    return Decimal.from_float(value).quantize(unit, context=UP)


def float_above(value: Decimal) -> float:
    """The least float that is not below a decimal."""
    nearest = float(value)
    return nearest if Decimal(nearest) >= value else math.nextafter(nearest, math.inf)
