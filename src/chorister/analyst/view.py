"""What a result is made of: the released sums, and rows that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.estimate import Estimates, Floats
from chorister.recipe import Recipe

__all__ = ["Labels", "Part", "View", "column_names", "part_columns"]

Labels: TypeAlias = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Part:
    """The released sums of one group and arm, or of the whole cohort where there are neither."""

    group: tuple[str, ...]  # its values, in the order of the recipe's group_by, then its arm
    reports: int  # verified
    sums: NDArray[np.uint64]  # one a bin, noise included


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class View:
    """Rows that are not, or no longer, the bins as they came."""

    labels: Labels
    rows: Estimates
    bounds: tuple[Floats, Floats] | None = None  # (least, most) possible, if a step knows them
    shown: Floats | None = None  # estimates after post-processing; intervals stay the noise's


def part_columns(recipe: Recipe) -> int:
    """How many label columns tell parts apart: the groups' and the arms'."""
    return len(recipe.group_by) + bool(recipe.arms)


def column_names(recipe: Recipe) -> list[str]:
    """Of the label columns: groups, the arm, then features; no two alike."""
    names: list[str] = []
    wanted = [ref.rpartition(".")[2] for ref in recipe.group_by]
    wanted += ["arm"] if recipe.arms else []
    wanted += ["_".join(feature.columns_read) for feature in recipe.features]
    reserved = {"estimate", "std_error", "ci_low", "ci_high"}
    for name in wanted:
        unique, number = name, 1
        while unique in names or unique in reserved:
            number += 1
            unique = f"{name}_{number}"
        names.append(unique)
    return names
