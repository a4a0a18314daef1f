"""What a server checks of its system before it serves."""

from __future__ import annotations

import resource

import pytest

from chorister.aggregator.server import allow_connections
from chorister.errors import ServiceError


class Limits:
    """The system's limit on open files, as far as it lets itself be told."""

    def __init__(self, soft: int, hard: int) -> None:
        self.now = (soft, hard)

    def get(self, _: int) -> tuple[int, int]:
        return self.now

    def set(self, _: int, limits: tuple[int, int]) -> None:
        self.now = limits


def asked(
    monkeypatch: pytest.MonkeyPatch, connections: int, *, soft: int, hard: int
) -> tuple[int, int]:
    limits = Limits(soft, hard)
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    monkeypatch.setattr(resource, "setrlimit", limits.set)
    allow_connections(connections)
    return limits.now


def test_the_limit_on_open_files_is_raised_if_need_be(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = resource.RLIM_INFINITY
    assert asked(monkeypatch, 4096, soft=1024, hard=20_000) == (4608, 20_000)
    assert asked(monkeypatch, 4096, soft=256, hard=endless) == (4608, endless)
    assert asked(monkeypatch, 100, soft=1024, hard=2048) == (1024, 2048)
    assert asked(monkeypatch, 4096, soft=endless, hard=endless) == (endless, endless)


def test_more_connections_than_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServiceError, match="set connections to at most 3584"):
        asked(monkeypatch, 4096, soft=1024, hard=4096)
