"""Heat maps at equal aggregate epsilon: static grids, with and without the fit, and interactive.

Every seed draws 100,000 devices (with replacement) from the points inside the box; all competitors
of a seed see the same population. Static grids have all devices; each column of the table takes the
grid that turned out best for it (hindsight), while an interactive run gives one map for all
columns. Keys: `static_METRIC_EPS` is the best raw grid, `static_fit_METRIC_EPS` the best with the
same fit, `interactive_METRIC_EPS` three rounds that everyone answers (k = 3); `_k1` is one report a
device, `_noised` noise by the aggregators, `_10000` a largest domain of 10,000 bins, `_se` the
standard error of a mean. Those are of New York, or of `--data`.

The same for families of other data, as ratios to static with the fit (see `_ratios.py`): the keys
`worst_ratio_to_static_fit_k3` and `_k1` are the worst over families of the root mean squared error
at the finest level, and of one minus the precision of the hundred heaviest cells. Ratios of errors
at 64 x 64 and of L1 are printed too: fine cells cost accuracy in sums, and with k1 there is no
other round to make up for it. `coverage_k3` and `_k1` are the least coverage over families
of the 95% intervals of the last round's cells, `interval_width_k3` and `_k1` the largest median
width over the central 95% of the errors of what was measured.
With `--data FILE` (any CSV file whose first two columns are x and y) that file is the only family.

    python benchmarks/accuracy_heatmap.py [--data FILE] [--seeds N] [--quick] [--families-only]
        [--json] [--pictures FOLDER]
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from _accuracy import Floats, Ints, Release1, in_parallel, print_json, single, split, verdict
from _places import CHOSEN_ON, at_hand, points
from _ratios import Cells95, Coverage, RatioTable
from chorister.analyst.algorithms.map_rules import DISJOINT_RULES, EVERYONE_RULES, Partition
from chorister.analyst.algorithms.pyramid import Measured, fit_map, spread_evenly, summed
from chorister.analyst.consistency import norm_sub
from chorister.analyst.estimate import Estimates

DEVICES, DEPTH, LIMIT = 100_000, 10, 10_000
FIRST_SEED = 1_000  # rules were chosen on seeds below
EPSILONS = (0.25, 0.5)
FAMILY_CASES = ((0.25, False), (0.5, True))
LEVELS = (5, 6, 7, 8, 9, 10)
METRICS = ("mse", "l1", "l1_64", "top100", "mse_64")
LARGER_IS_BETTER = (False, False, False, True, False)
SHOWN = ("mse_64", "l1", "l1_64")  # beside what the worst ratios are over
WHOLE = np.ones((1, 1), dtype=np.bool_)


@dataclass(frozen=True)
class HeatmapTrial:
    source: str  # a family or a file
    epsilon: float
    noised: bool
    seed: int


@lru_cache(maxsize=2)
def cell_codes(source: str) -> Ints:
    """The finest cell of every point inside the box at the .1% quantiles."""
    x, y = points(source)
    (x0, x1), (y0, y1) = np.quantile(x, [0.001, 0.999]), np.quantile(y, [0.001, 0.999])
    inside = (x >= x0) & (x < x1) & (y >= y0) & (y < y1)
    column = np.floor((x[inside] - x0) / (x1 - x0) * 2**DEPTH).astype(np.int64)
    row = np.floor((y[inside] - y0) / (y1 - y0) * 2**DEPTH).astype(np.int64)
    codes: Ints = row * 2**DEPTH + column
    return codes


def images(codes: Ints) -> list[Ints]:
    """Counts at every level."""
    size = 2**DEPTH
    found = [np.bincount(codes, minlength=size * size).reshape(size, size).astype(np.float64)]
    while found[0].shape[0] > 1:
        found.insert(0, summed(found[0]))
    return [image.astype(np.int64) for image in found]


def metrics(found: Floats, truth: Ints) -> list[float]:
    """MSE (e-11) and L1 at the finest level, L1 at 64 x 64, precision of the top 100 at 128^2.

    Last, MSE (e-11) at 64 x 64.
    """
    error = (found - truth) / DEVICES
    coarse = summed(summed(summed(error)))
    at_64 = summed(coarse)
    true_128 = summed(summed(summed(truth.astype(np.float64)))).ravel()
    found_128 = summed(summed(summed(found))).ravel()
    best = np.argsort(-true_128, kind="stable")[:100]
    chosen = np.argsort(-found_128, kind="stable")[:100]
    return [
        float(np.mean(error**2)) * 1e11,
        float(np.abs(error).sum()),
        float(np.abs(at_64).sum()),
        len(np.intersect1d(best, chosen)) / 100.0,
        float(np.mean(at_64**2)) * 1e11,
    ]


def measure(
    rng: np.random.Generator,
    measured: Measured,
    partition: Partition,
    counts: list[Ints],
    release: Release1,
    whole: list[Ints],
) -> Cells95:
    """Ask one round about a partition; its cohort stands for all devices.

    Returns its intervals, each with the true count among all devices.
    """
    found: list[Cells95] = []
    factor = DEVICES / release.reports
    slope = release.slope * factor + factor - 1.0
    for level, mask in enumerate(partition.masks):
        if mask.any():
            value = release.draw(rng, counts[level][mask]) * factor
            rows = Estimates(
                value=value,
                base=np.full(value.shape, release.base * factor**2),
                slope=np.full(value.shape, slope),
                reports=np.full(value.shape, DEVICES, dtype=np.int64),
            )
            measured.add(level, mask, value, rows.variance)
            step = release.randomizer.step * factor
            found.append(Cells95.of(rows, whole[level][mask], step))
    return Cells95.joined(found)


def started() -> Measured:
    """All devices are inside the box."""
    measured = Measured()
    measured.add(0, WHOLE, np.array([float(DEVICES)]), np.array([1e-6]))
    return measured


def static(task: HeatmapTrial) -> list[list[list[float]]]:
    """Every grid: raw (Norm-Sub over the grid) and with the fit."""
    rng = np.random.default_rng([task.seed, 1])
    counts = images(population(task))
    release = single(task.epsilon, DEVICES, task.noised)
    found = []
    for level in LEVELS:
        measured, full = started(), np.ones((2**level, 2**level), dtype=np.bool_)
        value = release.draw(rng, counts[level][full])
        measured.add(level, full, value, release.base + release.slope * np.maximum(value, 0.0))
        raw = norm_sub(value, float(DEVICES)).reshape(full.shape)
        fitted = fit_map(measured, DEPTH).at(DEPTH)
        found.append([metrics(spread_evenly(raw, DEPTH), counts[-1]), metrics(fitted, counts[-1])])
    return found


def population(task: HeatmapTrial) -> Ints:
    codes = cell_codes(task.source)
    return np.random.default_rng([task.seed, 0]).choice(codes, DEVICES)


@dataclass(frozen=True)
class HeatmapRun:
    """A whole interactive run."""

    scores: list[float]
    image: Floats
    bins: int  # of its largest question
    intervals: Cells95  # of the last round


def interactive(task: HeatmapTrial, *, once: bool, limit: int) -> HeatmapRun:
    """Ask all rounds and fit the map."""
    rng = np.random.default_rng([task.seed, 2 + once])
    devices = population(task)
    rules = DISJOINT_RULES if once else EVERYONE_RULES
    whole = images(devices)
    if once:
        ends = np.round(np.cumsum(rules.shares)[:-1] * DEVICES).astype(np.int64)
        cohorts = [images(part) for part in np.split(devices, ends)]
        sizes = [int(cohort[0][0, 0]) for cohort in cohorts]
        releases = [single(task.epsilon, size, task.noised) for size in sizes]
    else:
        cohorts = [whole] * len(rules.shares)
        releases = split(task.epsilon, DEVICES, task.noised, rules.shares)
    measured = started()
    partition, most = Partition.uniform(rules.first_level), 0
    for number, (cohort, release) in enumerate(zip(cohorts, releases, strict=True)):
        if number:
            sigma = math.sqrt(release.base) * DEVICES / release.reports
            seen = fit_map(measured, DEPTH - 1)
            partition = rules.refinements[number - 1].partition(
                seen, sigma, depth=DEPTH, most_cells=limit - 1
            )
        most = max(most, len(partition) + 1)
        intervals = measure(rng, measured, partition, cohort, release, whole)
    found = fit_map(measured, DEPTH).at(DEPTH)
    return HeatmapRun(metrics(found, whole[-1]), found, most, intervals)


def work(task: HeatmapTrial) -> dict[str, Any]:
    """Everything of one seed, epsilon and crowd."""
    found: dict[str, Any] = {"static": static(task)}
    for name, once in (("k3", False), ("k1", True)):
        free = interactive(task, once=once, limit=10**9)
        bound = free if free.bins <= LIMIT else interactive(task, once=once, limit=LIMIT)
        found |= {
            name: free.scores,
            f"{name}_10000": bound.scores,
            f"{name}_intervals": free.intervals,
        }
    return found


def best(grids: Floats, *, fit: bool, most_bins: int | None = None) -> Floats:
    """By column, the grid with the best mean over seeds: a row per seed, a column per metric."""
    chosen = [i for i, level in enumerate(LEVELS) if most_bins is None or 4**level + 1 <= most_bins]
    part = grids[:, chosen, int(fit), :]
    means = part.mean(axis=0)
    picks = [
        int(np.argmax(means[:, m]) if LARGER_IS_BETTER[m] else np.argmin(means[:, m]))
        for m in range(len(METRICS))
    ]
    return np.stack([part[:, pick, m] for m, pick in enumerate(picks)], axis=1)


def squares(rows: Floats) -> Floats:
    """Squared errors, seed by seed.

    The precision counts half a cell more as missed, so that no ratio is to zero.
    """
    found = rows**2
    for metric in ("mse", "mse_64"):
        found[:, METRICS.index(metric)] = rows[:, METRICS.index(metric)]
    at = METRICS.index("top100")
    found[:, at] = (1.005 - rows[:, at]) ** 2
    return found


def compare(sources: list[str], cases: list[tuple[float, bool]], seeds: int) -> dict[str, float]:
    """Print ours beside static, family by family, and return the worst ratios."""
    comparison, coverage = RatioTable(METRICS, SHOWN), Coverage()
    for source in sources:
        kind = "chosen on" if source in CHOSEN_ON else "held out"
        tasks = [
            HeatmapTrial(source, *case, FIRST_SEED + seed)
            for case in cases
            for seed in range(seeds)
        ]
        all_found = in_parallel(work, tasks)
        for number, (epsilon, noised) in enumerate(cases):
            found = all_found[number * seeds : (number + 1) * seeds]
            grids = np.array([each["static"] for each in found])
            setting = f"{epsilon} {'noised' if noised else 'honest'}"
            static_, fitted = (
                {f"{2**level}": squares(grids[:, i, fit]) for i, level in enumerate(LEVELS)}
                for fit in (0, 1)
            )
            ours = {k: squares(np.array([each[k] for each in found])) for k in ("k3", "k1")}
            comparison.add(source, setting, ours, static_, fitted)
            print(f"{source} ({kind}), epsilon {setting}: ratio to static with fit")
            means = {
                "static": best(grids, fit=False).mean(axis=0),
                "static, fit": best(grids, fit=True).mean(axis=0),
                **{k: np.mean([each[k] for each in found], axis=0) for k in ("k3", "k1")},
            }
            for name, row in means.items():
                parts = (f"{m} {v:.3f}" for m, v in zip(METRICS, row, strict=True))
                print(f"  {name:12} {'  '.join(parts)}")
            print("\n".join(comparison.lines(source, setting)))
            for k in ours:
                joined = Cells95.joined([each[f"{k}_intervals"] for each in found])
                print(coverage.add(k, joined), flush=True)
    numbers = comparison.summary(CHOSEN_ON, [each for each in sources if each not in CHOSEN_ON])
    return numbers | coverage.keys()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, help="CSV of x and y, one row per device")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--quick", action="store_true", help="few seeds, one epsilon per family")
    parser.add_argument("--families-only", action="store_true", help="without the city's tables")
    parser.add_argument("--families", nargs="*", help="only these")
    parser.add_argument("--pictures", type=Path, help="folder for PNG files")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.data is not None and not options.data.exists():
        parser.error(f"{options.data} is absent")
    sources = [str(options.data)] if options.data else options.families or at_hand()
    city = str(options.data) if options.data else "new york"
    if city == "new york" and city not in at_hand():
        city = "streets"
    seeds = max(options.seeds or (4 if options.quick else 20), 2)
    numbers: dict[str, float] = {}
    if not options.families_only:
        numbers = tables(city, EPSILONS[:1] if options.quick else EPSILONS, seeds)
    cases = list(FAMILY_CASES[:1] if options.quick else FAMILY_CASES)
    numbers |= compare(sources, cases, seeds)
    if options.pictures:
        draw(options.pictures, city)
    if options.json:
        print_json(numbers)


def tables(source: str, epsilons: tuple[float, ...], seeds: int) -> dict[str, float]:
    """The tables and keys of one family."""
    cases = [(epsilon, noised) for epsilon in epsilons for noised in (False, True)]
    tasks = [
        HeatmapTrial(source, *case, seed)
        for case in cases
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
    ]
    found = in_parallel(work, tasks)
    console = Console(width=160)
    numbers: dict[str, float] = {}
    for number, (epsilon, noised) in enumerate(cases):
        part = found[number * seeds : (number + 1) * seeds]
        numbers |= report(console, epsilon, noised, part)
    return numbers


def report(
    console: Console, epsilon: float, noised: bool, seeds: list[dict[str, Any]]
) -> dict[str, float]:
    grids = np.array([seed["static"] for seed in seeds])
    crowd = "_noised" if noised else ""
    static_rows = {
        "static": best(grids, fit=False),
        "static_fit": best(grids, fit=True),
        "static_10000": best(grids, fit=False, most_bins=LIMIT),
        "static_fit_10000": best(grids, fit=True, most_bins=LIMIT),
    }
    table = Table(title=f"epsilon {epsilon}, {'noised' if noised else 'honest'} crowd")
    for heading in ("", *METRICS, "against raw static", "against static with the fit"):
        table.add_column(heading)
    numbers: dict[str, float] = {}

    def add(name: str, key: str, rows: Floats, suffix: str, verdicts: tuple[str, str]) -> None:
        mean = rows.mean(axis=0)
        error = rows.std(axis=0, ddof=1) / math.sqrt(len(rows))
        table.add_row(
            name, *(f"{m:.3f} ± {e:.3f}" for m, e in zip(mean, error, strict=True)), *verdicts
        )
        for metric, value, spread in zip(METRICS, mean, error, strict=True):
            numbers[f"{key}_{metric}_{epsilon}{suffix}"] = float(value)
            numbers[f"{key}_{metric}_{epsilon}{suffix}_se"] = float(spread)

    for key, rows in static_rows.items():
        kind, _, limit = key.partition("_10000")
        suffix = crowd + ("_10000" if key.endswith("_10000") else "")
        add(key.replace("_", " "), kind + limit, rows, suffix, ("", ""))
    for name in ("k3", "k1", "k3_10000", "k1_10000"):
        rows = np.array([seed[name] for seed in seeds])
        limit = "_10000" if name.endswith("_10000") else ""
        verdicts = (
            judged(rows, static_rows["static" + limit]),
            judged(rows, static_rows["static_fit" + limit]),
        )
        suffix = ("_k1" if name.startswith("k1") else "") + crowd + limit
        add(f"interactive {name}", "interactive", rows, suffix, verdicts)
    console.print(table)
    return numbers


def judged(ours: Floats, theirs: Floats) -> str:
    return " ".join(
        verdict(ours[:, m], theirs[:, m], larger_is_better=LARGER_IS_BETTER[m])
        for m in range(len(METRICS))
    )


def draw(folder: Path, source: str) -> None:
    """The truth and an interactive map side by side."""
    import altair as alt

    folder.mkdir(parents=True, exist_ok=True)
    task = HeatmapTrial(source, 0.5, False, 0)
    truth = images(population(task))[8]
    found = summed(summed(interactive(task, once=False, limit=10**9).image))
    charts = []
    for title, image in (("truth", truth), ("three rounds, epsilon 0.5", found)):
        rows, columns = np.nonzero(image >= 0.5)
        values = [
            {"x": int(c), "x2": int(c) + 1, "y": int(r), "y2": int(r) + 1, "devices": float(v)}
            for r, c, v in zip(rows, columns, image[rows, columns], strict=True)
        ]
        base = alt.Chart(alt.InlineData(values=values), title=title, width=420, height=420)
        scale = alt.Scale(type="log", scheme="inferno", domain=[0.5, 300], clamp=True)
        color = alt.Color("devices:Q", scale=scale, legend=alt.Legend(values=[1, 10, 100]))
        stroke = alt.Stroke("devices:Q", scale=scale, legend=None)
        axes: dict[str, Any] = {"axis": None, "scale": alt.Scale(domain=[0, 256], nice=False)}
        charts.append(
            base.mark_rect(strokeWidth=0.4).encode(
                x=alt.X("x:Q", **axes), x2="x2:Q", y=alt.Y("y:Q", **axes), y2="y2:Q",
                color=color, stroke=stroke,
            )
        )  # fmt: skip
    chart = alt.hconcat(*charts).configure_view(fill="black", stroke=None)
    chart.save(str(folder / "heatmap.png"))


if __name__ == "__main__":
    main()
