"""`chorister keys`: an operator looks at report keys, and has the next one made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from chorister.aggregator.service import open_core
from chorister.cli import app
from chorister.clock import SystemClock
from tests.aggregator.operators import Operators


def run(operators: Operators, *arguments: str) -> Any:
    config = ["--config", str(operators.settings("leader"))]
    result = CliRunner().invoke(app, ["keys", *arguments, *config, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_the_next_key_is_made_once_and_seen_through(tmp_path: Path) -> None:
    operators = Operators(tmp_path)
    core = open_core(operators.leader(), SystemClock(), migrate=True)
    first = core.keys.generate()
    core.keys.publish(first)
    assert [each["state"] for each in run(operators, "list")["keys"]] == ["in use"]

    made = run(operators, "rotate")
    assert made["made"] is True
    again = run(operators, "rotate")  # it is on its way: no second one
    assert again == {**made, "made": False}
    states = {each["digest"]: each["state"] for each in run(operators, "list")["keys"]}
    assert sorted(states.values()) == ["in use", "waiting"]
    assert states[made["digest"]] == "waiting"

    # What the running aggregator does when the log has it.
    [waiting] = core.keys.unpublished()
    core.keys.publish(waiting)
    states = {each["digest"]: each["state"] for each in run(operators, "list")["keys"]}
    assert states[made["digest"]] == "in use"
    assert sorted(states.values()) == ["in use", "retired"]
    core.database.close()


def test_people_can_read_it(tmp_path: Path) -> None:
    operators = Operators(tmp_path)
    open_core(operators.leader(), SystemClock(), migrate=True).database.close()
    config = ["--config", str(operators.settings("leader"))]
    for _, words in ((1, "created key 0"), (2, "key 0 is already waiting to be published")):
        assert words in CliRunner().invoke(app, ["keys", "rotate", *config]).output
    table = CliRunner().invoke(app, ["keys", "list", *config]).output
    assert "waiting" in table
