"""A console's workspace that an earlier version left shows the same, and goes on.

**What every version owes to these files:** it opens them, or refuses them with an error of
`chorister.errors` that says what to do (see `test_refusals.py`). It never opens them by half: a
round that is not read would be missing from what devices are known to have spent.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from chorister.aggregator.inprocess import InProcessNetwork
from chorister.analyst.rounds import RoundState
from chorister.clock import SettableClock
from chorister.console.access import NotFound, origins_of
from chorister.console.app import build_app
from chorister.console.config import ConsoleConfig
from chorister.console.workspace import Workspace
from tests.aggregator.inprocess_pair import wait_until
from tests.compatibility.opening import unpack
from tests.console.world import TOKENS

ORIGIN = "http://127.0.0.1:8090"
STUDY = "/studies/rehearsal/ada/ages"


class OldConsole:
    """A console of an earlier version, open."""

    def __init__(self, workspace: Workspace, expected: dict[str, Any]) -> None:
        self.workspace = workspace
        self.expected = expected
        self.study = workspace.find("ada", "rehearsal", "ada", "ages").study
        # The time at which it was written, whatever today is: by now the budgets have renewed.
        clock = workspace.connections["rehearsal"].fleet.clock
        assert isinstance(clock, SettableClock)
        clock.set(max(round_.recipe.window.opens for round_ in self.study.rounds))

    def state(self, number: int) -> RoundState:
        return self.study.rounds[number - 1].state


@pytest.fixture
def old(kept: Path, tmp_path: Path) -> Iterator[OldConsole]:
    expected = unpack(kept, "console", tmp_path)
    with Workspace.open(ConsoleConfig.load(tmp_path / "console.toml")) as workspace:
        yield OldConsole(workspace, expected)


def test_results_runs_and_budgets_are_all_there(old: OldConsole) -> None:
    last = len(old.expected["states"])
    assert [round_.state.name for round_ in old.study.rounds][: last - 1] == (
        old.expected["states"][: last - 1]
    )
    first = old.study.result(1)
    assert first.n_reports == old.expected["reports"]
    assert first.parts[0].sums.tolist() == old.expected["sums"]
    (record,) = old.workspace.runs.of(("rehearsal", "ada.ages"))
    assert [record.state, list(record.rounds), record.words] == old.expected["run"]
    assert old.workspace.runs.picture(("rehearsal", "ada.ages"), 1)
    spent = {
        each.limit: [str(each.spent.epsilon), str(each.spent.delta), each.reports]
        for each in old.study.budget.limits
    }
    assert spent == old.expected["budget"]


def test_whoever_could_look_still_can_and_nobody_else(old: OldConsole) -> None:
    view = old.workspace.find("ben", "rehearsal", "ada", "ages")
    assert not view.own
    assert not view.may_ask
    with pytest.raises(NotFound):
        old.workspace.find("cleo", "rehearsal", "ada", "ages")


def test_the_open_question_gets_its_result(old: OldConsole) -> None:
    number = len(old.expected["states"])
    wait_until(lambda: old.state(number) is not RoundState.ASKED, "the open question")
    assert old.study.result(number).n_reports == old.expected["reports"]


def test_the_pages_show_the_study_and_its_result(old: OldConsole) -> None:
    clock = SettableClock(2_000_000_000)
    app = build_app(old.workspace, clock, origins=origins_of("127.0.0.1", 8090, None))
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(InProcessNetwork())
        network.serve(ORIGIN, app)
        client = httpx2.Client(base_url=ORIGIN, headers={"origin": ORIGIN}, transport=network)
        stack.callback(client.close)
        assert client.post("/sign-in", data={"token": TOKENS["ada"]}).status_code == 303
        assert f'href="{STUDY}"' in client.get("/").text
        page = client.get(STUDY)
        assert page.status_code == 200
        table = client.get(f"{STUDY}/rounds/1/result.csv")
        assert table.status_code == 200
        shown = [float(row["estimate"]) for row in csv.DictReader(io.StringIO(table.text))]
        assert shown == pytest.approx(old.study.result(1).to_polars()["estimate"].to_list())
        assert len(shown) >= len(old.expected["sums"]) - 1  # OOV may be left out
        assert client.get(f"{STUDY}/runs/1").status_code == 200
