"""Whatever comes in over any route: an answer of DAP's or a problem document, never a failure.

Paths, methods, header fields and bodies are random, and so are mutations of valid requests. A 5xx
is a bug, and so is anything that is written for a request that is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister.canonical import b64url_encode
from chorister.clock import SystemClock
from chorister.dap import draft
from chorister.dap.messages import CollectionJobReq, Query
from chorister.dap.task import Task, advertise
from tests.aggregator.inprocess_pair import InProcessPair, a_pair, wait_until
from tests.aggregator.operators import TOKENS

MEDIA = [value for value in vars(draft).values() if str(value).startswith("application/")]
KINDS = ("reports", "collection_jobs", "aggregation_jobs", "aggregate_shares")
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessPair]:
    quiet = {"leader": {"run_jobs": False}, "helper": {"run_jobs": False}}
    with a_pair(tmp_path_factory.mktemp("pair"), settings=quiet) as pair:
        both = (pair.leader, pair.helper)
        # Before that there is nothing to show, which is a 503.
        wait_until(lambda: all(each.core.keys.published() for each in both), "the keys")
        yield pair


@pytest.fixture(scope="module")
def task(pair: InProcessPair) -> Task:
    return pair.publish(pair.operators.recipe("ages", SystemClock().now()))


@pytest.fixture(scope="module")
def report(pair: InProcessPair, task: Task) -> bytes:
    return pair.seal(task, [1])[0]


def send(
    pair: InProcessPair, method: str, url: str, headers: dict[str, str], body: bytes
) -> httpx2.Response:
    answer = pair.request(method, url, headers=headers, body=body)
    assert answer.status_code < 500, (method, url, answer.content)
    if answer.status_code >= 400 and method != "HEAD":
        assert answer.headers["content-type"] == draft.PROBLEM
        assert b"Traceback" not in answer.content
    return answer


def _advertised(configuration: bytes) -> str:
    return advertise(configuration)["DAP-Taskprov"]


segments = st.one_of(
    st.sampled_from([*KINDS, "tasks", "chorister", "recipes", "hpke_config", "..", "%2e", ""]),
    st.text(
        st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="?#/%\\"), max_size=50
    ),
    st.binary(min_size=16, max_size=32).map(b64url_encode),
)
identifiers = st.binary(min_size=16, max_size=16).map(b64url_encode)
values = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=100).map(str.strip)
fields = st.fixed_dictionaries(
    {},
    optional={
        "Content-Type": st.one_of(st.sampled_from(MEDIA), values),
        "Authorization": st.one_of(
            st.sampled_from([f"Bearer {token}" for token in TOKENS.values()]), values
        ),
        "DAP-Taskprov": st.one_of(
            values, st.binary(max_size=60).map(lambda b: advertise(b)["DAP-Taskprov"])
        ),
        "Chorister-Upload-Credential": values,
    },
)


@pytest.mark.usefixtures("report")  # without keys in the log 503 would be the right answer
@settings(max_examples=300)
@given(
    side=st.sampled_from(["leader", "helper"]),
    method=st.sampled_from(METHODS),
    path=st.lists(segments, max_size=5),
    headers=fields,
    body=st.binary(max_size=300),
)
def test_any_request(
    pair: InProcessPair,
    side: str,
    method: str,
    path: list[str],
    headers: dict[str, str],
    body: bytes,
) -> None:
    url = getattr(pair.operators.at, side) + "/".join(path)
    send(pair, method, url, headers, body)


@settings(max_examples=300)
@given(
    side=st.sampled_from(["leader", "helper"]),
    kind=st.sampled_from(KINDS),
    resource=st.one_of(
        st.just(""), st.binary(min_size=16, max_size=16).map(b64url_encode), segments
    ),
    method=st.sampled_from(["GET", "POST", "DELETE"]),
    media=st.sampled_from(MEDIA),
    whose=st.sampled_from(sorted(TOKENS)),
    named=st.booleans(),
    body=st.one_of(st.binary(max_size=400), st.just(b"")),
)
def test_any_body_on_any_route_of_a_known_task(
    pair: InProcessPair,
    task: Task,
    side: str,
    kind: str,
    resource: str,
    method: str,
    media: str,
    whose: str,
    named: bool,
    body: bytes,
) -> None:
    path = f"tasks/{b64url_encode(task.task_id)}/{kind}" + (f"/{resource}" if resource else "")
    headers = {"Content-Type": media, "Authorization": f"Bearer {TOKENS[whose]}"}
    if named:
        headers |= advertise(task.configuration.encode())
    send(pair, method, getattr(pair.operators.at, side) + path, headers, body)


@settings(max_examples=200)
@given(data=st.data())
def test_altered_messages(
    pair: InProcessPair, task: Task, report: bytes, data: st.DataObject
) -> None:
    interval = task.configuration.task_interval
    assert interval is not None
    collect = CollectionJobReq(query=Query.of(interval)).encode()
    kind, media, message, whose = data.draw(
        st.sampled_from(
            [
                ("reports", draft.UPLOAD_REQUEST, report, "stranger"),
                ("collection_jobs", draft.COLLECTION_JOB_REQUEST, collect, "collector"),
            ]
        )
    )
    altered = bytearray(message)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(altered), 200) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                altered[place] ^= data.draw(st.integers(1, 255))
            case "cut":
                del altered[place + 1 :]
            case "insert":
                altered.insert(place, data.draw(st.integers(0, 255)))
    url = f"{pair.operators.at.leader}tasks/{b64url_encode(task.task_id)}/{kind}"
    headers = {"Content-Type": media, "Authorization": f"Bearer {TOKENS[whose]}"}
    send(pair, "POST", url, headers, bytes(altered))
