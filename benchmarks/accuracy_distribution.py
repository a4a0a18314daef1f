"""A real-valued feature at equal privacy: static partitions, raw and with the fit; interactive.

Mean squared error of 1,000 range queries of half the domain (d = 1024), at equal aggregate epsilon
(.02 / .05 / .1, delta 1e-6), honest and noised crowd, one report per device (`_k1`) or everyone
answering every round; for the first two families also at equal local epsilon (.4 / .8 / 1.6) with
one report per device. Static partitions have all devices and equal cells. Families: the age of UCI
Adult and a million draws of a Gaussian, other real columns, and made-up ones (`_shapes.py`); those
that the rules were chosen on are printed apart from those that were held out. `--data FILE` takes
any CSV in the place of Adult (`--column`: age if there is one, else the first column of numbers)
and leaves the other families out, except those that `--families` names.

Keys: `static_adult_EPS` (best raw), `static_fit_adult_EPS` (best with the same fit),
`interactive_adult_EPS`; `local0.4` and so on for local epsilons; suffixes `_k1`, `_noised`, and
`_se` for the standard error of a mean (single runs vary by as much as their mean). These take the
number of cells that turned out best on the very same seeds. The other families alike.

`ratio_FAMILY_EPS` with the same suffixes is the root mean squared error over that of the best
static partition with the fit, seed by seed; that partition is chosen with hindsight on the other
half of the seeds. `worst_ratio_to_static_fit_k3` and `_k1` are the largest ratios, each with its
`_se`; `missed_k3` and `missed_k1` count the ratios that exceed 1.1 and 1.3 by two standard errors;
`worst_held_out_k3` and `_k1` are the largest of the families that were held out.
`worst_ratio_of_static_rule` is the least that one number of cells for all families can do. No
question has more than 200 bins, so a largest domain of 10,000 changes nothing.

    python benchmarks/accuracy_distribution.py [--data FILE] [--column NAME] [--families A,B]
        [--settings honest] [--epsilons .02,.1] [--seeds N] [--quick] [--json] [--pictures DIR]
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
import polars as pl
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
from _shapes import COLUMNS, DATA, DESIGNED, UNSEEN
from chorister.analyst.algorithms.density import Cells, DensityFit, fit_density
from chorister.analyst.algorithms.density_rules import equal_edges, regime
from chorister.errors import InvalidInput

SIZE, QUERIES = 1024, 1000
GAUSSIAN, MADE_UP = 1_000_000, 100_000  # devices
FIRST_SEED = 1_000  # to choose rules on seeds below; the last revision also saw 1,000 to 1,009
CELLS = (4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 25, 32, 33, 48, 64)
LOCAL = (0.4, 0.8, 1.6)
AGGREGATE = (0.02, 0.05, 0.1)
CHOSEN = (
    "adult", "gaussian", "delays", "prices", "uniform", "normal", "narrow", "bimodal", "lognormal",
    "spikes", "steps", "arcsine", "triangular", "hours",
)  # fmt: skip
LIMITS = {"k3": 1.1, "k1": 1.3}
# Shapes whose devices are mostly outside the range say nothing new about what is inside.
SHAPES = {name: shape for name, shape in (DESIGNED | UNSEEN).items() if name != "absent"}
Column = tuple[str, str, float]  # family, setting, epsilon


@dataclass(frozen=True)
class DistributionTrial:
    file: str  # of a real column, else empty
    name: str  # of that column
    data: str  # the family
    setting: str  # local, honest or noised
    epsilon: float
    seed: int
    cells: tuple[int, ...] = CELLS


@lru_cache(maxsize=4)
def real(path: str, name: str) -> Ints:
    """Devices by step of the grid, from the least value to the greatest."""
    if path:
        column = pl.read_csv(path, infer_schema_length=None)[name]
        values = column.cast(pl.Float64, strict=False).drop_nulls().drop_nans().to_numpy()
    else:
        rng = np.random.default_rng(7)
        values = np.clip(np.round(17 + rng.gamma(3.0, 8.0, 32_561)), 17, 90)
    # A whole number stands for what it is rounded down from.
    whole = bool(np.all(values == np.round(values)))
    low, high = values.min(), values.max() + (1.0 if whole else 0.0)
    steps = np.floor((values - low) / max(high - low, 1e-300) * SIZE).astype(np.int64)
    return np.bincount(np.clip(steps, 0, SIZE - 1), minlength=SIZE)


def population(task: DistributionTrial) -> Ints:
    """Counts by step."""
    if task.name:
        return real(task.file, task.name)
    rng = np.random.default_rng([task.seed, 0])
    if task.data == "gaussian":
        chances = np.diff(norm.cdf(np.linspace(-5.0, 5.0, SIZE + 1)))
        return rng.multinomial(GAUSSIAN, chances / chances.sum()).astype(np.int64)
    values = SHAPES[task.data](rng, MADE_UP)
    return np.histogram(values[values < 100.0], SIZE, (0.0, 100.0))[0].astype(np.int64)


def error(density: Floats, truth: Ints, seed: int) -> float:
    """Mean squared error of range queries."""
    first = np.random.default_rng([seed, 9]).integers(0, SIZE // 2 + 1, QUERIES)
    found = np.concatenate([[0.0], np.cumsum(density)])
    true = np.concatenate([[0.0], np.cumsum(truth / truth.sum())])
    wrong = (found[first + SIZE // 2] - found[first]) - (true[first + SIZE // 2] - true[first])
    return float(np.mean(wrong**2))


def alone(task: DistributionTrial, reports: int) -> Release1:
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
    n, slope = release.reports, release.slope + sampled
    least = np.full(len(value), (release.base + slope) / n**2)
    return Cells.between(edges, value / n, least, np.full(len(value), slope / n))


def static(task: DistributionTrial) -> list[list[float]]:
    """Every number of cells: raw and with the fit."""
    rng = np.random.default_rng([task.seed, 1])
    truth = population(task)
    release = alone(task, int(truth.sum()))
    found = []
    for count in task.cells:
        cells = measure(rng, truth, equal_edges(count, SIZE), release, 0.0)
        width = cells.high - cells.low
        raw = np.repeat(cells.values / width, width)
        fitted = fit_density([cells], SIZE).density
        found.append([error(raw, truth, task.seed), error(fitted, truth, task.seed)])
    return found


def interactive(task: DistributionTrial, *, once: bool) -> tuple[float, DensityFit]:
    """One whole run."""
    rng = np.random.default_rng([task.seed, 2 + once])
    truth = population(task)
    devices = int(truth.sum())
    noise = math.sqrt(alone(task, devices).base) / devices
    rules = regime(noise, splitting_costs=once and task.setting != "local")
    sizes = [round(share * devices) for share in rules.shares[:-1]]
    left, parts = truth, list[Cells]()
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
        alike = math.sqrt(release.base) / release.reports
        edges = rules.edges(number, parts, SIZE, noise=alike)
        parts.append(measure(rng, counts, edges, release, 1.0 - share if once else 0.0))
    fit = fit_density(parts, SIZE)
    return error(fit.density, truth, task.seed), fit


def work(task: DistributionTrial) -> dict[str, Any]:
    """Everything of one seed and column."""
    found: dict[str, Any] = {"static": static(task), "k1": interactive(task, once=True)[0]}
    if task.setting != "local":
        found["k3"] = interactive(task, once=False)[0]
    return found


def families(options: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """The families asked for: file and column of the real ones."""
    adult = options.data or DATA / "adult.csv.gz"
    if options.data is not None and not options.data.exists():
        raise InvalidInput(f"{options.data} does not exist")
    found = {"adult": (str(adult), _column(adult, options.column)), "gaussian": ("", "")}
    if not adult.exists():
        print(f"{adult} is absent: ages are generated")
        found["adult"] = ("", "age")
    more = {name: (str(DATA / file), column) for name, (file, column) in COLUMNS.items()}
    del more["ages"]  # these are Adult's
    for name, (file, _) in list(more.items()):
        if not Path(file).exists():
            print(f"{file} is absent: {name} is left out")
            del more[name]
    more |= dict.fromkeys(SHAPES, ("", ""))
    if options.families is not None:
        unknown = set(filter(None, options.families.split(","))) - set(more)
        if unknown:
            raise InvalidInput(f"there are no such families: {', '.join(sorted(unknown))}")
        more = {name: more[name] for name in options.families.split(",") if name}
    elif options.data is not None:
        more = {}
    elif options.quick:
        more = {name: more[name] for name in ("lognormal", "spikes")}
    return found | more


def _column(path: Path, wanted: str | None) -> str:
    """The column of numbers that is asked for, or the likeliest one."""
    if not path.exists():
        return wanted or "age"
    types = pl.read_csv(path, n_rows=1_000).schema
    numbers = [name for name, kind in types.items() if kind.is_numeric()]
    name = wanted or ("age" if "age" in numbers else next(iter(numbers), ""))
    if name not in types:
        raise InvalidInput(f"{path.name} has no column {name or 'of numbers'}")
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, help="a CSV file in the place of Adult")
    parser.add_argument("--column", help="its column; age, or else the first one of numbers")
    parser.add_argument("--families", help="names, separated by commas; all unless --data is given")
    parser.add_argument("--settings", default="local,honest,noised", help="some of them only")
    parser.add_argument("--epsilons", help="some of .02, .05 and .1 only, for a shorter run")
    parser.add_argument("--seeds", type=int, help="40, or 4 with --quick")
    parser.add_argument("--quick", action="store_true", help="few columns, for tests")
    parser.add_argument("--pictures", type=Path, help="folder for PNG files")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seeds = options.seeds or (4 if options.quick else 40)
    if seeds < 4:
        raise InvalidInput("at least four seeds are needed: half of them choose the competitor")
    kinds = families(options)
    columns: list[Column] = [
        (data, setting, epsilon)
        for data in kinds
        for setting in ("local", "honest", "noised")
        for epsilon in (LOCAL if setting == "local" else AGGREGATE)
        if setting != "local" or data in ("adult", "gaussian")
        if setting in options.settings.split(",")
    ]
    if options.epsilons:
        kept = {float(each) for each in options.epsilons.split(",")} | set(LOCAL)
        columns = [each for each in columns if each[2] in kept]
    if options.quick:
        columns = [each for each in columns if each[1:] in (("local", 0.8), ("honest", 0.05))]
    cells = (5, 9, 17, 33) if options.quick else CELLS
    tasks = [
        DistributionTrial(*kinds[data], data, setting, epsilon, seed, cells)
        for data, setting, epsilon in columns
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
    ]
    found = in_parallel(work, tasks)
    by_column = {
        column: found[number * seeds : (number + 1) * seeds]
        for number, column in enumerate(columns)
    }
    numbers: dict[str, float] = {}
    for title, chosen in (("families that rules were chosen on", True), ("held out", False)):
        table = Table(title=f"range-query mean squared error: {title}")
        headings = ("family", "setting", "epsilon", "static raw", "static + fit")
        for heading in (*headings, "k = 1", "raw/fit", "ratio", "k = 3", "raw/fit", "ratio"):
            table.add_column(heading)
        for column, rows in by_column.items():
            if (column[0] in CHOSEN and not options.data) == chosen:
                numbers |= report(table, column, rows)
        if table.row_count:
            Console(width=170).print(table)
    numbers |= worst(numbers, by_column, held_out=set(kinds) - set(CHOSEN))
    for key, value in numbers.items():
        if key.startswith(("worst", "missed")):
            print(f"{key}: {value:.3f}")
    if options.pictures:
        draw(options.pictures, kinds["adult"])
    if options.json:
        print_json(numbers)


def ratio_to_static(ours: Floats, grids: Floats) -> tuple[float, float]:
    """Root mean squared error over that of the best grid, and the ratio's standard error.

    The even seeds choose the grid that the odd ones are compared with, and the other way round.
    """
    even = np.arange(len(ours)) % 2 == 0
    picked = [int(np.argmin(grids[half].mean(axis=0))) for half in (~even, even)]
    theirs = np.where(even, grids[:, picked[0]], grids[:, picked[1]])
    ratio = math.sqrt(ours.mean() / theirs.mean())
    spread = ours / ours.mean() - theirs / theirs.mean()
    return ratio, float(ratio / 2.0 * spread.std(ddof=1) / math.sqrt(len(ours)))


def worst(
    numbers: dict[str, float], by_column: dict[Column, list[dict[str, Any]]], held_out: set[str]
) -> dict[str, float]:
    """Over all families at equal aggregate epsilon."""
    found: dict[str, float] = {}
    columns = [column for column in by_column if column[1] != "local"]
    for name, limit in LIMITS.items():
        keys = {f"ratio_{_key(column, name)}": column[0] for column in columns}
        top = max(keys, key=lambda key: numbers[key])
        found[f"worst_ratio_to_static_fit_{name}"] = numbers[top]
        found[f"worst_ratio_to_static_fit_{name}_se"] = numbers[f"{top}_se"]
        unseen = [numbers[key] for key, data in keys.items() if data in held_out]
        if unseen:
            found[f"worst_held_out_{name}"] = max(unseen)
        missed = [numbers[key] - 2.0 * numbers[f"{key}_se"] > limit for key in keys]
        found[f"missed_{name}"] = float(sum(missed))
    rules = []
    for column in columns:
        grids = np.array([seed["static"] for seed in by_column[column]])[:, :, 1]
        rules.append([ratio_to_static(grids[:, k], grids)[0] for k in range(grids.shape[1])])
    found["worst_ratio_of_static_rule"] = float(np.array(rules).max(axis=0).min())
    return found


def _key(column: Column, name: str) -> str:
    """As in the names of figures: family, epsilon, who answers, crowd."""
    data, setting, epsilon = column
    if setting == "local":  # one report per device is all there is
        return f"{data}_local{epsilon}"
    return f"{data}_{epsilon}{'_k1' if name == 'k1' else ''}{'_noised' * (setting == 'noised')}"


def report(table: Table, column: Column, seeds: list[dict[str, Any]]) -> dict[str, float]:
    grids = np.array([seed["static"] for seed in seeds])
    best = [grids[:, int(np.argmin(grids[:, :, fit].mean(axis=0))), fit] for fit in (0, 1)]
    numbers: dict[str, float] = {}

    def put(key: str, rows: Floats) -> None:
        mean, error = mean_and_error(rows)
        numbers[key], numbers[f"{key}_se"] = float(mean), float(error)

    put(f"static_{_key(column, 'k3')}", best[0])
    put(f"static_fit_{_key(column, 'k3')}", best[1])
    shown = [_shown(rows) for rows in best]
    for name in ("k1", "k3"):
        if name not in seeds[0]:
            shown += ["", "", ""]
            continue
        rows, key = np.array([seed[name] for seed in seeds]), _key(column, name)
        put(f"interactive_{key}", rows)
        ratio, error = ratio_to_static(rows, grids[:, :, 1])
        numbers[f"ratio_{key}"], numbers[f"ratio_{key}_se"] = ratio, error
        # Seed by seed: the same people and queries, noise drawn apart.
        shown += [_shown(rows), "/".join(_judged(rows, rows_) for rows_ in best)]
        shown.append(f"{ratio:.2f} ± {error:.2f}")
    table.add_row(column[0], column[1], str(column[2]), *shown)
    return numbers


def _judged(ours: Floats, theirs: Floats) -> str:
    return verdict(ours, theirs, larger_is_better=False)


def _shown(rows: Floats) -> str:
    mean, error = mean_and_error(rows)
    return f"{mean:.2e} ± {error:.0e}"


def draw(folder: Path, adult: tuple[str, str]) -> None:
    """Ages as they are and as they were found."""
    import altair as alt

    folder.mkdir(parents=True, exist_ok=True)
    charts = []
    for data in ("adult", "gaussian"):
        kind = adult if data == "adult" else ("", "")
        task = DistributionTrial(*kind, data, "honest", 0.1, 0)
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
