"""The people of a rehearsal, and what their devices answer.

Devices with the same rows form a *class*. A table of events by device has one class per device; a
table of counts has one class per row, however many devices it stands for. The work grows with the
number of rows, never with the number of devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.arguments import as_count
from chorister.analyst.rehearsal.columns import Ints
from chorister.analyst.rehearsal.device_tables import class_rows, number_devices, split_by_table
from chorister.analyst.rehearsal.queries import QueryRows, QueryRunner, no_column
from chorister.encoding import Encoding, Selection
from chorister.errors import InvalidInput
from chorister.policy import OTHER, Policy
from chorister.recipe import Recipe


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class GroupCounts:
    """What the devices that answer hold, group by group."""

    groups: tuple[tuple[str, ...], ...]
    reports: Ints  # devices per group
    counts: Ints  # devices per group and bin


class Population:
    """The data of simulated devices, for one policy."""

    def __init__(
        self,
        source: object,
        policy: Policy,
        *,
        device: str = "device",
        count: str = "count",
        devices: int | None = None,
    ) -> None:
        self._policy = policy
        frames = split_by_table(source, policy, device=device, count=count)
        self._tables, weights = number_devices(frames, device=device, count=count)
        total = int(weights.sum())
        devices = as_count(devices, "devices")
        if devices is not None:
            if devices < total:
                raise InvalidInput(f"devices={devices:,} is fewer than the {total:,} in the data")
            if devices > total:  # another class, of devices without data
                weights = np.append(weights, devices - total)
        self.weights: Ints = weights
        """Devices per class."""
        self._queries = QueryRunner(self._tables, policy, len(weights))
        self._groups: dict[tuple[str, ...], Ints] = {}

    @property
    def size(self) -> int:
        return int(self.weights.sum())

    def __repr__(self) -> str:
        return f"<Population: {self.size:,} devices in {len(self.weights):,} classes>"

    def each_device(self) -> Iterator[dict[str, list[dict[str, object]]]]:
        """Yield the rows of every single device, table by table."""
        spans = {
            name: list(class_rows(table.owners, len(self.weights)))
            for name, table in self._tables.items()
        }
        for one, weight in enumerate(self.weights.tolist()):
            rows = {
                name: table.frame[spans[name][one][0] : spans[name][one][1]].to_dicts()
                for name, table in self._tables.items()
            }
            for _ in range(weight):
                yield rows

    def truth(self, recipe: Recipe, seed: int) -> NDArray[np.float64]:
        """The true counts if every device answered: one per bin, or one row per group."""
        found = self.answers(recipe, self.weights, np.random.default_rng([seed, 0])).counts
        return (found if recipe.group_by else found[0]).astype(np.float64)

    def answers(self, recipe: Recipe, answering: Ints, rng: np.random.Generator) -> GroupCounts:
        """Count what devices report, each one bin, by the device's own rule.

        `answering` is the number of devices of each class that answer.
        """
        rows = self._queries.run(recipe)
        names, group_of = self.groups_of(recipe.group_by)
        encoding = recipe.encoding
        everyone = bool((answering > 0).all())
        keep = None if everyone else answering[rows.owners] > 0
        bins = _bins(encoding, rows, keep)
        owners = rows.owners if keep is None else rows.owners[keep]
        if everyone and _one_each(owners, len(answering)):
            classes, held, devices = owners, np.maximum(bins, 0), answering
        else:
            classes, held, devices = choose(
                encoding, owners, bins, answering, recipe.selection, rng
            )
        size = encoding.size
        if len(names) == 1:
            flat = np.bincount(held, devices, size)
            reports = np.array([answering.sum()], dtype=np.int64)
        else:
            flat = np.bincount(group_of[classes] * size + held, devices, size * len(names))
            reports = np.bincount(group_of, answering, len(names)).astype(np.int64)
        counts = np.rint(flat).astype(np.int64).reshape(len(names), size)
        return GroupCounts(groups=names, reports=reports, counts=counts)

    def groups_of(self, refs: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], ...], Ints]:
        """Return all groups, and the group of each class."""
        values = [self._policy.group_values(ref) for ref in refs]
        names = tuple(product(*values))
        if refs not in self._groups:
            found = np.zeros(len(self.weights), dtype=np.int64)
            for ref, known in zip(refs, values, strict=True):
                found = found * len(known) + self._group_codes(ref, known)
            self._groups[refs] = found
        return names, self._groups[refs]

    def _group_codes(self, ref: str, known: tuple[str, ...]) -> Ints:
        table, _, name = ref.partition(".")
        codes = np.full(len(self.weights), known.index(OTHER), dtype=np.int64)
        held = self._tables.get(table)
        if held is not None and name in held.frame.columns:
            index = {value: i for i, value in enumerate(known)}
            other = index[OTHER]
            values = held.frame[name].to_list()
            codes[held.owners] = [index.get(value, other) for value in values]
        return codes


def _one_each(owners: Ints, classes: int) -> bool:
    """Whether every class has exactly one row, so that there is no choice."""
    return len(owners) == classes and bool((owners == np.arange(classes)).all())


def _bins(encoding: Encoding, rows: QueryRows, keep: NDArray[np.bool_] | None) -> Ints:
    """Return the bin of every row that is kept, or -1 if it is denied."""
    bins: Ints | None = None
    for feature in encoding.features:
        columns = [rows.columns.get(name) for name in feature.columns_read]
        found = [column for column in columns if column is not None]
        if len(found) != len(columns):
            raise no_column(feature.columns_read[columns.index(None)])
        if len(found) == 1:
            cells = found[0].cells(feature, keep)
        else:
            cells = np.array(feature.find(*(column.values(keep) for column in found)), np.int64)
        bins = cells if bins is None else bins * feature.size + cells
    if bins is None:
        raise InvalidInput("an encoding has at least one feature")
    for deny in encoding.deny:
        column = rows.columns.get(deny.column)
        if column is None:
            raise no_column(deny.column)
        denied = column.marked(deny.denied, keep)
        bins = np.where(denied, -1, bins)
    return bins


# --- Which row a device reports ------------------------------------------------------------------


def choose(
    encoding: Encoding,
    owners: Ints,
    bins: Ints,
    answering: Ints,
    selection: Selection,
    rng: np.random.Generator,
) -> tuple[Ints, Ints, Ints]:
    """Draw how many devices of which class report which bin: (class, bin, devices).

    This is `Encoder.select` for many devices at once: of a device's rows, those that are OOV in the
    fewest features; of these, a random one (`uniform`) or the smallest bin (`first`).

    `owners` (increasing) and `bins` belong to the rows of all classes, -1 marks a denied row;
    `answering` is the number of devices per class. Classes without a row report bin 0.
    """
    # With one feature, an OOV row is no better than no row at all.
    keep = bins > 0 if len(encoding.features) == 1 else bins >= 0
    if not keep.all():
        owners, bins = owners[keep], bins[keep]
    if len(bins):
        best = _misses(encoding, bins)
        owners, bins = _least(owners, bins, best)
    starts = _starts(owners)
    classes = owners[starts]
    devices = answering[classes]
    silent = answering.copy()
    silent[classes] = 0
    empty = np.flatnonzero(silent)
    nothing = (empty, np.zeros(len(empty), dtype=np.int64), silent[empty])
    if not len(bins):
        return nothing
    if selection == "first":
        found = (classes, np.minimum.reduceat(bins, starts), devices)
    else:
        lengths = np.diff(np.append(starts, len(bins)))
        found = _uniform(classes, starts, lengths, bins, devices, rng)
    return _joined([found, nothing])


def _misses(encoding: Encoding, bins: Ints) -> NDArray[np.int8]:
    """Count in how many features each row is OOV."""
    misses = np.zeros(len(bins), dtype=np.int8)
    stride = encoding.size
    for feature in encoding.features:
        stride //= feature.size
        misses += bins // stride % feature.size == 0
    return misses


def _starts(owners: Ints) -> Ints:
    """Where the rows of each class begin."""
    if not len(owners):
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(np.concatenate(([True], owners[1:] != owners[:-1])))


def _least(owners: Ints, bins: Ints, misses: NDArray[np.int8]) -> tuple[Ints, Ints]:
    """Keep the rows of each class with the fewest misses."""
    starts = _starts(owners)
    if len(starts) == len(owners):
        return owners, bins
    least = np.minimum.reduceat(misses, starts)
    lengths = np.diff(np.append(starts, len(owners)))
    keep = misses == np.repeat(least, lengths)
    return owners[keep], bins[keep]


def _uniform(
    classes: Ints, starts: Ints, lengths: Ints, bins: Ints, devices: Ints, rng: np.random.Generator
) -> tuple[Ints, Ints, Ints]:
    """Let every device draw one of the rows of its class."""
    if not len(devices) or int(devices.max()) <= 1:
        at = starts + (rng.random(len(starts)) * lengths).astype(np.int64)
        return classes, bins[at], devices
    # Multinomial, row by row: each remaining device takes the next of k rows with chance 1/k.
    found: list[tuple[Ints, Ints, Ints]] = []
    left, at, rows = devices.copy(), starts.copy(), lengths.copy()
    alive = np.flatnonzero(left > 0)
    while len(alive):
        taken = left[alive].copy()
        several = rows[alive] > 1
        taken[several] = rng.binomial(taken[several], 1.0 / rows[alive][several])
        some = taken > 0
        found.append((classes[alive][some], bins[at[alive]][some], taken[some]))
        left[alive] -= taken
        at[alive] += 1
        rows[alive] -= 1
        alive = alive[(left[alive] > 0) & (rows[alive] > 0)]
    return _joined(found)


def _joined(parts: list[tuple[Ints, Ints, Ints]]) -> tuple[Ints, Ints, Ints]:
    classes, bins, devices = (np.concatenate(each) for each in zip(*parts, strict=True))
    return classes, bins, devices
