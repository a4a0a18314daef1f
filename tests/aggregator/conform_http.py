"""Sections 3, 4.1 and 4.2 of the draft: HTTP, authentication, errors, tasks."""

from __future__ import annotations

import dataclasses
import re
import ssl
import tempfile
from pathlib import Path

import httpx2
import pytest

from chorister.aggregator.known_tasks import KnownTask
from chorister.canonical import b64url_encode, sha256
from chorister.dap.draft import (
    AGGREGATE_SHARE_REQUEST,
    AGGREGATION_JOB_CONTINUE_REQUEST,
    AGGREGATION_JOB_INIT_REQUEST,
    COLLECTION_JOB_REQUEST,
    UPLOAD_REQUEST,
    Problem,
    aggregate_shares_path,
    aggregation_jobs_path,
    collection_jobs_path,
    reports_path,
)
from chorister.dap.http import HTTPClient, problem_document
from chorister.dap.messages import AggregationJobInitReq
from chorister.dap.task import TaskConfiguration, advertise, task_id
from chorister.errors import InvalidInput, ProblemError, Unreachable
from tests.aggregator.apps import MIN_COHORT, Answer, Apps, problem, share_request
from tests.aggregator.crafted import craft
from tests.aggregator.world import HELPER_URL, LEADER_URL
from tests.certificates import a_certificate
from tests.device.loopback import Reply, serve

IDENTIFIER = re.compile(r"[A-Za-z0-9_-]{22}")


def three_resources(apps: Apps) -> tuple[KnownTask, list[tuple[httpx2.Response, httpx2.Response]]]:
    """An aggregation job, an aggregate share and a collection job, each asked for twice."""
    task = apps.task()
    reports = apps.reports(task)
    apps.upload(task, *reports)
    apps.work(task)
    collections = (apps.create_collection(task), apps.create_collection(task))
    (sent,) = apps.sent(aggregation_jobs_path(task.task_id))
    jobs = (apps.create_job(task, sent.content), apps.create_job(task, sent.content))
    apps.work(task)
    (asked,) = apps.sent(aggregate_shares_path(task.task_id))
    shares = (apps.create_share(task, asked.content), apps.create_share(task, asked.content))
    return task, [jobs, shares, collections]


def identifiers_are_base64url(apps: Apps) -> None:
    task, created = three_resources(apps)
    for response, _ in created:
        assert IDENTIFIER.fullmatch(response.headers["location"].rsplit("/", 1)[1])
    spelled = b64url_encode(task.task_id)
    for other in (f"{spelled}=", task.task_id.hex(), spelled[:-1], spelled.swapcase()):
        url = f"{LEADER_URL}tasks/{other}/collection_jobs"
        token = apps.collector_token
        answer = apps.ask("POST", url, b"", media=COLLECTION_JOB_REQUEST, token=token)
        assert problem(answer) == Problem.UNRECOGNIZED_TASK


def credentials_travel_by_https(apps: Apps) -> None:
    http = HTTPClient(token="t", transport=apps.network)  # noqa: S106
    with pytest.raises(InvalidInput, match="https"):
        http.request("GET", LEADER_URL.replace("https:", "http:"))


def certificates_are_checked(apps: Apps) -> None:
    with tempfile.TemporaryDirectory() as folder:
        key, chain = a_certificate(Path(folder), "127.0.0.2")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain, key)
        with serve(lambda _: Reply(), tls=context) as server:
            with pytest.raises(Unreachable):
                HTTPClient().request("GET", server.url)
            wrong_name = server.url.replace("localhost", "127.0.0.1")
            with pytest.raises(Unreachable):
                HTTPClient(ca_bundle=chain).request("GET", wrong_name)
            assert not server.seen


def a_failure_comes_with_the_next_look(apps: Apps) -> None:
    """The helper refuses its share: the collector reads why at the collection job."""
    task = apps.task()
    apps.upload(task, *apps.reports(task))
    apps.work(task)
    created = apps.create_collection(task)
    assert (created.status_code, created.content) == (202, b"")

    def refuse(request: httpx2.Request, _: Answer) -> httpx2.Response:
        refused = ProblemError(Problem.BATCH_MISMATCH, "not the same reports")
        headers = {"Content-Type": "application/problem+json"}
        return httpx2.Response(400, headers=headers, content=problem_document(refused))

    with apps.tampered(refuse):
        apps.work(task)
    for answer in (apps.resource("GET", created, LEADER_URL), apps.create_collection(task)):
        assert problem(answer) == Problem.BATCH_MISMATCH


def a_failure_comes_at_once(apps: Apps) -> None:
    task = apps.task()
    assert problem(apps.create_job(task, b"\0")) == Problem.INVALID_MESSAGE
    assert problem(apps.create_share(task, share_request(task))) == Problem.INVALID_BATCH_SIZE


def creation_is_idempotent(apps: Apps) -> None:
    task, created = three_resources(apps)
    for first, second in created:
        assert first.headers["location"] == second.headers["location"]
    jobs, shares, _ = created
    assert jobs[0].content == jobs[1].content
    assert shares[0].content == shares[1].content
    assert apps.verified(task) == (MIN_COHORT, MIN_COHORT)


