"""The helper: verifies what a leader brings, adds it up, and hands out its share once. No HTTP.

The helper believes a leader nothing. The task is the one it knows from the log, the minimum is the
one in its own copy of the configuration, count and checksum are its own. A request is answered from
memory if it came before, byte for byte; otherwise all that follows from it (ids claimed, sum,
answer) is one durable transaction at the end, and only then is it answered.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from sqlalchemy import Connection, delete, insert, select

from chorister._native import Aggregated, Headers, scan_verify_inits
from chorister.aggregator import batches
from chorister.aggregator.collected_file import CollectedFile, restored
from chorister.aggregator.collecting import check_collection_request, seal_share
from chorister.aggregator.counters import VERIFIED, count, rejections
from chorister.aggregator.database import Database
from chorister.aggregator.hpke_keys import KeyRing
from chorister.aggregator.noise import Sampler, add_noise, draw
from chorister.aggregator.progress import TaskStatus, task_status
from chorister.aggregator.schema import BatchState, aggregate_shares, helper_jobs
from chorister.aggregator.sweeping import Swept, sweep
from chorister.aggregator.tasks import MAX_SKEW, KnownTask, TaskRegister
from chorister.canonical import sha256
from chorister.clock import Clock
from chorister.dap.draft import (
    REPORT_ID_BYTES,
    VERIFICATION_KEY_ID,
    Problem,
    ReportError,
    Role,
)
from chorister.dap.messages import (
    AggregateShare,
    AggregateShareReq,
    AggregationJobInitReq,
    AggregationJobResp,
)
from chorister.dap.problems import invalid_message
from chorister.dap.taskprov import verify_key
from chorister.errors import DecodeError, InternalError, ProblemError

__all__ = ["Answer", "Helper"]

_ID_BYTES: Final = 16


class Answer(NamedTuple):
    """A resource's id and its content."""

    resource_id: bytes
    body: bytes


class _Taken(Exception):
    """Some of the ids were added by others in the meantime."""

    def __init__(self, ids: set[bytes]) -> None:
        super().__init__(f"{len(ids)} ids")
        self.ids = ids


