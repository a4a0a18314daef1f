"""Uploads at the leader: checked without a database, then stored, many requests at a time.

`ReportWriter.check` is cheap and decides everything that a report's header and our clock decide.
`ReportWriter.store` is one durable transaction for any number of requests: it claims the ids (of
two copies that arrive at the same moment, one is accepted) and writes the reports unchanged.

`UploadQueue` is group commit: while one transaction is being written, new uploads wait for the
next. One disk sync then serves every client that arrived meanwhile, and nobody waits for a timer.
The queue is bounded in requests and in bytes: when it is full, clients have to try again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from chorister._native import scan_reports
from chorister.aggregator.jobs.aggregation_job_driver import job_capacity
from chorister.aggregator.known_tasks import MAX_SKEW_SECONDS, KnownTask
from chorister.aggregator.storage.batches import lock_batch
from chorister.aggregator.storage.counters import UPLOADED, count, rejections
from chorister.aggregator.storage.database import Database, Transaction
from chorister.aggregator.storage.hpke_keys import KeyRing
from chorister.aggregator.storage.reports import Segment, add_report_ids, add_segments
from chorister.aggregator.storage.schema import BatchState
from chorister.clock import Clock
from chorister.dap.draft import REPORT_ID_BYTES, Problem, ReportError
from chorister.dap.http import invalid_message
from chorister.dap.upload_messages import ReportUploadStatus, UploadErrors
from chorister.errors import DecodeError, ProblemError

if TYPE_CHECKING:
    from chorister.aggregator.jobs.job_queue import JobQueue

U = TypeVar("U")
R = TypeVar("R")

_MAX_SEGMENT_REPORTS: Final = 64
_MANY_REPORTS: Final = 256
_SEGMENT_ID_BYTES: Final = 16
_ALL_STORED: Final = UploadErrors(())


class CheckedUpload(NamedTuple):
    """One checked request: what is to be stored, and what not. (A tuple is fastest to create.)"""

    task: KnownTask
    reports: bytes
    ids: tuple[bytes, ...]
    ends: tuple[int, ...]  # where each report ends
    errors: bytes  # one `ReportError` per report, 0 where there is none yet


class _Part(NamedTuple):
    """An upload, and the outcome for each of its reports."""

    upload: CheckedUpload
    codes: bytearray

    def errors(self) -> UploadErrors:
        if not any(self.codes):
            return _ALL_STORED
        return UploadErrors(
            tuple(
                ReportUploadStatus(report_id, code)
                for report_id, code in zip(self.upload.ids, self.codes, strict=True)
                if code
            )
        )


class ReportWriter:
    """Checks and stores uploads. Any thread of any process may call it."""

    def __init__(
        self, database: Database, keys: KeyRing, clock: Clock, *, queue: JobQueue | None = None
    ) -> None:
        """`queue`: where workers fetch jobs; None if the server's own loop runs them."""
        self._database = database
        self._keys = keys
        self._clock = clock
        self._queue = queue

    def check(self, task: KnownTask, reports: bytes) -> CheckedUpload:
        """Check a request; raises `ProblemError` if it is not a list of reports."""
        try:
            headers = scan_reports(reports)
        except DecodeError as error:
            raise invalid_message(error, task_id=task.task_id) from None
        joined = headers.ids
        self._check_number(task, len(joined) // REPORT_ID_BYTES, len(reports))
        if len(joined) == REPORT_ID_BYTES:
            ids: tuple[bytes, ...] = (joined,)
        else:
            ids = tuple(
                joined[start : start + REPORT_ID_BYTES]
                for start in range(0, len(joined), REPORT_ID_BYTES)
            )
        # Plain loops: most requests have one report, for which numpy would take longer.
        extensions, config_ids = headers.extensions, headers.config_ids
        ends = tuple(memoryview(headers.ends).cast("Q"))
        times = memoryview(headers.times).cast("Q")
        known = self._keys.usable_ids(config_ids)
        now, bucket, size = self._clock.now(), task.interval.start, task.report_bytes
        early, closed = now < task.starts - MAX_SKEW_SECONDS, now >= task.closes
        errors = bytearray(len(ids))
        start = 0
        for place, end in enumerate(ends):
            # If several apply, the first one counts: those that make a device give up come first.
            if closed:
                errors[place] = ReportError.TASK_EXPIRED
            elif times[place] != bucket:
                errors[place] = ReportError.REPORT_DROPPED
            elif end - start != size or extensions[place]:
                errors[place] = ReportError.INVALID_MESSAGE
            elif early:
                errors[place] = ReportError.REPORT_TOO_EARLY
            elif config_ids[place] not in known:
                errors[place] = ReportError.OUTDATED_CONFIG
            start = end
        return CheckedUpload(task, reports, ids, ends, bytes(errors))

    @staticmethod
    def _check_number(task: KnownTask, count: int, size: int) -> None:
        """Refuse a body most of whose reports must be too short, before naming each of them.

        A few bad reports among good ones are named; hundreds of thousands are an attack.
        """
        if count > _MANY_REPORTS and count * task.report_bytes > 2 * size:
            raise task.refusal(
                Problem.INVALID_MESSAGE,
                f"{size} bytes can't hold {count} reports of {task.report_bytes} bytes each",
            )

    def store(self, uploads: Sequence[CheckedUpload]) -> list[UploadErrors]:
        """Store uploads in one transaction. Returns the rejected reports of each.

        Durable when it returns: then, and not before, the requests are answered.
        """
        by_task: dict[bytes, list[_Part]] = defaultdict(list)
        parts = [_Part(upload, bytearray(upload.errors)) for upload in uploads]
        for part in parts:
            by_task[part.upload.task.task_id].append(part)
        with self._database.write() as tx:
            stored = 0
            for task_id in sorted(by_task):
                stored += self._store_task(tx, by_task[task_id])
            if stored and self._queue is not None:
                self._queue.reports_stored(tx)
        self._database.written(sum(len(upload.reports) for upload in uploads))
        return [part.errors() for part in parts]

    def _store_task(self, tx: Transaction, parts: Sequence[_Part]) -> int:
        """Store the uploads for one task. Returns the number of reports stored."""
        task = parts[0].upload.task
        state = lock_batch(tx, task.task_id, exclusive=False)
        if state is not BatchState.OPEN:
            over = state is None or state >= BatchState.ENDING
            closed = ReportError.TASK_EXPIRED if over else ReportError.BATCH_COLLECTED
            for _, codes in parts:
                codes[:] = bytes(code or closed for code in codes)
            if over:
                return 0  # nothing about it is written any more
        wanted: set[bytes] = set()
        for upload, codes in parts:
            if any(codes):
                wanted.update(
                    each for each, code in zip(upload.ids, codes, strict=True) if not code
                )
            else:
                wanted.update(upload.ids)
        new = add_report_ids(self._database, tx, task.task_id, wanted)
        stored: list[bytes] = []
        for upload, codes in parts:
            start = 0
            for place, (report_id, end) in enumerate(zip(upload.ids, upload.ends, strict=True)):
                if not codes[place]:
                    if report_id in new:
                        new.discard(report_id)  # a second copy in the same transaction is a replay
                        stored.append(upload.reports[start:end])
                    else:
                        codes[place] = ReportError.REPORT_REPLAYED
                start = end
        size = min(_MAX_SEGMENT_REPORTS, job_capacity(task))
        add_segments(
            self._database,
            tx,
            task.task_id,
            [
                Segment(self._segment_id(), stored[start : start + size])
                for start in range(0, len(stored), size)
            ],
        )
        names = {UPLOADED: len(stored)} | rejections(
            "upload", b"".join(codes for _, codes in parts)
        )
        count(self._database, tx, task.task_id, names)
        return len(stored)

    def _segment_id(self) -> bytes:
        """Return a unique id; ids ascend in the order of arrival."""
        return self._clock.now().to_bytes(6, "big") + secrets.token_bytes(_SEGMENT_ID_BYTES - 6)


class QueueFull(ProblemError):
    """There is no room for an upload; the client should try again later."""

    def __init__(self) -> None:
        super().__init__(None, "too many uploads are waiting; try again later", status=503)


class _Waiting(NamedTuple, Generic[U, R]):
    """An upload in the queue. `done` is called with its outcome."""

    upload: U
    size: int
    done: Callable[[R | BaseException], None]


class UploadQueue(Generic[U, R]):
    """Passes uploads to `store`, many at a time, in threads.

    A thread that has stored some takes the next ones itself: it never waits for a busy event loop.
    """

    def __init__(
        self,
        store: Callable[[Sequence[U]], Sequence[R]],
        *,
        max_waiting: int = 4096,
        max_bytes: int = 256 << 20,
        batch: int = 256,
        threads: int = 1,
        stored: Callable[[int, float], None] = lambda _count, _seconds: None,
    ) -> None:
        """`stored` is called on the loop after each transaction.

        `threads`: how many transactions may be under way at the same time.
        """
        self._store = store
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self._batch = batch
        self._stored = stored
        self._queue: SimpleQueue[_Waiting[U, R] | None] = SimpleQueue()
        self._number = threads
        self._threads: list[threading.Thread] = []  # started with the first upload
        self._closing = False
        # Requests without a response yet, and their bytes; these belong to the loop.
        self.waiting = 0
        self._bytes = 0

    def add(self, upload: U, size: int, done: Callable[[R | BaseException], None]) -> None:
        """Queue one upload of `size` bytes. `done` is called when it is durable, or has failed."""
        if (
            self._closing
            or self.waiting >= self._max_waiting
            or self._bytes + size > self._max_bytes
        ):
            raise QueueFull
        if not self._threads:
            self._start()
        self.waiting += 1
        self._bytes += size
        self._queue.put(_Waiting(upload, size, done))

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(self._number):
            thread = threading.Thread(target=self._run, args=(loop,), name="uploads", daemon=True)
            thread.start()
            self._threads.append(thread)

    def put(self, upload: U, size: int) -> asyncio.Future[R]:
        """Queue one upload; the future is done when it is durable."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()

        def done(outcome: R | BaseException) -> None:
            if future.done():  # its client has disconnected
                return
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self.add(upload, size, done)
        return future

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Store what waits, until None comes."""
        more = True
        while more:
            taken: list[_Waiting[U, R]] = []
            with contextlib.suppress(Empty):
                while len(taken) < self._batch:
                    each = self._queue.get(block=not taken)
                    if each is None:
                        more = False
                        break
                    taken.append(each)
            if taken:
                self._store_batch(taken, loop)

    def _store_batch(
        self, taken: Sequence[_Waiting[U, R]], loop: asyncio.AbstractEventLoop
    ) -> None:
        started = time.monotonic()
        outcomes: Sequence[R | BaseException]
        seconds = None
        try:
            outcomes = self._store([each.upload for each in taken])
            seconds = time.monotonic() - started
        except BaseException as error:
            outcomes = [error] * len(taken)
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(self._tell, taken, outcomes, seconds)

    def _tell(
        self,
        taken: Sequence[_Waiting[U, R]],
        outcomes: Sequence[R | BaseException],
        seconds: float | None,  # None if the transaction failed
    ) -> None:
        self.waiting -= len(taken)
        self._bytes -= sum(each.size for each in taken)
        for each, outcome in zip(taken, outcomes, strict=True):
            try:
                each.done(outcome)
            except Exception as error:  # a client's: the others get their answers
                context = {"message": "an upload was not answered", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)
        if seconds is not None:
            self._stored(len(taken), seconds)

    async def close(self) -> None:
        """Accept nothing more, and write what waits."""
        self._closing = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
