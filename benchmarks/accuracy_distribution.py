"""A real-valued feature at equal privacy: static partitions, raw and with the fit; interactive.

Mean squared error of 1,000 range queries of half the domain (d = 1024). Two settings: equal local
epsilon (.4 / .8 / 1.6) with one report a device, and equal aggregate epsilon (.02 / .05 / .1, delta
1e-6), honest and noised crowd, with one report a device (`_k1`) or everyone answering every round.
Static partitions have all devices and equal cells; each column takes the number of cells that
turned out best (hindsight). Data: age of UCI Adult, and a million draws of a Gaussian.

Keys: `static_adult_EPS` (best raw), `static_fit_adult_EPS` (best with the same fit),
`interactive_adult_EPS`; `local0.4` and so on for local epsilons; suffixes `_k1`, `_noised`, and
`_se` for the standard error of a mean (single runs vary by as much as their mean). No
question has more than 65 bins, so a largest domain of 10,000 changes nothing.

    python benchmarks/accuracy_distribution.py [--data FILE] [--seeds N] [--json] [--pictures DIR]
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import norm

from _accuracy import (
    Floats,
    Ints,
    Release1,
    in_parallel,
    mean_and_error,
    print_json,
    single,
    split,
    verdict,
)
from chorister.analyst.algorithms.density import Cells, DensityFit, fit_density
from chorister.analyst.algorithms.density_rules import equal_edges, regime

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "adult.csv.gz"
SIZE, QUERIES = 1024, 1000
GAUSSIAN = 1_000_000
FIRST_SEED = 1_000  # rules were chosen on seeds below
CELLS = (4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 25, 32, 33)
LOCAL = (0.4, 0.8, 1.6)
AGGREGATE = (0.02, 0.05, 0.1)


@dataclass(frozen=True)
class Task:
    path: str
    data: str  # adult or gaussian
    setting: str  # local, honest or noised
    epsilon: float
    seed: int


@lru_cache(maxsize=2)
def adult(path: str) -> Ints:
    """Devices by step of the grid: ages from the least to the greatest, in years."""
    if path:
        import polars as pl

        values = pl.read_csv(path)["age"].to_numpy().astype(np.float64)
    else:
        rng = np.random.default_rng(7)
        values = np.clip(np.round(17 + rng.gamma(3.0, 8.0, 32_561)), 17, 90)
    low, high = values.min(), values.max() + 1.0
    steps = np.floor((values - low) / (high - low) * SIZE).astype(np.int64)
    return np.bincount(steps, minlength=SIZE)


def population(task: Task) -> Ints:
    """Counts by step."""
    if task.data == "adult":
        return adult(task.path)
    chances = np.diff(norm.cdf(np.linspace(-5.0, 5.0, SIZE + 1)))
    rng = np.random.default_rng([task.seed, 0])
    return rng.multinomial(GAUSSIAN, chances / chances.sum()).astype(np.int64)


def error(density: Floats, truth: Ints, seed: int) -> float:
    """Mean squared error of range queries."""
    first = np.random.default_rng([seed, 9]).integers(0, SIZE // 2 + 1, QUERIES)
    found = np.concatenate([[0.0], np.cumsum(density)])
    true = np.concatenate([[0.0], np.cumsum(truth / truth.sum())])
    wrong = (found[first + SIZE // 2] - found[first]) - (true[first + SIZE // 2] - true[first])
    return float(np.mean(wrong**2))


def alone(task: Task, reports: int) -> Release1:
    """One release to one cohort."""
    if task.setting == "local":
        return Release1(Decimal(str(task.epsilon)), reports, noised=False)
    return single(task.epsilon, reports, task.setting == "noised")


def measure(
    rng: np.random.Generator, counts: Ints, edges: Ints, release: Release1, sampled: float
) -> Cells:
    """One round; `sampled` is the share of the devices that are not in its cohort."""
    sums = np.diff(np.concatenate([[0], np.cumsum(counts)])[edges])
    value = release.draw(rng, sums)
    variance = release.base + (release.slope + sampled) * np.maximum(value, 1.0)
    return Cells.between(edges, value / release.reports, variance / release.reports**2)


def static(task: Task) -> list[list[float]]:
    """Every number of cells: raw and with the fit."""
    rng = np.random.default_rng([task.seed, 1])
    truth = population(task)
    release = alone(task, int(truth.sum()))
    found = []
    for count in CELLS:
        cells = measure(rng, truth, equal_edges(count, SIZE), release, 0.0)
        width = cells.high - cells.low
        raw = np.repeat(cells.values / width, width)
        fitted = fit_density([cells], SIZE).density
        found.append([error(raw, truth, task.seed), error(fitted, truth, task.seed)])
    return found


def interactive(task: Task, *, once: bool) -> tuple[float, DensityFit]:
    """One whole run."""
    rng = np.random.default_rng([task.seed, 2 + once])
    truth = population(task)
    devices = int(truth.sum())
    noise = math.sqrt(alone(task, devices).base) / devices
    rules = regime(noise, splitting_costs=once and task.setting != "local")
    sizes = [round(share * devices) for share in rules.shares[:-1]]
    left, parts, fit = truth, list[Cells](), None
    for number, share in enumerate(rules.shares, start=1):
        if once:
            counts = left
            if number < len(rules.shares):
                counts = rng.multivariate_hypergeometric(
                    left, sizes[number - 1], method="marginals"
                )
            left = left - counts
            release = alone(task, int(counts.sum()))
        else:
            counts = truth
            noised = task.setting == "noised"
            release = split(task.epsilon, devices, noised, rules.shares)[number - 1]
        edges = rules.edges(number, None if fit is None else fit.density, SIZE)
        parts.append(measure(rng, counts, edges, release, 1.0 - share if once else 0.0))
        fit = fit_density(parts, SIZE)
    if fit is None:
        raise RuntimeError("no rounds")
    return error(fit.density, truth, task.seed), fit


def work(task: Task) -> dict[str, Any]:
    """Everything of one seed and column."""
    found: dict[str, Any] = {"static": static(task), "k1": interactive(task, once=True)[0]}
    if task.setting != "local":
        found["k3"] = interactive(task, once=False)[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA, help="CSV with a column age")
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--pictures", type=Path, help="folder for PNG files")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    path = str(options.data) if options.data.exists() else ""
    if not path:
        print(f"{options.data} is absent: ages are generated")
    columns = [
        (data, setting, epsilon)
        for data in ("adult", "gaussian")
        for setting in ("local", "honest", "noised")
        for epsilon in (LOCAL if setting == "local" else AGGREGATE)
    ]
    tasks = [
        Task(path, *column, seed)
        for column in columns
        for seed in range(FIRST_SEED, FIRST_SEED + options.seeds)
    ]
    found = in_parallel(work, tasks)
    table = Table(title="range-query mean squared error")
    headings = ("data", "setting", "epsilon", "static raw", "static + fit")
    for heading in (*headings, "k = 1", "raw/fit", "k = 3", "raw/fit"):
        table.add_column(heading)
    numbers: dict[str, float] = {}
    for number, column in enumerate(columns):
        seeds = found[number * options.seeds : (number + 1) * options.seeds]
        numbers |= report(table, column, seeds)
    Console(width=150).print(table)
    if options.pictures:
        draw(options.pictures, path)
    if options.json:
        print_json(numbers)


def report(
    table: Table, column: tuple[str, str, float], seeds: list[dict[str, Any]]
) -> dict[str, float]:
    data, setting, epsilon = column
    grids = np.array([seed["static"] for seed in seeds])
    best = [grids[:, int(np.argmin(grids[:, :, fit].mean(axis=0))), fit] for fit in (0, 1)]
    at = f"{data}_{'local' if setting == 'local' else ''}{epsilon}"
    crowd = "_noised" if setting == "noised" else ""
    numbers: dict[str, float] = {}

    def put(key: str, rows: Floats) -> None:
        mean, error = mean_and_error(rows)
        numbers[key], numbers[f"{key}_se"] = float(mean), float(error)

    put(f"static_{at}{crowd}", best[0])
    put(f"static_fit_{at}{crowd}", best[1])
    shown = [_shown(rows) for rows in best]
    for name, suffix in (("k1", "_k1"), ("k3", "")):
        if name not in seeds[0]:
            shown += ["", ""]
            continue
        rows = np.array([seed[name] for seed in seeds])
        key = "" if setting == "local" else suffix  # one report a device is all there is
        put(f"interactive_{at}{key}{crowd}", rows)
        # Seed by seed: the same people and queries, noise drawn apart.
        shown += [_shown(rows), "/".join(_judged(rows, rows_) for rows_ in best)]
    table.add_row(data, setting, str(epsilon), *shown)
    return numbers


def _judged(ours: Floats, theirs: Floats) -> str:
    return verdict(ours, theirs, larger_is_better=False)


def _shown(rows: Floats) -> str:
    mean, error = mean_and_error(rows)
    return f"{mean:.2e} ± {error:.0e}"


def draw(folder: Path, path: str) -> None:
    """Ages as they are and as they were found."""
    import altair as alt

    folder.mkdir(parents=True, exist_ok=True)
    charts = []
    for data in ("adult", "gaussian"):
        task = Task(path, data, "honest", 0.1, 0)
        truth = population(task) / population(task).sum()
        found = interactive(task, once=False)[1]
        rows = [
            {"x": i * 32, "share": float(values[i * 32 : i * 32 + 32].sum()), "what": what}
            for what, values in (("truth", truth), ("found", found.density))
            for i in range(SIZE // 32)
        ]
        charts.append(
            alt.Chart(alt.InlineData(values=rows), title=f"{data}, epsilon 0.1", width=420)
            .mark_line(interpolate="step-after", strokeWidth=1.3)
            .encode(x=alt.X("x:Q", title="step"), y="share:Q", color="what:N")
        )
    alt.hconcat(*charts).save(str(folder / "distribution.png"))


if __name__ == "__main__":
    main()
