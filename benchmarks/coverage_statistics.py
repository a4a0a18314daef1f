"""How often the intervals of `study.mean`, `total`, `rate` and `quantiles` hold the truth.

Every run draws new noise and new rounding on devices whose sums are drawn by the exact law of the
aggregates; questions and intervals are the library's own. Values lie on 0 to 100, and what is
outside is cut to it. Settings: `one`, one row per device; `three`, three rows per device, of which
it reports one. Rates are of values of at least 80. A quantile counts as held if its interval holds
every value that one of the nine usual definitions gives; coverage is the least over the quantiles.

Keys: `cover_KIND_SHAPE_SETTING_DEVICES`, `width_...` (the median width, as a share of the range; of
a total, per device), `worst_KIND`, and `worst` over all.

    python benchmarks/coverage_statistics.py [--runs N] [--shapes A,B] [--devices 2000,20000]
        [--settings one,three] [--json]
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from _accuracy import Floats, Ints, in_parallel, print_json
from _shapes import DESIGNED, UNSEEN
from chorister.analyst.estimate import Part
from chorister.analyst.question import Question
from chorister.analyst.rehearsal import rehearse
from chorister.analyst.rehearsal.simulation import draw_sums
from chorister.analyst.result import Result
from chorister.analyst.statistic_questions import StatisticQuestion
from chorister.analyst.study import Study
from chorister.encoding import Intervals
from chorister.policy import Policy

ROOT = Path(__file__).resolve().parent.parent
POLICY = ROOT / "examples" / "algorithms" / "policy.toml"
KINDS = ("mean", "total", "rate", "quantiles")
SHARES = (0.1, 0.5, 0.9)
LOW, HIGH, THRESHOLD = 0.0, 100.0, 80.0
SETTINGS = ("one", "three")


@dataclass(frozen=True)
class StatisticTrial:
    shape: str
    setting: str
    devices: int
    seed: int
    runs: int


class DrawnStatistics(Study):
    """A study of devices with some rows each: answers are drawn, and nothing is kept."""

    def begin(self, rows: Floats, seed: int) -> None:
        """New devices: one line of rows each."""
        self.rows, self.rng = rows, np.random.default_rng(seed)

    def ask(self, question: Question, **_: object) -> Result:
        """Let every device draw a row, and the rounding of its value; then draw the sums."""
        recipe = question.recipe(number=1, opens=0)
        (feature,) = recipe.features
        n, many = self.rows.shape
        drawn = self.rows[np.arange(n), self.rng.integers(0, many, n)]
        if isinstance(feature, Intervals):
            edges = np.array(feature.edges, dtype=np.float64)
            clipped = np.where(drawn < LOW, edges[0], np.where(drawn >= HIGH, HIGH, drawn))
            counts = np.diff(np.searchsorted(np.sort(clipped), edges, "left"))
            counts = np.concatenate([[0], counts])
        elif feature.size == 3:
            yes = int((self.rows >= THRESHOLD).any(axis=1).sum())
            counts = np.array([0, n - yes, yes])
        else:
            counts = self._levels(drawn, feature.size - 4)
        sums = draw_sums(recipe, counts, n, self.rng)
        return Result(recipe=recipe, parts=(Part(group=(), reports=n, sums=sums),))

    def _levels(self, drawn: Floats, gaps: int) -> Ints:
        steps = self.steps
        place = np.floor((np.clip(drawn, LOW, HIGH) - LOW) * gaps * steps / (HIGH - LOW) + 0.5)
        level = (place.astype(np.int64) + self.rng.integers(0, steps, len(drawn))) // steps
        level = np.where(drawn < LOW, -1, np.where(drawn > HIGH, gaps + 1, level))
        return np.bincount(level + 2, minlength=gaps + 4)

    steps = 0


def policy(setting: str) -> Policy:
    """The example's, with one report; where a device has one row, that is a profile."""
    text = POLICY.read_text().replace("reports = 3", "reports = 1")
    text = text.replace("local_epsilon = 36", "local_epsilon = 12")
    return Policy.load((text.replace("streams", "profiles") if setting == "one" else text).encode())


