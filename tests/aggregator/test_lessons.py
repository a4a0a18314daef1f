"""Where neighbouring systems went wrong, or what their users asked for: one test for each thread.

The names in the table are public threads, as repository#number; each test answers the one in its
`lesson`. Threads about devices, budgets and results are answered beside those.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import httpx2
import pytest

from chorister._native import HPKEKeypair
from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.storage.counters import task_status
from chorister.canonical import sha256
from chorister.dap.collector import Collected, CollectionHandle, Collector, NotYet, RecipeStatus
from chorister.dap.draft import (
    UPLOAD_REQUEST,
    Problem,
    ReportError,
    aggregation_jobs_path,
    reports_path,
)
from chorister.dap.messages import AggregationJobInitReq
from chorister.dap.task import task_id
from chorister.errors import ProblemError
from tests.aggregator.apps import BINS, MIN_COHORT, Answer, Apps, problem, share_request
from tests.aggregator.conform_upload import counted, errors, helper_errors
from tests.aggregator.crafted import craft
from tests.aggregator.world import HELPER_URL, LEADER_URL, collector_keys, signed, small_recipe

Function = TypeVar("Function", bound=Callable[..., None])
LESSONS: dict[str, str] = {}


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apps]:
    """One pair for all cases: each makes tasks of its own."""
    pair = Apps(tmp_path_factory.mktemp("pair"))
    yield pair
    pair.close()


def lesson(*threads: str) -> Callable[[Function], Function]:
    """Say which threads a test answers."""

    def register(function: Function) -> Function:
        LESSONS.update(dict.fromkeys(threads, function.__name__))
        return function

    return register


def collector(apps: Apps) -> Collector:
    """A new process of the analyst's."""
    return Collector(
        LEADER_URL,
        apps.collector_token,
        collector_keys(),
        transport=apps.network,
        clock=apps.clock,
    )


def status(apps: Apps, task: KnownTask) -> RecipeStatus:
    return collector(apps).status(task.recipe_digest)


# --- why is nothing released? -------------------------------------------------------------------


@lesson("janus#1860")
def test_asking_before_anything_is_aggregated_is_no_error(apps: Apps) -> None:
    """The query is fine, the reports are there, they are only not verified yet."""
    task = apps.task()
    apps.upload(task, *apps.reports(task))
    analyst = collector(apps)
    handle = analyst.create(task)
    waiting = analyst.poll(handle)
    assert isinstance(waiting, NotYet)
    assert 0 < waiting.retry_after <= 30
    apps.work(task)
    assert isinstance(analyst.poll(handle), Collected)


@lesson("janus#763")
def test_too_few_reports_have_a_type_of_their_own(apps: Apps) -> None:
    task = apps.task()
    apps.upload(task, *apps.reports(task, MIN_COHORT - 1))
    apps.work(task)
    request = share_request(task, report_count=MIN_COHORT - 1)
    assert problem(apps.create_share(task, request)) == Problem.INVALID_BATCH_SIZE
    # At the leader it is not even an error: it waits.
    analyst = collector(apps)
    assert isinstance(analyst.poll(analyst.create(task)), NotYet)


@lesson("janus#3427")
def test_nothing_gets_stuck_when_uploads_stop(apps: Apps) -> None:
    """However few reports wait, they get a job: there is no least size of one."""
    task = apps.task()
    apps.upload(task, *apps.reports(task, MIN_COHORT))
    apps.work(task)
    (straggler,) = apps.reports(task, 1)
    apps.upload(task, straggler)
    analyst = collector(apps)
    handle = analyst.create(task)
    apps.work(task)
    outcome = analyst.poll(handle)
    assert isinstance(outcome, Collected)
    assert outcome.report_count == MIN_COHORT + 1


@lesson("janus#1414")
def test_only_verified_reports_count_towards_the_minimum(apps: Apps) -> None:
    task = apps.task()
    spoilt = [bytearray(each) for each in apps.reports(task, 2 * MIN_COHORT)]
    for report in spoilt:
        report[-1] ^= 1  # the helper can't open it
    apps.upload(task, *map(bytes, spoilt), *apps.reports(task, MIN_COHORT - 1))
    apps.work(task)
    analyst = collector(apps)
    handle = analyst.create(task)
    apps.work(task)
    assert isinstance(analyst.poll(handle), NotYet)
    assert status(apps, task).state == "collecting"
    apps.upload(task, *apps.reports(task, 1))
    apps.work(task)
    outcome = analyst.poll(handle)
    assert isinstance(outcome, Collected)
    assert outcome.report_count == MIN_COHORT
    assert outcome.counts.tolist() == [MIN_COHORT] + [0] * (BINS - 1)


