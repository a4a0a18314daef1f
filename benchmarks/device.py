"""What the device adds to the bare work, in one run: donating events, and bringing them to a query.

Databases lie on a memory file system where there is one, so that the disk's sync, which both sides
pay alike, does not hide what we add. Sides take turns, and each figure is the best of its turns,
because the machine has other work too.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import apsw
from rich.console import Console
from rich.table import Table

from chorister.clock import SystemClock
from chorister.device.database import transaction
from chorister.device.keys import SecretKey
from chorister.device.sandbox import Sandbox
from chorister.device.store import EventStore
from chorister.policy import Policy

REPOSITORY = Path(__file__).parent.parent
MEMORY = Path("/dev/shm")  # noqa: S108
POLICY = Policy.load(REPOSITORY / "examples" / "keyboard" / "policy.toml")
FIELDS = {"keyboard": ["ngram", "perplexity"]}
QUERY = "SELECT ngram, perplexity FROM keyboard"
ONE_BY_ONE, BATCH = 100, 1_000
FEW, MANY = 100, 10_000


@contextmanager
def folder() -> Iterator[Path]:
    place = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as path:
        yield Path(path)


def open_store(path: Path) -> EventStore:
    store = EventStore(path, SecretKey.generate(), POLICY, SystemClock())
    store.opt_in()
    return store


def event(i: int) -> dict[str, object]:
    return {"ngram": f"see you at {i % 24} o'clock", "perplexity": 0.25 * i}


def best(turns: int, sides: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each side's best turn."""
    seconds = dict.fromkeys(sides, float("inf"))
    for _ in range(turns):
        for name, work in sides.items():
            start = time.perf_counter()
            work()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


BARE = (
    "CREATE TABLE bare (id INTEGER PRIMARY KEY, donated INTEGER NOT NULL, ngram TEXT,"
    " perplexity REAL) STRICT"
)
INSERT = "INSERT INTO bare (donated, ngram, perplexity) VALUES (?, ?, ?)"


def donation(turns: int) -> dict[str, float]:
    """Donating, over a bare insert of the same row into the same kind of database."""
    events = [event(i) for i in range(BATCH)]
    rows = [(1_794_800_000, row["ngram"], row["perplexity"]) for row in events]

    def bare_one_by_one(connection: apsw.Connection) -> None:
        for row in rows[:ONE_BY_ONE]:
            connection.execute(INSERT, row)

    def bare_batch(connection: apsw.Connection) -> None:
        with transaction(connection):
            connection.executemany(INSERT, rows)

    def donate_one_by_one(store: EventStore) -> None:
        for row in events[:ONE_BY_ONE]:
            store.donate("keyboard", row)

    with folder() as place, ExitStack() as stack:
        # A database a side, so that nobody pays for another's checkpoints.
        one, two, three, four = (
            stack.enter_context(open_store(place / f"{side}.db")) for side in range(4)
        )
        for store in (one, two):
            store._connection.execute(BARE)
        seconds = best(
            turns,
            {
                "bare": lambda: bare_one_by_one(one._connection),
                "donate": lambda: donate_one_by_one(three),
                "bare_batch": lambda: bare_batch(two._connection),
                "donate_batch": lambda: four.donate_many("keyboard", events),
            },
        )
    return {
        "donate_microseconds": seconds["donate"] / ONE_BY_ONE * 1e6,
        "bare_microseconds": seconds["bare"] / ONE_BY_ONE * 1e6,
        "donate_batch_microseconds": seconds["donate_batch"] / BATCH * 1e6,
        "bare_batch_microseconds": seconds["bare_batch"] / BATCH * 1e6,
        "donate_over_bare": seconds["donate"] / seconds["bare"],
        "donate_batch_over_bare": seconds["donate_batch"] / seconds["bare_batch"],
    }


def bare_copy(connection: apsw.Connection) -> None:
    connection.execute("ATTACH DATABASE ':memory:' AS copy KEY ''")
    connection.execute("CREATE TABLE copy.keyboard (ngram TEXT, perplexity REAL)")
    connection.execute(
        "INSERT INTO copy.keyboard SELECT field_ngram, field_perplexity FROM stream_keyboard"
        " ORDER BY random()"
    )
    connection.execute("DETACH DATABASE copy")


def events(turns: int) -> dict[str, float]:
    """From the store through the sandbox to the rows: what 9,900 more events add."""
    sides: dict[str, Callable[[], object]] = {}
    with folder() as place, Sandbox() as sandbox:
        stores = {count: open_store(place / f"{count}.db") for count in (FEW, MANY)}

        def ask(store: EventStore) -> None:
            snapshot = store.snapshot(FIELDS)
            sandbox.run(QUERY, snapshot, functions=(), deadline=30)

        for count, store in stores.items():
            store.donate_many("keyboard", [event(i) for i in range(count)])
            sides[f"ask_{count}"] = lambda store=store: ask(store)  # type: ignore[misc]
            sides[f"snapshot_{count}"] = lambda store=store: store.snapshot(FIELDS)  # type: ignore[misc]
            sides[f"bare_{count}"] = lambda store=store: bare_copy(store._connection)  # type: ignore[misc]
        seconds = best(turns, sides)
        for store in stores.values():
            store.close()

    def added(side: str) -> float:
        return seconds[f"{side}_{MANY}"] - seconds[f"{side}_{FEW}"]

    return {
        "query_milliseconds_100_events": seconds[f"ask_{FEW}"] * 1e3,
        "query_milliseconds_10000_events": seconds[f"ask_{MANY}"] * 1e3,
        "bare_copy_milliseconds_10000_events": seconds[f"bare_{MANY}"] * 1e3,
        "snapshot_over_bare_copy": added("snapshot") / added("bare"),
        "events_over_bare_copy": added("ask") / added("bare"),
    }


# Each measurement takes the number of turns and returns its figures.
MEASUREMENTS: tuple[Callable[[int], dict[str, float]], ...] = (donation, events)
WANTED = {"donate_over_bare": 2, "donate_batch_over_bare": 2, "events_over_bare_copy": 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one flat object as the last line")
    parser.add_argument("--turns", type=int, default=100, help="turns a side, best one counts")
    options = parser.parse_args()

    table = Table(title="device")
    for title in ("figure", "measured", "at most"):
        table.add_column(title, justify="left" if title == "figure" else "right")
    results: dict[str, float] = {}
    for measure in MEASUREMENTS:
        figures = measure(options.turns)
        for name, value in figures.items():
            table.add_row(name, f"{value:,.3f}", str(WANTED.get(name, "")))
        results |= figures
    Console().print(table)
    if options.json:
        print(json.dumps({name: round(value, 4) for name, value in results.items()}))


if __name__ == "__main__":
    main()
