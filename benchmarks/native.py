"""Compare the native module with a plain Rust loop over the crates it uses or has replaced.

Both do the same work on reports of the same shape: open, decode, verify, encode, add up. The plain
loop is `src/rust/examples/plain_loop.rs`, over `prio` and `hpke-dispatch`, which sealed formerly.
Ratios are rates: above 1, ours is faster. One thread is measured by its CPU time, two threads by
the clock; the two sides take turns, and each figure is the best of its turns, because the machine
has other work too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from chorister._native import Aggregated, HPKEKeypair, LeaderJob, Prio3, TaskBinding, hpke_seal

T = TypeVar("T")
REPOSITORY = Path(__file__).parent.parent
# Length, maximal weight (asymmetric, epsilon 5), reports per job.
JOBS = [(1_000, 48, 500), (10_000, 230, 100)]


def build_plain_loop() -> Path:
    target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
    subprocess.run(
        [
            *("cargo", "build", "--quiet", "--release", "--locked", "--no-default-features"),
            *("--example", "plain_loop", "--manifest-path", "src/rust/Cargo.toml"),
            *("--target-dir", str(target)),
        ],
        cwd=REPOSITORY,
        check=True,
    )
    return target / "release" / "examples" / "plain_loop"


class JobInputs:
    """One job's inputs, made once."""

    def __init__(self, length: int, max_weight: int, n: int) -> None:
        self.n = n
        self.leader, self.helper = HPKEKeypair.generate(1), HPKEKeypair.generate(2)
        self.key = os.urandom(32)
        self.vdaf = Prio3.multihot_count_vec(length, max_weight)
        self.task = TaskBinding(
            self.vdaf, context=b"context", aad=bytes(300), leader_info=b"l", helper_info=b"h"
        )
        places = (np.arange(n)[:, None] + np.arange(length)) * max_weight % (2 * length)
        self.bits = (places < max_weight).astype(np.uint8)
        self.reports = b"".join(self.seal(threads=0))
        self.inits = self.lead(threads=0).verify_inits
        _, *shares = self.vdaf.shard(b"context", self.bits[0], bytes(16))
        self.sealed = [
            [hpke_seal(keys.config, b"info", bytes(400), share) for _ in range(n)]
            for keys, share in zip((self.leader, self.helper), shares, strict=True)
        ]

    def shard(self) -> None:
        for row in self.bits:
            self.vdaf.shard(b"context", row, bytes(16))

    def seal(self, *, threads: int) -> list[bytes]:
        return self.task.seal_reports(
            self.bits,
            report_ids=os.urandom(16 * self.n),
            time=0,
            leader_config=self.leader.config,
            helper_config=self.helper.config,
            threads=threads,
        )

    def lead(self, *, threads: int) -> LeaderJob:
        return self.task.leader_initialize(self.key, [self.leader], self.reports, threads=threads)

    def help(self, *, threads: int) -> tuple[bytes, Aggregated]:
        return self.task.helper_initialize(self.key, [self.helper], self.inits, threads=threads)

    def open(self, keys: HPKEKeypair, ciphertexts: list[bytes]) -> None:
        for ciphertext in ciphertexts:
            keys.open(ciphertext, b"info", bytes(400))

    def micros(self, clock: Callable[[], float], work: Callable[[], T]) -> tuple[float, T]:
        start = clock()
        outcome = work()
        return (clock() - start) * 1e6 / self.n, outcome

    def one_thread(self) -> dict[str, float]:
        cpu = time.thread_time
        leader_init, job = self.micros(cpu, lambda: self.lead(threads=1))
        helper_init, (resps, _) = self.micros(cpu, lambda: self.help(threads=1))
        leader_finish, _ = self.micros(cpu, lambda: job.finish(resps, threads=1))
        leader_open, _ = self.micros(cpu, lambda: self.open(self.leader, self.sealed[0]))
        helper_open, _ = self.micros(cpu, lambda: self.open(self.helper, self.sealed[1]))
        return {
            "leader_open": leader_open,
            "helper_open": helper_open,
            "leader_init": leader_init,
            "helper_init": helper_init,
            "leader_finish": leader_finish,
        }

    def by_the_clock(self, threads: int) -> float:
        leader, _ = self.micros(time.perf_counter, lambda: self.lead(threads=threads))
        helper, _ = self.micros(time.perf_counter, lambda: self.help(threads=threads))
        return leader + helper