@lesson("flower#955", "flower#4147")
def test_waiting_is_never_silent(apps: Apps) -> None:
    """What is waited for is said, in tenths of the minimum, until it is there."""
    task = apps.task(min_cohort=10)
    seen = [status(apps, task)]
    for _ in range(10):
        apps.upload(task, *apps.reports(task, 1))
        apps.work(task)
        seen.append(status(apps, task))
    assert [each.filled for each in seen] == [count / 10 for count in range(11)]
    assert {each.waiting_for for each in seen[:-1]} == {"more reports"}
    assert (seen[-1].state, seen[-1].waiting_for) == ("ready", "a collector")
    assert seen[-1].reports == 10


# --- failures unseen ----------------------------------------------------------------------------


@lesson("janus#2293")
def test_rejected_uploads_are_counted_by_reason(apps: Apps) -> None:
    task = apps.task()
    (good,) = apps.reports(task, 1)
    early = apps.reports(task, 2, time=task.interval.start - 1)
    strange = craft(apps, task, public=[(7, b"")]).report
    apps.upload(task, good, good, *early, strange)
    (operators,) = task_status(apps.leader.core.database, [task])
    assert operators.uploaded == 1
    assert operators.rejected("upload") == {
        "report_replayed": 1,
        "report_dropped": 2,
        "invalid_message": 1,
    }
    assert set(status(apps, task).rejected.leader) == set(operators.rejected("upload"))


@lesson("janus#3798")
def test_the_helper_s_rejections_are_seen_at_the_leader(apps: Apps) -> None:
    task = apps.task()
    spoilt = bytearray(apps.reports(task, 1)[0])
    spoilt[-1] ^= 1
    apps.upload(task, bytes(spoilt))
    apps.work(task)
    for service in (apps.leader, apps.helper):
        (operators,) = task_status(service.core.database, [task])
        assert operators.rejected("helper") == {"hpke_decrypt_error": 1}
    assert "hpke_decrypt_error" in status(apps, task).rejected.helper


@lesson("divviup-api#172")
def test_a_helper_that_refuses_jobs_is_told_of(apps: Apps) -> None:
    """To the operator in the helper's own words; in metrics, that uploads were refused."""
    task = apps.task()
    apps.upload(task, *apps.reports(task))

    def refuse(_: httpx2.Request, __: Answer) -> httpx2.Response:
        return httpx2.Response(401)

    with apps.tampered(refuse):
        apps.work(task)
    (operators,) = task_status(apps.leader.core.database, [task])
    assert operators.unfinished_jobs == 1
    assert "401" in operators.failures[0]
    assert status(apps, task).waiting_for == "the helper, to verify reports"
    assert b'chorister_reports_total{outcome="refused"}' in apps.leader.metrics.text()
    assert counted(apps, task) == (MIN_COHORT, MIN_COHORT)


# --- provisioning -------------------------------------------------------------------------------


@lesson("janus#760")
def test_a_new_round_needs_no_call_to_anybody(apps: Apps) -> None:
    """A recipe in the log is enough: both aggregators serve its task at once."""
    recipe = small_recipe(min_cohort=MIN_COHORT, bins=BINS, crowd="honest", id="another-round")
    for service in apps.services:
        assert service.core.tasks.of_recipe(recipe.digest) == []
        service.core.tasks.accept([signed(recipe)])
    (task,) = apps.leader.core.tasks.of_recipe(recipe.digest)
    apps.upload(task, *apps.reports(task))
    assert counted(apps, task) == (MIN_COHORT, MIN_COHORT)


