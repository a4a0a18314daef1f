"""What a large fleet needs: the table of docs/scale.md from the JSON of `operators.py`.

    python benchmarks/operators.py --json | tail -1 > figures.json
    python benchmarks/scale.py figures.json

Nothing is measured here: without a file the figures that the page was made from are taken.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DAY = 86_400
RATES = (10**6, 10**8, 10**9)
SIZES = (272, 1_000, 10_000)
MEASURED = 1_000
"""Bins of the reports that the whole deployment was measured with."""
JOB_REPORTS, JOB_BYTES = 500, 16 << 20
FIGURES = Path(__file__).parent.parent / "docs" / "scale.json"


@dataclass(frozen=True)
class Need:
    """Of one fleet, on an average second; a peak of three times that is usual."""

    reports: int  # a day
    bins: int
    leader_cores: float
    helper_cores: float
    database_cores: float  # of both operators together
    uploaded: float  # bytes per second, from devices
    between: float  # bytes per second, between the operators
    waiting: float  # bytes at the leader, of an hour's reports: if the helper is away for an hour
    kept: float  # bytes at both, of a day's reports after they were added up
    rows: float  # inserted per second, at both
    jobs: float  # per second


def native(figures: Mapping[str, float], role: str, bins: int) -> float:
    """CPU seconds of a role's native calls, at the pace of the run that measured everything."""
    both = sum(figures[f"bins_{MEASURED}_{each}_native_cpu"] for each in ("leader", "helper"))
    pace = figures["workers_2_native_cpu"] / both
    return pace * figures[f"bins_{bins}_{role}_native_cpu"]


def need(figures: Mapping[str, float], reports: int, bins: int) -> Need:
    """Native cost by the number of bins; all else by bytes, and never less than was measured."""
    rate = reports / DAY

    def of(name: str, size: int = bins) -> float:
        return figures[f"bins_{size}_{name}"]

    longer = max(1.0, of("report_bytes") / of("report_bytes", MEASURED))

    def cores(role: str, process: str) -> float:
        around = figures[process] - native(figures, role, MEASURED)
        return rate * (native(figures, role, bins) + max(0.0, around) * longer)

    in_job = max(1, min(JOB_REPORTS, JOB_BYTES // (16 * bins)))
    ratio = of("report_bytes") / of("report_bytes", MEASURED)
    return Need(
        reports=reports,
        bins=bins,
        leader_cores=cores("leader", "workers_2_worker_cpu"),
        helper_cores=cores("helper", "workers_2_helper_cpu"),
        database_cores=rate * figures["workers_2_database_cpu"] * longer,
        uploaded=rate * of("report_bytes"),
        between=rate * (of("inits") + of("resps")),
        waiting=3600 * rate * figures["leader_bytes_waiting"] * ratio,
        kept=reports * (figures["leader_bytes_collected"] + figures["helper_bytes_collected"]),
        rows=2 * rate,
        jobs=rate / in_job,
    )


def table(figures: Mapping[str, float]) -> str:
    """Markdown."""
    titles = (
        "reports per day", "bins", "leader's cores", "helper's cores", "databases' cores",
        "uploads", "between the two", "an hour waiting", "a day kept",
        "rows per second", "jobs per second",
    )  # fmt: skip
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for reports in RATES:
        for bins in SIZES:
            each = need(figures, reports, bins)
            cells = (
                f"{reports:.0e}".replace("e+0", "e"),
                f"{bins:,}",
                number(each.leader_cores),
                number(each.helper_cores),
                number(each.database_cores),
                f"{size(each.uploaded)}/s",
                f"{size(each.between)}/s",
                size(each.waiting),
                size(each.kept),
                number(each.rows),
                number(each.jobs),
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parts(figures: Mapping[str, float]) -> str:
    """Where the CPU time of one report goes, over all processes: Markdown."""
    leader, helper = (native(figures, role, MEASURED) for role in ("leader", "helper"))
    found = {
        "native calls of both roles": leader + helper,
        "HTTP, at the leader's worker": figures["leader_http"],
        "the database's driver, at the leader's worker": figures["leader_database"],
        "HTTP, driver and Python, at the helper": figures["workers_2_helper_cpu"] - helper,
        "both PostgreSQL servers": figures["workers_2_database_cpu"],
    }
    found = {name: max(0.0, value) for name, value in found.items()}
    spent = figures["workers_2_cpu"]
    rest = "Python and everything else, at the leader's worker"
    found[rest] = max(0.0, spent - sum(found.values()))
    lines = ["| CPU of | microseconds per report | share |", "|---|---|---|"]
    lines += [
        f"| {name} | {number(1e6 * value)} | {value / spent:.0%} |" for name, value in found.items()
    ]
    return "\n".join([*lines, f"| total | {number(1e6 * spent)} | 100% |"])


def growth(figures: Mapping[str, float]) -> str:
    """How the cost of a report changes with reports and tasks: Markdown."""
    found = {
        f"10,000 reports in a task | {figures['large_reports']:,.0f}": "large_cpu_over_small",
        "1 task | 10 tasks": "tasks_10_cpu_over_1",
        "1 task | 100 tasks, jobs as full": "tasks_100_cpu_over_1",
        "1 task | 100 tasks of 100 reports each": "tasks_100_small_cpu_over_1",
    }
    lines = ["| from | to | cost of a report |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| {what} | {figures[name]:.2f} |" for what, name in found.items())]
    )


def number(value: float) -> str:
    """Two digits: more would promise too much."""
    if value < 1:
        return f"{value:.2g}"
    digits = len(str(int(value)))
    return f"{round(value, 2 - digits):,.0f}" if value >= 10 else f"{value:.1f}"


def size(value: float) -> str:
    """Bytes, in decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{number(value)} {unit}"
        value /= 1000
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", type=Path, nargs="*", help="JSON of operators.py, or parts")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--parts", action="store_true", help="where the time of a report goes")
    shown.add_argument("--growth", action="store_true", help="with more reports and more tasks")
    parser.add_argument("--json", action="store_true", help="one flat object as the last line")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for path in options.figures or [FIGURES]:
        figures |= json.loads(path.read_text().strip().splitlines()[-1])
    show = parts if options.parts else growth if options.growth else table
    print(show(figures))
    if options.json:
        largest = need(figures, RATES[-1], MEASURED)
        cores = largest.leader_cores + largest.helper_cores + largest.database_cores
        print(json.dumps({"cores_for_1e9_reports_of_1000_bins": round(cores, 1)}))


if __name__ == "__main__":
    main()