class Helper:
    """All that a helper does. Every method may be called from any thread, and of any process."""

    def __init__(
        self,
        database: Database,
        tasks: TaskRegister,
        keys: KeyRing,
        clock: Clock,
        *,
        verify_key_init: bytes,
        collectors: Mapping[bytes, bytes],
        threads: int = 0,
        sample: Sampler = draw,
        collected: CollectedFile | None = None,
    ) -> None:
        """As for a `Leader`. `collected` outlives a database that is restored from a backup."""
        self.tasks = tasks
        self.keys = keys
        self._database = database
        self._clock = clock
        self._verify_key_init = verify_key_init
        self._collectors = collectors
        self._threads = threads
        self._sample = sample
        self._collected = collected

    # --- aggregation jobs -----------------------------------------------------------------------

    def aggregate(self, task: KnownTask, request: bytes) -> Answer:
        """Verify and add up a job; the id of the resource and an encoded `AggregationJobResp`."""
        self._check_time(task)
        digest = sha256(request)
        known = self._known_job(task, digest)
        if known is not None:
            return known
        inits, headers = _read(task, request)
        ids = _split(headers.ids)
        rejected = bytearray(_refusals(task, headers))
        # Each turn either commits or learns of further ids that others have added: it ends.
        for _ in range(len(ids) + 1):
            with self._database.read() as connection:
                if batches.state_of(connection, task.task_id) is not BatchState.OPEN:
                    rejected[:] = bytes([ReportError.BATCH_COLLECTED]) * len(rejected)
            resps, added = task.binding.helper_initialize(
                verify_key(self._verify_key_init, task.task_id),
                self.keys.keypairs(),
                inits,
                rejected=bytes(rejected),
                threads=self._threads,
            )
            try:
                return self._commit(task, digest, ids, resps, added)
            except _Taken as taken:
                for place, report_id in enumerate(ids):
                    if report_id in taken.ids:
                        rejected[place] = ReportError.REPORT_REPLAYED
        raise InternalError("a job's ids are taken over and over")

    def _commit(
        self,
        task: KnownTask,
        digest: bytes,
        ids: Sequence[bytes],
        resps: bytes,
        added: Aggregated,
    ) -> Answer:
        answer = Answer(digest[:_ID_BYTES], AggregationJobResp(resps).encode())
        valid = [each for each, code in zip(ids, added.errors, strict=True) if not code]
        with self._database.write() as connection:
            state = batches.lock(connection, task.task_id, alone=False)
            if state is not BatchState.OPEN:
                if valid:
                    raise _Taken(set())  # collected in between: begin anew, with all refused
                return answer  # nothing to remember: it is refused again, the same way
            row = {
                "task_id": task.task_id,
                "job_id": answer.resource_id,
                "request_digest": digest,
                "response": answer.body,
            }
            if not self._database.insert_new(connection, helper_jobs, [row]):
                return _stored_job(connection, task, digest)
            new = batches.add_ids(self._database, connection, task.task_id, valid)
            if len(new) < len(valid):
                raise _Taken(set(valid) - new)
            batches.accumulate(self._database, connection, task, added)
            names = {VERIFIED: added.count} | rejections("helper", added.errors)
            count(self._database, connection, task.task_id, names)
        return answer

    def _check_time(self, task: KnownTask) -> None:
        now = self._clock.now()
        task.check_live(now)
        if now < task.starts - MAX_SKEW:
            # The whole job, for its reports have one timestamp. Answering `report_too_early` to
            # each would be remembered with the job, and the reports lost to a clock that is behind.
            raise ProblemError(
                None,
                f"by this helper's clock, {now}, the task begins only at {task.starts}",
                status=503,
                task_id=task.task_id,
            )

    def _known_job(self, task: KnownTask, digest: bytes) -> Answer | None:
        with self._database.read() as connection:
            row = connection.execute(
                select(helper_jobs).filter_by(task_id=task.task_id, job_id=digest[:_ID_BYTES])
            ).one_or_none()
        if row is None:
            return None
        if not hmac.compare_digest(bytes(row.request_digest), digest):
            raise ProblemError(
                Problem.INVALID_MESSAGE, "another job has this id", task_id=task.task_id
            )
        return Answer(bytes(row.job_id), bytes(row.response))

    def aggregation_job(self, task: KnownTask, job_id: bytes) -> bytes:
        """The encoded `AggregationJobResp` of a job."""
        task.check_live(self._clock.now())
        with self._database.read() as connection:
            body = connection.scalar(
                select(helper_jobs.c.response).filter_by(task_id=task.task_id, job_id=job_id)
            )
        if body is None:
            raise ProblemError(
                Problem.UNRECOGNIZED_AGGREGATION_JOB,
                "no such aggregation job",
                status=404,
                task_id=task.task_id,
            )
        return bytes(body)

    def delete_aggregation_job(self, task: KnownTask, job_id: bytes) -> None:
        """Forget the answer. What it added stays added, and its ids stay known."""
        task.check_live(self._clock.now())
        with self._database.write() as connection:
            connection.execute(delete(helper_jobs).filter_by(task_id=task.task_id, job_id=job_id))

    # --- aggregate shares -----------------------------------------------------------------------

    def aggregate_share(self, task: KnownTask, request: bytes) -> Answer:
        """Release this helper's share of a batch, once; its id and an encoded `AggregateShare`."""
        answer = self._release(task, request)
        if self._collected is not None:
            self._collected.add(task.task_id)  # before it leaves, whoever committed it
        return answer

    def _release(self, task: KnownTask, request: bytes) -> Answer:
        task.check_live(self._clock.now())
        asked = _read_share_request(task, request)
        collector = self._collectors.get(task.collector)
        if collector is None:
            raise ProblemError(
                Problem.INVALID_TASK,
                "the collector's HPKE configuration is not known to this aggregator",
                task_id=task.task_id,
            )
        digest = sha256(request)
        # The file before the database: it is written after, so what it knows the database knows
        # too, unless that was restored.
        released = self._collected is not None and task.task_id in self._collected
        # Looked at first, so that noise is drawn for nobody who does not get it.
        with self._database.read() as connection:
            known = _stored_share(connection, task, digest)
            if known is not None:
                return known
            before = self._check_batch(connection, task, asked, released)
        noised = add_noise(task.vdaf, before.share, task.noise, self._sample)
        sealed = seal_share(
            task, asked.collection_job_req, noised, sender=Role.HELPER, collector=collector
        )
        answer = Answer(digest[:_ID_BYTES], AggregateShare(sealed).encode())
        with self._database.write() as connection:
            state = batches.lock(connection, task.task_id, alone=True)
            if state is not BatchState.OPEN:
                # Another request was faster; its noise is the one that was committed.
                known = _stored_share(connection, task, digest)
                if known is not None:
                    return known
            # Nothing can be added while we hold the lock: what was sealed is what is there.
            if self._check_batch(connection, task, asked, released) != before:
                raise InternalError("a batch of the same reports has another sum")
            connection.execute(
                insert(aggregate_shares).values(
                    task_id=task.task_id,
                    share_id=answer.resource_id,
                    request_digest=digest,
                    response=answer.body,
                )
            )
            batches.set_state(connection, task.task_id, BatchState.COLLECTED)
            batches.drop_total(connection, task.task_id)
            connection.execute(delete(helper_jobs).where(helper_jobs.c.task_id == task.task_id))
        return answer

    def _check_batch(
        self, connection: Connection, task: KnownTask, asked: AggregateShareReq, released: bool
    ) -> batches.Total:
        """The sum, if it may be released for this request; `released`: the file says it was."""
        if batches.state_of(connection, task.task_id) is not BatchState.OPEN:
            raise ProblemError(
                Problem.BATCH_OVERLAP, "the batch was collected before", task_id=task.task_id
            )
        if released:
            raise restored(task, "helper")
        total = batches.total(self._database, connection, task)
        if total.reports < task.min_batch_size:
            raise ProblemError(
                Problem.INVALID_BATCH_SIZE,
                f"fewer than {task.min_batch_size} reports are verified here",
                task_id=task.task_id,
            )
        same = hmac.compare_digest(total.checksum, asked.checksum)
        if total.reports != asked.report_count or not same:
            raise ProblemError(
                Problem.BATCH_MISMATCH,
                f"the leader added up {asked.report_count} reports, this helper {total.reports}"
                + ("" if total.reports != asked.report_count else ", but not the same ones"),
                task_id=task.task_id,
            )
        return total

    def stored_aggregate_share(self, task: KnownTask, share_id: bytes) -> bytes:
        """The encoded `AggregateShare` that was released."""
        task.check_live(self._clock.now())
        with self._database.read() as connection:
            body = connection.scalar(
                select(aggregate_shares.c.response).filter_by(
                    task_id=task.task_id, share_id=share_id
                )
            )
        if body is None:
            raise ProblemError(None, "no such aggregate share", status=404, task_id=task.task_id)
        if self._collected is not None:
            self._collected.add(task.task_id)
        return bytes(body)

    def delete_aggregate_share(self, task: KnownTask, share_id: bytes) -> None:
        """Forget a released share; the batch stays collected."""
        task.check_live(self._clock.now())
        with self._database.write() as connection:
            connection.execute(
                delete(aggregate_shares).filter_by(task_id=task.task_id, share_id=share_id)
            )

    # --- everyone -------------------------------------------------------------------------------

    def status(self, tasks: Sequence[KnownTask]) -> list[TaskStatus]:
        """Exact figures, for the operator."""
        return task_status(self._database, tasks)

    def sweep(self) -> Swept:
        """Delete what has ended, and destroy the HPKE keys that nothing needs any more."""
        swept = sweep(self._database, self._clock.now())
        if swept.removed:
            self.tasks.forget()
        self.keys.destroy_due()
        return swept


