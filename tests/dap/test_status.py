"""A recipe's progress, as a leader tells it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.dap.status import RecipeStatus
from chorister.errors import Unreachable

TREE: dict[str, object] = {
    "tasks": 3,
    "state": "collecting",
    "filled": 0.4,
    "waiting_for": "reports",
    "rejected": {"leader": {"task_expired": 2}, "helper": {"vdaf_verify_error": 1}},
    "closes": 100,
    "ends": 200,
}


def test_what_a_leader_says() -> None:
    status = RecipeStatus.parse(json.dumps(TREE).encode())
    assert (status.tasks, status.state, status.filled) == (3, "collecting", 0.4)
    assert status.rejected.helper == {"vdaf_verify_error": 1}
    assert status.reports is None


def test_a_later_leader_may_say_more() -> None:
    status = RecipeStatus.parse(json.dumps(TREE | {"weather": "fine"}).encode())
    assert status == RecipeStatus.parse(json.dumps(TREE).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"tasks": -1},
        {"tasks": "3"},
        {"state": "sulking"},
        {"filled": 1.5},
        {"waiting_for": "\x1b[31m"},
        {"rejected": {"leader": {"a": -1}}},
        {"rejected": []},
    ],
)
def test_what_can_t_be_read(change: dict[str, object]) -> None:
    with pytest.raises(Unreachable, match="can't be read"):
        RecipeStatus.parse(json.dumps(TREE | change).encode())


@given(st.one_of(st.binary(), st.text().map(lambda text: json.dumps({"state": text}).encode())))
def test_any_bytes(data: bytes) -> None:
    with pytest.raises(Unreachable):
        RecipeStatus.parse(data)
