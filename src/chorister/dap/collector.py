"""The collector: asks a leader for a task's batch, waits, opens both shares and adds them up.

    handle = collector.create(task)         # any number of times: it is one collection job
    outcome = collector.poll(handle)        # `Collected`, or `NotYet` with the time to wait
    collector.delete(handle)                # when the result is safe

A handle is all that there is to remember, and asking twice makes no second job: a collector that
crashed resumes with `create`, or with the handle's JSON, and reads the same sealed result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

import httpx2
import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from chorister._native import HPKEKeypair
from chorister.canonical import Model, b64url_decode, b64url_encode, culprit, loads
from chorister.clock import Clock, SystemClock
from chorister.dap.binding import native_vdaf
from chorister.dap.draft import (
    COLLECTION_JOB_REQUEST,
    COLLECTION_JOB_RESPONSE,
    BatchMode,
    Problem,
    Role,
    aggregate_share_info,
    collection_jobs_path,
)
from chorister.dap.http import MIN_LIMIT, HTTPClient
from chorister.dap.media import is_media_type
from chorister.dap.messages import AggregateShareAad, CollectionJobReq, CollectionJobResp, Query
from chorister.dap.status import RecipeStatus
from chorister.dap.task import Interval, TaskConfiguration, task_id
from chorister.dap.taskprov import AdvertisedTask, advertise
from chorister.dap.urls import created_resource, resource_url
from chorister.errors import (
    CollectionInvalid,
    DecodeError,
    HPKEError,
    InvalidInput,
    ProblemError,
    Unreachable,
)

__all__ = ["Collected", "CollectionHandle", "Collector", "NotYet"]

_PAUSE: Final = 1
_LONGEST_PAUSE: Final = 300
_GONE: Final = frozenset((404, 410))
_MAX_HANDLE: Final = 1 << 20


class _HandleJSON(Model):
    version: Literal[1] = 1
    task_configuration: str
    request: str
    job: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionHandle:
    """A collection job, as its collector remembers it. It holds no secret."""

    configuration: TaskConfiguration
    request: CollectionJobReq
    job: str  # what the leader called it, and maybe a query

    @property
    def task_id(self) -> bytes:
        """The task that is collected."""
        return task_id(self.configuration)

    @property
    def url(self) -> str:
        """Where the leader keeps it."""
        jobs = collection_jobs_path(self.task_id)
        return resource_url(self.configuration.leader_aggregator_endpoint, f"{jobs}/{self.job}")

    def to_json(self) -> bytes:
        """To be kept until the result is safe."""
        return _HandleJSON(
            task_configuration=b64url_encode(self.configuration.encode()),
            request=b64url_encode(self.request.encode()),
            job=self.job,
        ).canonical()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Raises `DecodeError` for what `to_json` did not write."""
        try:
            kept = _HandleJSON.model_validate(loads(data, max_bytes=_MAX_HANDLE))
        except ValidationError as error:
            field, why = culprit(error)
            raise DecodeError(why, field=field) from None
        if not re.fullmatch(r"[A-Za-z0-9_-]+(\?[!-\"$-~]*)?", kept.job):
            raise DecodeError("not the name of a collection job", field="job")
        try:
            request = CollectionJobReq.decode(b64url_decode(kept.request))
        except ProblemError as error:
            raise DecodeError(str(error), field="request") from None
        return cls(
            configuration=TaskConfiguration.decode(b64url_decode(kept.task_configuration)),
            request=request,
            job=kept.job,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NotYet:
    """There is no result yet, which is no error: `Collector.status` knows what it waits for."""

    retry_after: int  # seconds
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Collected:
    """A batch's result."""

    report_count: int
    interval: Interval  # in units of the task's time precision
    leader_share: bytes
    helper_share: bytes
    counts: NDArray[np.uint64]  # of each bin, aggregators' noise included


class Collector:
    """Collects the tasks of one leader that were made for `keypair`."""

    def __init__(
        self,
        leader_url: str,
        token: str,
        keypair: HPKEKeypair,
        *,
        timeout: float = 60.0,
        ca_file: Path | None = None,
        transport: httpx2.BaseTransport | None = None,
        clock: Clock | None = None,
    ) -> None:
        """How the leader is spoken to is as in `HTTPClient`."""
        self._leader = leader_url
        self._keypair = keypair
        self._http = HTTPClient(token=token, timeout=timeout, ca_file=ca_file, transport=transport)
        self._clock = clock or SystemClock()

    def create(self, task: AdvertisedTask) -> CollectionHandle:
        """Ask for the task's only batch. Asking again gives the same job."""
        interval = self._check(task)
        request = CollectionJobReq(query=Query.of(interval))
        url = resource_url(self._leader, collection_jobs_path(task.task_id))
        answer = self._http.request(
            "POST",
            url,
            headers={
                "Content-Type": COLLECTION_JOB_REQUEST,
                **advertise(task.configuration.encode()),
            },
            body=request.encode(),
            limit=_result_limit(task.configuration),
        )
        location = created_resource(url, answer.headers.get("location", ""))
        return CollectionHandle(
            configuration=task.configuration,
            request=request,
            job=location.removeprefix(f"{url}/"),
        )

    def poll(self, handle: CollectionHandle, *, noise_trials: int = 0) -> Collected | NotYet:
        """Look once. `noise_trials` is how many coins each aggregator threw for each bin.

        Raises `CollectionInvalid` where the answer is not this task's result, `ProblemError` where
        the leader refuses, `Unreachable` where a later look may find more.
        """
        self._check_leader(handle.configuration)
        try:
            answer = self._http.request(
                "GET",
                handle.url,
                headers=advertise(handle.configuration.encode()),
                limit=_result_limit(handle.configuration),
            )
        except ProblemError as error:
            if error.problem != Problem.INVALID_BATCH_SIZE:
                raise
            # A leader that does not wait for more reports says so: that is no failure either.
            return NotYet(retry_after=_LONGEST_PAUSE, reason=f"too few reports yet: {error.detail}")
        if not answer.body:
            asked = answer.retry_after(self._clock)
            pause = min(_PAUSE if asked is None else max(asked, _PAUSE), _LONGEST_PAUSE)
            return NotYet(retry_after=pause, reason="the leader has no result yet")
        if not is_media_type(answer.content_type, COLLECTION_JOB_RESPONSE):
            raise Unreachable(f"{handle.url} answers with {answer.content_type!r}")
        return self._open(handle, answer.body, noise_trials)

    def delete(self, handle: CollectionHandle) -> None:
        """Tell the leader that the result is safe; it forgets it. Twice does no harm."""
        self._check_leader(handle.configuration)
        try:
            headers = advertise(handle.configuration.encode())
            self._http.request("DELETE", handle.url, headers=headers)
        except ProblemError as error:
            if error.status not in _GONE:
                raise

    def status(self, recipe_digest: bytes) -> RecipeStatus:
        """What the leader says of a recipe's progress: Chorister's own resource, none of DAP's."""
        url = resource_url(self._leader, f"chorister/recipes/{recipe_digest.hex()}")
        return RecipeStatus.parse(self._http.request("GET", url).body)

    def _check(self, task: AdvertisedTask) -> Interval:
        """Take part only in what can be collected (taskprov, "Opting into a Task")."""
        configuration = task.configuration
        self._check_leader(configuration)
        if task_id(configuration) != task.task_id:
            raise InvalidInput("the task's id is not that of its configuration")
        native_vdaf(configuration.vdaf)
        interval = configuration.task_interval
        if configuration.batch_mode is not BatchMode.TIME_INTERVAL or interval is None:
            raise InvalidInput("only tasks of the time-interval mode with an interval are known")
        end = (interval.start + interval.duration) * configuration.time_precision
        if self._clock.now() >= end:
            raise InvalidInput(f"the task ended at {end} (POSIX seconds): its reports are gone")
        return interval

    def _check_leader(self, configuration: TaskConfiguration) -> None:
        if configuration.leader_aggregator_endpoint != self._leader:
            raise InvalidInput(
                f"the task's leader is {configuration.leader_aggregator_endpoint}, and this "
                f"credential is for {self._leader}"
            )

    def _open(self, handle: CollectionHandle, body: bytes, noise_trials: int) -> Collected:
        configuration = handle.configuration
        aad = AggregateShareAad(
            task_id=handle.task_id,
            task_configuration=configuration,
            collection_job_req=handle.request,
        ).encode()
        try:
            result = CollectionJobResp.decode(body)
            _check_result(handle, result)
            leader, helper = (
                self._keypair.open(share, aggregate_share_info(role), aad)
                for role, share in (
                    (Role.LEADER, result.leader_encrypted_agg_share),
                    (Role.HELPER, result.helper_encrypted_agg_share),
                )
            )
            counts = native_vdaf(configuration.vdaf).unshard(
                leader, helper, count=result.report_count, noise_trials=noise_trials
            )
        except (DecodeError, HPKEError, InvalidInput) as error:
            raise CollectionInvalid(
                f"what {self._leader} answers is not the result of this task: {error}"
            ) from error
        return Collected(
            report_count=result.report_count,
            interval=result.interval,
            leader_share=leader,
            helper_share=helper,
            counts=np.frombuffer(counts, dtype=np.uint64),
        )


def _check_result(handle: CollectionHandle, result: CollectionJobResp) -> None:
    least = handle.configuration.min_batch_size
    if result.report_count < least:
        raise DecodeError(f"{result.report_count} reports, where devices asked for {least}")
    batch, given = handle.request.query.batch_interval, result.interval
    outside = given.start < batch.start or sum(given) > sum(batch)
    if outside or not given.duration:
        raise DecodeError(f"the reports' interval {tuple(given)} is not within {tuple(batch)}")


def _result_limit(configuration: TaskConfiguration) -> int:
    """Two shares of 16 bytes a bin, and what seals them."""
    return MIN_LIMIT + 2 * 16 * configuration.vdaf.length