def every_interaction_but_upload_is_authenticated(apps: Apps) -> None:
    task = apps.task()
    some = bytes(16)
    jobs, shares = aggregation_jobs_path(task.task_id), aggregate_shares_path(task.task_id)
    collections = collection_jobs_path(task.task_id)
    requests = [
        ("POST", HELPER_URL + jobs, AGGREGATION_JOB_INIT_REQUEST),
        ("POST", f"{HELPER_URL}{jobs}/{b64url_encode(some)}", AGGREGATION_JOB_CONTINUE_REQUEST),
        ("GET", f"{HELPER_URL}{jobs}/{b64url_encode(some)}", None),
        ("DELETE", f"{HELPER_URL}{jobs}/{b64url_encode(some)}", None),
        ("POST", HELPER_URL + shares, AGGREGATE_SHARE_REQUEST),
        ("GET", f"{HELPER_URL}{shares}/{b64url_encode(some)}", None),
        ("DELETE", f"{HELPER_URL}{shares}/{b64url_encode(some)}", None),
        ("POST", LEADER_URL + collections, COLLECTION_JOB_REQUEST),
        ("GET", f"{LEADER_URL}{collections}/{b64url_encode(some)}", None),
        ("DELETE", f"{LEADER_URL}{collections}/{b64url_encode(some)}", None),
    ]
    for method, url, media in requests:
        swapped = apps.collector_token if url.startswith(HELPER_URL) else apps.helper_token
        for token in (None, "wrong", swapped):
            answer = apps.ask(method, url, b"", media=media, token=token)
            assert answer.status_code == 401, (method, url)
            assert answer.headers["www-authenticate"] == "Bearer"


def _refusals(apps: Apps) -> list[httpx2.Response]:
    task = apps.task()
    return [
        apps.ask("GET", f"{LEADER_URL}nothing"),
        apps.ask("PUT", f"{LEADER_URL}hpke_config"),
        apps.ask("POST", LEADER_URL + collection_jobs_path(task.task_id)),
        apps.create_job(task, b""),
        apps.create_job(task, b"", media="text/plain"),
        apps.create_job(task, AggregationJobInitReq(verify_inits=b"", agg_param=b"1")),
        apps.create_share(task, share_request(task)),
        apps.create_collection(task, b"\xff"),
        apps.upload(task, b"\0"),
        apps.ask("POST", f"{LEADER_URL}tasks/x/reports", b"", media=UPLOAD_REQUEST),
    ]


def a_problem_document_has_an_error_s_status(apps: Apps) -> None:
    for answer in _refusals(apps):
        assert 400 <= answer.status_code < 600
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == answer.status_code


def only_registered_errors_are_in_dap_s_namespace(apps: Apps) -> None:
    for answer in _refusals(apps):
        kind = problem(answer)
        assert kind is None or kind in set(Problem)
    with pytest.raises(ValueError, match="unregistered"):
        problem_document(ProblemError("unregistered", ""))


# --- section 4.1, 4.2 ---------------------------------------------------------------------------


def urls_are_never_re_encoded(apps: Apps) -> None:
    task = apps.task()
    odd = dataclasses.replace(
        task.configuration, leader_aggregator_endpoint="HTTPS://L.Example:443/a/../%7e/"
    )
    assert TaskConfiguration.decode(odd.encode()) == odd
    apps.upload(task, *apps.reports(task, 1))
    apps.work(task)
    (request,) = apps.sent(aggregation_jobs_path(task.task_id))
    (field,) = advertise(task.configuration.encode()).values()
    assert request.headers["DAP-Taskprov"] == field


def task_ids_are_unique(apps: Apps) -> None:
    tasks = [apps.task(), apps.task()]
    assert tasks[0].task_id != tasks[1].task_id
    for task in tasks:
        salt = sha256(b"dap-taskprov task id")
        assert task.task_id == sha256(salt + task.configuration.encode())


def _advertise_bytes(apps: Apps, configuration: bytes) -> httpx2.Response:
    identity = sha256(sha256(b"dap-taskprov task id") + configuration)
    return apps.ask(
        "POST",
        LEADER_URL + reports_path(identity),
        craft(apps, apps.task()).report,
        media=UPLOAD_REQUEST,
        headers={"Chorister-Upload-Credential": apps.credential, **advertise(configuration)},
    )


def unknown_task_extensions_are_refused(apps: Apps) -> None:
    plain = apps.task().configuration.encode()
    # The last 22 bytes are the extensions: their length, and task_interval.
    unknown = plain[:-22] + (24).to_bytes(2, "big") + plain[-20:] + b"\x12\x34\0\0"
    assert problem(_advertise_bytes(apps, unknown)) == Problem.UNRECOGNIZED_TASK


def task_extensions_are_in_order(apps: Apps) -> None:
    plain = apps.task().configuration.encode()
    twice = plain[:-22] + (40).to_bytes(2, "big") + plain[-20:] * 2
    assert problem(_advertise_bytes(apps, twice)) == Problem.UNRECOGNIZED_TASK
    configuration = TaskConfiguration.decode(plain)
    assert task_id(configuration) == sha256(sha256(b"dap-taskprov task id") + plain)
