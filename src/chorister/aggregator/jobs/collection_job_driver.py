"""Collection at the leader: freeze, let the last jobs finish, ask the helper, release once.

The batch moves `open -> frozen -> collected`. It is frozen when enough reports are *verified* and a
collector waits: from then on no report is accepted, so the remaining jobs run dry, and the request
to the helper is the same whenever it is repeated. While the helper can't be reached, the collection
waits. If the helper refuses it for good, the collection has failed, its collector is told, and the
batch stays frozen: no report is lost, and once the operators have fixed what they disagree about,
the same request collects it (delete the failed job, create it again). The leader's noise is drawn
before the last transaction and committed with the state `collected` and the sealed result: nobody
ever sees a draw that was not committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from chorister.aggregator.jobs.aggregation_job_driver import MAX_REASON_CHARACTERS, StepResult
from chorister.aggregator.jobs.release import (
    CollectedFile,
    Sampler,
    add_noise,
    check_collection_request,
    released_before_restore,
    sample_noise,
    seal_share,
    unknown_collector,
)
from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.storage import batches
from chorister.aggregator.storage.batches import CollectionRef, Total
from chorister.aggregator.storage.database import Database
from chorister.aggregator.storage.reports import has_unverified_reports
from chorister.aggregator.storage.schema import BatchState
from chorister.aggregator.storage.tasks import TaskStore
from chorister.canonical import sha256
from chorister.clock import Clock
from chorister.dap.draft import Problem, Role
from chorister.dap.helper_client import HelperClient
from chorister.dap.http import invalid_message
from chorister.dap.messages import (
    AggregateShare,
    AggregateShareReq,
    BatchSelector,
    CollectionJobReq,
    CollectionJobResp,
)
from chorister.errors import DecodeError, ProblemError, Unreachable

if TYPE_CHECKING:
    from chorister.aggregator.jobs.job_queue import JobQueue

_ID_BYTES: Final = 16


class CollectionJobDriver:
    """The collection jobs of one leader. Any thread of any process may call it."""

    def __init__(
        self,
        database: Database,
        tasks: TaskStore,
        clock: Clock,
        *,
        helper: HelperClient,
        collectors: Mapping[bytes, bytes],
        queue: JobQueue | None = None,
        sample: Sampler = sample_noise,
        collected: CollectedFile | None = None,
    ) -> None:
        """`collectors` maps the SHA-256 of an HPKE configuration to the configuration.

        `collected` outlives a database that is restored from a backup.
        """
        self._database = database
        self._tasks = tasks
        self._clock = clock
        self._helper = helper
        self._collectors = collectors
        self._queue = queue
        self._sample = sample
        self._collected = collected

    # --- requests of collectors -----------------------------------------------------------------

    def create(self, task: KnownTask, request: bytes, collector: bytes) -> CollectionRef:
        """Create a collection job, or find the one of the same request.

        `collector` is the digest of the HPKE configuration that the caller's token belongs to.
        """
        self._check_collector(task, collector)
        try:
            check_collection_request(task, CollectionJobReq.decode(request))
        except DecodeError as error:
            raise invalid_message(error, task_id=task.task_id) from None
        ref = CollectionRef(task.task_id, sha256(request)[:_ID_BYTES])
        with self._database.write() as tx:
            state = batches.lock_batch(tx, task.task_id, exclusive=True)
            if batches.find_collection(tx, ref) is not None:
                return ref
            if state is not BatchState.OPEN and state is not BatchState.FROZEN:
                raise task.refusal(
                    Problem.BATCH_OVERLAP, "the batch was collected, and its result deleted"
                )
            now = self._clock.now()
            batches.add_collection(self._database, tx, ref, request=request, now=now)
            if self._queue is not None:
                self._queue.collection_created(tx, ref)
        return ref

    def _check_collector(self, task: KnownTask, collector: bytes) -> None:
        task.check_live(self._clock.now())
        if collector != task.collector:
            raise task.refusal(None, "the recipe names another collector", status=403)
        if task.collector not in self._collectors:
            raise unknown_collector(task)

    def result(
        self, task: KnownTask, collection_id: bytes, collector: bytes
    ) -> CollectionJobResp | None:
        """Return the sealed result, None while there is none; `ProblemError` if it failed."""
        self._check_collector(task, collector)
        with self._database.read() as tx:
            found = batches.find_collection(tx, CollectionRef(task.task_id, collection_id))
        if found is None:
            raise task.refusal(None, "no such collection job", status=404)
        if found.response is not None:
            if self._collected is not None:
                self._collected.add(task.task_id)  # before it leaves
            return CollectionJobResp.decode(found.response)
        if found.refusal is not None:
            raise found.refusal
        return None

    def delete(self, task: KnownTask, collection_id: bytes, collector: bytes) -> None:
        """Delete a collection job. The batch's state stays: nothing is collected twice."""
        self._check_collector(task, collector)
        with self._database.write() as tx:
            batches.delete_collection(tx, CollectionRef(task.task_id, collection_id))

    # --- stepping -------------------------------------------------------------------------------

    def pending(self) -> list[CollectionRef]:
        """List the collection jobs to step. All of them: most wait for reports."""
        with self._database.read() as tx:
            return batches.pending_collections(tx, live_at=self._clock.now())

    def step(self, ref: CollectionRef) -> StepResult:
        """Advance a collection job as far as possible. Safe to repeat, even concurrently."""
        task = self._tasks.find(ref.task_id)
        if task is None or self._clock.now() >= task.ends:
            return StepResult(done=True)
        collector = self._collectors.get(task.collector)
        if collector is None:
            return self._waits(ref, "the collector's HPKE configuration is not in the settings")
        # The file before the database, which is written first: a release that only the file knows
        # was forgotten by restoring a backup.
        released = self._collected is not None and task.task_id in self._collected
        with self._database.read() as tx:
            found = batches.find_collection(tx, ref)
        if found is None or not found.pending:
            return StepResult(done=True)
        if released:
            return self._refused(ref, released_before_restore(task, "leader"), "")
        reason = self._freeze(task)
        if reason is not None:
            return self._waits(ref, reason)
        with self._database.read() as tx:
            total = batches.batch_total(self._database, tx, task)
        request = CollectionJobReq.decode(found.request)
        try:
            return self._collect(task, ref, request, total, collector)
        except ProblemError as error:
            if not _may_pass(error):
                return self._refused(ref, error, "the helper: ")
            return self._waits(ref, f"the helper is not ready yet: {error}", helper_away=True)
        except (DecodeError, Unreachable) as error:
            return self._waits(ref, f"the helper is not ready yet: {error}", helper_away=True)

    def _freeze(self, task: KnownTask) -> str | None:
        """Freeze the batch if it is large enough. Returns why it can't be collected yet."""
        with self._database.write() as tx:
            state = batches.lock_batch(tx, task.task_id, exclusive=True)
            if state is BatchState.OPEN:
                if batches.verified_reports(tx, task.task_id) < task.min_batch_size:
                    # No number: below the minimum an analyst sees tenths, for the whole recipe.
                    return f"fewer than the minimum of {task.min_batch_size} reports are verified"
                batches.set_batch_state(tx, task.task_id, BatchState.FROZEN)
            elif state is not BatchState.FROZEN:
                return "the batch can no longer be collected"
            if has_unverified_reports(tx, task.task_id):
                return "the last reports are being verified"
        return None

    def _collect(
        self,
        task: KnownTask,
        ref: CollectionRef,
        request: CollectionJobReq,
        total: Total,
        collector: bytes,
    ) -> StepResult:
        share_request = AggregateShareReq(
            collection_job_req=request,
            batch_selector=BatchSelector.of(task.interval),
            report_count=total.reports,
            checksum=total.checksum,
        )
        answer = self._helper.aggregate_share(task, share_request.encode())
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
        with self._database.write() as tx:
            state = batches.lock_batch(tx, task.task_id, exclusive=True)
            if state is not BatchState.FROZEN or has_unverified_reports(tx, task.task_id):
                return StepResult(done=True)  # another worker has collected it, or it was deleted
            if not batches.store_result(tx, ref, response.encode()):
                return StepResult(done=True)  # deleted meanwhile: another job can still collect
            batches.set_batch_state(tx, task.task_id, BatchState.COLLECTED)
            batches.delete_total(tx, task.task_id)
        return StepResult(done=True)

    def _waits(self, ref: CollectionRef, reason: str, *, helper_away: bool = False) -> StepResult:
        known = reason[:MAX_REASON_CHARACTERS]
        batches.record_collection_failure(self._database, ref, known)
        return StepResult(done=False, reason=reason, helper_away=helper_away)

    def _refused(self, ref: CollectionRef, error: ProblemError, who: str) -> StepResult:
        failure = f"{who}{error.detail}"[:MAX_REASON_CHARACTERS]
        with self._database.write() as tx:
            batches.store_refusal(tx, ref, error, failure)
        return StepResult(done=True, reason=str(error))


def _may_pass(error: ProblemError) -> bool:
    """Whether a refusal may be temporary, or an operator can fix it in the helper's settings."""
    return (
        error.problem in (None, Problem.INVALID_TASK, Problem.UNRECOGNIZED_TASK)
        or error.status in (401, 403)
        or error.status >= 500
    )
