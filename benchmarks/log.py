"""What publishing costs in a long log, and what a poll fetches when nothing has changed.

An entry is published once it is in a checkpoint with both cosignatures, which costs: its submission
(`submit_ms`), the registry's work on the checkpoint (`checkpoint_ms`: list, tiles, candidate, two
cosignatures), and a cosigner's (`cosign_ms`: it reads what is new, checks it and remembers it; two
cosigners do so at the same time on their own machines). A registry issues one checkpoint for all
entries that came in an interval, a minute by default: `publish_milliseconds_at_N` is the mean per
entry for batches of ten. `alone_milliseconds_at_N` is the sum for an entry that comes alone.

Every poll fetches the list, 163 bytes per open recipe here: `idle_poll_bytes` is for
`listed_recipes` of them.

The log is on a real disk, because an entry is durable before it is acknowledged: most of the time
is that of syncs. `sync_ms` is what one takes here, for comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.logworld import (
    HELPER,
    LEADER,
    ORIGIN,
    World,
    hpke_entry,
    identity,
    key,
    recipe_entry,
    submission,
    trust,
)

from chorister.transparency.checkpoint import Checkpoint
from chorister.transparency.entries import Submission
from chorister.transparency.reader import Current, read_log
from chorister.transparency.tiles import Source

ENTRIES = 100_000
ALONE, BATCH, BATCHES = 30, 10, 6


class CountedSource:
    """A source that counts the bytes that are read."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.bytes = 0

    def read(self, path: str, *, limit: int) -> bytes:
        data = self.source.read(path, limit=limit)
        self.bytes += len(data)
        return data


class Stopwatch:
    """Milliseconds by name."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.taken[name].append(1000 * (time.perf_counter() - begun))

    def median(self, *names: str) -> float:
        return sum(statistics.median(self.taken[name]) for name in names)


def a_long_log(folder: Path, entries: int) -> World:
    """A log whose entries were added in bulk, and a leader that knows them."""
    world = World(folder)
    many = [hpke_entry(HELPER, b"config %d" % number).encode() for number in range(entries)]
    world._log.append_all(many, {})
    world.restart()
    leader = world.leader
    state = world.registry._state.copy()
    checkpoint = Checkpoint(origin=ORIGIN, size=state.size, root=state.frontier.root)
    signed = leader.identity.head(checkpoint.sign(key("log")), world.clock.now())
    leader.head.commit(signed, [Submission(entry) for entry in many], state)
    world.submit(hpke_entry(LEADER), hpke_entry(HELPER))
    publish(world, Stopwatch())
    return world


def publish(world: World, timed: Stopwatch) -> None:
    """A checkpoint with both cosignatures; the helper signs without a look."""
    world.clock.advance(1)
    with timed("issue"):
        candidate = world.registry.issue().checkpoint
    with timed("cosign"):
        leader = world.leader.cosign(world.source)
    helper = identity("helper").sign(candidate, world.clock.now()).encode().encode()
    with timed("add"):
        for line in (leader, helper):
            world.registry.add_cosignature(line)


def publish_alone(world: World) -> dict[str, float]:
    timed = Stopwatch()
    for number in range(ALONE):
        data = submission(recipe_entry(f"alone-{number}")).encode()
        with timed("submit"):
            world.registry.submit(data)
        publish(world, timed)
    return {
        "submit_ms": timed.median("submit"),
        "checkpoint_ms": timed.median("issue", "add"),
        "cosign_ms": timed.median("cosign"),
    }


def publish_batches(world: World) -> float:
    timed = Stopwatch()
    for batch in range(BATCHES):
        names = [f"batch-{batch}-{number}" for number in range(BATCH)]
        datas = [submission(recipe_entry(name)).encode() for name in names]
        with timed("all"):
            for data in datas:
                world.registry.submit(data)
            publish(world, timed)
    return timed.median("all") / BATCH


def sync(folder: Path) -> float:
    timed = Stopwatch()
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(ALONE):
            file.write(b"x")
            file.flush()
            with timed("sync"):
                os.fsync(file.fileno())
    return timed.median("sync")


def poll(world: World) -> dict[str, float]:
    kept: dict[bytes, bytes] = {}
    fetched, listed = [], 0
    for _ in range(2):
        source = CountedSource(world.source)
        reading = read_log(
            source, [trust()], clock=world.clock, kept=kept.values, forget=kept.clear
        )
        (outcome,) = reading.outcomes
        assert isinstance(outcome, Current), outcome
        kept = reading.bodies or {}
        listed = len(outcome.recipes)
        fetched.append(source.bytes)
    return {
        "proof_bytes": len(world.proof().encode()),
        "listed_recipes": listed,
        "poll_bytes_first": fetched[0],
        "idle_poll_bytes": fetched[1],
        "poll_bytes_unchanged": fetched[1],
    }


def measure(folder: Path, entries: int) -> dict[str, float]:
    world = a_long_log(folder, entries)
    alone = publish_alone(world)
    polled = poll(world)
    return {
        "entries": entries,
        f"publish_milliseconds_at_{entries}": publish_batches(world),
        f"alone_milliseconds_at_{entries}": sum(alone.values()),
        **alone,
        "sync_ms": sync(folder),
        **polled,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=ENTRIES)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.entries)
    if options.json:
        print(json.dumps(found))
        return
    table = Table("what", "figure", title=f"a log of {options.entries:,} entries")
    for name, value in found.items():
        table.add_row(name, f"{value:,.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
