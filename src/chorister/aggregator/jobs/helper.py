"""The helper's half: verify a leader's jobs, add them up, and release its share once.

The helper does not trust the leader. The task is the one it knows from the log, the minimum is the
one in its own copy of the configuration, count and checksum are its own. A repeated request
gets the stored response, byte for byte; for any other, everything that follows from it (ids
claimed, sum, response) is one durable transaction at the end, and only then is it answered.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from chorister._native import Aggregated, Headers, scan_verify_inits
from chorister.aggregator.jobs.release import (
    CollectedFile,
    Sampler,
    add_noise,
    check_collection_request,
    released_before_restore,
    sample_noise,
    seal_share,
    unknown_collector,
    wrong_bucket,
)
from chorister.aggregator.known_tasks import MAX_SKEW_SECONDS, KnownTask
from chorister.aggregator.storage import batches
from chorister.aggregator.storage.batches import JOB_RESPONSES, SHARES, StoredResponse
from chorister.aggregator.storage.counters import VERIFIED, count, rejections
from chorister.aggregator.storage.database import Database, Transaction
from chorister.aggregator.storage.hpke_keys import KeyRing
from chorister.aggregator.storage.reports import add_report_ids
from chorister.aggregator.storage.schema import BatchState
from chorister.canonical import sha256
from chorister.clock import Clock
from chorister.dap.draft import (
    REPORT_ID_BYTES,
    VERIFICATION_KEY_ID,
    Problem,
    ReportError,
    Role,
)
from chorister.dap.http import invalid_message
from chorister.dap.messages import (
    AggregateShare,
    AggregateShareReq,
    AggregationJobInitReq,
    AggregationJobResp,
)
from chorister.dap.task import verify_key
from chorister.errors import DecodeError, InternalError

_ID_BYTES: Final = 16


class _IdsTaken(Exception):
    """Other jobs added some of the report ids meanwhile."""

    def __init__(self, ids: set[bytes]) -> None:
        super().__init__(f"{len(ids)} ids")
        self.ids = ids


class Helper:
    """The helper's responses to its leader. Any thread of any process may call it."""

    def __init__(
        self,
        database: Database,
        keys: KeyRing,
        clock: Clock,
        *,
        verify_key_init: Callable[[str], bytes],
        collectors: Mapping[bytes, bytes],
        threads: int = 0,
        sample: Sampler = sample_noise,
        collected: CollectedFile | None = None,
    ) -> None:
        """The arguments mean the same as those of the leader's two job drivers.

        But `verify_key_init` maps a leader's URL to the secret shared with it.
        """
        self._database = database
        self._keys = keys
        self._clock = clock
        self._verify_key_init = verify_key_init
        self._collectors = collectors
        self._threads = threads
        self._sample = sample
        self._collected = collected

    # --- aggregation jobs -----------------------------------------------------------------------

    def create_job(self, task: KnownTask, request: bytes) -> StoredResponse:
        """Verify and add up a job; the body is an encoded `AggregationJobResp`."""
        self._check_time(task)
        digest = sha256(request)
        with self._database.read() as tx:
            known = _known_job(tx, task, digest)
        if known is not None:
            return known
        inits, headers = _read_job_request(task, request)
        ids = _split_ids(headers.ids)
        rejected = bytearray(_rejected_headers(task, headers))
        # Each round either commits or learns of further ids that other jobs added: it ends.
        for _ in range(len(ids) + 1):
            with self._database.read() as tx:
                if batches.batch_state(tx, task.task_id) is not BatchState.OPEN:
                    rejected[:] = bytes([ReportError.BATCH_COLLECTED]) * len(rejected)
            resps, added = task.binding.helper_initialize(
                verify_key(self._verify_key_init(task.leader_url), task.task_id),
                self._keys.keypairs(),
                inits,
                rejected=bytes(rejected),
                threads=self._threads,
            )
            try:
                return self._commit_job(task, digest, ids, resps, added)
            except _IdsTaken as taken:
                for place, report_id in enumerate(ids):
                    if report_id in taken.ids:
                        rejected[place] = ReportError.REPORT_REPLAYED
        raise InternalError("other jobs keep adding a job's report ids")

    def _commit_job(
        self,
        task: KnownTask,
        digest: bytes,
        ids: Sequence[bytes],
        resps: bytes,
        added: Aggregated,
    ) -> StoredResponse:
        body = AggregationJobResp(resps).encode()
        response = StoredResponse(digest[:_ID_BYTES], digest, body)
        valid = [each for each, code in zip(ids, added.errors, strict=True) if not code]
        with self._database.write() as tx:
            state = batches.lock_batch(tx, task.task_id, exclusive=False)
            if state is not BatchState.OPEN:
                if valid:
                    raise _IdsTaken(set())  # collected in between: start again, rejecting all
                return response  # nothing to store: it would be rejected again, the same way
            if not JOB_RESPONSES.add(self._database, tx, task.task_id, response):
                known = _known_job(tx, task, digest)  # another thread was faster
                if known is None:
                    raise InternalError("a stored response can't be found")
                return known
            new = add_report_ids(self._database, tx, task.task_id, valid)
            if len(new) < len(valid):
                raise _IdsTaken(set(valid) - new)
            batches.accumulate(self._database, tx, task, added)
            names = {VERIFIED: added.count} | rejections("helper", added.errors)
            count(self._database, tx, task.task_id, names)
        return response

    def _check_time(self, task: KnownTask) -> None:
        now = self._clock.now()
        task.check_live(now)
        if now < task.starts - MAX_SKEW_SECONDS:
            # Refuse the whole job, whose reports all have the same timestamp. Rejecting each with
            # `report_too_early` would be stored with the job, and a slow clock would lose reports.
            raise task.refusal(
                None,
                f"by this helper's clock, {now}, the task begins only at {task.starts}",
                status=503,
            )

    def find_job(self, task: KnownTask, job_id: bytes) -> bytes:
        """Return the encoded `AggregationJobResp` of a job."""
        task.check_live(self._clock.now())
        with self._database.read() as tx:
            found = JOB_RESPONSES.find(tx, task.task_id, job_id)
        if found is None:
            raise task.refusal(
                Problem.UNRECOGNIZED_AGGREGATION_JOB, "no such aggregation job", status=404
            )
        return found.body

    def delete_job(self, task: KnownTask, job_id: bytes) -> None:
        """Delete a stored response. What the job added stays added, and its ids stay known."""
        task.check_live(self._clock.now())
        with self._database.write() as tx:
            JOB_RESPONSES.delete(tx, task.task_id, job_id)

    # --- aggregate shares -----------------------------------------------------------------------

    def create_share(self, task: KnownTask, request: bytes) -> StoredResponse:
        """Release this helper's share of a batch, once; the body is an `AggregateShare`."""
        response = self._release(task, request)
        if self._collected is not None:
            self._collected.add(task.task_id)  # before it leaves, whichever process committed it
        return response

    def _release(self, task: KnownTask, request: bytes) -> StoredResponse:
        task.check_live(self._clock.now())
        share_request = _read_share_request(task, request)
        collector = self._collectors.get(task.collector)
        if collector is None:
            raise unknown_collector(task)
        digest = sha256(request)
        # The file before the database: it is written later, so the database knows every release
        # that the file knows, unless the database was restored.
        released = self._collected is not None and task.task_id in self._collected
        # Check first, so that noise is drawn only for a request that may get it.
        with self._database.read() as tx:
            known = _known_share(tx, task, digest)
            if known is not None:
                return known
            before = self._check_batch(tx, task, share_request, released)
        noised = add_noise(task.vdaf, before.share, task.noise, self._sample)
        sealed = seal_share(
            task, share_request.collection_job_req, noised, sender=Role.HELPER, collector=collector
        )
        response = StoredResponse(digest[:_ID_BYTES], digest, AggregateShare(sealed).encode())
        with self._database.write() as tx:
            state = batches.lock_batch(tx, task.task_id, exclusive=True)
            if state is not BatchState.OPEN:
                # Another request was faster; its noise is the one that was committed.
                known = _known_share(tx, task, digest)
                if known is not None:
                    return known
            # Nothing can be added while we hold the lock: what was sealed is what is there.
            if self._check_batch(tx, task, share_request, released) != before:
                raise InternalError("a batch of the same reports has another sum")
            if not SHARES.add(self._database, tx, task.task_id, response):
                raise InternalError("an open batch has a released share")
            batches.set_batch_state(tx, task.task_id, BatchState.COLLECTED)
            batches.delete_total(tx, task.task_id)
            JOB_RESPONSES.delete(tx, task.task_id)
        return response

    def _check_batch(
        self, tx: Transaction, task: KnownTask, request: AggregateShareReq, released: bool
    ) -> batches.Total:
        """Return the sum if it may be released; `released`: the file says that it was."""
        if batches.batch_state(tx, task.task_id) is not BatchState.OPEN:
            raise task.refusal(Problem.BATCH_OVERLAP, "the batch was collected before")
        if released:
            raise released_before_restore(task, "helper")
        total = batches.batch_total(self._database, tx, task)
        if total.reports < task.min_batch_size:
            raise task.refusal(
                Problem.INVALID_BATCH_SIZE,
                f"fewer than {task.min_batch_size} reports are verified here",
            )
        same = hmac.compare_digest(total.checksum, request.checksum)
        if total.reports != request.report_count or not same:
            raise task.refusal(
                Problem.BATCH_MISMATCH,
                f"the leader added up {request.report_count} reports, this helper {total.reports}"
                + ("" if total.reports != request.report_count else ", but not the same ones"),
            )
        return total

    def find_share(self, task: KnownTask, share_id: bytes) -> bytes:
        """Return the encoded `AggregateShare` that was released."""
        task.check_live(self._clock.now())
        with self._database.read() as tx:
            found = SHARES.find(tx, task.task_id, share_id)
        if found is None:
            raise task.refusal(None, "no such aggregate share", status=404)
        if self._collected is not None:
            self._collected.add(task.task_id)
        return found.body

    def delete_share(self, task: KnownTask, share_id: bytes) -> None:
        """Delete a released share; the batch stays collected."""
        task.check_live(self._clock.now())
        with self._database.write() as tx:
            SHARES.delete(tx, task.task_id, share_id)