@lesson("draft-ietf-ppm-dap#697")
def test_the_helper_seals_to_the_recipe_s_collector_only(apps: Apps) -> None:
    """The recipe names the collector's key by digest, and no leader can name another."""
    task = apps.task()
    apps.upload(task, *apps.reports(task))
    apps.work(task)
    assert task.collector == sha256(collector_keys().config)
    helper = apps.helper.helper
    known = dataclasses.replace(task, collector=sha256(HPKEKeypair.generate(7).config))
    request = share_request(task, report_count=MIN_COHORT).encode()
    with pytest.raises(ProblemError, match="collector's HPKE configuration") as caught:
        helper.create_share(known, request)
    assert caught.value.problem == Problem.INVALID_TASK


@lesson("draft-ietf-ppm-dap#758")
def test_who_disagrees_on_a_parameter_has_another_task(apps: Apps) -> None:
    """A report for three does not open under a task for two, and nobody serves that task."""
    task = apps.task()
    fewer = dataclasses.replace(task.configuration, min_batch_size=2)
    before = [service.core.tasks.all() for service in apps.services]
    answer = apps.ask(
        "POST",
        LEADER_URL + reports_path(task_id(fewer)),
        apps.reports(task, 1)[0],
        media=UPLOAD_REQUEST,
        advertised=fewer,
        headers={"Chorister-Upload-Credential": apps.credential},
    )
    assert problem(answer) == Problem.INVALID_TASK
    altered = AggregationJobInitReq(verify_inits=apps.verify_inits(task, *apps.reports(task)))
    answer = apps.create_job(task, altered, advertised=fewer)
    assert problem(answer) == Problem.UNRECOGNIZED_TASK
    assert [service.core.tasks.all() for service in apps.services] == before


# --- windows, retries ---------------------------------------------------------------------------


@lesson("draft-ietf-ppm-dap#118")
def test_a_minimum_that_the_window_can_t_fill_is_told(apps: Apps) -> None:
    task = apps.task()
    apps.upload(task, *apps.reports(task, MIN_COHORT - 1))
    apps.work(task)
    analyst = collector(apps)
    handle = analyst.create(task)
    with apps.at(task.closes):
        ((_, code),) = errors(apps.upload(task, *apps.reports(task, 1)))
        assert code == ReportError.TASK_EXPIRED
        apps.work(task)
        assert isinstance(analyst.poll(handle), NotYet)
        told = status(apps, task)
        assert told.state == "collecting"
        assert told.waiting_for is not None
        assert "window is closed" in told.waiting_for
    with apps.at(task.ends):
        assert status(apps, task).state == "expired"
        with pytest.raises(ProblemError):
            analyst.poll(handle)


@lesson("janus#2731")
def test_stragglers_delay_nothing(apps: Apps) -> None:
    """From the moment a batch is frozen for its collector, late reports are refused with a code."""
    task = apps.task()
    apps.upload(task, *apps.reports(task))
    apps.work(task)
    analyst = collector(apps)
    handle = analyst.create(task)

    def away(request: httpx2.Request, _: Answer) -> httpx2.Response:
        raise httpx2.ConnectError("away", request=request)

    with apps.tampered(away):
        apps.work(task)  # frozen, but the helper's share is not there yet
    ((_, code),) = errors(apps.upload(task, *apps.reports(task, 1)))
    assert code == ReportError.BATCH_COLLECTED
    apps.work(task)
    outcome = analyst.poll(handle)
    assert isinstance(outcome, Collected)
    assert outcome.report_count == MIN_COHORT


@lesson("janus#1877")
def test_a_collector_s_crash_loses_nothing(apps: Apps) -> None:
    """Before it remembered the job, before it read the result, and before it kept it."""
    task = apps.task(crowd="noised")
    apps.upload(task, *apps.reports(task))
    apps.work(task)
    collector(apps).create(task)  # crashed: the handle is lost
    handle = collector(apps).create(task)
    kept = handle.to_json()
    apps.work(task)
    assert task.noise is not None
    trials = task.noise.trials
    results = [
        collector(apps).poll(each, noise_trials=trials)
        for each in (handle, CollectionHandle.from_json(kept), collector(apps).create(task))
    ]
    shares = set()
    for result in results:
        assert isinstance(result, Collected)
        shares.add((result.leader_share, result.helper_share))
    assert len(shares) == 1  # the noise was drawn once
    collector(apps).delete(handle)
    with pytest.raises(ProblemError) as caught:
        collector(apps).create(task)
    assert caught.value.problem == Problem.BATCH_OVERLAP


