"""Collection at the leader: freeze, let the last jobs finish, ask the helper, release once.

The batch goes `open -> frozen -> collected`. It is frozen when enough reports are *verified* and a
collector waits: from then on no report is taken, so the remaining jobs run dry, and the request to
the helper is the same whenever it is made again. While the helper is away, the collection waits. If
the helper refuses it for good, it has failed, which its collector is told, and the batch stays
frozen: no report is lost, and once the operators have mended what they disagree about, the same
request collects it (delete the failed job, create it again). The leader's noise is drawn before the
last transaction and committed with the mark `collected` and the sealed result: a draw that is not
committed is never seen by anybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from sqlalchemy import Connection, delete, func, select, update

from chorister._native import hpke_seal
from chorister.aggregator import batches
from chorister.aggregator.aggregation import MAX_FAILURE, HelperClient, Step
from chorister.aggregator.batches import Total
from chorister.aggregator.collected_file import CollectedFile, restored
from chorister.aggregator.database import Database
from chorister.aggregator.noise import Sampler, add_noise
from chorister.aggregator.queue import JobQueue
from chorister.aggregator.schema import (
    BatchState,
    accumulators,
    collections,
    segments,
    tasks,
)
from chorister.aggregator.tasks import KnownTask, TaskRegister
from chorister.canonical import sha256
from chorister.clock import Clock
from chorister.dap.draft import Problem, Role, aggregate_share_info
from chorister.dap.messages import (
    AggregateShare,
    AggregateShareAad,
    AggregateShareReq,
    BatchSelector,
    CollectionJobReq,
    CollectionJobResp,
)
from chorister.dap.problems import invalid_message
from chorister.errors import DecodeError, ProblemError, Unreachable

__all__ = ["CollectionRef", "Collections", "check_collection_request", "seal_share"]

_ID_BYTES: Final = 16


class CollectionRef(NamedTuple):
    """One collection job."""

    task_id: bytes
    collection_id: bytes


def check_collection_request(task: KnownTask, request: CollectionJobReq) -> None:
    """The checks that leader and helper share: the query must be for the task's one bucket."""
    if request.query.batch_mode is not task.configuration.batch_mode:
        raise ProblemError(
            Problem.INVALID_MESSAGE, "the task has another batch mode", task_id=task.task_id
        )
    if request.agg_param:
        raise ProblemError(
            Problem.INVALID_AGGREGATION_PARAMETER,
            "Prio3 has no aggregation parameter but the empty one",
            task_id=task.task_id,
        )
    if request.query.batch_interval != task.interval:
        raise ProblemError(
            Problem.BATCH_INVALID,
            f"the task has one bucket: ask for start {task.interval.start}, duration 1",
            task_id=task.task_id,
        )


def seal_share(
    task: KnownTask, request: CollectionJobReq, share: bytes, *, sender: Role, collector: bytes
) -> bytes:
    """An aggregate share, sealed to the collector's HPKE configuration."""
    aad = AggregateShareAad(
        task_id=task.task_id, task_configuration=task.configuration, collection_job_req=request
    )
    return hpke_seal(collector, aggregate_share_info(sender), aad.encode(), share)


