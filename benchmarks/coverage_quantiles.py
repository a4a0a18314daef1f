"""How often the intervals of `distribution().quantiles()` hold the true quantile.

Every run draws new noise, and every fiftieth new devices: `distribution` runs as it is, on devices
whose sums are drawn by the exact law of the aggregates. A quantile counts as held if its interval
holds every value that one of the nine usual definitions gives (Hyndman and Fan, 1996), so ties and
gaps count in full. Settings: `k1`, one report per device, so that rounds go to disjoint cohorts;
`k1local`, the same with a local epsilon of at most 1; `k3`, three reports per device.

Families are reported in three parts: those that were looked at when the intervals were designed,
those that were not, and real columns. `--epsilon`, `--mechanism` and `--crowd` ask with other
privacy than the policy's budget, asymmetric reports and a noised crowd. Keys, each as
`_SHAPE_SETTING_DEVICES`: `cover` (the least coverage over the quantiles), `cover_se` (its standard
error), `cdf` (the least coverage of the distribution function's band over fifteen places),
`units` (the median width, in units of the range 0 to 100; the median over the quantiles), `width`
(the same, relative to the central 95% of the estimate's own errors), `mass` (the share of devices
strictly inside the interval, the median), `invalid` (intervals that are inverted, leave the range
or do not hold their own estimate). `worst_designed`, `worst_unseen` and `worst_data` are the least
coverages of each part; `invalid` alone is the sum of all.

    python benchmarks/coverage_quantiles.py [--runs N] [--shapes A,B] [--settings k1,k3]
        [--devices 2000,20000] [--epsilon 0.1] [--mechanism symmetric] [--crowd honest]
        [--redraws 4] [--data FILE --column NAME] [--json]

With `--redraws N` every run draws the noise of its last round N times: its edges follow from the
rounds before, so each is an answer that could have been. The standard error counts runs, not draws.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from _accuracy import Floats, in_parallel, print_json
from _shapes import COLUMNS, DATA, DESIGNED, SHARES, UNSEEN, Rng, real_column
from chorister.analyst.algorithms.distribution import distribution
from chorister.analyst.arguments import Real
from chorister.analyst.cohorts import RoundsPlan
from chorister.analyst.estimate import Part
from chorister.analyst.question import Question
from chorister.analyst.rehearsal import rehearse
from chorister.analyst.rehearsal.simulation import draw_sums
from chorister.analyst.result import Result
from chorister.analyst.study import Study
from chorister.encoding import Intervals
from chorister.policy import Crowd, Policy
from chorister.privacy import Mechanism

ROOT = Path(__file__).resolve().parent.parent
POLICY = ROOT / "examples" / "algorithms" / "policy.toml"
PLACES = np.linspace(6.25, 93.75, 15)
BLOCK = 50  # runs on the same devices
FITTED = 10  # the fit takes most of the time: one run in so many tells its error
SETTINGS = ("k1", "k1local", "k3")
FLEETS = (2_000, 20_000, 200_000)


@dataclass(frozen=True)
class QuantileTrial:
    shape: str
    setting: str
    devices: int
    first: int  # seed of the first run
    runs: int
    file: str = ""
    column: str = ""
    epsilon: float | None = None
    mechanism: Mechanism | None = None
    crowd: Crowd = "noised"
    redraws: int = 1  # of the last round, whose edges follow from the rounds before


def population(task: QuantileTrial, rng: Rng) -> Floats:
    """New devices."""
    if task.file:
        return rng.choice(real_column(task.file, task.column), task.devices)
    return (DESIGNED | UNSEEN)[task.shape](rng, task.devices)


@lru_cache(maxsize=len(SETTINGS))
def policy(setting: str) -> Policy:
    """The example's, with as many reports as the setting says."""
    text = POLICY.read_text()
    if setting != "k3":
        text = text.replace("reports = 3", "reports = 1")
        local = "1" if setting == "k1local" else "12"
        text = text.replace("local_epsilon = 36", f"local_epsilon = {local}")
    crowds = 'crowds = ["noised", "honest"]\nhonest_fraction = "1/1"\nmax_bins'
    text = text.replace("max_bins", crowds, 1)
    return Policy.load(text.encode())


