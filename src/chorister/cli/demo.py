"""`chorister demo`: a private histogram on a simulated fleet, from noisy bits to estimates.

Everything but the fleet's data is real: the devices' noise, secret shares, encryption, both
aggregators' verification and noise, the analyst's estimates. Leader and helper are two objects in
this process, and all they exchange are the bytes that they would exchange over the network.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.progress import Progress
from rich.table import Table

from chorister._native import HPKEKeypair, sample_binomials
from chorister.cli import app, console
from chorister.dap.binding import native_vdaf, task_binding
from chorister.dap.draft import BatchMode
from chorister.dap.task import TaskConfiguration
from chorister.dap.vdaf import Prio3MultihotCountVec
from chorister.errors import InternalError, InvalidInput
from chorister.privacy import Crowd, OneHotRandomizer, Setting, delta_before_bound, epsilon

WORDS = [
    *("the", "I", "to", "and", "you", "a", "is", "it", "that", "of"),
    *("in", "my", "for", "on", "have", "be", "this", "so", "not", "we"),
]
LABELS = ["(other)", *WORDS]
LOCAL_EPSILON = 4
MIN_COHORT = 500
DELTA = Decimal("1e-6")
JOB = 250  # reports that the aggregators verify at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """One row of the result, beside the truth that only a simulation knows."""

    label: str
    estimate: float
    std_error: float
    ci_low: float
    ci_high: float
    truth: int


def simulate_truth(devices: int, seed: int) -> NDArray[np.int64]:
    """The word that each device would report: frequencies fall as in natural language."""
    weights = 1 / np.arange(1.0, len(LABELS))
    chances = np.concatenate([[0.25], 0.75 * weights / weights.sum()])
    return np.random.default_rng(seed).choice(len(LABELS), size=devices, p=chances)


def collect(
    held: NDArray[np.int64], randomizer: OneHotRandomizer, bar: Progress
) -> NDArray[np.uint64]:
    """Device -> leader and helper -> sum: one privatized, sealed, verified report a device."""
    bounded = Prio3MultihotCountVec.bounded(randomizer.length, randomizer.max_weight)
    configuration = TaskConfiguration(
        task_info=secrets.token_bytes(32),
        leader_aggregator_endpoint="https://leader.example/",
        helper_aggregator_endpoint="https://helper.example/",
        time_precision=3600,
        min_batch_size=MIN_COHORT,
        batch_mode=BatchMode.TIME_INTERVAL,
        vdaf_type=bounded.TYPE,
        vdaf_configuration=bounded.encode(),
        task_interval=None,
    )
    task, vdaf = task_binding(configuration), native_vdaf(bounded)
    verify_key = secrets.token_bytes(32)
    leader, helper = HPKEKeypair.generate(1), HPKEKeypair.generate(2)
    leader_share, helper_share, count = vdaf.zero(), vdaf.zero(), 0
    step = bar.add_task("reports", total=len(held))
    for start in range(0, len(held), JOB):
        batch = held[start : start + JOB]
        reports = task.seal_reports(
            randomizer.randomize_many(batch),
            report_ids=secrets.token_bytes(16 * len(batch)),
            time=0,
            leader_config=leader.config,
            helper_config=helper.config,
        )
        job = task.leader_initialize(verify_key, [leader], b"".join(reports))
        verify_resps, helped = task.helper_initialize(verify_key, [helper], job.verify_inits)
        led = job.finish(verify_resps)
        leader_share = vdaf.merge([leader_share, led.share])
        helper_share = vdaf.merge([helper_share, helped.share])
        count += led.count
        bar.advance(step, len(batch))
    if count < MIN_COHORT:
        raise InternalError(f"only {count} reports were verified, nothing is released")
    # Each aggregator hides everybody behind noise of its own before it lets its share go.
    shares = [
        vdaf.add_counts(share, draw_noise(randomizer)) for share in (leader_share, helper_share)
    ]
    entries = vdaf.unshard(*shares, count=count, noise_trials=MIN_COHORT - 1)
    return np.frombuffer(entries, dtype=np.uint64)


def draw_noise(randomizer: OneHotRandomizer) -> NDArray[np.uint64]:
    """One aggregator's noise: Bin(min_cohort - 1, q) for every bin."""
    draws = sample_binomials(randomizer.length, MIN_COHORT - 1, threshold=randomizer.q_threshold)
    return np.frombuffer(draws, dtype=np.uint64)


