"""The collector: requests a task's batch from the leader, waits, opens both shares and adds them.

    handle = collector.create(task)         # any number of times: it is one collection job
    outcome = collector.poll(handle)        # `Collected`, or `NotYet` with the time to wait
    collector.delete(handle)                # when the result is safe

The handle is all there is to remember, and asking twice does not create a second job: a collector
that crashed resumes with `create`, or with the handle's JSON, and reads the same sealed result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, Self

import httpx2
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from chorister._native import HPKEKeypair
from chorister.canonical import Model, b64url_decode, b64url_encode, first_error, loads
from chorister.clock import Clock, SystemClock, utc_text
from chorister.dap.draft import (
    COLLECTION_JOB_REQUEST,
    COLLECTION_JOB_RESPONSE,
    BatchMode,
    Problem,
    Role,
    aggregate_share_info,
    collection_jobs_path,
)
from chorister.dap.http import (
    MIN_LIMIT,
    HTTPClient,
    created_resource,
    is_media_type,
    poll_delay,
    resource_url,
)
from chorister.dap.messages import AggregateShareAad, CollectionJobReq, CollectionJobResp, Query
from chorister.dap.task import (
    AdvertisedTask,
    Interval,
    TaskConfiguration,
    advertise,
    task_id,
)
from chorister.errors import (
    CollectionInvalid,
    DecodeError,
    HPKEError,
    InvalidInput,
    ProblemError,
    Unreachable,
)

_MAX_POLL_SECONDS: Final = 300
_GONE_STATUSES: Final = frozenset((404, 410))
_MAX_HANDLE_BYTES: Final = 1 << 20


# --- Progress of a recipe: Chorister's own resource, not DAP's ------------------------------------


_Text = Annotated[str, StringConstraints(max_length=500, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
_Count = Annotated[int, Field(ge=0)]


class _Received(BaseModel):
    """A later version of the leader may send more; the rest is ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Rejections(_Received):
    """Reports that were not counted, by reason, at each aggregator."""

    leader: Mapping[_Text, _Count] = {}
    helper: Mapping[_Text, _Count] = {}


class RecipeStatus(_Received):
    """How far a recipe has come, and what it waits for.

    Below the minimum cohort there are only tenths of it, for the whole recipe. That is coarse but
    not a protection: whoever uploads their own reports can learn exact counts from it, and when a
    report arrived.
    """

    tasks: _Count
    state: Literal["collecting", "ready", "collected", "expired"]
    filled: Annotated[float, Field(ge=0, le=1)] | None = None
    """Tenths of the minimum, over all tasks."""
    reports: _Count | None = None
    """The smallest task's verified reports, rounded down, once every task has the minimum."""
    waiting_for: _Text | None = None
    rejected: Rejections = Rejections()
    closes: int | None = None
    ends: int | None = None
    finished: bool = False
    """Whether nothing more will be released: each batch is collected, or stays too small."""

    @classmethod
    def parse(cls, data: bytes) -> Self:
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            field, why = first_error(error)
            raise Unreachable(f"the leader's status is not readable: {field}: {why}") from None


# --- Collection -----------------------------------------------------------------------------------