class DrawnDistributions(Study):
    """A study whose devices are a sorted list: questions are drawn, and nothing is kept.

    The same recipes and the same law of the released sums as a rehearsal, at a tenth of the time.
    """

    def begin(self, values: Floats, seed: int) -> None:
        """A new run on these devices."""
        self.rng = np.random.default_rng(seed)
        self.left = values
        self.plans: dict[tuple[Any, ...], RoundsPlan] = getattr(self, "plans", {})

    def plan_rounds(self, shares: Sequence[Real], **options: Any) -> RoundsPlan:  # noqa: ANN401
        """Priced once: plans do not depend on data."""
        key = (tuple(shares), *sorted((name, str(value)) for name, value in options.items()))
        if key not in self.plans:
            self.plans[key] = super().plan_rounds(shares, **options)
        return self.plans[key]

    def ask(self, question: Question, **_: object) -> Result:
        """Let the devices answer, each by its coin, and draw the sums."""
        recipe = question.recipe(number=1, opens=0)
        answering = self.left
        if recipe.participation.once_per_study:
            coins = self.rng.random(len(self.left)) < float(recipe.participation.probability)
            answering, self.left = self.left[coins], self.left[~coins]
        (feature,) = recipe.features
        if not isinstance(feature, Intervals):
            raise TypeError("a distribution asks for intervals")
        edges = np.array(feature.edges, dtype=np.float64)
        counts = np.diff(np.searchsorted(answering, edges, "left"))
        counts = np.concatenate([[len(answering) - counts.sum()], counts])
        self.last = recipe, counts, len(answering)
        return self.redraw()

    def redraw(self) -> Result:
        """The last question again: the same devices, new noise."""
        recipe, counts, reports = self.last
        sums = draw_sums(recipe, counts, reports, self.rng)
        return Result(recipe=recipe, parts=(Part(group=(), reports=reports, sums=sums),))


def work(task: QuantileTrial) -> dict[str, Floats]:
    """Some runs on the same devices: what was hit, how wide and how wrong the answers were."""
    rows: dict[str, list[Any]] = {"hit": [], "cdf": [], "units": [], "error": [], "mass": []}
    rows["invalid"] = []
    rng = np.random.default_rng([task.first, *task.shape.encode(), task.devices])
    values = np.sort(population(task, rng))
    inside = values[(values >= 0.0) & (values < 100.0)]
    shares = np.array(SHARES)
    # All nine definitions lie between these two ranks.
    rank = np.floor(shares * len(inside) + 1e-9).astype(np.int64)
    least = inside[np.clip(rank - 1, 0, len(inside) - 1)]
    most = inside[np.clip(rank + 1, 0, len(inside) - 1)]
    below = np.searchsorted(inside, PLACES, "left") / len(inside)
    fleet = rehearse({"fare": [0.0], "count": [len(values)]}, policy(task.setting), seed=0)
    study = DrawnDistributions(fleet, "fares", "trips")
    for seed in range(task.first, task.first + task.runs):
        study.begin(values, seed)
        found = distribution(
            study, "fare", 0, 100,
            epsilon=task.epsilon, mechanism=task.mechanism, crowd=task.crowd,
        ).result  # fmt: skip
        hits, inside_band = [], []
        for number in range(task.redraws):
            again = found
            if number:
                again = replace(found, results=(*found.results[:-1], study.redraw()))
            band = again.band()
            low, high = band.quantiles(shares)
            hits.append((low <= least) & (most <= high))
            rows["invalid"].append(~((low >= 0.0) & (low < high) & (high <= 100.0)))
            lower, upper = band.at(PLACES)
            inside_band.append((lower <= below) & (below <= upper))
        rows["hit"].append(np.mean(hits, axis=0))
        rows["cdf"].append(np.mean(inside_band, axis=0))
        if seed % FITTED == 0:
            columns = found.quantiles(SHARES)
            low, high = columns["ci_low"], columns["ci_high"]
            estimated = columns["quantile"]
            rows["invalid"].append(~((low <= estimated) & (estimated <= high)))
            rows["units"].append(high - low)
            rows["error"].append(columns["quantile"] - np.quantile(inside, shares))
            held = np.searchsorted(inside, high, "left") - np.searchsorted(inside, low, "right")
            rows["mass"].append(np.maximum(held, 0) / len(inside))
    return {name: np.array(values, dtype=np.float64) for name, values in rows.items()}