def planned(study: Study, kind: str) -> StatisticQuestion:
    if kind == "mean":
        return study.mean("x", LOW, HIGH)
    if kind == "total":
        return study.total("x", LOW, HIGH)
    if kind == "rate":
        return study.rate(f"trip.x >= {THRESHOLD}")
    return study.quantiles("x", LOW, HIGH, SHARES)


def truths(kind: str, rows: Floats) -> tuple[Floats, Floats]:
    """The least and the largest value that an interval has to hold."""
    clipped = np.clip(rows, LOW, HIGH)
    if kind == "mean":
        found = np.array([clipped.mean()])
    elif kind == "total":
        found = np.array([clipped.mean(axis=1).sum()])
    elif kind == "rate":
        found = np.array([(rows >= THRESHOLD).any(axis=1).mean()])
    else:
        many, ranked = rows.shape[1], np.sort(clipped, axis=None)
        every = len(ranked)
        first = [max(math.floor(share * every / many) - 1, 0) * many for share in SHARES]
        last = [min((math.floor(share * every / many) + 1) * many, every - 1) for share in SHARES]
        if many > 1:  # a device's rows weigh a part of it: the quantile over all rows
            first = last = [math.ceil(share * every) - 1 for share in SHARES]
        return ranked[first], ranked[last]
    return found, found


def work(task: StatisticTrial) -> dict[str, tuple[Floats, Floats]]:
    """For each kind, how often the interval held the truth, and how wide it was."""
    rng = np.random.default_rng(task.seed)
    fleet = rehearse({"x": [1.0], "count": [task.devices]}, policy(task.setting), seed=1)
    study = DrawnStatistics(fleet, f"coverage-{task.shape}-{task.devices}", "trips")
    many = 3 if task.setting == "three" else 1
    found: dict[str, tuple[Floats, Floats]] = {}
    shape = (DESIGNED | UNSEEN)[task.shape]
    rows = shape(rng, task.devices * many).reshape(task.devices, many)
    study.begin(rows, task.seed + 1)
    for kind in KINDS:
        question = planned(study, kind)
        study.steps = question.scale.steps if question.scale is not None else 1
        least, most = truths(kind, rows)
        held, width = [], []
        for _ in range(task.runs):
            columns: dict[str, Any] = question.run().columns()
            low, high = columns["ci_low"], columns["ci_high"]
            held.append((low <= least + 1e-9) & (most - 1e-9 <= high))
            width.append(np.median(high - low))
        found[kind] = np.array(held, dtype=np.float64), np.array(width)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=400, help="a case")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--shapes", default=",".join(DESIGNED), help="eight families; more exist")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--devices", default="2000,20000")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tasks = [
        StatisticTrial(shape, setting, int(devices), options.seed, options.runs)
        for shape in options.shapes.split(",")
        for setting in options.settings.split(",")
        for devices in options.devices.split(",")
    ]
    table = Table(title=f"coverage of 95% intervals, {options.runs:,} runs per case")
    for heading in ("family", "rows", "devices", *(f"{kind} (width)" for kind in KINDS)):
        table.add_column(heading)
    numbers: dict[str, float] = {}
    for task, found in zip(tasks, in_parallel(work, tasks), strict=True):
        cells = []
        for kind, (held, width) in found.items():
            at = f"{kind}_{task.shape}_{task.setting}_{task.devices}"
            unit = 1.0 if kind == "rate" else HIGH - LOW
            unit *= task.devices if kind == "total" else 1.0
            numbers[f"cover_{at}"] = float(held.mean(axis=0).min())
            numbers[f"width_{at}"] = float(np.median(width)) / unit
            cells.append(f"{numbers[f'cover_{at}']:.4f} ({numbers[f'width_{at}']:.4f})")
        table.add_row(task.shape, task.setting, f"{task.devices:,}", *cells)
    for kind in KINDS:
        numbers[f"worst_{kind}"] = min(
            value for key, value in numbers.items() if key.startswith(f"cover_{kind}_")
        )
    numbers["worst"] = min(numbers[f"worst_{kind}"] for kind in KINDS)
    Console(width=120).print(table)
    print(f"least coverage: {numbers['worst']:.4f}")
    if options.json:
        print_json(numbers)


if __name__ == "__main__":
    main()