def estimate(
    entries: NDArray[np.uint64], held: NDArray[np.int64], randomizer: OneHotRandomizer
) -> list[Estimate]:
    """Remove the noise's mean, and say how much of its spread is left."""
    n, trials = len(held), MIN_COHORT - 1
    counts = randomizer.debias(entries, n, trials)
    errors = randomizer.std_error(n, counts, trials)
    interval = randomizer.interval(counts, n, trials)
    truth = np.bincount(held, minlength=len(LABELS))
    return [
        Estimate(
            label=label,
            estimate=round(float(counts[i]), 1),
            std_error=round(float(errors[i]), 1),
            ci_low=round(float(interval.low[i]), 1),
            ci_high=round(float(interval.high[i]), 1),
            truth=int(truth[i]),
        )
        for i, label in enumerate(LABELS)
    ]


def show(rows: list[Estimate], devices: int) -> None:
    """The estimates as a table, with bars to compare by eye."""
    table = Table(title=f"Which word does a device type most? {devices:,} simulated devices")
    table.add_column("word")
    table.add_column("estimate", justify="right")
    table.add_column("95 % interval", justify="right")
    table.add_column("truth", justify="right")
    table.add_column("[cyan]█[/] estimate  [bold]│[/] truth")
    widest = max(max(row.estimate, row.truth) for row in rows)
    for row in sorted(rows, key=lambda row: -row.estimate):
        inside = row.ci_low <= row.truth <= row.ci_high
        table.add_row(
            row.label,
            f"{row.estimate:z,.0f}",
            f"{row.ci_low:z,.0f} – {row.ci_high:z,.0f}",
            f"[{'green' if inside else 'red'}]{row.truth:,}",
            bar_with_mark(row.estimate / widest, row.truth / widest, 28),
        )
    console.print(table)


def bar_with_mark(length: float, mark: float, width: int) -> str:
    """A bar of `length` (0 to 1) with a stroke at `mark`, `width` characters wide."""
    filled, stroke = round(max(length, 0) * width), round(mark * width)
    cells = ["[cyan]█[/]" if i < filled else " " for i in range(width + 1)]
    cells[stroke] = "[bold]│[/]"
    return "".join(cells)


@app.command()
def demo(
    devices: Annotated[int, typer.Option(help="Simulated devices.")] = 5000,
    seed: Annotated[int, typer.Option(help="Seed of the fleet's data; noise has none.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Watch a private histogram being made, beside the truth.

    Each simulated device holds one word. It randomizes it, splits the noisy bits into two secret
    shares and seals one for each aggregator. Leader and helper verify the reports together without
    seeing one, add up their shares, and add noise of their own; only the sum of both is ever put
    together.
    """
    if devices < MIN_COHORT:
        raise InvalidInput(f"--devices must be at least the minimum cohort, {MIN_COHORT}")
    randomizer = OneHotRandomizer(
        mechanism="asymmetric", local_epsilon=LOCAL_EPSILON, length=len(LABELS)
    )
    held = simulate_truth(devices, seed)
    with Progress(console=console, transient=True, disable=as_json) as bar:
        rows = estimate(collect(held, randomizer, bar), held, randomizer)
    crowd = Setting(local_epsilon=LOCAL_EPSILON, crowd=Crowd.NOISED)
    # Part of delta pays for the weight bound of reports; the rest is amplification's.
    rest = delta_before_bound(DELTA, Decimal(LOCAL_EPSILON), honest=1)
    certified = epsilon(crowd, cohort=MIN_COHORT, delta=rest).upper
    covered = sum(row.ci_low <= row.truth <= row.ci_high for row in rows)
    if as_json:
        spent = {"epsilon": certified, "delta": float(DELTA), "local_epsilon": LOCAL_EPSILON}
        spent |= {"min_cohort": MIN_COHORT, "reports": 1}
        rounds = [{"reports": devices, "bins": len(rows), "covered": covered}]
        answer = {"devices": devices, "rounds": rounds, "estimates": [asdict(row) for row in rows]}
        print(json.dumps(answer | {"spent": spent}))
        return
    show(rows, devices)
    console.print(
        f"{covered} of {len(rows)} intervals cover the truth.\n\n"
        f"Each device sent one report of {len(rows)} noisy bits. To both aggregators together it "
        f"is {LOCAL_EPSILON}-DP; to everybody who does not control both, even with all other "
        f"devices, it is ({certified:.3f}, {DELTA:e})-DP. Each aggregator saw random shares, and "
        f"releases nothing below {MIN_COHORT} verified reports."
    )
