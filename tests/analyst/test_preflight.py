"""No wasted questions: everything that would fail fails before a device is charged."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chorister as ch
from chorister.analyst.algorithms.distribution import distribution
from chorister.analyst.algorithms.ngrams import discover_ngrams
from chorister.analyst.fleet import OthersQuestions
from chorister.analyst.rehearsal import Rehearsal
from chorister.analyst.series import TrackPlan
from chorister.analyst.spending import expected_ledgers
from chorister.encoding import AnyFeature
from chorister.errors import (
    BudgetExceeded,
    ChoristerError,
    CohortTooSmall,
    InvalidInput,
    QueryRefused,
)
from chorister.policy import Policy
from tests.analyst.fleets import DEVICES, decades, fleet, generous
from tests.keyboard import ANALYSIS

PEOPLE = {"age": [20], "count": [1_000]}
AGE = {"user": ("age",)}
LIMITS = ("epsilon", "delta", "reports")
WHERE = ("device", "analysis", "field")


def of_twelve(**changes: Any) -> Policy:
    """Epsilon 12 and 12 reports, device-wide, for the analysis, and for every field."""
    limits = {"local_epsilon": 8, "epsilon": 12, "delta": Decimal("1.2e-5"), "reports": 12}
    return generous(
        12,
        **{
            "device/epsilon": 12,
            "device/delta": Decimal("1.2e-5"),
            f"analyses/{ANALYSIS}/budget/epsilon": 12,
            f"analyses/{ANALYSIS}/budget/delta": Decimal("1.2e-5"),
            f"analyses/{ANALYSIS}/fields": dict.fromkeys(
                ("keyboard.ngram", "keyboard.perplexity", "user.age"), limits
            ),
            **changes,
        },
    )


def spent_of(rehearsal: Rehearsal) -> Decimal:
    """What the device-wide epsilon of the fullest ledger is."""
    limits = expected_ledgers(rehearsal).fullest.limits(ANALYSIS)
    return limits[0].standing().spent.epsilon


def texts(policy: Policy | None = None) -> Rehearsal:
    """Devices that hold a phrase."""
    rows = {"ngram": ["how are you", "the cat sat"], "count": [4000, 3000]}
    found: Rehearsal = ch.rehearse(rows, policy or of_twelve(), seed=3)
    return found


# --- 1. What is already spent -------------------------------------------------------------------


def test_item_1_a_plan_counts_what_is_spent() -> None:
    """The case of the issue: with 8 of 12 spent, a plan of 6 spent 3.08 more, and then failed."""
    rehearsal = fleet(of_twelve())
    study = rehearsal.study("first", analysis=ANALYSIS)
    study.histogram(decades(), epsilon=8).run()
    with pytest.raises(BudgetExceeded, match=r"12 in total, 8 is spent, and this asks for 6"):
        distribution(study, "age", 0, 100, epsilon=6)
    assert spent_of(rehearsal) == 8
    run = distribution(study, "age", 0, 100)
    assert run.plan.epsilon <= 4
    assert "after earlier questions" in run.plan.explain()
    assert run.result.devices == DEVICES
    assert spent_of(rehearsal) <= 12


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("where", WHERE)
def test_item_1_every_limit_counts(where: str, limit: str) -> None:
    """Whichever limit has a third left: what is offered fits into that third."""
    low = {"epsilon": 3, "delta": Decimal("3e-6"), "reports": 3}[limit]
    field = {"local_epsilon": 8, "epsilon": 12, "delta": Decimal("1.2e-5"), "reports": 12}
    path = {"device": "device", "analysis": f"analyses/{ANALYSIS}/budget"}
    change = (
        {f"analyses/{ANALYSIS}/fields": {"user.age": {**field, limit: low}}}
        if where == "field"
        else {f"{path[where]}/{limit}": low}
    )
    rehearsal = fleet(of_twelve(**change))
    study = rehearsal.study("limits", analysis=ANALYSIS)
    for number in range(2):
        edges = ch.intervals("age", [0, 50 + number, 100])
        study.histogram(edges, epsilon=1, delta="1e-6").run()
    assert study.cohorts(3, reads=AGE) == ("disjoint" if limit == "reports" else "everyone")
    if limit == "reports":
        with pytest.raises(InvalidInput, match="1 more reports, fewer than 3 rounds"):
            study.plan_rounds([1, 1, 1], reads=AGE, cohorts="everyone")
        return
    plan = study.plan_rounds([1, 1, 1], reads=AGE)
    assert plan.epsilon <= (1 if limit == "epsilon" else 10)
    assert plan.delta <= (Decimal("1e-6") if limit == "delta" else Decimal("1e-5"))


def test_item_1_nothing_left_is_refused_with_the_limit() -> None:
    study = fleet(of_twelve()).study("all", analysis=ANALYSIS)
    study.histogram(decades(), epsilon=12).run()
    with pytest.raises(BudgetExceeded, match="the whole device epsilon 12"):
        study.plan_rounds([1, 1], reads=AGE)


def test_item_1_devices_that_can_pay_are_planned_with() -> None:
    """A tenth of the fleet has spent everything, nine tenths nothing: these are asked."""
    study = fleet(of_twelve()).study("tenth", analysis=ANALYSIS)
    study.histogram(decades(), epsilon=12, participation="0.1").run()
    plan = study.plan_rounds([1, 1], reads=AGE)
    assert plan.epsilon == 12
    assert plan.rounds[0].expected_reports == pytest.approx(0.9 * DEVICES, rel=0.01)


def test_item_1_a_fleet_that_has_spent_its_budget_is_not_too_small() -> None:
    """Nearly all devices have spent everything: the reason is their budget, not the cohort."""
    study = fleet(of_twelve()).study("spent", analysis=ANALYSIS)
    study.histogram(decades(), epsilon=12).run(target=DEVICES - 40)
    question = study.histogram(ch.intervals("age", [0, 50, 100]), epsilon=2)
    cost = question.cost()
    assert cost.expected is not None
    assert cost.expected <= 40
    (warning,) = cost.warnings
    assert "100% of the devices have too little budget left" in warning
    assert "the whole device epsilon 12 in total, 12 is spent" in warning
    assert "larger share" not in warning
    with pytest.raises(CohortTooSmall, match="too little budget left"):
        question.run()
    with pytest.raises(CohortTooSmall, match=r"only \d+ of .* have enough budget.*12 is spent"):
        distribution(study, "age", 0, 100)


def test_item_1_how_many_devices_can_pay_is_part_of_the_cost() -> None:
    study = fleet(of_twelve()).study("half", analysis=ANALYSIS)
    study.histogram(decades(), epsilon=12, participation="0.5").run()
    cost = study.histogram(ch.intervals("age", [0, 50, 100]), epsilon=2).cost()
    assert not cost.warnings
    assert "About 50% of the devices have too little budget left" in cost.remarks[0]


def test_item_1_disjoint_rounds_need_devices_that_are_new_to_the_study() -> None:
    rehearsal = fleet(of_twelve())
    study = rehearsal.study("new", analysis=ANALYSIS)
    study.histogram(decades(), epsilon=1).run()
    with pytest.raises(CohortTooSmall, match="begin a new study"):
        study.plan_rounds([".5", ".5"], reads=AGE, cohorts="disjoint")
    other = rehearsal.study("other", analysis=ANALYSIS)
    assert other.plan_rounds([".5", ".5"], reads=AGE, cohorts="disjoint").epsilon <= 11


def test_item_1_a_run_that_resumes_plans_as_when_it_began(tmp_path: Path) -> None:
    """Its own rounds are spent, but they are its own: nothing is asked or spent twice."""
    options: dict[str, Any] = {"folder": tmp_path}
    study = fleet(of_twelve(), **options).study("resume", analysis=ANALYSIS)
    run = distribution(study, "age", 0, 100)
    steps = iter(run)
    next(steps)
    again = fleet(of_twelve(), **options).study("resume", analysis=ANALYSIS)
    resumed = distribution(again, "age", 0, 100)
    assert resumed.plan.epsilon == run.plan.epsilon
    assert len(list(resumed)) == len(run.plan.rounds) == len(again.rounds)
    third = fleet(of_twelve(), **options).study("resume", analysis=ANALYSIS)
    assert distribution(third, "age", 0, 100).result.devices == DEVICES
    assert len(third.rounds) == len(run.plan.rounds)


def test_item_1_what_was_asked_since_the_plan_is_counted_when_it_begins() -> None:
    rehearsal = fleet(of_twelve())
    study = rehearsal.study("late", analysis=ANALYSIS)
    run = distribution(study, "age", 0, 100, epsilon=6)
    rehearsal.study("quicker", analysis=ANALYSIS).histogram(decades(), epsilon=8).run()
    with pytest.raises(BudgetExceeded):
        next(iter(run))
    assert spent_of(rehearsal) == 8
    assert not study.rounds


def test_item_1_others_are_bounded_from_the_log_and_the_unknown_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rehearsal = fleet(of_twelve())
    elsewhere = fleet(of_twelve()).study("elsewhere", analysis=ANALYSIS)
    now = rehearsal.clock.now()
    recipe = elsewhere.histogram(decades(), epsilon=9).recipe(number=1, opens=now)
    study = rehearsal.study("here", analysis=ANALYSIS)
    monkeypatch.setattr(rehearsal, "others", lambda: OthersQuestions(recipes=(recipe,)))
    assert study.plan_rounds([1, 1], reads=AGE).epsilon <= 3
    assert study.budget.limits[0].spent.epsilon == 9
    assert "1 questions of other analysts" in study.budget.explain()
    # Nobody knows who answered them, so they refuse nothing: but it is said.
    plan = study.plan_rounds([1, 1], reads=AGE, epsilon=6)
    assert "public log" in plan.explain()
    cost = study.histogram(decades(), epsilon=6).cost()
    assert cost.allowed
    assert any("public log" in remark for remark in cost.remarks)
    monkeypatch.setattr(rehearsal, "others", lambda: OthersQuestions(problem="the log is away"))
    assert "unknown: the log is away" in study.histogram(decades()).cost().explain()
    assert "unknown: the log is away" in study.budget.explain()


# --- 2. Types -----------------------------------------------------------------------------------


def test_item_2_a_distribution_of_text_is_refused() -> None:
    """It returned "median 0.50 (0.42 to 0.59), 50,000 devices"."""
    rehearsal = texts()
    study = rehearsal.study("text", analysis=ANALYSIS)
    with pytest.raises(QueryRefused, match="ngram holds text") as caught:
        distribution(study, "ngram", 0, 1)
    assert caught.value.check == "types"
    assert spent_of(rehearsal) == 0


def test_item_2_features_fit_their_columns() -> None:
    study = texts().study("types", analysis=ANALYSIS)
    wrong: list[AnyFeature] = [
        ch.intervals("ngram", [0, 1]),
        ch.categories("ngram", [1, 2]),
        ch.categories("age", ["ten"]),
        ch.categories("perplexity", [1]),
        ch.prefix_tree("age", ["ten"]),
        ch.grid(["age", "ngram"], [0, 0, 1, 1], level=1),
    ]
    for feature in wrong:
        query = None
        if len(feature.columns_read) == 2:
            query = "SELECT age, ngram FROM keyboard, user"
        question = study.histogram(feature, query=query)
        assert not question.cost().allowed
        with pytest.raises(QueryRefused, match="types"):
            question.run()
    with pytest.raises(InvalidInput, match="holds numbers"):
        discover_ngrams(study, ["a", "b"], field="user.age")
    right: list[tuple[AnyFeature, str | None]] = [
        (ch.intervals("age", [0, 1]), None),
        (ch.categories("ngram", ["a", 1]), None),
        (ch.categories("age", [1]), None),
        # What a query computes is not known before it runs.
        (ch.categories("n", [3]), "SELECT length(ngram) AS n FROM keyboard"),
        (ch.intervals("n", [3, 4]), "SELECT age AS n FROM user UNION SELECT ngram FROM keyboard"),
    ]
    for feature, query in right:
        assert study.histogram(feature, query=query).cost().allowed, feature


@pytest.mark.parametrize(
    ("column", "fits"),
    [
        ("lower(keyboard.ngram)", False),
        ("'x'", False),
        ("substr(lower(keyboard.ngram), 1, 2)", False),
        ("length(keyboard.ngram)", True),
        ("length(keyboard.ngram) + 1", True),
        ("coalesce(length(keyboard.ngram), lower(keyboard.ngram))", True),  # unknown
        ("CAST(substr(keyboard.ngram, 1, 2) AS INTEGER)", True),
    ],
)
def test_item_2_functions_of_text_and_texts_are_known_to_be_text(column: str, fits: bool) -> None:
    policy = of_twelve(
        **{f"analyses/{ANALYSIS}/functions": ["coalesce", "lower", "length", "substr"]}
    )
    study = texts(policy).study("computed", analysis=ANALYSIS)
    query = f"SELECT {column} AS n FROM keyboard WHERE keyboard.ngram > ''"  # noqa: S608
    checks = study.histogram(ch.intervals("n", [0, 5, 10]), query=query).cost().checks
    (types,) = [check for check in checks if check.name == "types"]
    assert types.passed is fits, types.why
    nested = f"SELECT length(n) AS n FROM ({query})"  # noqa: S608
    assert study.histogram(ch.intervals("n", [0, 5, 10]), query=nested).cost().allowed


def test_item_2_a_query_has_to_return_the_columns_of_the_features() -> None:
    study = texts().study("columns", analysis=ANALYSIS)
    question = study.histogram(decades(), query='SELECT "perplexity" FROM "keyboard"')
    assert not question.cost().allowed
    with pytest.raises(QueryRefused, match="does not select"):
        question.run()


# --- 3. Functions -------------------------------------------------------------------------------


def test_item_3_functions_are_those_of_the_policy() -> None:
    """`upper` passed `cost().allowed`, and every device refused it."""
    rehearsal = texts()
    study = rehearsal.study("upper", analysis=ANALYSIS)
    feature = ch.categories("ngram", ["HOW ARE YOU"])
    question = study.histogram(feature, query="SELECT upper(ngram) AS ngram FROM keyboard")
    cost = question.cost()
    assert not cost.allowed
    assert "does not permit the function upper; it permits" in cost.explain()
    with pytest.raises(QueryRefused, match="function upper"):
        question.run()
    assert not study.rounds
    assert spent_of(rehearsal) == 0
    lower = study.histogram(feature, query="SELECT lower(ngram) AS ngram FROM keyboard")
    assert lower.cost().allowed


def test_item_3_a_rehearsal_compiles_as_its_devices_do() -> None:
    """The analyst's policy allows it, the devices' policy does not: nobody is charged."""
    permissive = of_twelve(**{f"analyses/{ANALYSIS}/functions": ["lower", "upper"]})
    rows = {"ngram": ["how are you"], "count": [4000]}
    rehearsal = ch.rehearse(rows, permissive, device_policy=of_twelve(), seed=3)
    study = rehearsal.study("upper", analysis=ANALYSIS)
    feature = ch.categories("ngram", ["HOW ARE YOU"])
    question = study.histogram(feature, query="SELECT upper(ngram) AS ngram FROM keyboard")
    assert question.cost().allowed
    with pytest.raises(CohortTooSmall, match="function upper"):
        question.run()


# --- 4. Delta -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reports", [1, 12])
def test_item_4_half_of_epsilon_takes_half_of_delta(reports: int) -> None:
    paths = ("device", f"analyses/{ANALYSIS}/budget")
    policy = of_twelve(**{f"{path}/reports": reports for path in paths})
    study = fleet(policy).study("half", analysis=ANALYSIS)
    question = study.histogram(decades(), epsilon=6)
    assert question.privacy.delta == Decimal("6e-6")
    assert study.histogram(decades(), epsilon=12).privacy.delta == Decimal("1.2e-5")
    plan = study.plan_rounds([1], reads=AGE, epsilon=6)
    assert plan.delta == Decimal("6e-6")


def test_item_4_two_halves_fit() -> None:
    rehearsal = fleet(of_twelve())
    study = rehearsal.study("halves", analysis=ANALYSIS)
    for number in range(2):
        study.histogram(ch.intervals("age", [0, 20 + number, 99]), epsilon=6).run()
    assert spent_of(rehearsal) == 12


# --- 5. Hopeless questions ----------------------------------------------------------------------


def test_item_5_noise_larger_than_what_could_be_seen() -> None:
    few = ch.rehearse({"age": [30], "count": [60]}, of_twelve(), seed=1)
    study = few.study("noise", analysis=ANALYSIS)
    cost = study.histogram(decades(), local_epsilon="0.05", epsilon=1, min_cohort=50).cost()
    assert cost.allowed
    assert "would not stand out from the noise" in cost.warnings[0]
    assert "Don't ask it" in cost.explain()
    plan = study.plan_rounds([1, 1], reads=AGE, epsilon="0.01")
    assert "would not stand out" in plan.warnings[0]
    assert "Don't run it" in plan.explain()


def test_item_5_a_target_above_the_fleet() -> None:
    study = fleet(of_twelve()).study("target", analysis=ANALYSIS)
    question = study.histogram(decades(), epsilon=1)
    assert not question.cost(target=DEVICES).warnings
    assert "target of 100,000" in question.cost(target=100_000).warnings[0]


def test_item_5_a_cohort_below_the_minimum() -> None:
    study = fleet(of_twelve()).study("cohort", analysis=ANALYSIS)
    part = study.histogram(decades(), local_epsilon=3, min_cohort=10_000, participation="0.01")
    cost = part.cost()
    assert "nothing is released below 10,000" in cost.warnings[0]
    with pytest.raises(CohortTooSmall):
        part.run()
    grouped = study.histogram(
        decades(), local_epsilon=3, min_cohort=50_000, group_by=["user.locale"]
    )
    assert "in each part of the fleet" in grouped.cost().warnings[0]


def test_item_5_many_bins_get_a_remark_but_no_warning() -> None:
    study = fleet(of_twelve()).study("bins", analysis=ANALYSIS)
    cost = study.histogram(ch.intervals("age", range(9000)), epsilon="0.05").cost()
    assert not cost.warnings
    assert "use fewer bins" in cost.remarks[0]
    assert not study.histogram(decades(), epsilon=3).cost().remarks


# --- 6. Asked already ---------------------------------------------------------------------------


def test_item_6_a_question_that_was_asked_says_so_and_costs_nothing() -> None:
    rehearsal = fleet(of_twelve())
    study = rehearsal.study("again", analysis=ANALYSIS)
    question = study.histogram(decades(), epsilon=1)
    assert question.cost().asked is None
    question.run()
    cost = study.histogram(decades(), epsilon=1).cost()
    assert cost.asked == 1
    assert "asked already, in round 1" in cost.explain()
    assert "costs nothing" in cost.explain()
    assert question.again().cost().asked is None
    study.histogram(decades(), epsilon=1).run()
    assert spent_of(rehearsal) == 1


# --- 7. Errors in our own words -----------------------------------------------------------------


def a_track(study: ch.Study) -> TrackPlan:
    return study.track(decades(), windows=3)


def twice(study: ch.Study, **options: Any) -> object:
    query = "SELECT age, age AS again FROM user"
    axes = ch.intervals("age", [0, 50, 100]), ch.categories("again", [1])
    return ch.crosstab(study, *axes, query=query, **options)


def test_item_7_one_field_may_be_a_text_everywhere() -> None:
    """Its letters were read as fields."""
    study = fleet(of_twelve()).study("one", analysis=ANALYSIS)
    asked = [distribution(study, "age", 0, 100, reads={"user": name}) for name in ("age", ["age"])]
    assert asked[0].plan == asked[1].plan


def test_item_7_features_fail_in_our_words() -> None:
    for make in (
        lambda: ch.intervals("age", [1]),
        lambda: ch.intervals("age", []),
        lambda: ch.categories("age", []),
        lambda: ch.categories("age", [1.5]),  # type: ignore[list-item]
        lambda: ch.intervals("a b", [1, 2]),
        lambda: ch.grid(["a", "b"], [0, 0, 1, 1], level=99),
        lambda: ch.prefix_tree("a", [], []),
        lambda: ch.categories("smoker", [True, False]),
        lambda: ch.categories("city", "Lima"),  # not the letters L, i, m, a
        lambda: ch.categories("city", 5),  # type: ignore[arg-type]
        lambda: ch.prefix_tree("city", "Lima"),
        lambda: ch.prefix_tree("city", [1, 2]),  # type: ignore[list-item]
        lambda: ch.intervals("age", "10 20"),
        lambda: ch.intervals("age", None),  # type: ignore[arg-type]
        lambda: ch.intervals("age", [0, float("nan")]),
        lambda: ch.grid("xy", [0, 0, 1, 1], level=2),
        lambda: ch.grid(["a", "b"], None, level=2),  # type: ignore[arg-type]
        lambda: ch.rehearse(PEOPLE, of_twelve(), devices="many"),  # type: ignore[call-overload]
        lambda: ch.rehearse(PEOPLE, of_twelve(), reach="all"),  # type: ignore[call-overload]
        lambda: ch.rehearse(PEOPLE, of_twelve(), seed="x"),  # type: ignore[call-overload]
        lambda: ch.rehearse(PEOPLE, of_twelve(), seed=-1),
        lambda: ch.rehearse({"age": [10**400], "count": [5]}, of_twelve()),
        lambda: ch.rehearse({"age": [5], "count": [10**400]}, of_twelve()),
        lambda: ch.rehearse({"age": [Decimal("1e999")], "count": [5]}, of_twelve()),
        lambda: ch.rehearse({"age": [Decimal("NaN")], "count": [5]}, of_twelve()),
        lambda: ch.intervals("age", np.array(3)),
        lambda: ch.categories("city", ["Lima" * 100]),
        lambda: ch.rehearse(PEOPLE, of_twelve(), later=PEOPLE),  # type: ignore[call-overload]
        lambda: ch.rehearse(PEOPLE, 5),  # type: ignore[call-overload]
    ):
        with pytest.raises(InvalidInput) as caught:
            make()
        for foreign in ("Tuple", "validation", "Input should", "constrained", "pydantic"):
            assert foreign not in str(caught.value), caught.value
    with pytest.raises(InvalidInput, match="write 'age', without its stream"):
        ch.intervals("user.age", [0, 1])
    with pytest.raises(InvalidInput, match="edges: at least 2 entries are needed"):
        ch.intervals("age", [1])


def test_numbers_of_numpy_are_numbers() -> None:
    """The edges that people have are often an array; a float means what it prints."""
    tenths = tuple(map(Decimal, ("0", "0.1", "0.2")))
    one: Any = np.int64(1)
    for kind in (np.float16, np.float32, np.float64):
        assert ch.intervals("age", np.array([0, 0.1, 0.2], kind)).edges == tenths
    assert ch.intervals("age", np.arange(3)).edges == tuple(map(Decimal, range(3)))
    found = ch.categories("age", np.array([3, 5], np.int16))
    assert found.values == (3, 5)
    assert {type(value) for value in found.values} == {int}
    question = fleet().study("numpy", analysis=ANALYSIS).histogram(decades(), epsilon=one)
    assert question.privacy.epsilon == 1
    wrongs: list[Any] = [np.bool_(True), np.float32("nan")]
    for wrong in wrongs:
        with pytest.raises(InvalidInput, match="is not a number"):
            ch.intervals("age", [wrong, 5])


@pytest.mark.parametrize(("text", "seconds"), [("1d", 86_400), ("12h", 43_200), (7200, 7200)])
def test_item_7_durations_are_accepted_as_text(text: str | int, seconds: int) -> None:
    study = fleet().study("window", analysis=ANALYSIS)
    question = study.histogram(decades(), window=text, grace=text)
    assert (question.answer_seconds, question.grace_seconds) == (seconds, seconds)


@pytest.mark.parametrize("wrong", ["1 day", "soon", 0, -5, 1.5, True, "d"])
def test_item_7_other_durations_say_what_to_write(wrong: Any) -> None:
    study = fleet().study("window", analysis=ANALYSIS)
    with pytest.raises(InvalidInput, match='such as "90s"'):
        study.histogram(decades(), window=wrong)


@pytest.mark.parametrize(
    "options",
    [
        {"epsilon": "much"}, {"epsilon": -1}, {"delta": 2}, {"min_cohort": "many"},
        {"min_cohort": 1}, {"local_epsilon": 1000}, {"selection": "best"}, {"mechanism": "magic"},
        {"participation": "some"}, {"group_by": ["nothing"]}, {"group_by": "nothing"},
        {"deny": ["a word"]}, {"repeat": "x"}, {"crowd": "wise"}, {"report": "long"},
        {"epsilon": float("nan")}, {"epsilon": 0}, {"delta": "few"}, {"group_by": 3}, {"arms": 3},
        {"reads": "user"}, {"reads": 3},
        {"query": ""}, {"query": 5}, {"reads": {"user": ["nothing"]}}, {"arms": {"a": 0, "b": 1}},
        {"reads": {}}, {"deny": None}, {"deny": 3}, {"query": "SELECT 30 AS age", "reads": {}},
        {"deny": np.array(3)}, {"group_by": [["user.locale"]]}, {"group_by": np.array(3)},
        {"arms": [["a"], ["b"]]}, {"arms": [1, 2]}, {"participation": 1e-13},
        {"report": ["bounded"]}, {"report": "other"}, {"series": "1w"},
        {"min_cohort": np.array([1, 2])}, {"min_cohort": -(10**400)},
    ],
    ids=str,
)  # fmt: skip
def test_item_7_whatever_is_wrong_is_an_error_of_ours(options: dict[str, Any]) -> None:
    study = fleet(of_twelve()).study("wrong", analysis=ANALYSIS)
    with pytest.raises(ChoristerError) as caught:
        study.histogram(decades(), **options).run()
    assert "Input should" not in str(caught.value)


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda study: study.histogram("age"), "features"),
        (lambda study: study.histogram(["age"]), "features"),
        (lambda study: study.histogram(decades(), epsilon=0), "epsilon"),
        (
            lambda study: study.histogram(decades(), reads={"user": "age"}).cost(target="x"),
            "target",
        ),
        (lambda study: study.histogram(decades()).cost(reports="x"), "reports"),
        (lambda study: study.histogram(decades()).run(target="x"), "target"),
        (lambda study: study.histogram(decades()).cost(reports=10**400), "reports"),
        (lambda study: study.histogram(decades()).cost(reports=-(10**400)), "reports"),
        (lambda study: study.histogram(decades()).cost(reports=np.array([1, 2])), "reports"),
        (lambda study: study.for_accuracy(decades(), relative_error="x"), "relative_error"),
        (lambda study: study.for_accuracy(decades(), relative_error=5e-324), None),
        (lambda study: a_track(study).cost(reports="x"), "reports"),  # type: ignore[arg-type]
        (lambda study: a_track(study).cost(level="x"), "level"),  # type: ignore[arg-type]
        (lambda study: a_track(study).cost(chance="x"), "chance"),  # type: ignore[arg-type]
        (lambda study: a_track(study).cost(false_alarms="x"), "false_alarms"),  # type: ignore[arg-type]
        (lambda study: study.plan_rounds([0, 1], reads={"user": ["age"]}), "shares"),
        (lambda study: study.plan_rounds([1], reads={"nobody": ["age"]}), "reads"),
        (lambda study: study.quantiles("age", 0, 1, "half"), "shares"),
        (lambda study: study.mean("age", "x", 1), "low"),
        (lambda study: distribution(study, "age", 0, 100, target=0), "target"),
        (lambda study: distribution(study, "age", 0, 100, target=10**9), "target"),
        (lambda study: distribution(study, "age", 0, 100, epsilon=0), "epsilon"),
        (lambda study: distribution(study, "age", 0, 100, reads=0.5), "reads"),  # type: ignore[arg-type]
        (lambda study: twice(study, reads="user"), "reads"),
        (lambda study: study.plan_rounds([1], reads={"user": 3}), None),
        (lambda study: study.fleet.study(None), "name"),
        (lambda study: study.fleet.study("x", analysis=[]), None),
        (lambda study: distribution(study, "age", 0, 100, cohorts="some"), "cohorts"),  # type: ignore[arg-type]
        (lambda study: discover_ngrams(study, "good morning"), "vocabulary"),
        (lambda study: discover_ngrams(study, [1, 2]), "vocabulary"),  # type: ignore[list-item]
        (lambda study: discover_ngrams(study, ["good", "day"], deny="bad"), "deny"),
        (lambda study: discover_ngrams(study, ["good", "day"], field="nowhere"), "field"),
        (lambda study: discover_ngrams(study, ["good", "day"], field=["x"]), "field"),  # type: ignore[arg-type]
    ],
)
def test_item_7_an_error_names_what_was_given(ask: Any, field: str | None) -> None:
    study = fleet(of_twelve()).study("wrong", analysis=ANALYSIS)
    with pytest.raises(InvalidInput) as caught:
        ask(study)
    assert caught.value.field == field
    with pytest.raises(InvalidInput, match="plan a question"):
        study.ask("how old?")  # type: ignore[arg-type]


def test_item_7_a_wanted_error_may_be_a_text_like_every_number() -> None:
    study = fleet().study("text", analysis=ANALYSIS)
    for wanted in ({"std_error": 150, "reports": 50_000}, {"relative_error": 0.01}):
        texts = {name: str(value) if name != "reports" else value for name, value in wanted.items()}
        asked = [study.for_accuracy(decades(), **options) for options in (wanted, texts)]
        assert asked[0].privacy == asked[1].privacy


def test_item_7_a_run_that_failed_says_so_with_our_error() -> None:
    study = fleet(of_twelve()).study("failed", analysis=ANALYSIS)
    run = distribution(study, "age", 0, 100)

    def fails(*_: object, **__: object) -> None:
        raise CohortTooSmall("too few", reports=1, needed=2)

    study.ask = fails  # type: ignore[method-assign,assignment]
    with pytest.raises(CohortTooSmall):
        _ = run.result
    with pytest.raises(ChoristerError, match="start it again"):
        _ = run.result