def summary(parts: list[dict[str, Floats]]) -> dict[str, float]:
    """One case."""
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    cover = rows["hit"].mean(axis=0)
    worst = int(np.argmin(cover))
    spread = np.diff(np.quantile(rows["error"], [0.025, 0.975], axis=0), axis=0)[0]
    moved = spread > 1e-9  # an estimate that never moves has no error to compare with
    units = np.median(rows["units"], axis=0)
    ratio = units[moved] / spread[moved]
    return {
        "cover": float(cover[worst]),
        "cover_se": float(rows["hit"][:, worst].std()) / math.sqrt(len(rows["hit"])),
        "share": SHARES[worst],
        "cdf": float(rows["cdf"].mean(axis=0).min()),
        "width": float(np.median(ratio)) if moved.any() else math.nan,
        "units": float(np.median(units)),
        "mass": float(np.median(rows["mass"])),
        "invalid": float(rows["invalid"].sum()),
    }


def cases(options: argparse.Namespace) -> list[QuantileTrial]:
    """One task for each family, setting and fleet."""
    kinds: dict[str, tuple[str, str]] = dict.fromkeys(DESIGNED | UNSEEN, ("", ""))
    if options.data is not None:
        kinds = {options.data.name.partition(".")[0]: (str(options.data), options.column)}
    else:
        for name, (file, column) in COLUMNS.items():
            if (DATA / file).exists():
                kinds[name] = (str(DATA / file), column)
            else:
                print(f"{DATA / file} is absent: {name} is left out")
    wanted = options.shapes.split(",") if options.shapes else list(kinds)
    privacy = options.epsilon, options.mechanism, options.crowd
    return [
        QuantileTrial(
            shape,
            setting,
            int(devices),
            options.seed,
            options.runs,
            *kinds[shape],
            *privacy,
            options.redraws,
        )
        for shape in wanted
        for setting in options.settings.split(",")
        for devices in options.devices.split(",")
    ]


def blocks(case: QuantileTrial) -> list[QuantileTrial]:
    """New devices for each."""
    last = case.first + case.runs
    return [
        replace(case, first=first, runs=min(BLOCK, last - first))
        for first in range(case.first, last, BLOCK)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=100, help="a case; the documentation has 2,000")
    parser.add_argument("--seed", type=int, default=1_000, help="of the first run")
    parser.add_argument("--shapes", default="", help="some families only")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--devices", default=",".join(map(str, FLEETS)))
    parser.add_argument("--epsilon", type=float, help="of all rounds; else the policy's budget")
    parser.add_argument("--mechanism", type=Mechanism, choices=list(Mechanism))
    parser.add_argument("--crowd", default="noised", choices=["noised", "honest"])
    parser.add_argument(
        "--redraws", type=int, default=1, help="how often the last round's noise is drawn in a run"
    )
    parser.add_argument("--data", type=Path, help="a CSV file instead of the families")
    parser.add_argument("--column", default="age", help="of the CSV file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    every = cases(options)
    found = iter(in_parallel(work, [block for case in every for block in blocks(case)]))
    table = Table(title=f"coverage of 95% intervals, {options.runs:,} runs per case")
    for heading in (
        "family", "setting", "devices", "least coverage", "at", "cdf", "width",
        "/ own error", "mass", "invalid",
    ):  # fmt: skip
        table.add_column(heading)
    numbers: dict[str, float] = {}
    worst: dict[str, float] = {}
    for case in every:
        one = summary([next(found) for _ in blocks(case)])
        part = "data" if case.file else "designed" if case.shape in DESIGNED else "unseen"
        worst[part] = min(worst.get(part, 1.0), one["cover"])
        table.add_row(
            case.shape, case.setting, f"{case.devices:,}",
            f"{one['cover']:.4f} ± {one['cover_se']:.4f}", f"{one['share']:g}",
            f"{one['cdf']:.4f}", f"{one['units']:.2f}", f"{one['width']:.1f}",
            f"{one['mass']:.4f}", f"{one['invalid']:.0f}",
        )  # fmt: skip
        at = f"{case.shape}_{case.setting}_{case.devices}"
        for key in ("cover", "cover_se", "cdf", "units", "width", "mass", "invalid"):
            if not math.isnan(one[key]):
                numbers[f"{key}_{at}"] = one[key]
    invalid = sum(value for key, value in numbers.items() if key.startswith("invalid_"))
    numbers |= {f"worst_{part}": value for part, value in worst.items()} | {"invalid": invalid}
    Console(width=120).print(table)
    for part, value in worst.items():
        print(f"least coverage, {part}: {value:.4f}")
    print(f"invalid intervals: {invalid:.0f}")
    if options.json:
        print_json(numbers)


if __name__ == "__main__":
    main()