# --- reading requests ---------------------------------------------------------------------------


def _read_job_request(task: KnownTask, request: bytes) -> tuple[bytes, Headers]:
    try:
        message = AggregationJobInitReq.decode(request)
        headers = scan_verify_inits(message.verify_inits)
    except DecodeError as error:
        raise invalid_message(error, task_id=task.task_id) from None
    if message.verification_key_id != VERIFICATION_KEY_ID:
        raise task.refusal(
            Problem.INVALID_MESSAGE,
            f"the task's only verification key is key {VERIFICATION_KEY_ID}",
        )
    if message.agg_param:
        raise task.refusal(
            Problem.INVALID_AGGREGATION_PARAMETER,
            "the only aggregation parameter of Prio3 is the empty one",
        )
    if not headers.count:
        raise task.refusal(Problem.INVALID_MESSAGE, "a job has at least one report")
    return message.verify_inits, headers


def _split_ids(ids: bytes) -> list[bytes]:
    return [ids[at : at + REPORT_ID_BYTES] for at in range(0, len(ids), REPORT_ID_BYTES)]


def _rejected_headers(task: KnownTask, headers: Headers) -> bytes:
    """Return error codes for reports outside the task's interval, or with extensions."""
    times = np.frombuffer(headers.times, np.uint64)
    codes = np.zeros(headers.count, np.uint8)
    codes[np.frombuffer(headers.extensions, np.uint8) != 0] = ReportError.INVALID_MESSAGE
    codes[times < task.interval.start] = ReportError.TASK_NOT_STARTED
    codes[times >= task.interval.start + task.interval.duration] = ReportError.TASK_EXPIRED
    return codes.tobytes()


