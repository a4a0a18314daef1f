"""What the device adds to the bare work, in one run: donating, querying, reporting; and a fleet.

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
from decimal import Decimal
from pathlib import Path

import apsw
from rich.console import Console
from rich.table import Table

from _fleet import a_device, fleet
from _question import DAY, NOW, QuestionLog
from chorister.clock import SettableClock, SystemClock, uptime
from chorister.dap.task import optimal_chunk_length, task_binding, task_configuration
from chorister.dap.upload_client import new_report_id
from chorister.device.database import transaction
from chorister.device.keys import SecretKey
from chorister.device.run import RunStep
from chorister.device.sandbox import Sandbox
from chorister.device.store import EventStore
from chorister.encoding import Encoding, Intervals
from chorister.policy import Policy
from chorister.recipe import Recipe

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
    """From the store through the sandbox to the bin: what 9,900 more events add."""
    sides: dict[str, Callable[[], object]] = {}
    _, words = QuestionLog().recipe("events").features
    grades = Intervals(column="perplexity", edges=tuple(map(Decimal, range(0, 800, 100))))
    encoding = Encoding((grades, words))  # 1,000 bins
    with folder() as place, Sandbox() as sandbox:
        stores = {count: open_store(place / f"{count}.db") for count in (FEW, MANY)}

        def ask(store: EventStore) -> None:
            sandbox.choose(
                QUERY,
                store.snapshot(FIELDS),
                functions=(),
                encoding=encoding,
                selection="uniform",
                until=uptime() + 30,
            )

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


def reporting(turns: int) -> dict[str, float]:
    """From an accepted recipe to its report in the outbox, over the bare shard and seal.

    Accepted means charged: the clock runs from the commit of the charge to that of the report.
    `recipe_over_native` also has all checks, the query's compilation and the charge itself.
    """
    question, clock = QuestionLog(), SettableClock(NOW - DAY)
    marks: dict[RunStep, float] = {}
    with folder() as place, Sandbox() as sandbox:
        (place / "heads").mkdir()
        device = a_device(
            place,
            "device",
            question,
            clock,
            sandbox,
            hook=lambda step: marks.__setitem__(step, time.perf_counter()),
        )
        device.opt_in()
        device.set_profile("user", {"age": 33, "locale": "en_GB"})
        device.donate_many("keyboard", [event(i) for i in range(FEW)])
        question.ask(time=clock.now())
        device.run_once()
        clock.set(NOW)
        answer = whole = native = float("inf")
        seal = bare_seal(question)
        # A report is the work of three processes: it takes more turns to find a quiet moment.
        for turn in range(4 * turns + 1):
            native = min(native, best(3, {"native": seal})["native"])
            recipe = question.recipe(f"turn-{turn}")
            # Another query each time: one that was compiled before is not compiled again.
            query = f"{recipe.query} LIMIT {1_000_000 + turn}"
            clock.advance(device.quiet_seconds())
            question.ask(recipe.model_copy(update={"query": query}), time=clock.now())
            if device.run_once().answered and turn:  # the first one warms up
                answer = min(answer, marks[RunStep.QUEUED] - marks[RunStep.CHARGED])
                whole = min(whole, marks[RunStep.QUEUED] - marks[RunStep.RECIPE_ARRIVED])
        device.close()
    return {
        "report_milliseconds": answer * 1e3,
        "recipe_milliseconds": whole * 1e3,
        "native_milliseconds": native * 1e3,
        "recipe_over_native": whole / native,
        "report_over_native": answer / native,
        "report_bytes": len(seal()),
        "report_bytes_formula": size_formula(question.recipe("bare")),
    }


def bare_seal(question: QuestionLog) -> Callable[[], bytes]:
    """The bare native work for the same report."""
    recipe = question.recipe("bare")
    task = task_configuration(question.policy, recipe, {"user.locale": "en_GB"})
    binding, bits = task_binding(task.configuration), recipe.randomizer.randomize(0)

    def seal() -> bytes:
        (report,) = binding.seal_reports(
            bits,
            report_ids=new_report_id(),
            time=0,
            leader_config=question.leader.config,
            helper_config=question.helper.config,
            threads=1,
        )
        return report

    return seal


def size_formula(recipe: Recipe) -> int:
    """Bytes of a bounded report.

    16 a field element: the bits, their weight in binary, and the proof; a seed for the joint
    randomness. Around it: metadata, public share, the helper's seeds, two HPKE envelopes.
    """
    elements = recipe.encoding.size + recipe.randomizer.max_weight.bit_length()
    chunk = optimal_chunk_length(elements)
    calls = -(-elements // chunk)
    proof = 2 * chunk + 2 * ((1 << calls.bit_length()) - 1) + 1
    return 16 * (elements + proof) + 32 + 26 + 68 + 64 + 2 * 61


def thousand(turns: int) -> dict[str, float]:
    """Ten devices a turn in one process, each made, filled, and asked once."""
    with folder() as place, Sandbox() as sandbox:
        return fleet(place, sandbox, 10 * turns)


# Each measurement takes the number of turns and returns its figures.
MEASUREMENTS: tuple[Callable[[int], dict[str, float]], ...] = (
    donation,
    events,
    reporting,
    thousand,
)
WANTED = {
    "donate_over_bare": 2,
    "donate_batch_over_bare": 2,
    "events_over_bare_copy": 3,
    "recipe_over_native": 8,
    "report_over_native": 5,
}


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
