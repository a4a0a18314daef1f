"""The decision vectors: a policy, questions with times, and what a device must decide.

tests/vectors/decisions/README.md says how any other device can run them.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import apsw
import pytest

from chorister.clock import SettableClock
from chorister.device.database import transaction
from chorister.device.ledger import Ledger
from chorister.device.ledger.budget import Charge
from chorister.errors import BudgetExceeded, LedgerStale, LedgerYoung, QueryRefused
from chorister.policy import Policy
from chorister.transparency.checkpoint import MAX_SKEW

VECTORS = sorted((Path(__file__).parent.parent / "vectors" / "decisions").glob("*.json"))


def decide(ledger: Ledger, connection: apsw.Connection, step: dict[str, Any]) -> tuple[str, str]:
    body = dict(step["recipe"])
    digest = body.pop("digest")
    charge = Charge.model_validate({**body, "recipe": digest})
    try:
        with transaction(connection):
            ledger.append(charge, step["time"])
    except LedgerStale:
        return "silent", "ledger-stale"
    except LedgerYoung:
        return "silent", "ledger-young"
    except QueryRefused as error:
        return "refused", error.check
    except BudgetExceeded as error:
        return "refused", error.field
    return "answered", ""


@pytest.mark.parametrize("path", VECTORS, ids=[path.stem for path in VECTORS])
def test_decisions(path: Path) -> None:
    vector = json.loads(path.read_text())
    policies = {name: Policy.model_validate(tree) for name, tree in vector["policies"].items()}
    tolerance = Decimal(vector.get("tolerance", 0))
    connection = apsw.Connection(":memory:")
    ledger: Ledger | None = None
    clock = SettableClock(0)
    for step in vector["steps"]:
        clock.set(step.get("clock", step["time"] - MAX_SKEW))
        where = f"{path.name}, {step['$comment']}"
        if "policy" in step:
            ledger = Ledger(
                connection,
                policies[step["policy"]],
                None,
                clock=clock,
                randbelow=lambda _: vector["offset"],
            )
            ledger.settle(step["time"])
            continue
        assert ledger is not None
        expected = (step["decision"], step.get("reason", ""))
        assert decide(ledger, connection, step) == expected, where
        found = {standing.limit: standing for standing in ledger.remaining(step["time"])}
        for limit, left in step["remaining"].items():
            its = found[limit]
            assert abs(its.remaining.epsilon - Decimal(left["epsilon"])) <= tolerance, where
            assert its.remaining.delta == Decimal(left["delta"]), where
            assert its.remaining_reports == left["reports"], where


def test_there_are_vectors_and_each_explains_itself() -> None:
    assert len(VECTORS) >= 7
    for path in VECTORS:
        vector = json.loads(path.read_text())
        assert vector["$comment"], path
        assert all(step["$comment"] for step in vector["steps"]), path