class Collections:
    """The collection jobs of one leader."""

    def __init__(
        self,
        database: Database,
        register: TaskRegister,
        clock: Clock,
        *,
        helper: HelperClient,
        queue: JobQueue,
        collectors: Mapping[bytes, bytes],
        sample: Sampler,
        collected: CollectedFile | None = None,
    ) -> None:
        """`collectors`: SHA-256 of an HPKE configuration -> the configuration."""
        self._database = database
        self._register = register
        self._clock = clock
        self._helper = helper
        self._queue = queue
        self._collectors = collectors
        self._sample = sample
        self._collected = collected

    def create(self, task: KnownTask, request: bytes, collector: bytes) -> CollectionRef:
        """Begin a collection job, or find the one of the same request.

        `collector` is who asks: the digest of the HPKE configuration that its token belongs to.
        """
        self._check_collector(task, collector)
        try:
            check_collection_request(task, CollectionJobReq.decode(request))
        except DecodeError as error:
            raise invalid_message(error, task_id=task.task_id) from None
        ref = CollectionRef(task.task_id, sha256(request)[:_ID_BYTES])
        with self._database.write() as connection:
            state = batches.lock(connection, task.task_id, alone=True)
            if connection.scalar(select(collections.c.created).filter_by(**ref._asdict())):
                return ref
            if state is not BatchState.OPEN and state is not BatchState.FROZEN:
                raise ProblemError(
                    Problem.BATCH_OVERLAP,
                    "the batch was collected, and its result deleted",
                    task_id=task.task_id,
                )
            row = ref._asdict() | {"created": self._clock.now(), "request": request}
            self._database.insert_new(connection, collections, [row])
            self._queue.collection_asked(connection, ref)
        return ref

    def _check_collector(self, task: KnownTask, collector: bytes) -> None:
        task.check_live(self._clock.now())
        if collector != task.collector:
            raise ProblemError(
                None,
                "the recipe names another collector",
                status=403,
                task_id=task.task_id,
            )
        if task.collector not in self._collectors:
            raise ProblemError(
                Problem.INVALID_TASK,
                "the collector's HPKE configuration is not known to this aggregator",
                task_id=task.task_id,
            )

    def find(
        self, task: KnownTask, collection_id: bytes, collector: bytes
    ) -> CollectionJobResp | None:
        """The result; None as long as there is none; raises `ProblemError` where it failed."""
        self._check_collector(task, collector)
        ref = CollectionRef(task.task_id, collection_id)
        with self._database.read() as connection:
            row = connection.execute(select(collections).filter_by(**ref._asdict())).one_or_none()
        if row is None:
            raise ProblemError(None, "no such collection job", status=404, task_id=task.task_id)
        if row.response is not None:
            if self._collected is not None:
                self._collected.add(task.task_id)  # before it leaves
            return CollectionJobResp.decode(bytes(row.response))
        if row.problem is not None:
            raise ProblemError(
                row.problem, row.failure, status=row.problem_status, task_id=task.task_id
            )
        return None

    def delete(self, task: KnownTask, collection_id: bytes, collector: bytes) -> None:
        """Delete a collection job. The batch stays what it is: nothing is collected twice."""
        self._check_collector(task, collector)
        ref = CollectionRef(task.task_id, collection_id)
        with self._database.write() as connection:
            connection.execute(delete(collections).filter_by(**ref._asdict()))

    def pending(self) -> list[CollectionRef]:
        """All collection jobs without an outcome: most wait for reports, and none hides another."""
        with self._database.read() as connection:
            rows = connection.execute(
                select(collections.c.task_id, collections.c.collection_id)
                .join(tasks, tasks.c.task_id == collections.c.task_id)
                .where(collections.c.response.is_(None), collections.c.problem.is_(None))
                .where(tasks.c.ends > self._clock.now())
                .order_by(collections.c.created, collections.c.task_id)
            )
            return [CollectionRef(bytes(task_id), bytes(ref)) for task_id, ref in rows]

    # --- stepping -------------------------------------------------------------------------------

    def step(self, ref: CollectionRef) -> Step:
        """Bring a collection job as far as it gets; harmless to do twice."""
        task = self._register.find(ref.task_id)
        if task is None or self._clock.now() >= task.ends:
            return Step(done=True)
        collector = self._collectors.get(task.collector)
        if collector is None:
            return self._waits(ref, "the collector's HPKE configuration is not configured here")
        # The file before the database, which is written first: what the file knows and the database
        # does not was forgotten by a backup.
        released = self._collected is not None and task.task_id in self._collected
        with self._database.read() as connection:
            row = connection.execute(select(collections).filter_by(**ref._asdict())).one_or_none()
        if row is None or row.response is not None or row.problem is not None:
            return Step(done=True)
        if released:
            return self._refused(ref, restored(task, "leader"), "")
        why = self._freeze(task)
        if why is not None:
            return self._waits(ref, why)
        with self._database.read() as connection:
            total = batches.total(self._database, connection, task)
        request = CollectionJobReq.decode(bytes(row.request))
        try:
            return self._collect(task, ref, request, total, collector)
        except ProblemError as error:
            if _operators(error):
                return self._waits(ref, f"the helper does not help yet: {error}", peer=True)
            return self._refused(ref, error, "the helper: ")
        except (DecodeError, Unreachable) as error:
            return self._waits(ref, f"the helper does not help yet: {error}", peer=True)

    def _freeze(self, task: KnownTask) -> str | None:
        """Freeze the batch if it is large enough; why it can't be collected yet, or None."""
        with self._database.write() as connection:
            state = batches.lock(connection, task.task_id, alone=True)
            if state is BatchState.OPEN:
                if self._verified(connection, task) < task.min_batch_size:
                    # No number: below the minimum an analyst sees tenths, for the whole recipe.
                    return f"fewer than the minimum of {task.min_batch_size} reports are verified"
                batches.set_state(connection, task.task_id, BatchState.FROZEN)
            elif state is not BatchState.FROZEN:
                return "the batch is no longer there to be collected"
            if _unfinished(connection, task.task_id):
                return "the last reports are being verified"
        return None

    def _verified(self, connection: Connection, task: KnownTask) -> int:
        verified = connection.scalar(
            select(func.sum(accumulators.c.reports)).where(accumulators.c.task_id == task.task_id)
        )
        return int(verified or 0)

    def _collect(
        self,
        task: KnownTask,
        ref: CollectionRef,
        request: CollectionJobReq,
        total: Total,
        collector: bytes,
    ) -> Step:
        asked = AggregateShareReq(
            collection_job_req=request,
            batch_selector=BatchSelector.of(task.interval),
            report_count=total.reports,
            checksum=total.checksum,
        )
        answer = self._helper.aggregate_share(task, asked.encode())
        helper_share = AggregateShare.decode(answer).encrypted_aggregate_share
        noised = add_noise(task.vdaf, total.share, task.noise, self._sample)
        response = CollectionJobResp(
            report_count=total.reports,
            interval=task.interval,
            leader_encrypted_agg_share=seal_share(
                task, request, noised, sender=Role.LEADER, collector=collector
            ),
            helper_encrypted_agg_share=helper_share,
        )
        with self._database.write() as connection:
            state = batches.lock(connection, task.task_id, alone=True)
            if state is not BatchState.FROZEN or _unfinished(connection, task.task_id):
                return Step(done=True)  # another worker has collected it, or it was swept
            stored = connection.execute(
                update(collections)
                .filter_by(**ref._asdict())
                .where(collections.c.response.is_(None))
                .values(response=response.encode(), problem=None, failure=None)
            )
            if not stored.rowcount:
                return Step(done=True)  # deleted meanwhile: another job can still collect
            batches.set_state(connection, task.task_id, BatchState.COLLECTED)
            batches.drop_total(connection, task.task_id)
        return Step(done=True)

    def _waits(self, ref: CollectionRef, why: str, *, peer: bool = False) -> Step:
        self._say(ref, why)
        return Step(done=False, why=why, peer=peer)

    def _refused(self, ref: CollectionRef, error: ProblemError, who: str) -> Step:
        with self._database.write() as connection:
            connection.execute(
                update(collections)
                .filter_by(**ref._asdict())
                .where(collections.c.response.is_(None))
                .values(
                    problem=error.problem,
                    problem_status=error.status,
                    failure=f"{who}{error.detail}"[:MAX_FAILURE],
                )
            )
        return Step(done=True, why=str(error))

    def _say(self, ref: CollectionRef, why: str) -> None:
        why = why[:MAX_FAILURE]
        with self._database.read() as connection:
            said = connection.scalar(select(collections.c.failure).filter_by(**ref._asdict()))
        if said == why:
            return
        with self._database.write(durable=False) as connection:
            connection.execute(update(collections).filter_by(**ref._asdict()).values(failure=why))


def _operators(error: ProblemError) -> bool:
    """Whether a refusal goes away by itself, or when an operator mends the helper's settings."""
    return (
        error.problem in (None, Problem.INVALID_TASK, Problem.UNRECOGNIZED_TASK)
        or error.status in (401, 403)
        or error.status >= 500
    )


def _unfinished(connection: Connection, task_id: bytes) -> bool:
    """Whether any report waits for a job, or for its job's end: its segment is there until then."""
    waiting = select(segments.c.segment_id).where(segments.c.task_id == task_id).limit(1)
    return connection.scalar(waiting) is not None
