"""Runs a device for as long as the process lives: polls and uploads, each at its drawn time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from chorister.clock import SECOND
from chorister.device.device import Device
from chorister.device.run import Run
from chorister.device.schedule import SendTimes

_PAUSE_SECONDS: Final = 60.0
"""Between two looks at the clock, which may be set, and at a device, which may be paused."""


def keep_running(device: Device) -> Iterator[Run]:
    """Run forever, and yield what each run did.

    Every time is absolute and was drawn before data was touched (`chorister.device.schedule`): when
    the next run sends does not depend on when this one ends. A failure, of the disk for example, is
    yielded as a silent run and never ends the loop.
    """
    clock, timing = device.clock, device.timing
    # Set after a missed moment, and after a run that failed or changed nothing: a failing disk must
    # not make a device poll more often.
    next_poll = next_upload = 0
    while True:
        begun = clock.microseconds()  # before the databases are opened, if they are not yet
        try:
            plan = device.plan()
        except Exception as error:  # of any kind: a device does not stop because of one
            clock.sleep(_PAUSE_SECONDS)
            yield Run(silent=str(error))
            continue
        poll_at = max(plan.poll_at, next_poll)
        upload_at = poll_at if plan.upload_at is None else max(plan.upload_at, next_upload)
        at, is_poll = min(poll_at, upload_at), poll_at <= upload_at
        if at < begun and timing.settle:  # it never polled, or missed this while nothing ran
            moment = timing.draw_missed(at, begun) if at else timing.draw_start(begun)
            next_poll, next_upload = (moment, next_upload) if is_poll else (next_poll, moment)
            continue
        if (wait := (at - begun) / SECOND - timing.settle) > 0:
            clock.sleep(min(wait, _PAUSE_SECONDS))
            continue
        try:
            run = device.run_once(at=at, hold=False) if is_poll else device.upload_due(at=at)
        except Exception as error:  # of any kind: a device does not stop because of one
            run = Run(silent=str(error))
        if run.waiting:  # somebody set the clock while data was touched
            clock.sleep(max(0.0, (run.busy_until or 0) - clock.microseconds() / SECOND))
            continue
        # Times drawn before data was touched stay valid, even if the run then failed. No time is
        # drawn from when the run ended: that may depend on data.
        changed, since = _has_changed(device, plan), max(at, begun)
        if is_poll:
            next_poll = 0 if changed else timing.draw_poll(since)
        else:
            next_upload = 0 if changed else timing.draw_missed(since, since)
        yield run


def _has_changed(device: Device, plan: SendTimes) -> bool:
    try:
        return device.plan() != plan
    except Exception:  # of any kind: the next look at the plan reports it
        return False