class _HandleJSON(Model):
    version: Literal[1] = 1
    task_configuration: str
    request: str
    job: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionHandle:
    """A collection job as its collector remembers it, without any secret."""

    configuration: TaskConfiguration
    request: CollectionJobReq
    job: str  # the name that the leader gave it, perhaps with a query

    @property
    def task_id(self) -> bytes:
        return task_id(self.configuration)

    @property
    def url(self) -> str:
        jobs = collection_jobs_path(self.task_id)
        return resource_url(self.configuration.leader_aggregator_endpoint, f"{jobs}/{self.job}")

    def to_json(self) -> bytes:
        """Return what to keep until the result is safe."""
        return _HandleJSON(
            task_configuration=b64url_encode(self.configuration.encode()),
            request=b64url_encode(self.request.encode()),
            job=self.job,
        ).canonical()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Parse what `to_json` returned; raise `DecodeError` for anything else."""
        try:
            kept = _HandleJSON.model_validate(loads(data, max_bytes=_MAX_HANDLE_BYTES))
        except ValidationError as error:
            field, why = first_error(error)
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
    """There is no result yet. `Collector.status` says what it is waiting for."""

    retry_after: int  # seconds
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Collected:
    """The result of a batch."""

    report_count: int
    interval: Interval  # in units of the task's time precision
    leader_share: bytes
    helper_share: bytes
    counts: NDArray[np.uint64]  # one per bin, including the aggregators' noise


class Collector:
    """Collects the results that one leader seals to `keypair`."""

    def __init__(
        self,
        leader_url: str,
        token: str,
        keypair: HPKEKeypair,
        *,
        ca_bundle: Path | None = None,
        transport: httpx2.BaseTransport | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`ca_bundle` and `transport` are as in `HTTPClient`."""
        self._leader = leader_url
        self._keypair = keypair
        self._http = HTTPClient(token=token, ca_bundle=ca_bundle, transport=transport)
        self._clock = clock or SystemClock()

    def create(self, task: AdvertisedTask) -> CollectionHandle:
        """Request the task's only batch. Asking again returns the same job."""
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
        """Poll once. `noise_trials` is how many coins each aggregator tossed for each bin.

        Raises `CollectionInvalid` if the answer is not this task's result, `ProblemError` if the
        leader refuses, `Unreachable` if a later attempt may succeed.
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
            # From a leader that does not wait for more reports: not a failure either.
            return NotYet(
                retry_after=_MAX_POLL_SECONDS, reason=f"too few reports yet: {error.detail}"
            )
        if not answer.body:
            delay = poll_delay(answer, self._clock, longest=_MAX_POLL_SECONDS)
            return NotYet(retry_after=delay, reason="the leader has no result yet")
        if not is_media_type(answer.content_type, COLLECTION_JOB_RESPONSE):
            raise Unreachable(f"{handle.url} answers with {answer.content_type!r}")
        return self._open(handle, answer.body, noise_trials)

    def delete(self, handle: CollectionHandle) -> None:
        """Tell the leader that it may delete the result. Calling it twice does no harm."""
        self._check_leader(handle.configuration)
        try:
            headers = advertise(handle.configuration.encode())
            self._http.request("DELETE", handle.url, headers=headers)
        except ProblemError as error:
            if error.status not in _GONE_STATUSES:
                raise

    def status(self, recipe_digest: bytes, opens: int | None = None) -> RecipeStatus:
        """Ask the leader for the progress of the window that opens then, or opened last."""
        url = resource_url(self._leader, f"chorister/recipes/{recipe_digest.hex()}")
        url += "" if opens is None else f"?opens={opens}"
        return RecipeStatus.parse(self._http.request("GET", url).body)

    def _check(self, task: AdvertisedTask) -> Interval:
        """Refuse tasks that can't be collected (taskprov, "Opting into a Task")."""
        configuration = task.configuration
        self._check_leader(configuration)
        if task_id(configuration) != task.task_id:
            raise InvalidInput("the task's id is not the hash of its configuration")
        configuration.vdaf.native()
        interval = configuration.task_interval
        if configuration.batch_mode is not BatchMode.TIME_INTERVAL or interval is None:
            raise InvalidInput("the task must have the time-interval mode and an interval")
        end = (interval.start + interval.duration) * configuration.time_precision
        if self._clock.now() >= end:
            raise InvalidInput(f"the task ended at {utc_text(end)}, and its reports were deleted")
        return interval

    def _check_leader(self, configuration: TaskConfiguration) -> None:
        if configuration.leader_aggregator_endpoint != self._leader:
            raise InvalidInput(
                f"the task's leader is {configuration.leader_aggregator_endpoint}, but this "
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
            counts = configuration.vdaf.native().unshard(
                leader, helper, count=result.report_count, noise_trials=noise_trials
            )
        except (DecodeError, HPKEError, InvalidInput) as error:
            raise CollectionInvalid(
                f"{self._leader} did not answer with the result of this task: {error}"
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
        raise DecodeError(f"{result.report_count} reports, but devices asked for at least {least}")
    batch, given = handle.request.query.batch_interval, result.interval
    outside = given.start < batch.start or sum(given) > sum(batch)
    if outside or not given.duration:
        raise DecodeError(f"the reports' interval {tuple(given)} is not within {tuple(batch)}")


def _result_limit(configuration: TaskConfiguration) -> int:
    """Two shares of 16 bytes per bin, and the overhead of sealing."""
    return MIN_LIMIT + 2 * 16 * configuration.vdaf.length