@lesson("janus#3143")
def test_a_concurrent_replay_counts_once(apps: Apps) -> None:
    """At the leader's door, and in several jobs at the helper at the same moment."""
    for _ in range(5):
        _race_at_the_leader(apps, os.urandom(16))
        _race_at_the_helper(apps, os.urandom(16))


def _race_at_the_leader(apps: Apps, report_id: bytes) -> None:
    task = apps.task()
    copies = [apps.reports(task, 1, ids=[report_id])[0] for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda report: apps.upload(task, report), copies))
    assert sorted(len(errors(answer)) for answer in answers) == [0] + [1] * 7
    assert counted(apps, task) == (1, 1)


def _race_at_the_helper(apps: Apps, report_id: bytes) -> None:
    task = apps.task()
    requests = []
    for _ in range(8):
        company, copy = apps.reports(task, 2), apps.reports(task, 1, ids=[report_id])
        inits = apps.verify_inits(task, *company, *copy)
        requests.append(AggregationJobInitReq(verify_inits=inits).encode())
    with ThreadPoolExecutor(8) as threads:
        jobs = list(threads.map(lambda body: apps.create_job(task, body), requests))
    said = [helper_errors(job) for job in jobs]
    assert {tuple(each[:2]) for each in said} == {(0, 0)}
    assert sorted(each[2] for each in said) == [0] + [ReportError.REPORT_REPLAYED] * 7
    assert apps.verified(task)[1] == 8 * 2 + 1


@lesson("janus#3142")
def test_a_third_copy_is_a_replay_like_the_second(apps: Apps) -> None:
    task = apps.task()
    (report,) = apps.reports(task, 1)
    said = [helper_errors(apps.job_of(task, report, *apps.reports(task, 1))) for _ in range(4)]
    assert said == [[0, 0]] + [[ReportError.REPORT_REPLAYED, 0]] * 3


@lesson("janus#2437")
def test_a_job_without_reports_is_never_sent(apps: Apps) -> None:
    """All of its reports fail at the leader: it is done, and the helper hears nothing."""
    task = apps.task()
    report = craft(apps, task)
    size = len(report.helper)
    spoilt = bytearray(report.report)
    spoilt[-size - 1] ^= 1  # the end of the leader's own share
    assert errors(apps.upload(task, bytes(spoilt))) == []
    assert apps.work(task) == []
    assert apps.sent(aggregation_jobs_path(task.task_id)) == []
    (operators,) = task_status(apps.leader.core.database, [task])
    assert operators.rejected("leader") == {"hpke_decrypt_error": 1}
    assert operators.unfinished_jobs == 0


# --- what leaves my device? ---------------------------------------------------------------------


@lesson("draft-ietf-ppm-dap#505")
def test_keys_say_nothing_about_tasks(apps: Apps) -> None:
    """One set of HPKE keys an aggregator: which config a device seals to names no task."""
    task, other = apps.task(), apps.task()
    for url, service in ((LEADER_URL, apps.leader), (HELPER_URL, apps.helper)):
        lists = {
            apps.ask("GET", f"{url}hpke_config{query}").content
            for query in ("", f"?task_id={task.task_id.hex()}", f"?task_id={other.task_id.hex()}")
        }
        assert len(lists) == 1
        configs = {keys.config for keys in service.core.keys.keypairs()}
        apps.task()
        assert {keys.config for keys in service.core.keys.keypairs()} == configs


# --- the table ----------------------------------------------------------------------------------

ASKED = {
    *("janus#1860", "janus#763", "janus#3427", "janus#1414", "flower#955", "flower#4147"),
    *("janus#2293", "janus#3798", "divviup-api#172", "janus#760", "janus#2731", "janus#1877"),
    *("draft-ietf-ppm-dap#697", "draft-ietf-ppm-dap#758", "draft-ietf-ppm-dap#118"),
    *("janus#3143", "draft-ietf-ppm-dap#505", "janus#3142", "janus#2437"),
}


def test_every_thread_has_its_test() -> None:
    assert set(LESSONS) == ASKED
    assert all(name in globals() for name in LESSONS.values())
