"""A console over a rehearsal, served on the loopback interface for the tests of its pages."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import uvicorn

from chorister.analyst.rehearsal.population import Population
from chorister.clock import SettableClock, SystemClock
from chorister.console.access import origins_of
from chorister.console.app import build_app
from chorister.console.config import AnalystConfig, ConnectionConfig, ConsoleConfig, FleetConfig
from chorister.console.connections import FleetConnection, PacedRehearsal
from chorister.console.workspace import Workspace
from chorister.policy import Policy
from tests.keyboard import ANALYSIS, policy_at

TOKENS = {name: f"{name}-token-of-many-characters" for name in ("ada", "ben", "cleo")}
NASTY = "<img src=x onerror=alert(1)>\"'&"
"""A label that would run if it were not escaped."""
PURPOSE = f"Find words {NASTY}"

WORDS = ("how", "are", "you", "the", "cat", "sat", "on", "mat", "hello", "world")
PHRASES = (
    ("how are you", 5000), ("the cat sat", 4000), ("hello world", 3000), ("on the mat", 2500),
    (NASTY, 2000), ("are you there", 1500),
)  # fmt: skip


def policy(reports: int = 6) -> Policy:
    """The keyboard's policy with room for several rounds of small cohorts."""
    limits = {"local_epsilon": 8, "epsilon": 6, "delta": Decimal("1e-5"), "reports": reports}
    base: dict[str, Any] = {
        f"analyses/{ANALYSIS}/purpose": PURPOSE,
        f"analyses/{ANALYSIS}/budget/epsilon": 6,
        f"analyses/{ANALYSIS}/budget/delta": Decimal("1e-5"),
        f"analyses/{ANALYSIS}/budget/reports": reports,
        f"analyses/{ANALYSIS}/fields": dict.fromkeys(
            (
                "keyboard.ngram",
                "keyboard.perplexity",
                "user.age",
                "user.locale",
                "visits.longitude",
                "visits.latitude",
            ),
            limits,
        ),
        "streams/visits": {
            "retention": "30d",
            "fields": {"longitude": {"type": "real"}, "latitude": {"type": "real"}},
        },
        f"analyses/{ANALYSIS}/cohort/smallest": 50,
        f"analyses/{ANALYSIS}/series": {
            "windows": 26, "longest": "400d", "answers": 4, "cells": 200,
        },
        "device/epsilon": 6,
        "device/delta": Decimal("1e-5"),
        "device/reports": reports,
    }  # fmt: skip
    return policy_at(base)


def people_in_two_places() -> dict[str, Any]:
    """The same devices, a third of them with a locale of its own and younger owners."""
    rows = people()
    return {
        **{name: [*column, *column] for name, column in rows.items() if name != "count"},
        "locale": ["en_US"] * len(rows["age"]) + ["de_DE"] * len(rows["age"]),
        "count": [
            *rows["count"],
            *(round(n * (1.0 if age < 36 else 0.15))
              for n, age in zip(rows["count"], rows["age"], strict=True)),
        ],
    }  # fmt: skip


def people() -> dict[str, Any]:
    """Devices with an age, a phrase and a perplexity."""
    rows: dict[str, list[Any]] = {"age": [], "ngram": [], "perplexity": [], "count": []}
    for i, (phrase, count) in enumerate(PHRASES):
        for age in range(12, 78, 6):
            rows["age"].append(age)
            rows["ngram"].append(phrase)
            rows["perplexity"].append(5.0 + 3 * i + age / 10)
            rows["count"].append(round(count * (1.4 - abs(age - 35) / 60) / 9))
    return rows


@dataclass
class ConsoleWorld:
    """A console that runs."""

    url: str
    workspace: Workspace
    clock: SettableClock
    fleet: PacedRehearsal = field(repr=False)

    @property
    def origin(self) -> str:
        return self.url


def settings(folder: Path, *, fleet: FleetConfig | None = None) -> ConsoleConfig:
    """Three analysts; cleo may not use the fleet."""
    return ConsoleConfig(
        folder=str(folder / "console"),
        analysts=tuple(
            AnalystConfig(name=name, token_digest=hashlib.sha256(token.encode()).hexdigest())
            for name, token in TOKENS.items()
        ),
        connections=(
            ConnectionConfig(
                name="rehearsal", policy="unused", population="unused.csv", folder=str(folder),
                analysts=("ada", "ben"),
            ),
        ),
        fleet=fleet,
    )  # fmt: skip


def open_workspace(
    folder: Path,
    *,
    fill_seconds: float = 0.0,
    reports: int = 6,
    fleet: FleetConfig | None = None,
    population: dict[str, Any] | None = None,
) -> tuple[Workspace, PacedRehearsal]:
    """A workspace over a rehearsal of its own."""
    rules = policy(reports)
    rehearsal = PacedRehearsal(
        Population(population or people(), rules), rules, folder=folder / "studies",
        fill_seconds=fill_seconds, seed=5,
    )  # fmt: skip
    (folder / "studies").mkdir(exist_ok=True)
    (folder / "console").mkdir(exist_ok=True)
    connection = FleetConnection(
        name="rehearsal",
        title=f"A rehearsal {NASTY}",
        fleet=rehearsal,
        live=False,
        folder=folder / "studies",
        analysts=frozenset({"ada", "ben"}),
        poll_seconds=0.05,
    )
    return Workspace(settings(folder, fleet=fleet), [connection]), rehearsal


@contextlib.contextmanager
def running(
    folder: Path,
    *,
    fill_seconds: float = 0.0,
    reports: int = 6,
    fleet: FleetConfig | None = None,
    population: dict[str, Any] | None = None,
) -> Iterator[ConsoleWorld]:
    """A console on a port of its own."""
    workspace, rehearsal = open_workspace(
        folder, fill_seconds=fill_seconds, reports=reports, fleet=fleet, population=population
    )
    clock = SettableClock(SystemClock().now())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        app = build_app(workspace, clock, origins=origins_of("127.0.0.1", port, None))
        server = uvicorn.Server(
            uvicorn.Config(
                app, access_log=False, log_level="error", server_header=False, ws="none",
                timeout_graceful_shutdown=1,
            )
        )  # fmt: skip
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            with workspace.collecting():
                yield ConsoleWorld(f"http://127.0.0.1:{port}", workspace, clock, rehearsal)
        finally:
            server.should_exit = True
            thread.join(20)
