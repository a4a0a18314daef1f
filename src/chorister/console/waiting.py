"""Threads that wait for results, one a round; what they wait for is on disk, and survives them."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from chorister.analyst.fleet import Progress
from chorister.analyst.rounds import Round, State
from chorister.analyst.study import Study
from chorister.errors import ChoristerError, QuestionWithdrawn, StudyError

__all__ = ["Waiters"]

_log = logging.getLogger("chorister.console")


@dataclass(kw_only=True, slots=True)
class _Waiter:
    thread: threading.Thread | None = None
    error: str | None = None  # why nobody waits any longer
    seen: Progress | None = None
    looked: float = 0.0


class Waiters:
    """Whoever waits for a round, by connection, study and number. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: dict[tuple[str, str, int], _Waiter] = {}

    def wait(self, connection: str, study: Study, round_: Round) -> None:
        """Wait for a round in the background, unless somebody does already."""
        key = (connection, study.name, round_.number)
        with self._lock:
            waiter = self._waiters.setdefault(key, _Waiter())
            if waiter.thread is not None and waiter.thread.is_alive():
                return
            waiter.error = None
            # A daemon: a live round may take days, and is gone on with after a restart.
            waiter.thread = threading.Thread(
                target=self._run, args=(waiter, study, round_), daemon=True,
                name=f"wait {study.name} {round_.number}",
            )  # fmt: skip
            waiter.thread.start()

    def _run(self, waiter: _Waiter, study: Study, round_: Round) -> None:
        try:
            study.wait(round_, bar=False)
        except (QuestionWithdrawn, StudyError) as error:
            # Too small, too late, cancelled: the round itself says so. A lock says nothing there.
            stored = study.rounds[round_.number - 1]
            if stored.state is State.ASKED:
                waiter.error = str(error)
        except ChoristerError as error:
            waiter.error = str(error)
        except Exception:
            _log.exception("waiting for a round ended, by a bug in Chorister")
            waiter.error = "a bug in Chorister; the server's log has the details"

    def error(self, connection: str, study: str, number: int) -> str | None:
        """Why nobody waits for a round any longer."""
        with self._lock:
            waiter = self._waiters.get((connection, study, number))
            return None if waiter is None else waiter.error

    def progress(
        self, connection: str, study: Study, round_: Round, look_seconds: float
    ) -> Progress:
        """How far an open round is; asks the fleet no more often than every `look_seconds`."""
        key = (connection, study.name, round_.number)
        with self._lock:
            waiter = self._waiters.setdefault(key, _Waiter())
        now = time.monotonic()
        if waiter.seen is None or now - waiter.looked >= look_seconds:
            waiter.looked = now
            waiter.seen = study.fleet.progress(round_)
        return waiter.seen
