"""Two-way tables: one static product grid against margins first, then a grid of their buckets.

Data: Adult, or a CSV file with columns age and hours_per_week (or any two numeric columns first),
one device a row. Metrics: L1 distance of the fitted shares at the true resolution (`l1`) and the
mean squared error of 1,000 rectangles of a quarter of the box (`range`). Static: every device
answers one product grid of equal cells; the best of all grids per column, with hindsight, raw
(cells cut at zero and scaled) and with the same fit as ours. Equal epsilon at delta 1e-6 by exact
accounting; `k1` one report per device (disjoint cohorts), `k3` three.

The same for families of other data, as ratios to static with the fit (see `_ratios.py`): the keys
`worst_ratio_to_static_fit_k3` and `_k1` are the worst over families of the root mean squares of L1
and of the errors of rectangles; `coverage_k3` and `_k1` the least coverage of the 95% intervals of
the last round's cells, `interval_width_k3` and `_k1` the largest median width over the central 95%
of the estimates' own errors. With `--data FILE` that file is the only family.

    python benchmarks/accuracy_marginals.py [--json] [--data FILE] [--seeds 20] [--quick]
        [--families-only] [--pictures FOLDER]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from _budgets import RoundNoise, one_question, rounds
from _ratios import Cells95, Coverage, RatioTable
from _tables import CHOSEN_ON, at_hand, pairs
from chorister.analyst.algorithms.crosstab_margins import (
    Precision,
    refined_margin,
    spikiness,
)
from chorister.analyst.algorithms.crosstab_rules import (
    bucket_count,
    bucket_starts,
    fit_table,
    full_table_pays,
    round_shares,
    steps_of_both,
)
from chorister.analyst.algorithms.crosstab_slices import (
    Slices,
    fit_slices,
    slice_counts,
    slice_starts,
)
from chorister.analyst.estimate import Estimates

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
EPSILONS = (0.25, 0.5, 1.0)
CROWDS = ("honest", "noised")
GRIDS = (2, 4, 6, 8, 10, 12, 16, 20, 25, 33, 50, 74, 99)  # cells an axis; 74 and 99: the values
FEW_GRIDS = (4, 8, 12, 20, 33, 50)  # for the families; and all the values
FAMILY_CASES = ((0.25, "noised"), (1.0, "noised"))
LIMIT = 10_000
FIRST_SEED = 1_000  # rules were chosen on seeds below


@dataclass(frozen=True, eq=False)
class People:
    """Devices by their two values."""

    rows: Ints
    columns: Ints
    high: int
    wide: int

    @classmethod
    def read(cls, source: str) -> People:
        """Of a family, or of a file."""
        a, b = pairs(source)
        a, b = a - a.min(), b - b.min()
        return cls(a.astype(np.int64), b.astype(np.int64), int(a.max()) + 1, int(b.max()) + 1)

    @property
    def count(self) -> int:
        return len(self.rows)

    @cached_property
    def shares(self) -> Floats:
        return self.everyone / self.count

    @cached_property
    def everyone(self) -> Ints:
        return self.table(np.arange(self.count))

    def table(self, who: Ints) -> Ints:
        cells = self.rows[who] * self.wide + self.columns[who]
        return np.bincount(cells, minlength=self.high * self.wide).reshape(self.high, self.wide)


@dataclass(frozen=True, eq=False)
class Rectangles:
    """Queries of a quarter of the box each."""

    top: Ints
    bottom: Ints
    left: Ints
    right: Ints

    @classmethod
    def drawn(cls, high: int, wide: int, count: int = 1_000) -> Rectangles:
        rng = np.random.default_rng(0)
        part = np.exp(
            rng.uniform(math.log(0.25), 0.0, count)
        )  # of the height; .25/part of the width
        tall = np.maximum(np.rint(part * high), 1).astype(np.int64)
        broad = np.clip(np.rint(0.25 / part * wide), 1, wide).astype(np.int64)
        top = (rng.random(count) * (high - tall + 1)).astype(np.int64)
        left = (rng.random(count) * (wide - broad + 1)).astype(np.int64)
        return cls(top, top + tall, left, left + broad)

    def sums(self, table: Floats) -> Floats:
        corner = np.zeros((table.shape[0] + 1, table.shape[1] + 1))
        corner[1:, 1:] = table.cumsum(axis=0).cumsum(axis=1)
        answers: Floats = (
            corner[self.bottom, self.right] - corner[self.top, self.right]
            - corner[self.bottom, self.left] + corner[self.top, self.left]
        )  # fmt: skip
        return answers


def equal_starts(size: int, count: int) -> Ints:
    return np.unique(np.floor(np.arange(count) * size / count).astype(np.int64))


def coarse(table: Ints, rows: Ints, columns: Ints) -> Ints:
    return np.add.reduceat(np.add.reduceat(table, rows, axis=0), columns, axis=1)


def measured(round_: RoundNoise, counts: Ints, rng: np.random.Generator) -> Floats:
    sums = round_.draw(counts.ravel(), rng).reshape(counts.shape)
    return round_.estimates(sums) / round_.reports


def static(
    people: People, round_: RoundNoise, high: int, wide: int, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """One grid of equal cells: raw and fitted."""
    rows, columns = equal_starts(people.high, high), equal_starts(people.wide, wide)
    counts = coarse(people.everyone, rows, columns)
    seen = measured(round_, counts, rng)
    flat_rows, flat_columns = np.ones(people.high), np.ones(people.wide)
    raw = np.maximum(seen, 0.0)
    raw /= max(raw.sum(), 1e-12)
    sizes = np.outer(
        np.diff(np.append(rows, people.high)), np.diff(np.append(columns, people.wide))
    )
    at = np.ix_(
        np.repeat(np.arange(len(rows)), np.diff(np.append(rows, people.high))),
        np.repeat(np.arange(len(columns)), np.diff(np.append(columns, people.wide))),
    )
    fitted = fit_table(
        seen, precision(round_, people.count), rows, columns, flat_rows, flat_columns
    )
    return (raw / sizes)[at], fitted


def precision(round_: RoundNoise, devices: int) -> Precision:
    """Noise of the shares, the mechanism's own and the cohort's chance included."""
    n = round_.reports
    return Precision((round_.sigma / n) ** 2, 1.0 / n + (1.0 / n - 1.0 / devices))


def intervals_of(round_: RoundNoise, shares: Floats, counts: Ints) -> Cells95:
    """The intervals of measured shares, for the devices that answered."""
    value = shares.ravel() * round_.reports
    law, trials = round_.randomizer, round_.noise_trials
    base = float(law.variance(round_.reports, 0.0, trials))
    slope = float(law.variance(round_.reports, 1.0, trials)) - base
    rows = Estimates(
        value=value,
        base=np.full(value.shape, base),
        slope=np.full(value.shape, slope),
        reports=np.full(value.shape, round_.reports, dtype=np.int64),
    )
    return Cells95.of(rows, counts.ravel(), law.step)


def interactive(
    people: People, plan: tuple[RoundNoise, ...], k: int, once: RoundNoise, rng: np.random.Generator
) -> tuple[Floats, Cells95]:
    """Both margins, then the product of their buckets; or everything at once where that pays."""
    cells = people.high * people.wide
    if cells <= LIMIT and full_table_pays(cells, once.sigma / people.count):
        seen = measured(once, people.everyone, rng)
        every = np.arange(people.high), np.arange(people.wide)
        fitted = fit_table(
            seen, precision(once, people.count), *every, np.ones(people.high), np.ones(people.wide)
        )
        return fitted, intervals_of(once, seen, people.everyone)
    first, second, third = plan
    if k == 1:
        order = rng.permutation(people.count)
        ends = np.cumsum([each.reports for each in plan])
        a, b, c = np.split(order[: ends[-1]], ends[:-1])
    else:
        a = b = c = np.arange(people.count)
    size = people.high, people.wide
    sliced = slice_counts(size, first.sigma / first.reports)
    if max(size[0] * sliced[0], size[1] * sliced[1]) > LIMIT:
        sliced = 1, 1
    slices = []
    for axis, each, who in ((0, first, a), (1, second, b)):
        at = [np.arange(size[0]), np.arange(size[1])]
        at[1 - axis] = slice_starts(size[1 - axis], sliced[axis])
        seen = measured(each, coarse(people.table(who), at[0], at[1]), rng)
        seen = seen if axis == 0 else seen.T
        slices.append(Slices(seen, precision(each, people.count), people.count))
    table_precision = precision(third, people.count)
    margins = [fit_slices(each) for each in slices]
    bends = [each.bends for each in margins if each.bends is not None]
    count = bucket_count(
        math.sqrt(table_precision.base),
        most=LIMIT,
        spikes=min(spikiness(each.shares) for each in margins),
        both_stepped=all(each.steps is not None for each in margins),
        bends=sum(bends) if len(bends) == 2 else None,
    )
    while True:
        starts = [bucket_starts(each.shares, count, steps=each.steps) for each in margins]
        if len(starts[0]) * len(starts[1]) <= LIMIT:
            break
        count -= 1
    counts = coarse(people.table(c), starts[0], starts[1])
    seen = measured(third, counts, rng)
    rows, columns = (
        refined_margin(
            margin, each.margin, each.margin_precision, seen.sum(axis=axis),
            table_precision.variance(np.add.reduceat(margin.shares, at), seen.shape[axis]), at,
        )
        for axis, margin, each, at in zip((1, 0), margins, slices, starts, strict=True)
    )  # fmt: skip
    fitted = fit_table(
        seen, table_precision, starts[0], starts[1], rows, columns,
        row_precision=slices[0].margin_precision, column_precision=slices[1].margin_precision,
        steps=steps_of_both(margins, starts),
    )  # fmt: skip
    return fitted, intervals_of(third, seen, counts)


def run(
    people: People,
    seeds: int,
    cases: list[tuple[float, str]],
    grids: tuple[int, ...] = GRIDS,
    intervals: dict[str, list[Cells95]] | None = None,
) -> dict[str, list[tuple[float, float]]]:
    queries = Rectangles.drawn(people.high, people.wide)
    truth, answers = people.shares, queries.sums(people.shares)
    scores: dict[str, list[tuple[float, float]]] = {}

    def score(name: str, table: Floats) -> None:
        error = float(np.mean((queries.sums(table) - answers) ** 2))
        scores.setdefault(name, []).append((float(np.abs(table - truth).sum()), error))

    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for epsilon, crowd in cases:
            rng = np.random.default_rng([seed, round(1000 * epsilon), len(crowd)])
            once = one_question(epsilon, crowd, people.count)
            for high in sorted({each for each in (*grids, people.high) if each <= people.high}):
                for wide in sorted({each for each in (*grids, people.wide) if each <= people.wide}):
                    if high * wide > LIMIT:
                        continue
                    raw, fitted = static(people, once, high, wide, rng)
                    score(f"static {high}x{wide} {crowd} {epsilon}", raw)
                    score(f"fitted {high}x{wide} {crowd} {epsilon}", fitted)
            for k in (1, 3):
                shares = round_shares(people.high * people.wide, once.sigma / people.count)
                plan = rounds(epsilon, crowd, people.count, shares, k)
                found, cells = interactive(people, plan, k, once, rng)
                name = f"interactive k{k} {crowd} {epsilon}"
                score(name, found)
                if intervals is not None:
                    intervals.setdefault(name, []).append(cells)
    return scores


def family(
    comparison: RatioTable,
    coverage: Coverage,
    source: str,
    seeds: int,
    cases: list[tuple[float, str]],
) -> None:
    """Print ours beside static for one family."""
    people = People.read(source)
    intervals: dict[str, list[Cells95]] = {}
    found = run(people, seeds, cases, FEW_GRIDS, intervals)
    scores = {name: np.array(values) for name, values in found.items()}

    def squares(values: Floats) -> Floats:
        return np.stack([values[:, 0] ** 2, values[:, 1]], axis=1)

    kind = "chosen on" if source in CHOSEN_ON else "held out"
    for epsilon, crowd in cases:
        tail = f" {crowd} {epsilon}"
        static_, fitted = (
            {
                # The full table is one rule for all families.
                "full" if f"{people.high}x{people.wide}" in name else name.split()[1]:
                    squares(values)
                for name, values in scores.items()
                if name.startswith(start) and name.endswith(tail)
            }
            for start in ("static", "fitted")
        )  # fmt: skip
        ours = {k: scores[f"interactive {k}{tail}"] for k in ("k3", "k1")}
        setting = f"{epsilon} {crowd}"
        comparison.add(
            source, setting, {k: squares(values) for k, values in ours.items()}, static_, fitted
        )
        print(
            f"{source} ({kind}), {people.count:,} devices, {people.high} x {people.wide} values, "
            f"epsilon {setting}: ratio to static with fit"
        )
        means = {
            name: [min(math.sqrt(each[:, m].mean()) for each in grids.values()) for m in (0, 1)]
            for name, grids in (("static", static_), ("static, fit", fitted))
        } | {k: np.sqrt(squares(values).mean(axis=0)).tolist() for k, values in ours.items()}
        for name, (l1, rms) in means.items():
            print(f"  {name:12} L1 {l1:.4f}  root range MSE {rms:.2e}")
        print("\n".join(comparison.lines(source, setting)))
        for k in ours:
            joined = Cells95.joined(intervals[f"interactive {k}{tail}"])
            print(coverage.add(k, joined), flush=True)


def keys(scores: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    found: dict[str, float] = {}

    def put(key: str, values: list[float]) -> None:
        found[key] = float(np.mean(values))
        found[f"{key}_se"] = (
            float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0
        )

    for epsilon in EPSILONS:
        for crowd in CROWDS:
            if f"interactive k1 {crowd} {epsilon}" not in scores:
                continue
            tail = f"_{epsilon:g}" + ("" if crowd == "honest" else "_noised")
            for at, metric in enumerate(("l1", "range")):
                for kind, suffix in (("static", ""), ("fitted", "_fit")):
                    names = [
                        name for name in scores
                        if name.startswith(kind) and name.endswith(f"{crowd} {epsilon}")
                    ]  # fmt: skip
                    best = min(names, key=lambda name: np.mean([v[at] for v in scores[name]]))
                    put(f"static_{metric}{tail}{suffix}", [v[at] for v in scores[best]])
                for k in (1, 3):
                    values = [v[at] for v in scores[f"interactive k{k} {crowd} {epsilon}"]]
                    put(f"interactive_{metric}{tail}_k{k}", values)
    return found


def show(found: dict[str, float]) -> None:
    print(f"{'':30}" + "".join(f"{f'eps {e:g}: L1':>14}{'range MSE':>12}" for e in EPSILONS))
    for crowd in CROWDS:
        print(f"{crowd} crowd")
        for title, key in (
            ("  static, best grid", "static_{}{}"),
            ("  static, best grid, fitted", "static_{}{}_fit"),
            ("  interactive, k=1", "interactive_{}{}_k1"),
            ("  interactive, k=3", "interactive_{}{}_k3"),
        ):
            line = ""
            for epsilon in EPSILONS:
                tail = f"_{epsilon:g}" + ("" if crowd == "honest" else "_noised")
                line += f"{found[key.format('l1', tail)]:14.4f}"
                line += f"{found[key.format('range', tail)]:12.2e}"
            print(f"{title:30}{line}")
    lost = []
    for key, value in found.items():
        if key.startswith("interactive_") and not key.endswith("_se"):
            base = key.removeprefix("interactive_").rsplit("_", 1)[0]
            for suffix in ("", "_fit"):
                other = f"static_{base}{suffix}"
                error = math.hypot(found[f"{key}_se"], found[f"{other}_se"])
                if value >= found[other] - 2.0 * error:
                    lost.append(f"{key} {value:.3g} against {other} {found[other]:.3g}")
    print("not beaten by two standard errors: " + ("; ".join(lost) if lost else "nothing"))


def picture(people: People, folder: Path) -> None:
    """The true table beside the interactive one, at epsilon 0.5 and k = 3."""
    import altair as alt

    rng = np.random.default_rng(0)
    once = one_question(0.5, "honest", people.count)
    shares = round_shares(people.high * people.wide, once.sigma / people.count)
    plan = rounds(0.5, "honest", people.count, shares, 3)
    tables = {
        "true": people.shares,
        "interactive, epsilon 0.5, k = 3": interactive(people, plan, 3, once, rng)[0],
    }
    rows = [
        {"table": name, "age": i + 17, "hours": j + 1, "devices": float(table[i, j]) * people.count}
        for name, table in tables.items()
        for i in range(people.high)
        for j in range(people.wide)
    ]
    chart = (
        alt.Chart(alt.InlineData(values=rows))
        .transform_calculate(age2="datum.age + 1", hours2="datum.hours + 1")
        .mark_rect()
        .encode(
            x=alt.X(
                "age:Q", title="age", scale=alt.Scale(domain=[17, 17 + people.high], nice=False)
            ),
            x2="age2:Q",
            y=alt.Y("hours:Q", title="hours per week", scale=alt.Scale(nice=False)),
            y2="hours2:Q",
            color=alt.Color(
                "devices:Q", scale=alt.Scale(type="symlog", constant=1, scheme="blues")
            ),
        )
        .properties(width=320, height=320)
        .facet(column=alt.Column("table:N", sort=["true"], title=None))
    )
    folder.mkdir(parents=True, exist_ok=True)
    chart.save(folder / "accuracy_marginals.png", scale_factor=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="one flat object as the last line")
    parser.add_argument("--data", type=Path, help="a CSV file with two numeric columns")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--quick", action="store_true", help="few seeds; families only")
    parser.add_argument("--families-only", action="store_true", help="without Adult's tables")
    parser.add_argument("--families", nargs="*", help="only these")
    parser.add_argument("--pictures", type=Path, help="a folder for pictures")
    options = parser.parse_args()
    if options.data is not None and not options.data.exists():
        parser.error(f"{options.data} is absent")
    begin = time.perf_counter()
    here = at_hand()
    sources = [str(options.data)] if options.data else options.families or here
    seeds = max(options.seeds or (4 if options.quick else 20), 2)
    people = People.read(
        str(options.data) if options.data else "adult" if "adult" in here else "normal"
    )
    found: dict[str, float] = {}
    if not (options.quick or options.families_only):
        found = keys(run(people, seeds, [(e, crowd) for e in EPSILONS for crowd in CROWDS]))
        show(found)
    comparison, coverage = RatioTable(("l1", "range")), Coverage()
    for source in sources:
        family(comparison, coverage, source, seeds, list(FAMILY_CASES))
    found |= comparison.summary(CHOSEN_ON, [each for each in sources if each not in CHOSEN_ON])
    found |= coverage.keys()
    found["seconds"] = time.perf_counter() - begin
    print(f"{seeds} seeds in {found['seconds']:.0f} s")
    if options.pictures:
        picture(people, options.pictures)
    if options.json:
        # Three reports per device are the headline: `interactive_METRIC_EPS`.
        headline = {
            key.replace("_k3", ""): value
            for key, value in found.items()
            if key.startswith("interactive_") and "_k3" in key
        }
        print(json.dumps(found | headline))


if __name__ == "__main__":
    main()
