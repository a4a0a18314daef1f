"""How often the intervals of a series hold, how often it raises false alarms, and what it finds.

Every run is a whole series of 26 windows. Devices draw their windows, and the sums of every window
are drawn by the exact law of the aggregates; estimates, intervals and changes are the library's
own. A case is a family of histories and a setting. Families: `flat`, `rare` (bins of 0.2 to 2%),
`drift`, `step`, `season`, `flip` (everybody changes sides in every window, so that devices in
several windows make differences as uncertain as they can be), `churn` (people move, shares do not)
and `rollout` (0.5% before the middle, 99% after it). Settings: `large` (20,000 reports per window,
noised), `small` (200, an honest crowd, rare bits), `symmetric` (1,000, 4 answers per device) and
`often` (1,000, all 26 windows).

Keys: `cover_levels_CASE`, `cover_pairs_CASE`, `cover_steps_CASE`: the share of series in which ALL
intervals hold, stated as 0.95. `alarms_pairs_CASE`, `alarms_steps_CASE`: the share of series where
nothing changes (flat, rare, flip and churn) with any certain change, stated as at most 0.05.
`power_pair_SETTING` and `power_steps_SETTING`: how often a shift of the size that `cost()` states
is found; `promised` is the rate that it states. `worst_cover`, `worst_alarms`, `worst_power` (the
least found less promised).

    python benchmarks/coverage_trend.py [--runs N] [--families A,B] [--settings A,B] [--json]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from _accuracy import Floats, Ints, in_parallel, print_json
from chorister.analyst.estimate import Part
from chorister.analyst.rehearsal import rehearse
from chorister.analyst.rehearsal.simulation import draw_sums, draw_windows
from chorister.analyst.request import categories
from chorister.analyst.result import Result
from chorister.analyst.series import TrackPlan
from chorister.analyst.trend import Trend
from chorister.policy import Policy
from chorister.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent
POLICY = ROOT / "examples" / "algorithms" / "policy.toml"
WINDOWS, BINS = 26, 5
MIDDLE = WINDOWS // 2
CONFIDENCE = 0.95
LEVEL, CHANCE = 0.1, 0.8


@dataclass(frozen=True)
class AnswerSetting:
    """How devices answer."""

    mechanism: str
    crowd: str
    local_epsilon: str
    reports: int  # per window
    answers: int  # per device


SETTINGS = {
    "large": AnswerSetting("asymmetric", "noised", "6", 20_000, 1),
    "small": AnswerSetting("asymmetric", "honest", "8", 200, 1),
    "symmetric": AnswerSetting("symmetric", "noised", "8", 1_000, 4),
    "often": AnswerSetting("asymmetric", "noised", "6", 1_000, WINDOWS),
}


@dataclass(frozen=True)
class Histories:
    """What kinds of people there are, and which bin each holds in every window."""

    shares: Floats  # by kind
    bins: Ints  # by kind and window

    def truth(self) -> Floats:
        """The share of every bin, by window."""
        found = np.zeros((WINDOWS, BINS))
        for share, path in zip(self.shares, self.bins, strict=True):
            found[np.arange(WINDOWS), path] += share
        return found


def constant(*shares: float) -> Histories:
    bins = np.repeat(np.arange(1, len(shares) + 1)[:, None], WINDOWS, axis=1)
    return Histories(np.array(shares), bins)


def moving(kinds: list[tuple[float, Ints]]) -> Histories:
    return Histories(np.array([share for share, _ in kinds]), np.stack([bins for _, bins in kinds]))


def histories(family: str) -> Histories:
    at = np.arange(WINDOWS)
    if family == "flat":
        return constant(0.4, 0.3, 0.2, 0.1)
    if family == "rare":
        return constant(0.97, 0.02, 0.008, 0.002)
    if family == "drift":
        movers = [(0.01, np.where(at < k, 1, 4)) for k in range(1, WINDOWS)]
        return moving([(0.35, 0 * at + 1), (0.4, 0 * at + 2), *movers])
    if family == "step":
        return moving([(0.6, 0 * at + 1), (0.3, 0 * at + 2), (0.1, np.where(at < MIDDLE, 1, 3))])
    if family == "season":
        return moving([(0.7, 0 * at + 1), (0.3, np.where(at % 4 < 2, 2, 3))])
    if family == "flip":
        return moving([(0.5, 1 + at % 2), (0.5, 2 - at % 2)])
    if family == "churn":
        return moving([(0.25, 1 + (at + k) % 4) for k in range(4)])
    if family == "rollout":
        changed = np.where(at < MIDDLE, 1, 2)
        return moving([(0.005, 0 * at + 2), (0.985, changed), (0.01, 0 * at + 1)])
    raise SystemExit(f"no family {family}")


FAMILIES = ("flat", "rare", "drift", "step", "season", "flip", "churn", "rollout")
UNCHANGED = ("flat", "rare", "flip", "churn")


def planned(setting: AnswerSetting) -> TrackPlan:
    text = POLICY.read_text().replace("streams", "profiles")
    text = text.replace('mechanisms = ["asymmetric", "symmetric"]', MECHANISMS)
    text += f'\n[analyses.trips.series]\nwindows = {WINDOWS}\nlongest = "400d"\n'
    policy = Policy.load((text + f"answers = {WINDOWS}\ncells = {WINDOWS}\n").encode())
    fleet = rehearse({"x": [1.0], "count": [setting.reports]}, policy, seed=1)
    return fleet.study("coverage", analysis="trips").track(
        categories("x", (1, 2, 3, 4)),
        windows=WINDOWS,
        answers_per_device=setting.answers,
        mechanism=setting.mechanism,
        crowd=setting.crowd,
        local_epsilon=setting.local_epsilon,
        min_cohort=setting.reports * 9 // 10,
    )


MECHANISMS = """mechanisms = ["asymmetric", "symmetric"]
crowds = ["noised", "honest"]
honest_fraction = "9/10"
"""


def drawn(
    recipe: Recipe, people: Histories, setting: AnswerSetting, rng: np.random.Generator
) -> Trend:
    """One series: who answers when, and what is released."""
    devices = round(setting.reports * WINDOWS / setting.answers)
    weights = np.rint(people.shares * devices).astype(np.int64)
    answering, _ = draw_windows(recipe, weights, setting.answers, 1.0, rng)
    results = {}
    for number in range(WINDOWS):
        counts = np.bincount(people.bins[:, number], answering[number], BINS).astype(np.int64)
        reports = int(answering[number].sum())
        sums = draw_sums(recipe, counts, reports, rng)
        part = Part(group=(), reports=reports, sums=sums)
        results[number] = Result(recipe=recipe, parts=(part,))
    return Trend(recipe=recipe, results=results, confidence=CONFIDENCE)


@dataclass(frozen=True)
class TrendTrial:
    family: str  # or "power"
    setting: str
    seed: int
    runs: int


def work(task: TrendTrial) -> dict[str, float]:
    rng = np.random.default_rng([task.seed, *task.family.encode(), *task.setting.encode()])
    setting = SETTINGS[task.setting]
    plan = planned(setting)
    recipe = plan.question.recipe(number=1, opens=1_700_000_000)
    if task.family == "power":
        return powers(plan, recipe, setting, task.runs, rng)
    people = histories(task.family)
    truth = people.truth()
    held = {"levels": 0, "pairs": 0, "steps": 0}
    alarms = {"pairs": 0, "steps": 0}
    for _ in range(task.runs):
        trend = drawn(recipe, people, setting, rng)
        columns = trend.columns()
        level = truth.ravel()
        held["levels"] += bool(((columns["ci_low"] <= level) & (level <= columns["ci_high"])).all())
        for compare in ("pairs", "steps"):
            found = trend.changes(compare)
            table = found.table
            before, after, at = table["before"], table["after"], table["bin"]
            if compare == "pairs":
                true = truth[after, at] - truth[before, at]
            else:
                total = np.concatenate([np.zeros((1, BINS)), np.cumsum(truth, axis=0)])
                later = (total[-1, at] - total[after, at]) / (WINDOWS - after)
                true = later - total[after, at] / after
            inside = (table["low"] - 1e-12 <= true) & (true <= table["high"] + 1e-12)
            held[compare] += bool(inside.all())
            alarms[compare] += len(found.certain()) > 0
    at_case = f"{task.family}_{task.setting}"
    numbers = {f"cover_{kind}_{at_case}": count / task.runs for kind, count in held.items()}
    if task.family in UNCHANGED:
        numbers |= {f"alarms_{kind}_{at_case}": n / task.runs for kind, n in alarms.items()}
    return numbers


def powers(
    plan: TrackPlan, recipe: Recipe, setting: AnswerSetting, runs: int, rng: np.random.Generator
) -> dict[str, float]:
    """How often the shifts that `cost()` states are found."""
    cost = plan.cost(reports=setting.reports, level=LEVEL, chance=CHANCE)
    numbers: dict[str, float] = {}
    name = next(key for key, value in SETTINGS.items() if value is setting)
    for kind, shift in (("pair", cost.shift), ("steps", cost.lasting_shift)):
        if shift is None:
            continue
        at = np.arange(WINDOWS)
        people = moving(
            [(LEVEL, 0 * at + 1), (shift, np.where(at < MIDDLE, 2, 1)),
             (1.0 - LEVEL - shift, 0 * at + 2)]
        )  # fmt: skip
        found = 0
        for _ in range(runs):
            changes = drawn(recipe, people, setting, rng).changes(
                "pairs" if kind == "pair" else "steps"
            )
            table = changes.table
            row = (table["bin"] == 1) & (table["after"] == MIDDLE) & (table["before"] == MIDDLE - 1)
            found += bool((table["low"][row] > 0.0).any())
        numbers[f"power_{kind}_{name}"] = found / runs
        numbers[f"shift_{kind}_{name}"] = shift
    numbers["promised"] = CHANCE
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=200, help="series per case")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--families", default=",".join((*FAMILIES, "power")))
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tasks = [
        TrendTrial(family, setting, options.seed, options.runs)
        for setting in options.settings.split(",")
        for family in options.families.split(",")
    ]
    table = Table(title=f"{options.runs:,} series of {WINDOWS} windows per case")
    for heading in ("family", "setting", "levels", "pairs", "steps", "alarms (pairs, steps)"):
        table.add_column(heading)
    numbers: dict[str, float] = {}
    for task, found in zip(tasks, in_parallel(work, tasks), strict=True):
        numbers |= found
        at = f"{task.family}_{task.setting}"
        if task.family == "power":
            keys = [key for key in found if key.startswith("power")]
            summary = ", ".join(
                f"{key}: {found[key]:.3f} for {found[key.replace('power', 'shift')]:.2%}"
                for key in keys
            )
            table.add_row("power", task.setting, summary, "", "", "")
            continue
        cells = [f"{found[f'cover_{kind}_{at}']:.4f}" for kind in ("levels", "pairs", "steps")]
        alarms = [found.get(f"alarms_{kind}_{at}") for kind in ("pairs", "steps")]
        summary = ", ".join(f"{each:.4f}" for each in alarms if each is not None)
        table.add_row(task.family, task.setting, *cells, summary)

    def of(prefix: str) -> list[float]:
        return [value for key, value in numbers.items() if key.startswith(prefix)]

    numbers["worst_cover"] = min(of("cover_"), default=1.0)
    numbers["worst_alarms"] = max(of("alarms_"), default=0.0)
    numbers["worst_power"] = min(of("power_"), default=CHANCE) - CHANCE
    Console(width=140).print(table)
    print(
        f"least coverage {numbers['worst_cover']:.4f}, most false alarms "
        f"{numbers['worst_alarms']:.4f}, power at least {numbers['worst_power']:+.3f} of promised"
    )
    if options.json:
        print_json(numbers)


if __name__ == "__main__":
    main()
