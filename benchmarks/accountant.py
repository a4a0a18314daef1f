"""The exact accountant beside the public numerical computation of 2020, in one run.

The competitor is the algorithm of arXiv 2012.12803, appendix E, as its authors published it: a
binary search over epsilon (10 steps, from their closed form where that is valid), and for each
epsilon a walk over the number of clones, outwards from its mean in intervals of 100, each interval
counted with the larger divergence of its ends. It is written here from that description with the
same library calls, and checked against the two values of its documentation (which count the
backward divergence at the upper end alone).

Times are the best of several turns taken alternately, because the machine has other work too.
Nothing is remembered between turns.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from scipy import stats

from chorister.privacy import Method, Setting, min_cohort
from chorister.privacy.certified import Exact, exact_epsilon
from chorister.privacy.randomizers import Mechanism

DELTA = 1e-6
STEP, SEARCH_STEPS = 100, 10  # the published defaults
# The published computation needs half a minute for eps0 = 1 at a million and much longer beyond:
# each local epsilon goes as far as it answers within seconds.
INPUTS = [
    (local, 10**power)
    for local, last in ((1.0, 5), (2.0, 5), (3.0, 6), (6.0, 7))
    for power in range(3, last + 1)
]
COHORTS = [
    ("asymmetric", "3", "0.5"),
    ("asymmetric", "3", "1"),
    ("asymmetric", "5", "0.3"),
    ("asymmetric", "6", "0.5"),
    ("asymmetric", "8", "1"),
    ("symmetric", "3", "0.5"),
    ("symmetric", "6", "1"),
]


# --- The computation of 2020 ---------------------------------------------------------------------


def closed_form_2020(n: int, local: float, delta: float) -> float | None:
    """The closed form of 2020, or None outside its regime."""
    if local > math.log(n / (16.0 * math.log(4.0 / delta))):
        return None
    spread = 8.0 * math.sqrt(math.exp(local) * math.log(4.0 / delta) / n)
    total = spread + 8.0 * math.exp(local) / n
    shrink = (1.0 - math.exp(-local)) / (1.0 + math.exp(-local) / (1.0 + total))
    return math.log(1.0 + shrink * total)


def divergence_2020(clones: int, epsilon: float, local: float, *, forward: bool) -> float:
    """The hockey-stick divergence given the number of clones, in either direction."""
    a = math.exp(local) / (math.exp(local) + 1.0)
    g = math.exp(epsilon)
    odds = ((g + 1.0) * a - 1.0) / ((1.0 + g) * a - g)
    share = 1.0 / (odds + 1.0) if forward else 1.0 / (1.0 / odds + 1.0)
    cut = share * (clones + 1)
    p = a * stats.binom.cdf(cut, clones, 0.5) + (1 - a) * stats.binom.cdf(cut - 1, clones, 0.5)
    q = (1 - a) * stats.binom.cdf(cut, clones, 0.5) + a * stats.binom.cdf(cut - 1, clones, 0.5)
    return float(p - g * q) if forward else float((1.0 - q) - g * (1.0 - p))


def delta_2020(n: int, epsilon: float, local: float, most: float) -> float:
    """Delta from above, or `most` as soon as that is exceeded."""
    chance = math.exp(-local)
    mean = (n - 1) * chance
    forward = backward = covered = 0.0
    for ring in range(1, math.ceil(n / STEP)):
        for upwards in (True, False):
            if upwards:
                high = math.ceil(mean + ring * STEP)
                low = high - STEP + (0 if ring == 1 else 1)
                if low > n - 1:
                    continue
                high = min(high, n - 1)
            else:
                low = math.ceil(mean - ring * STEP)
                high = low + STEP - 1
                if high < 0:
                    continue
                low = max(0, low)
            mass = float(
                stats.binom.cdf(high, n - 1, chance)
                - stats.binom.cdf(low, n - 1, chance)
                + stats.binom.pmf(low, n - 1, chance)
            )
            if max(forward, backward) > most:
                return most
            if 1.0 - covered < min(forward, backward):
                return max(forward, backward) + 1.0 - covered
            ends = [
                [divergence_2020(c, epsilon, local, forward=way) for c in (high, low)]
                for way in (True, False)
            ]
            forward += mass * max(ends[0])
            backward += mass * ends[1][0]
            covered += mass
    return max(forward, backward)


def epsilon_2020(n: int, local: float, delta: float) -> float:
    """The published computation: an upper bound on epsilon."""
    low, high = 0.0, closed_form_2020(n, local, delta) or local
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2.0
        if delta_2020(n, middle, local, delta) < delta:
            high = middle
        else:
            low = middle
    return high


def check_competitor() -> None:
    """The two values printed in the published documentation."""
    assert abs(epsilon_2020(10**5, 4.0, DELTA) - 0.172790550755978) < 1e-9
    closed = closed_form_2020(10**5, 4.0, DELTA)
    assert closed is not None
    assert abs(closed - 0.5378040242374512) < 1e-12


# --- Ours ----------------------------------------------------------------------------------------


def exact(n: int, local: float) -> Exact:
    exact_epsilon.cache_clear()
    return exact_epsilon(n, Mechanism.ASYMMETRIC, local, DELTA, noised=False)


def best_times(turns: int, *calls: Callable[[], object]) -> list[float]:
    """The best time of each call, taken in turns."""
    best = [math.inf] * len(calls)
    for _ in range(turns):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def compare_epsilon(console: Console) -> float:
    table = Table(title="Certified epsilon, asymmetric one-hot, delta 1e-6")
    for column in ("local", "cohort", "2020", "exact", "2020, ms", "exact, ms", "exact / 2020"):
        table.add_column(column, justify="right")
    worst = 0.0
    for local, n in INPUTS:
        published, ours = epsilon_2020(n, local, DELTA), exact(n, local).upper
        before, after = best_times(
            3,
            lambda n=n, local=local: epsilon_2020(n, local, DELTA),  # type: ignore[misc]
            lambda n=n, local=local: exact(n, local),  # type: ignore[misc]
        )
        worst = max(worst, after / before)
        table.add_row(
            *(f"{local:g}", f"{n:,}", f"{published:.5f}", f"{ours:.6f}"),
            *(f"{1e3 * before:.0f}", f"{1e3 * after:.0f}", f"{after / before:.3f}"),
        )
    console.print(table)
    return worst


def compare_cohorts(console: Console) -> tuple[float, float]:
    table = Table(title="Minimum cohort, delta 1e-6")
    for column in ("mechanism", "local", "epsilon", "clones", "exact", "exact / clones"):
        table.add_column(column, justify="right")
    table.add_column("time / one epsilon", justify="right")
    slowest = largest = 0.0
    for mechanism, local, target in COHORTS:
        setting = Setting(local_epsilon=local, mechanism=mechanism)

        def search(setting: Setting = setting, target: str = target) -> int:
            exact_epsilon.cache_clear()
            return min_cohort(setting, epsilon=target, delta=DELTA)

        least = search()

        def once(setting: Setting = setting, least: int = least) -> Exact:
            exact_epsilon.cache_clear()
            return exact_epsilon(least, setting.mechanism, setting.parameter, DELTA, noised=False)

        clones = min_cohort(setting, epsilon=target, delta=DELTA, method=Method.CLONES)
        searching, one = best_times(5, search, once)
        slowest = max(slowest, searching / one)
        largest = max(largest, least / clones)
        table.add_row(
            *(mechanism, local, target, f"{clones:,}", f"{least:,}"),
            *(f"{least / clones:.3f}", f"{searching / one:.1f}"),
        )
    console.print(table)
    return slowest, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one flat object at the end")
    arguments = parser.parse_args()
    console = Console()
    check_competitor()
    time_ratio = compare_epsilon(console)
    search_ratio, cohort_ratio = compare_cohorts(console)
    console.print(
        f"Largest exact / 2020 time {time_ratio:.3f}, search / epsilon {search_ratio:.1f}."
    )
    if arguments.json:
        print(
            json.dumps(
                {
                    "exact_over_2020_time": time_ratio,
                    "cohort_over_epsilon_time": search_ratio,
                    "exact_over_clones_cohort": cohort_ratio,
                }
            )
        )


if __name__ == "__main__":
    main()
