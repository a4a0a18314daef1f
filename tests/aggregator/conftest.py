"""Pairs of aggregators on SQLite and on a real PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from tests.aggregator.postgres import PostgresServer, postgres
from tests.aggregator.world import Pair

__all__ = ["MakePair", "make_pair", "postgres"]


class MakePair(Protocol):
    def __call__(self, *, threads: int = 1) -> Pair: ...


@pytest.fixture(params=["sqlite", "postgresql"])
def make_pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakePair]:
    """Makes a pair on either kind of database; closes it at the end."""
    with ExitStack() as stack:

        def make(*, threads: int = 1) -> Pair:
            if request.param == "sqlite":
                pair = Pair.in_folder(tmp_path, threads=threads)
            else:
                server: PostgresServer = request.getfixturevalue("postgres")
                leader, helper = stack.enter_context(server.databases(2))
                pair = Pair((leader, helper), threads=threads)
            stack.callback(pair.stop)
            return pair

        yield make
