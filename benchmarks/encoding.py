"""Finding the bins of 10,000 rows, against copying them.

"Copying" is what a device does with these rows before any query runs: INSERT ... SELECT ...
ORDER BY random() of the declared fields into a fresh in-memory database (`find_over_copy`, below 1
is asked for). The ratio to a copy that keeps the rows' order is printed too; it moves whole records
and is no step of ours. Both run on Python's own sqlite3, unencrypted, which favours the copy.

    python benchmarks/encoding.py [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
import statistics
import time
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import TypeAlias

from chorister.encoding import Encoding, Grid, Intervals, PrefixTree

Step: TypeAlias = Callable[[], object]

ROWS = 10_000
REPEATS = 31
COMMON = ("i", "the", "to", "you", "hello", "how", "are", "world", "got", "it")


def rows(seed: int) -> list[tuple[int, str, float, float]]:
    """Ages, n-grams of two to four words with a long tail, and points."""
    rng = random.Random(seed)  # noqa: S311 (synthetic data)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(5_000)]
    words[:12] = [*COMMON, "don't", "a"]
    weights = [1 / (rank + 3) for rank in range(len(words))]

    def phrase() -> str:
        text = " ".join(rng.choices(words, weights, k=rng.randint(2, 4)))
        return text.capitalize() + "!" if rng.random() < 0.2 else text

    return [
        (rng.randrange(5, 95), phrase(), rng.uniform(-74.3, -73.6), rng.uniform(40.4, 41))
        for _ in range(ROWS)
    ]


def copier(data: list[tuple[int, str, float, float]], fields: str, order: str) -> Step:
    """A copy of some fields into a new table."""
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE source (age INTEGER, ngram TEXT, lon REAL, lat REAL)")
    database.executemany("INSERT INTO source VALUES (?, ?, ?, ?)", data)

    def run() -> None:
        database.execute(f"CREATE TABLE target AS SELECT {fields} FROM source WHERE 0")  # noqa: S608
        database.execute(f"INSERT INTO target SELECT {fields} FROM source {order}")  # noqa: S608
        database.execute("DROP TABLE target")

    return run


def medians(*steps: Step) -> list[float]:
    """Seconds of each step; they take turns, so that a busy machine slows all of them alike."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(REPEATS):
        for step, seen in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            seen.append(time.perf_counter() - start)
    return [statistics.median(seen) for seen in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    data = rows(1)
    columns = dict(zip(("age", "ngram", "lon", "lat"), zip(*data, strict=True), strict=True))
    age = Intervals(column="age", edges=tuple(Decimal(n) for n in range(10, 90, 10)))
    small = PrefixTree(
        column="ngram",
        prefixes=("hello world", "how are", "i got"),
        vocabulary=("a", "all", "home", "it", "the", "to", "up", "world", "you"),
    )
    large = PrefixTree(
        column="ngram",
        prefixes=tuple(f"{a} {b}" for a in COMMON for b in COMMON),
        vocabulary=(*COMMON, *(f"w{i}" for i in range(88))),
    )
    box = (Decimal("-74.3"), Decimal("40.4"), Decimal("-73.6"), Decimal(41))
    cases = {
        "": ("age x 3-grams, 272 bins", Encoding((age, small)), "age, ngram"),
        "_large": ("3-grams, 10,001 bins", Encoding((large,)), "ngram"),
        "_hashed": ("the same, hashed", Encoding((large.hashed(bytes(16)),)), "ngram"),
        "_grid": ("points, 1,025 cells",
                  Encoding((Grid(columns=("lon", "lat"), box=box, level=5),)), "lon, lat"),
    }  # fmt: skip
    result: dict[str, float] = {}
    title = "finding the bins of 10,000 rows"
    print(f"{title:34} {'ms':>7} {'over copy':>10} {'over copy in order':>19}")
    for suffix, (title, encoding, fields) in cases.items():
        find, copy, in_order = medians(
            partial(encoding.find, columns),
            copier(data, fields, "ORDER BY random()"),
            copier(data, fields, ""),
        )
        result[f"find_over_copy{suffix}"] = round(find / copy, 3)
        result[f"find_over_copy_in_order{suffix}"] = round(find / in_order, 3)
        print(f"{title:34} {find * 1e3:7.2f} {find / copy:10.2f} {find / in_order:19.2f}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