def _read(task: KnownTask, request: bytes) -> tuple[bytes, Headers]:
    try:
        message = AggregationJobInitReq.decode(request)
        headers = scan_verify_inits(message.verify_inits)
    except DecodeError as error:
        raise invalid_message(error, task_id=task.task_id) from None
    if message.verification_key_id != VERIFICATION_KEY_ID:
        raise ProblemError(
            Problem.INVALID_MESSAGE,
            f"the task has no verification key but key {VERIFICATION_KEY_ID}",
            task_id=task.task_id,
        )
    if message.agg_param:
        raise ProblemError(
            Problem.INVALID_AGGREGATION_PARAMETER,
            "Prio3 has no aggregation parameter but the empty one",
            task_id=task.task_id,
        )
    if not headers.count:
        raise ProblemError(
            Problem.INVALID_MESSAGE, "a job has at least one report", task_id=task.task_id
        )
    return message.verify_inits, headers


def _split(ids: bytes) -> list[bytes]:
    return [ids[at : at + REPORT_ID_BYTES] for at in range(0, len(ids), REPORT_ID_BYTES)]


def _refusals(task: KnownTask, headers: Headers) -> bytes:
    """Codes of reports that are outside the task's interval, or carry extensions."""
    times = np.frombuffer(headers.times, np.uint64)
    codes = np.zeros(headers.count, np.uint8)
    codes[np.frombuffer(headers.extensions, np.uint8) != 0] = ReportError.INVALID_MESSAGE
    codes[times < task.interval.start] = ReportError.TASK_NOT_STARTED
    codes[times >= task.interval.start + task.interval.duration] = ReportError.TASK_EXPIRED
    return codes.tobytes()


