"""A store with a few events, and one sandbox for all tests of the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chorister.clock import SettableClock
from chorister.device.keys import SecretKey
from chorister.device.sandbox import Sandbox
from chorister.device.store import EventStore
from tests.keyboard import POLICY

KEY = SecretKey(bytes(range(32)))
NOW = 1_794_800_000


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock(NOW)


@pytest.fixture
def store(tmp_path: Path, clock: SettableClock) -> Iterator[EventStore]:
    (tmp_path / "store").mkdir()
    with EventStore(tmp_path / "store" / "events.db", KEY, POLICY, clock) as opened:
        opened.opt_in()
        yield opened


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as started:
        yield started
