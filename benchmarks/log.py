"""What publishing costs in a long log, and what a poll fetches when nothing has changed.

The log is on a real disk, because an entry is durable before it is acknowledged: most of the time
is that of syncs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.logworld import (
    HELPER,
    LEADER,
    World,
    hpke_entry,
    identity,
    recipe_entry,
    submission,
    trust,
)

from chorister.transparency.reader import Current, read_log
from chorister.transparency.tiles import Source

ENTRIES, PUBLISHED = 100_000, 30


class Counted:
    """A source that counts the bytes that are read."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.bytes = 0

    def read(self, path: str, *, limit: int) -> bytes:
        data = self.source.read(path, limit=limit)
        self.bytes += len(data)
        return data


def publish(world: World) -> None:
    """A checkpoint with both cosignatures, made without reading the log again."""
    world.clock.advance(1)
    candidate = world.registry.issue().checkpoint
    for side in ("leader", "helper"):
        line = identity(side).sign(candidate, world.clock.now())
        world.registry.add_cosignature(line.encode().encode())


def measure(folder: Path, entries: int) -> dict[str, float]:
    world = World(folder)
    config = [hpke_entry(HELPER, b"config %d" % number).encode() for number in range(entries)]
    world._log.append_all(config, [])
    world.restart()
    world.submit(hpke_entry(LEADER), hpke_entry(HELPER))
    publish(world)
    submitted, issued = [], []
    for number in range(PUBLISHED):
        data = submission(recipe_entry(f"recipe-{number}")).encode()
        begun = time.perf_counter()
        world.registry.submit(data)
        submitted.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        publish(world)
        issued.append(time.perf_counter() - begun)
    kept: dict[bytes, bytes] = {}
    fetched, listed = [], 0
    for _ in range(2):
        source = Counted(world.source)
        reading = read_log(
            source, [trust()], clock=world.clock, kept=kept.values, forget=kept.clear
        )
        (outcome,) = reading.outcomes
        assert isinstance(outcome, Current), outcome
        kept = reading.bodies or {}
        listed = len(outcome.recipes)
        fetched.append(source.bytes)
    return {
        "entries": entries,
        "submit_ms": 1000 * statistics.median(submitted),
        "checkpoint_ms": 1000 * statistics.median(issued),
        "proof_bytes": len(world.proof().encode()),
        "listed_recipes": listed,
        "poll_bytes_first": fetched[0],
        "poll_bytes_unchanged": fetched[1],
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
