"""A leader of two helpers, a helper of two leaders: the secrets of a pair are good for it alone."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chorister.aggregator.config import HelperConfig, LeaderConfig, load_config
from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.peers import leader_tokens, verify_keys
from chorister.aggregator.service import Service
from chorister.canonical import b64url_encode
from chorister.dap.draft import AGGREGATION_JOB_INIT_REQUEST, aggregation_jobs_path
from chorister.dap.messages import AggregationJobInitReq
from chorister.dap.task import task_binding, verify_key
from chorister.errors import ServiceError
from chorister.key_files import new_secret, token_digest, write_private
from chorister.policy import Policy
from tests.aggregator.apps import Apps
from tests.aggregator.world import (
    HELPER_URL,
    LEADER_URL,
    one_bit,
    signed,
    small_policy,
    small_recipe,
)
from tests.cli.toml import dumps

SECOND_HELPER = "https://second-helper.example/dap/"
SECOND_LEADER = "https://second-leader.example/dap/"
KEYS = (
    "Vaz4nMSuiZzZ-ntKWxEYlP4AGnjZFhjGMTmqaGYbWkE",
    "1yoeSMAyChjIgRgeTX1Mxv1IC2kAfrJNvlxwwfXg4xM",
)


def star_policy() -> Policy:
    """The small policy, whose leader has a second helper and whose helper a second leader."""
    tree: dict[str, Any] = small_policy().model_dump(exclude_unset=True)
    (first,) = tree["aggregators"]
    pairs = [first, copy.deepcopy(first), copy.deepcopy(first)]
    pairs[1]["name"], pairs[2]["name"] = "second-helper", "second-leader"
    pairs[1]["helper"] = {"url": SECOND_HELPER, "cosigning_keys": (KEYS[0],)}
    pairs[2]["leader"] = {"url": SECOND_LEADER, "cosigning_keys": (KEYS[1],)}
    return Policy.model_validate(tree | {"aggregators": pairs})


class Star(Apps):
    """A leader and two helpers; the second helper has secrets of its own."""

    def __init__(self, folder: Path) -> None:
        self.second_key, self.second_token = os.urandom(32), new_secret()
        write_private(folder / "second.key", b64url_encode(self.second_key).encode())
        write_private(folder / "second.token", self.second_token.encode())
        peer = {
            "url": SECOND_HELPER,
            "token": str(folder / "second.token"),
            "verify_key": str(folder / "second.key"),
        }
        # The first helper serves the pairs that this leader has, and not the second leader's.
        policy = star_policy()
        ours = policy.model_copy(update={"aggregators": policy.aggregators[:2]})
        super().__init__(folder, policy=ours, leader={"helpers": [peer]})
        settings = self.settings("helper", SECOND_HELPER) | {
            "database": f"sqlite:///{folder}/second.db",
            "head": str(folder / "second-head"),
            "verify_key": str(folder / "second.key"),
            "leader_token_digests": [token_digest(self.second_token.encode()).hex()],
        }
        self.second = Service(HelperConfig.model_validate(settings), self.clock)
        self.services = (*self.services, self.second)
        self.second.core.keys.publish(self.second.core.keys.generate())
        self.network.serve(SECOND_HELPER, self.second.app)

    def task_with(self, helper: str) -> KnownTask:
        """A task of a pair of this leader."""
        recipe = small_recipe(
            crowd="honest",
            id=f"recipe-{next(self._recipes)}",
            aggregators={"leader": LEADER_URL, "helper": helper},
        )
        for service in self.services:
            service.core.tasks.accept([signed(recipe)])
        (task,) = self.leader.core.tasks.of_recipe(recipe.digest)
        return task

    def reports_for(self, task: KnownTask, helper: Service) -> list[bytes]:
        return task_binding(task.configuration).seal_reports(
            one_bit(task.vdaf.length, [0, 0, 0]),
            report_ids=os.urandom(48),
            time=task.interval.start,
            leader_config=self.leader.core.keys.published()[0],
            helper_config=helper.core.keys.published()[0],
            threads=1,
        )


@pytest.fixture
def star(tmp_path: Path) -> Iterator[Star]:
    star = Star(tmp_path)
    yield star
    star.close()


def test_each_helper_verifies_under_its_own_key_and_token(star: Star) -> None:
    for url, helper in ((HELPER_URL, star.helper), (SECOND_HELPER, star.second)):
        task = star.task_with(url)
        assert star.upload(task, *star.reports_for(task, helper)).status_code == 200
        answer = star.collected(task)
        assert (answer.status_code, bool(answer.content)) == (200, True)


def test_a_helper_can_t_pass_for_the_leader_at_another_helper(star: Star) -> None:
    """It has the token that the leader shows to it, and its own verify key."""
    task = star.task_with(SECOND_HELPER)
    reports = star.reports_for(task, star.second)

    def job(key: bytes, token: str) -> tuple[int, bytes]:
        inits = star.verify_inits(task, *reports, key=verify_key(key, task.task_id))
        answer = star.ask(
            "POST",
            SECOND_HELPER + aggregation_jobs_path(task.task_id),
            AggregationJobInitReq(verify_inits=inits).encode(),
            media=AGGREGATION_JOB_INIT_REQUEST,
            token=token,
            advertised=task.configuration,
        )
        return answer.status_code, answer.content

    assert job(star.second_key, star.helper_token)[0] == 401
    status, refused = job(star.verify_key_init, star.second_token)
    assert status == 200
    status, accepted = job(star.second_key, star.second_token)
    assert status == 200
    assert len(refused) < len(accepted)  # rejected reports have no verifier message


def test_settings_for_one_helper_are_refused_where_there_are_two(star: Star) -> None:
    shared = star.leader.config.model_copy(update={"helpers": ()})
    with pytest.raises(ServiceError, match=r"second-helper\.example.* under \[\[helpers\]\]"):
        Service(shared, star.clock)


@pytest.mark.parametrize("field", ["token", "verify_key"])
def test_no_secret_is_used_twice(star: Star, field: str) -> None:
    config = star.leader.config
    assert isinstance(config, LeaderConfig)
    first = config.helper_token if field == "token" else config.verify_key
    (peer,) = config.helpers
    again = peer.model_copy(update={field: first})
    with pytest.raises(ServiceError, match=f"two pairs have the same {field}"):
        Service(config.model_copy(update={"helpers": (again,)}), star.clock)


def test_a_leader_s_token_opens_its_own_tasks_alone(star: Star, tmp_path: Path) -> None:
    """At a helper of two leaders: the second is a stranger to the first one's task."""
    second = new_secret()
    peer = {
        "url": SECOND_LEADER,
        "token_digests": [token_digest(second.encode()).hex()],
        "verify_key": "second.key",
    }
    policy = tmp_path / "star.toml"
    policy.write_text(dumps(star_policy().model_dump(exclude_unset=True)))
    settings = star.settings("helper", HELPER_URL) | {
        "database": "sqlite:///two-leaders.db",
        "policies": ["star.toml"],
        "leader_token_digests": [token_digest(star.helper_token.encode()).hex()],
    }
    with pytest.raises(ServiceError, match=r"second-leader\.example.* under \[\[leaders\]\]"):
        Service(HelperConfig.model_validate(settings | {"policies": [str(policy)]}), star.clock)
    (tmp_path / "helper.toml").write_text(dumps(settings | {"leaders": [peer]}))
    config = load_config(tmp_path / "helper.toml", {})
    assert isinstance(config, HelperConfig)
    assert verify_keys(config)(SECOND_LEADER) == star.second_key
    assert verify_keys(config)(LEADER_URL) == star.verify_key_init
    good_for = leader_tokens(config)[token_digest(second.encode())]
    assert good_for(SECOND_LEADER)
    assert not good_for(LEADER_URL)
    helper, before = Service(config, star.clock), star.services
    try:
        star.network.withdraw(HELPER_URL)
        star.network.serve(HELPER_URL, helper.app)
        helper.core.keys.publish(helper.core.keys.generate())
        star.services = (star.leader, helper, star.second)
        task = star.task_with(HELPER_URL)
        reports = star.reports_for(task, helper)
        inits = AggregationJobInitReq(verify_inits=star.verify_inits(task, *reports))
        assert star.create_job(task, inits, token=second).status_code == 403
        assert star.create_job(task, inits).status_code == 200
    finally:
        star.network.withdraw(HELPER_URL)
        star.network.serve(HELPER_URL, star.helper.app)
        star.services = before
        helper.close()