def _read_share_request(task: KnownTask, request: bytes) -> AggregateShareReq:
    try:
        message = AggregateShareReq.decode(request)
    except DecodeError as error:
        raise invalid_message(error, task_id=task.task_id) from None
    if message.collection_job_req.agg_param:
        # Not `invalidAggregationParameter`, which blames the collector: the leader let it pass.
        raise task.refusal(
            Problem.INVALID_MESSAGE, "the jobs of this batch had the empty aggregation parameter"
        )
    check_collection_request(task, message.collection_job_req)
    if message.batch_selector.batch_mode is not task.configuration.batch_mode:
        raise task.refusal(Problem.INVALID_MESSAGE, "the task has another batch mode")
    if message.batch_selector.batch_interval != task.interval:
        raise wrong_bucket(task)
    return message


def _known_job(tx: Transaction, task: KnownTask, digest: bytes) -> StoredResponse | None:
    """Find the stored response to the same request."""
    found = JOB_RESPONSES.find(tx, task.task_id, digest[:_ID_BYTES])
    if found is not None and not hmac.compare_digest(found.request_digest, digest):
        raise task.refusal(Problem.INVALID_MESSAGE, "another job has this id")
    return found


def _known_share(tx: Transaction, task: KnownTask, digest: bytes) -> StoredResponse | None:
    found = SHARES.find(tx, task.task_id, digest[:_ID_BYTES])
    if found is None or not hmac.compare_digest(found.request_digest, digest):
        return None
    return found
