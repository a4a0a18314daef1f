"""The quick look at an upload: most are one good report, and that is all there is to find out.

`Leader.check_upload` is the rule. This gives the same plan for the common case, one report with
nothing against it, in a tenth of the time, and asks the rule about everything else. (It is on the
event loop's path, where each microsecond counts for every upload.)
"""

from __future__ import annotations

import sys

from chorister._native import scan_reports
from chorister.aggregator.leader import Leader, UploadPlan
from chorister.aggregator.tasks import MAX_SKEW, KnownTask
from chorister.clock import Clock
from chorister.errors import DecodeError

__all__ = ["quick_check"]

_NOTHING = b"\0"


def quick_check(leader: Leader, clock: Clock, task: KnownTask, body: bytes) -> UploadPlan:
    """What `Leader.check_upload` says of an upload."""
    if len(body) == task.report_bytes:
        try:
            headers = scan_reports(body)
        except DecodeError:
            return leader.check_upload(task, body)
        if (
            headers.count == 1
            and headers.extensions == _NOTHING
            and int.from_bytes(headers.times, sys.byteorder) == task.interval.start
            and task.starts - MAX_SKEW <= clock.now() < task.closes
            and leader.keys.keypairs(headers.config_ids)
        ):
            return UploadPlan(
                task=task, reports=body, ids=(headers.ids,), ends=(len(body),), errors=_NOTHING
            )
    return leader.check_upload(task, body)
