"""An aggregator at its log: keys are published before use, rotated, destroyed; heads are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chorister._native import HPKEKeypair
from chorister.aggregator.cosigning import cosigner_identity
from chorister.aggregator.service import Service
from chorister.clock import SettableClock
from chorister.errors import HeadLost, ServiceError
from chorister.registry.registry import CANDIDATE_LIFETIME
from chorister.transparency.entries import HPKEConfigEntry, Submission
from chorister.transparency.note import key_name
from tests.aggregator.inprocess_pair import InProcessPair, an_idle_pair, wait_until
from tests.logworld import DAY, NOW, key, submission


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[InProcessPair]:
    with an_idle_pair(tmp_path) as pair:
        yield pair


def turn(pair: InProcessPair, seconds: int = 1) -> None:
    """Time passes, the registry offers a candidate, both look."""
    assert isinstance(pair.clock, SettableClock)
    pair.clock.advance(seconds)
    for service in (pair.leader, pair.helper):
        assert service.cosigning is not None
        service.cosigning._submit_keys()
    pair.registry.issue()
    for service in (pair.leader, pair.helper):
        assert service.cosigning is not None
        service.cosigning.run()


def logged(pair: InProcessPair, service: Service) -> list[bytes]:
    assert service.cosigning is not None
    entries = service.cosigning._head.state.hpke_entries(key_name(service.config.url))
    return [entry.config for entry in entries]


def test_a_key_is_in_the_log_before_it_is_shown(pair: InProcessPair) -> None:
    answer = pair.request("GET", f"{pair.operators.at.leader}hpke_config")
    if answer.status_code != 200:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert not pair.leader.core.keys.published()
    for _ in range(3):
        turn(pair)
    published = pair.leader.core.keys.published()
    assert published == logged(pair, pair.leader)
    assert len(published) == 1
    assert pair.registry.status().published is not None


def test_keys_are_rotated_and_old_ones_destroyed(pair: InProcessPair) -> None:
    for _ in range(3):
        turn(pair)
    (first,) = pair.leader.core.keys.published()
    for wait in (31 * DAY, 1, 1):
        turn(pair, wait)
    (second,) = pair.leader.core.keys.published()
    assert first != second
    assert logged(pair, pair.leader) == [first, second]
    # Nothing can be sealed to it any more, and no task needs it.
    turn(pair, 3 * DAY)
    living = [each.config for each in pair.leader.core.keys.keypairs()]
    assert first not in living
    assert first in pair.leader.core.keys.own_configs()


def test_a_key_is_not_submitted_twice_by_a_restart_after_it_came_through(
    pair: InProcessPair,
) -> None:
    for _ in range(3):
        turn(pair)
    pair.stop(pair.leader)
    pair.leader = pair.start("leader")
    for _ in range(3):
        turn(pair)
    assert len(logged(pair, pair.leader)) == 1


def test_a_key_in_our_name_that_is_not_ours_is_not_cosigned(pair: InProcessPair) -> None:
    for _ in range(3):
        turn(pair)
    assert pair.leader.cosigning is not None
    before = pair.leader.cosigning._cosigner.last
    assert before is not None
    stolen = HPKEConfigEntry(
        aggregator=key_name(pair.operators.at.leader),
        not_before=NOW,
        not_after=NOW + DAY,
        config=HPKEKeypair.generate(77).config,
    ).signed(key("leader"))
    pair.registry.submit(Submission.of(stolen).encode())
    turn(pair, CANDIDATE_LIFETIME)  # a candidate from before may still wait, and is replaced
    after = pair.leader.cosigning._cosigner.last
    assert after is not None
    # Perhaps of a later second: the pair looks at the log by itself, too.
    assert (after.size, after.root) == (before.size, before.root)
    failures = b'chorister_cosigning_failures_total{error="ForeignHPKEConfig"}'
    assert failures in pair.leader.metrics.text()


def test_a_registry_that_is_away_is_waited_for(pair: InProcessPair) -> None:
    pair.network.withdraw(pair.operators.at.registry)
    assert pair.leader.cosigning is not None
    assert pair.leader.cosigning.run() is False
    assert b"chorister_cosigning_failures_total" in pair.leader.metrics.text()


def test_a_lost_head_needs_a_decision(pair: InProcessPair, tmp_path: Path) -> None:
    for _ in range(3):
        turn(pair)
    pair.stop(pair.leader)
    head = tmp_path / "leader-head"
    checkpoint = tmp_path / "saved"
    checkpoint.write_bytes((head / "head").read_bytes())
    for path in head.iterdir():
        path.unlink()
    with pytest.raises(HeadLost, match="does not know what it signed last"):
        pair.start("leader")
    config = pair.operators.leader()
    with pytest.raises(ServiceError, match="is not a checkpoint"):
        Service(config, pair.clock, adopt=tmp_path / "policy.toml", transport=pair.network)
    with pytest.raises(ServiceError, match="can't read"):
        Service(config, pair.clock, adopt=tmp_path / "none", transport=pair.network)
    adopted = Service(config, pair.clock, adopt=checkpoint, transport=pair.network)
    adopted.close()
    pair.leader = pair.start("leader")

    def cosigned() -> bool:
        turn(pair)  # again: the registry may offer another candidate between two looks
        return pair.registry.status().waiting_for == ()

    wait_until(cosigned, "both cosignatures", 10)
    with pytest.raises(HeadLost, match="already holds a head"):
        Service(config, pair.clock, begin_log=True, transport=pair.network)


def test_who_cosigns_must_be_in_every_policy(pair: InProcessPair) -> None:
    policies = [pair.operators.policy]
    assert cosigner_identity(pair.operators.at.leader, key("leader"), policies).name
    with pytest.raises(ServiceError, match="does not list this aggregator's cosigning key"):
        cosigner_identity(pair.operators.at.leader, key("helper"), policies)
    with pytest.raises(ServiceError, match="has no aggregator at"):
        cosigner_identity("https://other.example/", key("leader"), policies)


def test_a_key_that_waits_is_submitted_again_with_the_same_bytes(pair: InProcessPair) -> None:
    assert isinstance(pair.clock, SettableClock)
    cosigning = pair.leader.cosigning
    assert cosigning is not None
    config = pair.leader.core.keys.generate()
    first = cosigning._entry(config, NOW)
    pair.stop(pair.leader)
    pair.leader = pair.start("leader")
    assert pair.leader.cosigning is not None
    assert first is not None
    assert pair.leader.cosigning._entry(config, NOW + 600) == first


def test_an_old_key_is_not_brought_back(pair: InProcessPair) -> None:
    """A second entry for a key of ours, signed by us, is not cosigned."""
    for _ in range(3):
        turn(pair)
    assert pair.leader.cosigning is not None
    before = pair.leader.cosigning._cosigner.last
    (config,) = pair.leader.core.keys.published()
    again = HPKEConfigEntry(
        aggregator=key_name(pair.operators.at.leader),
        not_before=NOW,
        not_after=NOW + DAY,
        config=config,
    ).signed(key("leader"))
    pair.registry.submit(Submission.of(again).encode())
    turn(pair, CANDIDATE_LIFETIME)  # a candidate from before may still wait, and is replaced
    after = pair.leader.cosigning._cosigner.last
    assert after is not None
    # Perhaps of a later second: the pair looks at the log by itself, too.
    assert (after.size, after.root) == (before.size, before.root)
    failures = b'chorister_cosigning_failures_total{error="ForeignHPKEConfig"}'
    assert failures in pair.leader.metrics.text()


def test_open_recipes_are_enumerated_again_at_a_start(pair: InProcessPair) -> None:
    """The database is new, or a policy was added, after the checkpoint was cosigned."""
    recipe = pair.operators.recipe("again", NOW)
    pair.registry.submit(submission(pair.operators.entry(recipe)).encode())
    for _ in range(3):
        turn(pair)
    before = [task.task_id for task in pair.leader.core.tasks.all()]
    assert before
    with pair.leader.core.database.write() as connection:
        connection.exec_driver_sql("DELETE FROM tasks")
        connection.exec_driver_sql("DELETE FROM batches")
    pair.stop(pair.leader)
    pair.leader = pair.start("leader")
    assert [task.task_id for task in pair.leader.core.tasks.all()] == before