def _stored_job(connection: Connection, task: KnownTask, digest: bytes) -> Answer:
    """What another worker answered to the same request in the meantime."""
    row = connection.execute(
        select(helper_jobs).filter_by(task_id=task.task_id, job_id=digest[:_ID_BYTES])
    ).one()
    if not hmac.compare_digest(bytes(row.request_digest), digest):
        raise ProblemError(Problem.INVALID_MESSAGE, "another job has this id", task_id=task.task_id)
    return Answer(bytes(row.job_id), bytes(row.response))


def _read_share_request(task: KnownTask, request: bytes) -> AggregateShareReq:
    try:
        asked = AggregateShareReq.decode(request)
    except DecodeError as error:
        raise invalid_message(error, task_id=task.task_id) from None
    if asked.collection_job_req.agg_param:
        # Not `invalidAggregationParameter`, which is the collector's fault: its leader let it pass.
        raise ProblemError(
            Problem.INVALID_MESSAGE,
            "the jobs of this batch had the empty aggregation parameter",
            task_id=task.task_id,
        )
    check_collection_request(task, asked.collection_job_req)
    if asked.batch_selector.batch_mode is not task.configuration.batch_mode:
        raise ProblemError(
            Problem.INVALID_MESSAGE, "the task has another batch mode", task_id=task.task_id
        )
    if asked.batch_selector.batch_interval != task.interval:
        raise ProblemError(
            Problem.BATCH_INVALID,
            f"the task has one bucket: ask for start {task.interval.start}, duration 1",
            task_id=task.task_id,
        )
    return asked


def _stored_share(connection: Connection, task: KnownTask, digest: bytes) -> Answer | None:
    row = connection.execute(
        select(aggregate_shares).filter_by(task_id=task.task_id, share_id=digest[:_ID_BYTES])
    ).one_or_none()
    if row is None or not hmac.compare_digest(bytes(row.request_digest), digest):
        return None
    return Answer(bytes(row.share_id), bytes(row.response))
