"""The real leader and helper applications, without sockets, with a tap on the wire between them.

Nothing runs beside the requests: `work` steps the leader's jobs when a test says so.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from chorister.aggregator.config import HelperConfig, LeaderConfig
from chorister.aggregator.inprocess import InProcessNetwork
from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.service import Service
from chorister.aggregator.storage.counters import task_status
from chorister.canonical import b64url_encode
from chorister.clock import SettableClock
from chorister.dap.draft import (
    AGGREGATE_SHARE_REQUEST,
    AGGREGATION_JOB_INIT_REQUEST,
    COLLECTION_JOB_REQUEST,
    ERROR_PREFIX,
    PROBLEM,
    UPLOAD_REQUEST,
    aggregate_shares_path,
    aggregation_jobs_path,
    collection_jobs_path,
    reports_path,
)
from chorister.dap.messages import (
    AggregateShareReq,
    AggregationJobInitReq,
    BatchSelector,
    CollectionJobReq,
    Query,
)
from chorister.dap.task import TaskConfiguration, advertise, task_binding, verify_key
from chorister.key_files import new_secret, token_digest, write_private
from chorister.policy import Policy
from tests.aggregator.world import (
    HELPER_URL,
    LEADER_URL,
    NOW,
    collector_digest,
    collector_keys,
    one_bit,
    signed,
    small_policy,
    small_recipe,
)
from tests.cli.toml import dumps

BINS = 4
MIN_COHORT = 3
Answer = Callable[[httpx2.Request], httpx2.Response]


class RecordingTransport(httpx2.BaseTransport):
    """The leader's way to the helper: it remembers all requests, and can be tampered with."""

    def __init__(self, network: httpx2.BaseTransport) -> None:
        self._network = network
        self.requests: list[httpx2.Request] = []
        self.tamper: Callable[[httpx2.Request, Answer], httpx2.Response] | None = None

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        return self.tamper(request, self.honest) if self.tamper else self.honest(request)

    def honest(self, request: httpx2.Request) -> httpx2.Response:
        """The answer as it is, whole."""
        answer = self._network.handle_request(request)
        answer.read()
        return answer

    def close(self) -> None:
        """Clients call this when they end."""


