"""Studies: nothing is asked twice, nothing is lost, and every refusal says what to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import chorister as ch
from chorister.analyst.rounds import Round, RoundState
from chorister.analyst.spending import _has_renewed
from chorister.device.ledger.counting import period_end
from chorister.errors import (
    BudgetExceeded,
    CohortTooSmall,
    DecodeError,
    InvalidInput,
    QueryRefused,
    QuestionWithdrawn,
    StudyError,
    WindowOver,
)
from chorister.policy import Policy
from tests.analyst.fleets import AGES, DEVICES, decades, fleet, generous
from tests.conftest import REPOSITORY
from tests.keyboard import ANALYSIS, POLICY, RECIPE, analysis_at


def a_study(policy: Policy | None = None, **options: object) -> ch.Study:
    return fleet(policy, **options).study("study", analysis=ANALYSIS)


def a_question(study: ch.Study, **options: object) -> ch.Question:
    settings = {"local_epsilon": 3, "epsilon": 1, **options}
    return study.histogram(decades(), **settings)  # type: ignore[arg-type]


# --- Planning -----------------------------------------------------------------------------------


def test_a_question_of_three_words() -> None:
    """All that is left out follows from the policy and the number of devices."""
    study = a_study(POLICY)
    question = study.histogram(decades())
    assert question.query == 'SELECT "user"."age" AS "age" FROM "user"'
    assert question.reads == {"user": ("age",)}
    assert question.privacy.epsilon == Decimal("0.3")  # the field's whole, for its one report
    assert question.privacy.local_epsilon == 2  # the field's largest
    cost = question.cost()
    assert cost.allowed
    assert cost.expected == DEVICES
    assert cost.more == 1
    assert "charged epsilon 0.3" in cost.explain()
    assert "<p>" in cost._repr_html_()
    assert question.run().n_reports == DEVICES


def test_the_local_epsilon_follows_from_the_cohort_if_the_cohort_binds() -> None:
    study = a_study()
    whole = study.histogram(decades(), epsilon="0.1", delta="1e-6")
    part = study.histogram(decades(), epsilon="0.1", delta="1e-6", participation=".1")
    assert part.privacy.local_epsilon < whole.privacy.local_epsilon < 8
    assert part.privacy.min_cohort < 0.1 * DEVICES
    assert whole.privacy.min_cohort <= DEVICES
    assert whole.run().n_reports == DEVICES


def test_which_epsilon_and_cohort_give_an_accuracy() -> None:
    study = a_study()
    question = study.for_accuracy(decades(), relative_error=0.01, local_epsilon=2, delta="1e-6")
    cost = question.cost(reports=question.privacy.min_cohort)
    assert cost.relative_error == pytest.approx(0.01, rel=0.01)
    other = study.for_accuracy(decades(), std_error=150, reports=50_000, delta="1e-6")
    assert other.cost(reports=50_000).std_error <= 150
    assert other.privacy.min_cohort == 50_000
    assert other.cost().allowed
    for wrong in ({}, {"std_error": 1.0, "relative_error": 0.1}, {"std_error": 1.0}):
        with pytest.raises(InvalidInput):
            study.for_accuracy(decades(), **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="leave it out"):
        study.for_accuracy(decades(), relative_error=0.1, epsilon=1)


def test_how_many_more_such_questions_are_left() -> None:
    study = a_study(generous(5))
    question = a_question(study, epsilon="0.5")
    assert study.budget.more(question) == 5
    question.run()
    assert study.budget.more(question) == 4
    standing = next(s for s in study.budget.limits if s.limit.endswith(".budget"))
    assert standing.spent.epsilon == Decimal("0.5")
    assert "epsilon 0.5 of 3" in study.budget.explain()


def test_bad_plans_say_what_to_do() -> None:
    study = a_study()
    with pytest.raises(InvalidInput, match="no field of this analysis has"):
        study.histogram(ch.intervals("height", [1, 2]))
    with pytest.raises(InvalidInput, match="participation"):
        a_question(study, participation="2")
    with pytest.raises(InvalidInput, match="below the minimum cohort"):
        a_question(study).run(target=3)
    with pytest.raises(InvalidInput, match="it has: keyboard"):
        fleet().study("x", analysis="nothing")
    with pytest.raises(InvalidInput, match="another study"):
        fleet().study("y", analysis=ANALYSIS).ask(a_question(study))


# --- Asking -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "my ages", "größe", "a/b", "-x", "x" * 91])
def test_a_study_has_a_name_that_recipes_can_hold(name: str) -> None:
    with pytest.raises(InvalidInput, match="without spaces"):
        fleet().study(name)


def test_a_refusal_comes_first_and_in_words() -> None:
    study = a_study()
    refused = study.histogram(decades(), window="1m", epsilon="0.3").cost().explain()
    assert refused.startswith("Refused (window): answered for 1 minute")
    assert "may answer" not in refused
    spent = study.histogram(decades(), epsilon=2)
    assert spent.cost().explain().endswith(".")
    spent.run()
    again = spent.again().cost()
    assert again.explain().startswith("No device would answer: the budget allows ")
    assert "analyses." not in again.explain()
    assert not again.remarks  # nothing about bins that nobody fills
    assert "Every device has answered in this study." in again.explain()


def test_a_cost_is_foreseen_until_it_has_renewed_on_every_device() -> None:
    """The last charge is dated five minutes ahead, and renews by a checkpoint as old as may be."""
    last = RECIPE.window.closes - 1 + 300
    period, age = POLICY.device.period, POLICY.checkpoint_max_age
    assert period is not None
    ends = [period_end(last, period, offset) or 0 for offset in range(0, period, period // 97)]
    assert not _has_renewed(RECIPE, POLICY, max(ends) + age)
    assert _has_renewed(RECIPE, POLICY, last + 1 + period + age)


def test_the_same_question_is_not_asked_twice() -> None:
    study = a_study()
    first = a_question(study).run()
    assert a_question(study).run() is first
    assert len(study.rounds) == 1
    again = a_question(study).again().run()
    assert again is not first
    assert (again.counts != first.counts).any()


def test_a_budget_that_is_exhausted() -> None:
    study = a_study(generous(1))
    a_question(study).run()
    with pytest.raises(BudgetExceeded, match="wait until the budget renews"):
        a_question(study).again().run()
    cost = a_question(study).again().cost()
    assert not cost.allowed
    assert "No device would answer" in cost.explain()
    assert len(study.rounds) == 1


def test_a_cohort_that_is_too_small_is_refused_before_anybody_is_charged() -> None:
    study = a_study()
    with pytest.raises(CohortTooSmall, match="ask a larger share") as caught:
        a_question(study, min_cohort=DEVICES + 2000).run()
    assert (caught.value.reports, caught.value.needed) == (DEVICES, DEVICES + 2000)
    assert study.rounds == []


def test_what_the_policy_refuses_is_not_asked() -> None:
    study = a_study(analysis_at({"mechanisms": ["asymmetric"]}))
    question = study.histogram(decades(), mechanism="symmetric", local_epsilon=1, epsilon="0.2")
    with pytest.raises(QueryRefused, match="mechanism"):
        question.run()
    assert study.rounds == []


def test_devices_that_refuse_everything_send_nothing() -> None:
    """The analyst has another policy than the devices: zero reports, and a clear error."""
    strict = analysis_at({"max_bins": 2})
    study = a_study(generous(), device_policy=strict)
    question = a_question(study)
    with pytest.raises(CohortTooSmall, match="devices' policy refuses it \\(bins\\)") as caught:
        question.run()
    assert caught.value.reports == 0
    with pytest.raises(CohortTooSmall, match="refuses it"):
        question.run()  # the same answer, from the study's own record
    (round_,) = study.rounds
    assert (round_.state, round_.result) == (RoundState.FAILED, None)
    assert "refuses it" in study.history().to_polars()["outcome"][0]
    assert "refuses it" in study.status().explain()


def test_a_window_that_is_over_before_the_recipe_was_published(tmp_path: Path) -> None:
    study = a_study(folder=tmp_path)
    question = a_question(study)
    study._begin(question, None)  # a crash before it was published
    from chorister.clock import SettableClock

    later = SettableClock(study.fleet.clock.now() + 30 * 86_400)
    resumed = a_study(folder=tmp_path, clock=later)
    with pytest.raises(WindowOver, match="again"):
        a_question(resumed).run()
    with pytest.raises(WindowOver):
        a_question(resumed).run()


def test_a_question_that_was_taken_back_may_have_been_answered() -> None:
    study = a_study(generous(2))
    study.post(a_question(study))
    spent = [each.reports for each in study.budget.limits]
    assert max(spent) == 1
    study.cancel()
    budget = study.budget
    assert [each.reports for each in budget.limits] == spent  # by whoever was quicker
    assert budget.fresh_devices == 1.0  # or by nobody: it can be asked again


def test_cancel_and_status() -> None:
    study = a_study(generous(1))  # a question that is taken back at once costs nobody anything
    assert "Nothing has been asked" in study.status().explain()
    question = a_question(study)
    study.post(question)
    words = study.status().explain()
    assert "Round 1" in words
    assert "Devices can answer until" in words
    with pytest.raises(StudyError, match="no result yet"):
        study.result()
    study.cancel()
    assert "cancelled" in study.status().explain()
    with pytest.raises(QuestionWithdrawn, match="again"):
        question.run()
    with pytest.raises(InvalidInput, match="no such open round"):
        study.cancel()
    assert question.again().run().n_reports == DEVICES
    assert study.result().round == 2
    assert [str(round_.state) for round_ in study.history()] == ["withdrawn", "collected"]
    assert "<table>" in study.history()._repr_html_()


def test_a_bar_shows_how_the_cohort_fills(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if it were a terminal
    study = a_study()
    study.ask(a_question(study), bar=True)
    assert "round 1" in capsys.readouterr().err


# --- On disk ------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["published", "drawn", "write-4", "write-5"])
def test_a_study_survives_a_kill_in_the_middle_of_a_round(moment: str, tmp_path: Path) -> None:
    def run(what: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tests.analyst.killed_analyst", tmp_path / "killed", what],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )

    killed = run(moment)
    assert killed.returncode == -9, killed.stderr
    finished = run("no")
    assert finished.returncode == 0, finished.stderr
    study = ch.rehearse(AGES, generous(1), folder=tmp_path / "killed").study(
        "victim", analysis=ANALYSIS
    )
    assert [round_.state for round_ in study.rounds] == [RoundState.COLLECTED] * 3
    # Cohorts are disjoint, whatever was killed in between.
    reports = [round_.result.n_reports for round_ in study.rounds if round_.result is not None]
    assert sum(reports) <= DEVICES
    assert sum(reports) == pytest.approx(DEVICES * (1 - 0.7**3), rel=0.02)


def test_a_killed_round_is_finished_as_it_would_have_been(tmp_path: Path) -> None:
    """The same seed, once with a crash between publishing and collecting, once without."""
    sums = []
    for name in ("whole", "crashed"):
        study = a_study(folder=tmp_path / name)
        study.post(a_question(study))
        if name == "crashed":
            study = a_study(folder=tmp_path / name)
        sums.append(a_question(study).run().parts[0].sums.tolist())
    assert sums[0] == sums[1]


def test_a_folder_belongs_to_one_study_of_one_fleet(tmp_path: Path) -> None:
    a_question(a_study(folder=tmp_path)).run()
    with pytest.raises(StudyError, match="seed"):
        a_study(folder=tmp_path, seed=8)
    (tmp_path / "rehearsal.json").unlink()
    with pytest.raises(StudyError, match="choose another name or folder"):
        a_study(folder=tmp_path, seed=8)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    a_question(a_study(folder=tmp_path)).run()
    (tmp_path / "study" / "round-0001.json").write_text("{}")
    with pytest.raises(StudyError, match=r"can't read .*round-0001\.json"):
        a_study(folder=tmp_path)


def test_two_processes_do_not_ask_at_once(tmp_path: Path) -> None:
    study = a_study(folder=tmp_path)
    other = a_study(folder=tmp_path)
    other.fleet.archive.lock_seconds = 0.0
    with study.fleet.archive.asking(), pytest.raises(StudyError, match="another process"):
        a_question(other).run()
    with study.fleet.archive.waiting("study", 1), pytest.raises(StudyError, match="another"):
        a_question(other).run()
    assert a_question(other).run().n_reports == DEVICES
    assert a_question(study).run().n_reports == DEVICES  # it reads what the other one wrote
    assert len(study.rounds) == 1


def test_another_process_may_cancel_what_this_one_waits_for(tmp_path: Path) -> None:
    study, other = a_study(folder=tmp_path), a_study(folder=tmp_path)
    question = a_question(study)
    round_ = study.post(question)
    with other.fleet.archive.asking():
        pass  # it looks
    with study.fleet.archive.waiting("study", 1):
        other.cancel()
        withdrawn = study.collect_round(round_, lambda _: None)
    assert withdrawn.state is RoundState.WITHDRAWN
    with pytest.raises(QuestionWithdrawn):
        question.run()


def test_cancelling_what_another_process_has_collected_keeps_the_result(tmp_path: Path) -> None:
    study, other = a_study(folder=tmp_path), a_study(folder=tmp_path)
    question = a_question(study)
    study.post(question)
    other.fleet.archive.refresh()
    question.run()
    with pytest.raises(InvalidInput, match="no such open round"):
        other.cancel(1)
    assert a_study(folder=tmp_path).result(1).n_reports == DEVICES


def test_files_are_private(tmp_path: Path) -> None:
    a_question(a_study(folder=tmp_path)).run()
    path = tmp_path / "study" / "round-0001.json"
    assert path.stat().st_mode & 0o077 == 0
    assert json.loads(path.read_text())["state"] == "collected"


@given(st.binary(max_size=100))
def test_rounds_that_are_rubbish(data: bytes) -> None:
    with pytest.raises(DecodeError):
        Round.from_json(data)


def test_every_arm_of_an_experiment_is_a_cohort_of_its_own() -> None:
    study = fleet(generous(1)).study("arms", analysis=ANALYSIS)
    question = study.histogram(decades(), epsilon=1, arms={"control": 3, "treatment": 1})
    assert question.privacy.min_cohort <= DEVICES / 4  # the smaller arm is to reach it
    found = question.run()
    assert [part.group for part in found.parts] == [("control",), ("treatment",)]
    assert found.n_reports == DEVICES
    # Each device draws its arm: within six standard deviations of a quarter.
    spread = 6 * (DEVICES * 3 / 16) ** 0.5
    assert abs(found.parts[1].reports - DEVICES / 4) < spread
    assert list(found.labels) == ["arm", "age"]
    control, treatment = found.group("control"), found.group("treatment")
    assert list(treatment.labels) == ["age"]
    difference = control.compare(treatment).to_polars()  # nothing was treated: shares are equal
    assert (difference["std_error"] > 0).all()
    assert (difference["difference"].abs() < 6 * difference["std_error"]).all()
    with pytest.raises(InvalidInput, match="separate cohorts"):
        found.marginal("age")
    assert ch.Result.from_json(found.to_json()).labels == found.labels
    again = study.histogram(decades(), epsilon=1, arms=["a", "b"], repeat=1)
    assert [arm.weight for arm in again.arms] == [1, 1]
    for wrong in (["a"], "ab", ["a", "a"], {"a": 0, "b": 1}):
        with pytest.raises(InvalidInput, match="arms"):
            study.histogram(decades(), epsilon=1, arms=wrong)


def test_a_target_counts_the_smallest_arm() -> None:
    study = fleet(generous(1)).study("arms", analysis=ANALYSIS)
    question = study.histogram(decades(), local_epsilon=6, epsilon=3, arms={"big": 3, "small": 1})
    found = question.run(target=5_000)
    assert min(part.reports for part in found.parts) == 5_000
    assert found.n_reports == pytest.approx(20_000, rel=0.1)
    left = study.histogram(decades(), local_epsilon=6, epsilon=3, repeat=1).run()
    assert left.n_reports == DEVICES - found.n_reports


def test_only_entry_points_know_which_kind_of_fleet_they_use() -> None:
    """All else sees a `Fleet`: what works in a rehearsal works with real devices."""
    root = Path(ch.__file__).parent
    kinds = re.compile(r"import .*\b(LiveFleet|Rehearsal|ReportsRehearsal)\b")
    sources = [*(root / "analyst").rglob("*.py"), *(root / "console").glob("*.py")]
    found = {str(path.relative_to(root)) for path in sources if kinds.search(path.read_text())}
    assert found == {
        "analyst/rehearsal/__init__.py",
        "analyst/rehearsal/real_devices.py",
        "analyst/rehearsal/simulation.py",
        "console/connections.py",
    }