def best(turns: list[dict[str, float]]) -> dict[str, float]:
    return {key: min(turn[key] for turn in turns) for key in turns[0]}


def measure(plain_loop: Path, length: int, max_weight: int, n: int, turns: int) -> dict[str, Any]:
    job = JobInputs(length, max_weight, n)
    plain, ours, one, two = [], [], [], []
    for _ in range(turns):
        run = subprocess.run(
            [plain_loop, str(length), str(max_weight), str(n)], capture_output=True, check=True
        )
        turn = json.loads(run.stdout)
        plain.append(turn | {"report": turn["shard"] + turn["seal"]})
        shard, _ = job.micros(time.thread_time, job.shard)
        report, _ = job.micros(time.thread_time, lambda: job.seal(threads=1))
        ours.append(job.one_thread() | {"shard": shard, "report": report})
        one.append(job.by_the_clock(1))
        two.append(job.by_the_clock(2))
    return {"plain": best(plain), "ours": best(ours), "two_threads": min(one) / min(two)}


STEPS = {
    "shard": "shard",
    "report": "shard and seal both shares",
    "leader_open": "leader: open (HPKE)",
    "leader_init": "leader: open, decode, verify-init, encode",
    "leader_finish": "leader: finish, add up",
    "helper_open": "helper: open (HPKE)",
    "helper_init": "helper: open, decode, verify, encode, add up",
}
# What both aggregators do for a report.
WHOLE_JOB = ("leader_init", "helper_init", "leader_finish")


def show(length: int, figures: dict[str, Any]) -> Table:
    table = Table(title=f"{length:,} bins: microseconds of CPU a report, one thread")
    for title in ("step", "plain Rust loop", "through Python", "ratio"):
        table.add_column(title, justify="left" if title == "step" else "right")
    for step, title in STEPS.items():
        plain, ours = figures["plain"][step], figures["ours"][step]
        table.add_row(title, f"{plain:,.1f}", f"{ours:,.1f}", f"{plain / ours:.3f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one flat object as the last line")
    parser.add_argument("--turns", type=int, default=9, help="turns a side, best one counts")
    options = parser.parse_args()

    plain_loop = build_plain_loop()
    results: dict[str, float] = {}
    for length, max_weight, n in JOBS:
        figures = measure(plain_loop, length, max_weight, n, options.turns)
        plain, ours = figures["plain"], figures["ours"]
        Console().print(show(length, figures))
        results |= {
            f"leader_over_rust_{length}": (plain["leader_init"] + plain["leader_finish"])
            / (ours["leader_init"] + ours["leader_finish"]),
            f"helper_over_rust_{length}": plain["helper_init"] / ours["helper_init"],
            f"two_threads_over_one_{length}": figures["two_threads"],
            f"native_over_crates_{length}": sum(plain[step] for step in WHOLE_JOB)
            / sum(ours[step] for step in WHOLE_JOB),
            f"hpke_open_over_former_{length}": (plain["leader_open"] + plain["helper_open"])
            / (ours["leader_open"] + ours["helper_open"]),
        }
    # The headline figures are those of the worse length.
    for key in [
        "leader_over_rust",
        "helper_over_rust",
        "two_threads_over_one",
        "hpke_open_over_former",
    ]:
        results[key] = min(value for name, value in results.items() if name.startswith(key))
    print(
        f"leader {results['leader_over_rust']:.3f} and helper {results['helper_over_rust']:.3f} of "
        f"the plain loop (at least .95 wanted); two threads {results['two_threads_over_one']:.2f} "
        "times one (at least 1.7 wanted)"
    )
    print(
        f"opening {results['hpke_open_over_former']:.2f} times as fast as formerly; jobs of 1,000 "
        f"bins {results['native_over_crates_1000']:.2f} times as fast as the plain loop (at least "
        "1.2 wanted)"
    )
    if options.json:
        print(json.dumps({name: round(value, 4) for name, value in results.items()}))


if __name__ == "__main__":
    main()