class Apps:
    """A pair of aggregators that serve the small policy, and everybody who talks to them."""

    def __init__(
        self, folder: Path, *, policy: Policy | None = None, leader: dict[str, Any] | None = None
    ) -> None:
        """`leader`: further settings of it."""
        self.clock = SettableClock(NOW)
        self.network = InProcessNetwork()
        self.wire = RecordingTransport(self.network)
        self.collector_token, self.helper_token = new_secret(), new_secret()
        self.credential = new_secret()
        self.verify_key_init = os.urandom(32)
        self._recipes = itertools.count(1)
        self._folder = folder
        tree = (policy or small_policy()).model_dump(exclude_unset=True)
        (folder / "policy.toml").write_text(dumps(tree))
        write_private(folder / "verify_key", b64url_encode(self.verify_key_init).encode())
        write_private(folder / "helper_token", self.helper_token.encode())
        self.leader = self._leader(leader or {})
        self.helper = self._helper()
        self.services: tuple[Service, ...] = (self.leader, self.helper)
        for service in self.services:
            keys = service.core.keys
            keys.publish(keys.generate())
            self.network.serve(service.config.url, service.app)

    def close(self) -> None:
        self.network.shut_down()
        for service in self.services:
            service.close()

    def settings(self, role: str, url: str) -> dict[str, Any]:
        """Those of a further aggregator, too."""
        at_rest = self._folder / f"{role}_at_rest_{next(self._recipes)}"
        write_private(at_rest, new_secret().encode())
        return {
            "role": role,
            "url": url,
            "database": f"sqlite:///{self._folder}/{role}.db",
            "at_rest_key": str(at_rest),
            "verify_key": str(self._folder / "verify_key"),
            "policies": [str(self._folder / "policy.toml")],
            "registry": "https://registry.example.org/",
            "cosigning_key": "unused",
            "head": str(self._folder / f"{role}-head"),
            "cosign": False,
            "run_jobs": False,
            "threads": 1,
            "collectors": [
                {
                    "name": "analyst",
                    "hpke_config": b64url_encode(collector_keys().config),
                    "token_digests": [token_digest(self.collector_token.encode()).hex()],
                }
            ],
        }

    def _leader(self, changes: dict[str, Any]) -> Service:
        settings = self.settings("leader", LEADER_URL) | {
            "helper_token": str(self._folder / "helper_token"),
            "upload_credential_digests": [token_digest(self.credential.encode()).hex()],
            **changes,
        }
        return Service(LeaderConfig.model_validate(settings), self.clock, transport=self.wire)

    def _helper(self) -> Service:
        settings = self.settings("helper", HELPER_URL) | {
            "leader_token_digests": [token_digest(self.helper_token.encode()).hex()]
        }
        return Service(HelperConfig.model_validate(settings), self.clock)

    # --- tasks and reports ----------------------------------------------------------------------

    def task(self, **changes: Any) -> KnownTask:
        """A task of its own, known to both aggregators; without noise unless asked for."""
        settings: dict[str, Any] = {
            "min_cohort": MIN_COHORT,
            "bins": BINS,
            "crowd": "honest",
            "id": f"recipe-{next(self._recipes)}",
        }
        recipe = small_recipe(**settings | changes)
        for service in self.services:
            service.core.tasks.accept([signed(recipe)])
        (task,) = self.leader.core.tasks.of_recipe(recipe.digest)
        return task

    def reports(
        self,
        task: KnownTask,
        count: int = MIN_COHORT,
        *,
        ids: Sequence[bytes] | None = None,
        time: int | None = None,
    ) -> list[bytes]:
        """Sealed reports; the first bit is set in each."""
        return task_binding(task.configuration).seal_reports(
            np.ascontiguousarray(one_bit(task.vdaf.length, [0] * count)),
            report_ids=b"".join(ids) if ids is not None else os.urandom(16 * count),
            time=task.interval.start if time is None else time,
            leader_config=self.leader.core.keys.published()[0],
            helper_config=self.helper.core.keys.published()[0],
            threads=1,
        )

    def verify_inits(self, task: KnownTask, *reports: bytes, key: bytes | None = None) -> bytes:
        """What the leader would send of these reports, or would with another verify key."""
        job = task.binding.leader_initialize(
            key or verify_key(self.verify_key_init, task.task_id),
            self.leader.core.keys.keypairs(),
            b"".join(reports),
            threads=1,
        )
        return job.verify_inits

    # --- requests -------------------------------------------------------------------------------

    def ask(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        media: str | None = None,
        token: str | None = None,
        advertised: TaskConfiguration | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx2.Response:
        """One request, whoever sends it."""
        fields = dict(headers or {})
        if media is not None:
            fields["Content-Type"] = media
        if token is not None:
            fields["Authorization"] = f"Bearer {token}"
        if advertised is not None:
            fields |= advertise(advertised.encode())
        return self.wire.honest(httpx2.Request(method, url, headers=fields, content=body))

    def upload(self, task: KnownTask, *reports: bytes) -> httpx2.Response:
        """A device's request."""
        return self.ask(
            "POST",
            LEADER_URL + reports_path(task.task_id),
            b"".join(reports),
            media=UPLOAD_REQUEST,
            advertised=task.configuration,
            headers={"Chorister-Upload-Credential": self.credential},
        )

    def create_job(
        self, task: KnownTask, request: AggregationJobInitReq | bytes, **changes: Any
    ) -> httpx2.Response:
        """The leader's request."""
        settings: dict[str, Any] = {
            "media": AGGREGATION_JOB_INIT_REQUEST,
            "token": self.helper_token,
            "advertised": task.configuration,
        }
        body = request if isinstance(request, bytes) else request.encode()
        url = HELPER_URL + aggregation_jobs_path(task.task_id)
        return self.ask("POST", url, body, **settings | changes)

    def job_of(self, task: KnownTask, *reports: bytes) -> httpx2.Response:
        """The helper's answer to a job of these reports."""
        inits = self.verify_inits(task, *reports)
        return self.create_job(task, AggregationJobInitReq(verify_inits=inits))

    def create_share(
        self, task: KnownTask, request: AggregateShareReq | bytes, **changes: Any
    ) -> httpx2.Response:
        """The leader's request for the helper's share."""
        settings: dict[str, Any] = {
            "media": AGGREGATE_SHARE_REQUEST,
            "token": self.helper_token,
            "advertised": task.configuration,
        }
        body = request if isinstance(request, bytes) else request.encode()
        url = HELPER_URL + aggregate_shares_path(task.task_id)
        return self.ask("POST", url, body, **settings | changes)

    def create_collection(
        self, task: KnownTask, request: CollectionJobReq | bytes | None = None, **changes: Any
    ) -> httpx2.Response:
        """The collector's request."""
        settings: dict[str, Any] = {
            "media": COLLECTION_JOB_REQUEST,
            "token": self.collector_token,
            "advertised": task.configuration,
        }
        request = collection_request(task) if request is None else request
        body = request if isinstance(request, bytes) else request.encode()
        url = LEADER_URL + collection_jobs_path(task.task_id)
        return self.ask("POST", url, body, **settings | changes)

    def resource(self, method: str, created: httpx2.Response, url: str) -> httpx2.Response:
        """A request about something that was created."""
        token = self.helper_token if url == HELPER_URL else self.collector_token
        return self.ask(method, _absolute(created, url), token=token)

    # --- jobs -----------------------------------------------------------------------------------

    def work(self, task: KnownTask) -> list[str]:
        """Run all of the leader's jobs for a task once; why some of them wait."""
        leader = self.leader.leader
        while leader.aggregation.create_jobs(16):
            pass
        jobs = [each for each in leader.aggregation.unfinished() if each.task_id == task.task_id]
        steps = [leader.aggregation.step(each) for each in jobs]
        asked = [each for each in leader.collection.pending() if each.task_id == task.task_id]
        steps += [leader.collection.step(each) for each in asked]
        return [step.reason for step in steps if step.reason is not None]

    def collected(self, task: KnownTask) -> httpx2.Response:
        """The collection job of a task, once everything was stepped."""
        self.create_collection(task)
        self.work(task)
        return self.create_collection(task)

    def verified(self, task: KnownTask) -> tuple[int, int]:
        """How many reports of a task each aggregator has added up."""
        leader, helper = (
            task_status(service.core.database, [known])[0].verified
            for service, known in (
                (self.leader, task),
                (self.helper, task),
            )
        )
        return leader, helper

    def sent(self, path: str) -> list[httpx2.Request]:
        """The leader's POST requests to a path of the helper."""
        url = HELPER_URL + path
        return [each for each in self.wire.requests if str(each.url) == url]

    @contextmanager
    def tampered(
        self, tamper: Callable[[httpx2.Request, Answer], httpx2.Response]
    ) -> Iterator[None]:
        """Something happens to requests of the leader, or to their answers."""
        self.wire.tamper = tamper
        try:
            yield
        finally:
            self.wire.tamper = None

    @contextmanager
    def at(self, now: int) -> Iterator[None]:
        """Another time."""
        before = self.clock.now()
        self.clock.set(now)
        try:
            yield
        finally:
            self.clock.set(before)


def _absolute(created: httpx2.Response, url: str) -> str:
    return str(httpx2.URL(url).join(created.headers["location"]))


def collection_request(task: KnownTask) -> CollectionJobReq:
    return CollectionJobReq(query=Query.of(task.interval))


def share_request(task: KnownTask, **changes: Any) -> AggregateShareReq:
    """A request for the helper's share of nothing; change what should be otherwise."""
    settings: dict[str, Any] = {
        "collection_job_req": collection_request(task),
        "batch_selector": BatchSelector.of(task.interval),
        "report_count": 0,
        "checksum": bytes(32),
    }
    return AggregateShareReq(**settings | changes)


def problem(response: httpx2.Response) -> str | None:
    """The DAP error of a refusal; None for one without."""
    assert response.status_code >= 400, response
    assert response.headers["content-type"] == PROBLEM
    kind = response.json()["type"]
    assert isinstance(kind, str)
    return kind.removeprefix(ERROR_PREFIX) if kind.startswith(ERROR_PREFIX) else None


__all__ = [
    "BINS",
    "MIN_COHORT",
    "Answer",
    "Apps",
    "collection_request",
    "collector_digest",
    "problem",
    "share_request",
]
