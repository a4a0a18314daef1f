"""Ours against static grids over families of data: ratios of root mean squared errors.

Every score is turned into a squared error per seed (of one minus the score where larger is better).
The competitor's grid is chosen with hindsight, per family and metric, but on other seeds: one half
of the seeds chooses for the other. All see the same populations, seed by seed, and standard errors
are the jackknife's over seeds. A limit is missed where the ratio minus two standard errors exceeds
it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.estimate import Estimates

Floats = NDArray[np.float64]
WANTED = {"k3": 1.1, "k1": 1.3}


def on_other_seeds(grids: Floats) -> Floats:
    """Squared errors (grids x seeds) of the grid that was best on the other half of the seeds."""
    seeds = grids.shape[1]
    if seeds < 2:
        raise ValueError("a grid is chosen on other seeds: two at least")
    halves = np.arange(seeds) % 2 == 0
    found = np.empty(seeds)
    for half in (halves, ~halves):
        chosen = int(np.argmin(grids[:, ~half].mean(axis=1)))
        found[half] = grids[chosen, half]
    return found


def ratio(ours: Floats, theirs: Floats) -> tuple[float, float]:
    """The ratio of root mean squares over seeds, and its standard error."""

    def of(kept: NDArray[np.int64]) -> float:
        return math.sqrt(ours[kept].mean() / max(theirs[kept].mean(), 1e-300))

    seeds = np.arange(len(ours), dtype=np.int64)
    without = np.array([of(np.delete(seeds, seed)) for seed in seeds])
    error = math.sqrt((len(seeds) - 1) * float(without.var()))
    return of(seeds), error


@dataclass(frozen=True, eq=False)
class Cells95:
    """95% intervals of cells: which cover, how wide they are, and how far the estimates err."""

    hits: NDArray[np.bool_]
    widths: Floats
    errors: Floats

    @classmethod
    def of(cls, rows: Estimates, truth: NDArray[np.int64], step: float) -> Cells95:
        """Of estimates that change by `step` with every bit."""
        ends = rows.interval(step=step)
        hits = (ends.low <= truth) & (truth <= ends.high)
        return cls(hits, ends.high - ends.low, rows.value - truth)

    @classmethod
    def joined(cls, parts: Sequence[Cells95]) -> Cells95:
        hits = np.concatenate([each.hits for each in parts])
        widths = np.concatenate([each.widths for each in parts])
        return cls(hits, widths, np.concatenate([each.errors for each in parts]))


@dataclass
class Coverage:
    """How often intervals of cells cover, and how wide they are, by family and setting.

    The width is the median, over the central 95% of the errors of the estimates themselves.
    """

    found: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)

    def add(self, k: str, cells: Cells95) -> str:
        """Add all cells of all seeds, and return a line about them."""
        part = float(cells.hits.mean())
        error = math.sqrt(part * (1.0 - part) / len(cells.hits))
        low, high = np.quantile(cells.errors, [0.025, 0.975])
        width = float(np.median(cells.widths) / max(high - low, 1e-300))
        self.found.setdefault(k, []).append((part, error, width))
        return f"  {k} intervals of cells cover {part:.4f} ± {error:.4f}, {width:.2f} times as wide"

    def keys(self) -> dict[str, float]:
        """The least coverage with its standard error, and the largest width."""
        numbers: dict[str, float] = {}
        for k, rows in self.found.items():
            numbers[f"coverage_{k}"], numbers[f"coverage_{k}_se"], _ = min(rows)
            numbers[f"interval_width_{k}"] = max(width for _, _, width in rows)
        return numbers


@dataclass
class RatioTable:
    """Ratios to static with the fit, by family, metric, setting and competitor."""

    metrics: Sequence[str]
    shown: Sequence[str] = ()  # of these, printed but no part of the worst case
    ratios: dict[tuple[str, str, str, str], tuple[float, float]] = field(default_factory=dict)
    rules: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(
        self,
        family: str,
        setting: str,
        ours: Mapping[str, Floats],
        static: Mapping[str, Floats],
        fitted: Mapping[str, Floats],
    ) -> None:
        """Add squared errors: seeds x metrics each; static grids by name.

        Without noise of its own, a single rule's ratio is to the same competitor as ours.
        """
        for m, metric in enumerate(self.metrics):
            best = on_other_seeds(np.stack([each[:, m] for each in fitted.values()]))
            raw = on_other_seeds(np.stack([each[:, m] for each in static.values()]))
            for k, rows in ours.items():
                self.ratios[family, setting, metric, k] = ratio(rows[:, m], best)
                self.ratios[family, setting, metric, f"{k} to raw"] = ratio(rows[:, m], raw)
            if metric in self.shown:
                continue
            for kind, grids in (("raw", static), ("fit", fitted)):
                for name, rows in grids.items():
                    found = ratio(rows[:, m], best)[0]
                    self.rules.setdefault((kind, name), []).append(found)

    def lines(self, family: str, setting: str) -> list[str]:
        """Ratio ± standard error, a line per metric."""
        found = []
        for metric in self.metrics:
            parts = []
            for k in ("k3", "k1"):
                value, error = self.ratios[family, setting, metric, k]
                raw, raw_error = self.ratios[family, setting, metric, f"{k} to raw"]
                counts = metric not in self.shown and value - 2.0 * error > WANTED[k]
                missed = " MISSED" if counts else ""
                parts.append(
                    f"{k} {value:.3f} ± {error:.3f} (raw {raw:.3f} ± {raw_error:.3f}){missed}"
                )
            found.append(f"  {metric:8} {'; '.join(parts)}")
        return found

    def worst(self, k: str, families: Sequence[str] | None = None) -> tuple[float, float, str]:
        """The largest ratio, its standard error, and where it is."""
        found = [
            (value, error, f"{family}, {setting}, {metric}")
            for (family, setting, metric, each), (value, error) in self.ratios.items()
            if each == k and metric not in self.shown
            if families is None or family in families
        ]
        return max(found, default=(math.nan, math.nan, "nowhere"))

    def missed(self, k: str) -> list[str]:
        return [
            f"{family}, {setting}, {metric}: {value:.3f} ± {error:.3f}"
            for (family, setting, metric, each), (value, error) in self.ratios.items()
            if each == k and metric not in self.shown and value - 2.0 * error > WANTED[k]
        ]

    def best_single_rule(self) -> tuple[float, str]:
        """The static rule with the smallest worst ratio: what one can do without adapting."""
        cases = max(map(len, self.rules.values()))  # a rule for all of them
        whole = [rule for rule, found in self.rules.items() if len(found) == cases]
        kind, name = min(whole, key=lambda rule: max(self.rules[rule]))
        return max(self.rules[kind, name]), f"{kind} {name}"

    def summary(self, chosen_on: Sequence[str], held_out: Sequence[str]) -> dict[str, float]:
        """Print the worst cases and return the keys of the last line."""
        numbers: dict[str, float] = {}
        for k, limit in WANTED.items():
            value, error, place = self.worst(k)
            key = f"worst_ratio_to_static_fit_{k}"
            numbers |= {key: value, f"{key}_se": error}
            missed = self.missed(k)
            numbers[f"missed_{k}"] = float(len(missed))
            print(f"{k}: worst ratio {value:.3f} ± {error:.3f} ({place}); wanted {limit}")
            for name, families in (("chosen on", chosen_on), ("held out", held_out)):
                value, error, place = self.worst(k, families)
                print(f"    {name}: {value:.3f} ± {error:.3f} ({place})")
            print("    missed: " + ("; ".join(missed) or "nowhere"))
        value, name = self.best_single_rule()
        numbers["worst_ratio_single_static_rule"] = value
        print(f"the best single static rule ({name}): worst ratio {value:.3f}")
        return numbers
