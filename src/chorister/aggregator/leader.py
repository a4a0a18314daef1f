"""The leader: uploads, aggregation jobs, collection, and the end of each task. No HTTP here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chorister.aggregator.aggregation import AggregationJobs, HelperClient, JobRef, Step
from chorister.aggregator.collected_file import CollectedFile
from chorister.aggregator.collecting import CollectionRef, Collections
from chorister.aggregator.database import Database
from chorister.aggregator.hpke_keys import KeyRing
from chorister.aggregator.noise import Sampler, draw
from chorister.aggregator.progress import TaskStatus, progress, task_status
from chorister.aggregator.queue import JobQueue, NoQueue
from chorister.aggregator.sweeping import Swept, sweep
from chorister.aggregator.tasks import KnownTask, TaskRegister
from chorister.aggregator.uploads import UploadPlan, Uploads
from chorister.clock import Clock
from chorister.dap.messages import CollectionJobResp, UploadErrors

__all__ = [
    "CollectionRef",
    "HelperClient",
    "JobRef",
    "Leader",
    "Step",
    "UploadPlan",
]


class Leader:
    """All that a leader does. Every method may be called from any thread, and of any process."""

    def __init__(
        self,
        database: Database,
        tasks: TaskRegister,
        keys: KeyRing,
        clock: Clock,
        *,
        verify_key_init: bytes,
        helper: HelperClient,
        collectors: Mapping[bytes, bytes],
        threads: int = 0,
        sample: Sampler = draw,
        queue: JobQueue | None = None,
        collected: CollectedFile | None = None,
    ) -> None:
        """`verify_key_init` is the secret that both aggregators share (taskprov).

        `collectors`: SHA-256 of a collector's encoded HPKE configuration -> the configuration.
        `threads`: of the native calls of one step; 0 for all cores.
        `queue`: where jobs are enqueued when they become due; for the embedded loop nowhere.
        `collected` outlives a database that is restored from a backup.
        """
        self.tasks = tasks
        self.keys = keys
        self._database = database
        self._clock = clock
        queue = queue or NoQueue()
        self._uploads = Uploads(database, keys, clock, queue=queue)
        self._jobs = AggregationJobs(
            database,
            tasks,
            keys,
            clock,
            verify_key_init=verify_key_init,
            helper=helper,
            queue=queue,
            threads=threads,
        )
        self._collections = Collections(
            database,
            tasks,
            clock,
            helper=helper,
            queue=queue,
            collectors=collectors,
            sample=sample,
            collected=collected,
        )

    # --- devices --------------------------------------------------------------------------------

    def check_upload(self, task: KnownTask, reports: bytes) -> UploadPlan:
        """Look at an upload, without the database; `ProblemError` where it is malformed."""
        return self._uploads.check_upload(task, reports)

    def store_uploads(self, plans: Sequence[UploadPlan]) -> list[UploadErrors]:
        """Store uploads in one transaction, durable when it returns; the errors of each."""
        return self._uploads.store_uploads(plans)

    # --- jobs -----------------------------------------------------------------------------------

    def create_aggregation_jobs(self, limit: int) -> list[JobRef]:
        """Make jobs of waiting reports, at most `limit`; fewer means that none wait any more."""
        return self._jobs.create(limit)

    def unfinished_jobs(self, limit: int = 1000) -> list[JobRef]:
        """Jobs to step, those that failed least often first."""
        return self._jobs.unfinished(limit)

    def step(self, job: JobRef) -> Step:
        """Verify a job with the helper and add it up. Harmless to do twice, also at once."""
        return self._jobs.step(job)

    # --- the collector --------------------------------------------------------------------------

    def create_collection(self, task: KnownTask, request: bytes, collector: bytes) -> CollectionRef:
        """Begin, or find, the collection job of a request by an authenticated collector."""
        return self._collections.create(task, request, collector)

    def collection(
        self, task: KnownTask, collection_id: bytes, collector: bytes
    ) -> CollectionJobResp | None:
        """The sealed result, None as long as there is none; `ProblemError` where it failed."""
        return self._collections.find(task, collection_id, collector)

    def delete_collection(self, task: KnownTask, collection_id: bytes, collector: bytes) -> None:
        """Forget a collection job and its result; the batch stays collected."""
        self._collections.delete(task, collection_id, collector)

    def pending_collections(self) -> list[CollectionRef]:
        """Collection jobs to step."""
        return self._collections.pending()

    def step_collection(self, collection: CollectionRef) -> Step:
        """Bring a collection job as far as it gets. Harmless to do twice, also at once."""
        return self._collections.step(collection)

    # --- everyone -------------------------------------------------------------------------------

    def progress(self, recipe_digest: bytes) -> dict[str, object] | None:
        """What an analyst may see of a recipe; None for one that this leader does not know."""
        tasks = self.tasks.of_recipe(recipe_digest)
        if not tasks:
            return None
        return progress(task_status(self._database, tasks), self._clock.now())

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
