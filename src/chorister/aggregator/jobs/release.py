"""Releasing an aggregate share: the aggregator's noise, the seal, and the record that it happened.

**Noise.** Each aggregator adds to every bin of its aggregate share an independent Bin(M, q), where
M is the recipe's min_cohort - 1 and q the probability with which a device sets a bit that is not
its own. Even if all other clients are hostile, one device's bits are then hidden as among
min_cohort honest devices: the stated epsilon is certified for the pair `Ber(h) + Bin(M, q)` and
`Ber(q) + Bin(M, q)`. The noise is drawn exactly, from the operating system's generator, once per
batch: the draw that is committed with the state `collected` is the only one that ever leaves the
process.

**Once.** A database that is restored from a backup has forgotten that a batch was collected, and
would release it again with other noise; the mean of several such releases has less noise than one.
That holds for each aggregator, whatever the other one does, so each keeps a `CollectedFile` outside
its database.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np

from chorister._native import Prio3, hpke_seal, sample_binomials
from chorister.aggregator.known_tasks import KnownTask, Noise
from chorister.dap.draft import Problem, Role, aggregate_share_info
from chorister.dap.messages import AggregateShareAad, CollectionJobReq
from chorister.errors import ProblemError, ServiceError
from chorister.transparency.disk import Disk

Sampler: TypeAlias = Callable[[int, Noise], bytes]
"""Takes a number of bins and a distribution; returns one draw per bin, as uint64."""


def sample_noise(bins: int, noise: Noise) -> bytes:
    """Draw the noise of every bin, exactly."""
    return sample_binomials(bins, noise.trials, threshold=noise.threshold)


def add_noise(vdaf: Prio3, share: bytes, noise: Noise | None, sample: Sampler) -> bytes:
    """Return the aggregate share that may leave the aggregator."""
    if noise is None:
        return share
    return vdaf.add_counts(share, np.frombuffer(sample(vdaf.length, noise), np.uint64))


def seal_share(
    task: KnownTask, request: CollectionJobReq, share: bytes, *, sender: Role, collector: bytes
) -> bytes:
    """Seal an aggregate share to the collector's HPKE configuration."""
    aad = AggregateShareAad(
        task_id=task.task_id, task_configuration=task.configuration, collection_job_req=request
    )
    return hpke_seal(collector, aggregate_share_info(sender), aad.encode(), share)


def check_collection_request(task: KnownTask, request: CollectionJobReq) -> None:
    """Raise unless the query is for the task's only bucket; leader and helper both check."""
    if request.query.batch_mode is not task.configuration.batch_mode:
        raise task.refusal(Problem.INVALID_MESSAGE, "the task has another batch mode")
    if request.agg_param:
        raise task.refusal(
            Problem.INVALID_AGGREGATION_PARAMETER,
            "the only aggregation parameter of Prio3 is the empty one",
        )
    if request.query.batch_interval != task.interval:
        raise wrong_bucket(task)


def wrong_bucket(task: KnownTask) -> ProblemError:
    """Return the refusal of a request for any other interval than the task's bucket."""
    return task.refusal(
        Problem.BATCH_INVALID,
        f"the task has one bucket: ask for start {task.interval.start}, duration 1",
    )


def unknown_collector(task: KnownTask) -> ProblemError:
    """Return the refusal to release anything to a collector that is not in the settings."""
    return task.refusal(
        Problem.INVALID_TASK, "the collector's HPKE configuration is not known to this aggregator"
    )


def released_before_restore(task: KnownTask, role: str) -> ProblemError:
    """Return the refusal of a batch that the file knows as released and the database does not."""
    return task.refusal(
        Problem.BATCH_OVERLAP, f"the batch was collected before this {role}'s database was restored"
    )


class CollectedFile:
    """The ids of tasks whose batch was released. Threads and processes share it.

    It is written after the transaction that marks the batch as collected and before the share
    leaves: a process that dies in between has released nothing, finds the share in the database,
    and writes the file then. One task id per line, with a line end on both sides: a line that was
    cut off spoils no other.

    The file only ever grows. Ended tasks could be left out, since they are refused anyway; but that
    would depend on the clock, which may be wrong just when a machine was restored, and on a rewrite
    that survives any crash. A thousand releases a day make 24 MB a year.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._disk = Disk()
        self._lock = threading.Lock()
        self._size = -1
        self._known: set[bytes] = set()

    def __contains__(self, task_id: bytes) -> bool:
        with self._lock:
            self._read()
            return task_id.hex().encode() in self._known

    def add(self, task_id: bytes) -> None:
        """Record a release. Durable when this returns."""
        line = task_id.hex().encode()
        with self._lock:
            self._read()
            if line in self._known:
                return
            try:
                new = not self._path.exists()
                self._disk.append(self._path, b"\n" + line + b"\n")
                self._disk.sync(self._path)
                if new:
                    self._disk.sync(self._path.parent)
            except OSError as error:
                raise ServiceError(f"can't write {self._path}: {error.strerror}") from error
            self._known.add(line)

    def _read(self) -> None:
        """Read the file again if another process has added to it."""
        try:
            if not self._path.exists() or self._path.stat().st_size == self._size:
                return
            data = self._path.read_bytes()
        except OSError as error:
            raise ServiceError(f"can't read {self._path}: {error.strerror}") from error
        self._known.update(data.split(b"\n"))
        self._size = len(data)
