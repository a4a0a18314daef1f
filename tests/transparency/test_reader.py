"""What a device requests of a log, over random histories: only the served bytes and one bit decide.

The model of a device is one set of files: those of its last complete reading, or none. Clocks,
times and sizes accepted before, and everything older than the last reading, are not in it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from chorister.clock import SettableClock
from chorister.errors import DecodeError, LogError, LogWithheld
from chorister.transparency.checkpoint import Checkpoint, ListProof
from chorister.transparency.client import PROOF, body_path, list_path
from chorister.transparency.entries import Entry, ListEntry
from chorister.transparency.reader import NOTHING_ACCEPTED, Current, LastAccepted, read_log
from chorister.transparency.state import CurrentList, ListedRecipe
from chorister.transparency.tree import Frontier, leaf_hash
from chorister.transparency.trust import CosignerKeys
from tests.logworld import (
    DAY,
    HELPER,
    LEADER,
    NOW,
    ORIGIN,
    OTHER_ANALYSIS,
    body_files,
    hpke_entry,
    identity,
    key,
    public,
    recipe_entry,
    trust,
)

CONFIGS = [hpke_entry(LEADER), hpke_entry(HELPER), hpke_entry(LEADER, b"rotated")]
RECIPES = [
    ListedRecipe.of(recipe_entry("one")),
    ListedRecipe.of(recipe_entry("two", author="second author")),
    ListedRecipe.of(recipe_entry("three", author="other author"))._replace(analysis=OTHER_ANALYSIS),
]
STRANGERS = [
    ListedRecipe.of(recipe_entry("four", author="stranger")),
    ListedRecipe("unknown", public("author"), bytes(32), 5),
]
ENTRIES: list[Entry] = [
    *CONFIGS,
    recipe_entry("one"),
    recipe_entry("two", author="second author"),
    recipe_entry("three", author="other author"),
]
BODIES = body_files([entry.encode() for entry in ENTRIES])
PAIR = trust()
ANOTHER_PAIR = replace(PAIR, helper=CosignerKeys(name="other.example", keys=(public("other"),)))


@dataclass(frozen=True, kw_only=True)
class ShownCheckpoint:
    """A cosigned checkpoint, and what a device with this policy needs of it."""

    files: dict[str, bytes]
    wanted: list[str]
    list_file: str


@functools.cache
def shown(chosen: int, time: int, size: int) -> ShownCheckpoint:
    """The bits of `chosen` say what is on the list."""
    configs = CONFIGS[1:] if chosen & 1 else CONFIGS[:2]
    recipes = [each for bit, each in enumerate(RECIPES, start=1) if chosen >> bit & 1]
    strangers = [each for bit, each in enumerate(STRANGERS, start=4) if chosen >> bit & 1]
    listed = CurrentList.of(
        hpke_configs=[(each.aggregator, each.address) for each in configs],
        recipes=[*recipes, *strangers],
    )
    last = ListEntry(time=time, digest=listed.digest)
    before = Frontier().extend(bytes([chosen]) * 32 for _ in range(size - 1))
    root = before.extend([leaf_hash(last.encode())]).root
    checkpoint = Checkpoint(origin=ORIGIN, size=size, root=root)
    signed = checkpoint.sign(key("log"))
    for side in ("leader", "helper"):
        signed = signed.with_cosigner(identity(side).sign(checkpoint, time))
    addresses = [address for _, address in listed.hpke_configs]
    addresses += [each.address for each in listed.recipes if each in recipes]
    return ShownCheckpoint(
        files={
            PROOF: ListProof(
                entry=last, index=size - 1, path=before.next_path, signed=signed
            ).encode(),
            list_path(listed.digest): listed.encode(),
            **BODIES,
        },
        wanted=[body_path(address) for address in addresses],
        list_file=list_path(listed.digest),
    )


@dataclass
class DeviceReader:
    """A device's reading, with a memory like a device's."""

    clock: SettableClock
    last: LastAccepted = NOTHING_ACCEPTED
    kept: list[bytes] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    accepted: int = 0
    served: dict[str, bytes] = field(default_factory=dict)
    fails_at: int | None = None

    def read(self, path: str, *, limit: int) -> bytes:
        self.requests.append(path)
        if len(self.requests) == self.fails_at:
            raise LogWithheld("broken off", path=path)
        data = self.served[path]
        assert len(data) <= limit
        return data

    def look(self, now: ShownCheckpoint, fails_at: int | None) -> list[str]:
        self.served = now.files
        self.requests, self.fails_at = [], fails_at
        try:
            reading = read_log(
                self,
                [PAIR, ANOTHER_PAIR],
                clock=self.clock,
                last=self.last,
                kept=lambda: self.kept,
                forget=lambda: self.kept.clear(),
            )
        except (LogError, DecodeError):
            return self.requests
        assert reading.bodies is not None
        self.kept = list(reading.bodies.values())
        first, second = reading.outcomes
        assert not isinstance(second, Current), "nobody cosigned for that pair"
        if isinstance(first, Current):
            checkpoint = first.checkpoint
            self.last = LastAccepted(first.time, checkpoint.size, checkpoint.root)
            self.accepted += 1
        return self.requests


STEPS = st.lists(
    st.tuples(
        st.integers(0, 63),
        st.sampled_from([NOW - 1, NOW, NOW + 1]),
        st.sampled_from([5, 6]),
        st.one_of(st.none(), st.integers(1, 8)),
    ),
    max_size=8,
)
CLOCKS = st.sampled_from([NOW, NOW + 2 * DAY, NOW + 2 * DAY + 1, NOW - 30 * DAY])


@given(STEPS, CLOCKS)
def test_requests_follow_from_the_list_and_one_set_of_files(
    steps: list[tuple[int, int, int, int | None]], now: int
) -> None:
    reader, complete = DeviceReader(SettableClock(now)), set[str]()
    for chosen, time, size, fails_at in steps:
        seen = shown(chosen, time, size)
        expected = [PROOF, seen.list_file]
        if set(seen.wanted) != complete:
            expected += seen.wanted
            if fails_at is not None and fails_at <= 2:
                pass  # Nothing of it was asked for: what is kept stays.
            elif fails_at is not None and fails_at <= len(expected):
                complete = set()
            else:
                complete = set(seen.wanted)
        assert reader.look(seen, fails_at) == expected[:fails_at]


@given(STEPS, STEPS, CLOCKS, CLOCKS, STEPS)
def test_two_devices_with_any_past_are_alike_after_one_list(
    one: list[tuple[int, int, int, int | None]],
    two: list[tuple[int, int, int, int | None]],
    clock_one: int,
    clock_two: int,
    after: list[tuple[int, int, int, int | None]],
) -> None:
    """Even that list may be refused by one of them and accepted by the other."""
    devices = [DeviceReader(SettableClock(clock)) for clock in (clock_one, clock_two)]
    for device, past in zip(devices, (one, two), strict=True):
        for chosen, time, size, fails_at in past:
            device.look(shown(chosen, time, size), fails_at)
        device.look(shown(0, NOW, 5), None)
    for chosen, time, size, fails_at in after:
        seen = shown(chosen, time, size)
        first, second = (device.look(seen, fails_at) for device in devices)
        assert first == second


def test_the_histories_hold_both_outcomes() -> None:
    """Or the properties above would say nothing about refusals."""
    reader = DeviceReader(SettableClock(NOW))
    reader.look(shown(0, NOW, 6), None)
    reader.look(shown(1, NOW - 1, 6), None)
    reader.look(shown(1, NOW + 1, 5), None)
    assert reader.accepted == 1
    assert len(reader.kept) == 2
    late = DeviceReader(SettableClock(NOW + 2 * DAY + 1))
    late.look(shown(0, NOW, 6), None)
    assert late.accepted == 0
    assert len(late.kept) == 2
