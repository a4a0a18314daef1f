"""A device that runs for as long as its process: polls and uploads, each at its own drawn time."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator

from chorister.clock import Clock, SystemClock
from chorister.device.device import Device
from chorister.device.run import Run
from chorister.device.timing import Timing
from chorister.errors import DeviceBusy

__all__ = ["keep_running"]

_LONGEST_SLEEP = 60
"""Seconds between two looks at the clock, which may be set meanwhile."""


def keep_running(
    device: Device,
    *,
    timing: Timing | None = None,
    clock: Clock | None = None,
    sleep: Callable[[float], None] = time.sleep,
    randbelow: Callable[[int], int] = secrets.randbelow,
) -> Iterator[Run]:
    """Run for ever; yields what each run did.

    The next poll's time is drawn before the run, an upload's before its query, and neither lies
    before the deadline of the run's last query: so neither shows how long a query took.
    """
    timing, clock = timing or Timing(), clock or SystemClock()
    next_poll = clock.now()
    while True:
        now = clock.now()
        upload_at = device.next_upload()
        if now >= next_poll:
            next_poll = timing.next_poll(now, randbelow=randbelow)
            run = _patiently(device.run_once)
            if run.busy_until is not None and next_poll <= run.busy_until:
                next_poll = timing.next_poll(run.busy_until, randbelow=randbelow)
            yield run
        elif upload_at is not None and now >= upload_at:
            yield _patiently(device.upload_due)
            if device.next_upload() == upload_at:
                # Paused, or another process is at it: wait, do not spin.
                sleep(_LONGEST_SLEEP)
        else:
            wake = next_poll if upload_at is None else min(next_poll, upload_at)
            sleep(min(wake - now, _LONGEST_SLEEP))


def _patiently(run: Callable[[], Run]) -> Run:
    try:
        return run()
    except DeviceBusy as error:
        return Run(silent=str(error))
