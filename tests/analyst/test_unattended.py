"""Collection without anybody present: once per window, whoever crashes, with alerts on the way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import chorister as ch
from chorister.analyst import alerts, unattended
from chorister.analyst.alert_delivery import AlertSender
from chorister.analyst.alert_record import AlertRecord
from chorister.analyst.alerts import AlertRule, AlertSettings, WatchedShare, judge_trend
from chorister.analyst.rehearsal import Rehearsal
from chorister.analyst.series import Track
from chorister.analyst.unattended import (
    UnattendedCollector,
    alert_record,
    pause,
    pauses,
    resume,
)
from chorister.clock import SettableClock
from chorister.errors import InvalidInput, ServiceError
from tests.analyst.fleets import AGES, decades, series_fleet
from tests.device.loopback import Reply, serve
from tests.keyboard import ANALYSIS

WEEK = 7 * 86_400
OLDER = {"age": AGES["age"], "count": AGES["count"][::-1]}
"""The same devices, with other ages: a shift that nobody can miss."""


class Weeks:
    """A series of four weeks in a folder, and the clock that it runs by."""

    def __init__(self, folder: Path, *, later: list[Any] | None = None) -> None:
        self.folder = folder
        self.clock = SettableClock(1_800_000_000)
        self.later = later or []
        self.track = self.study().track(decades(), every="1w", windows=4).ask()

    def fleet(self) -> Rehearsal:
        """As a new process would open it."""
        return series_fleet(folder=self.folder, clock=self.clock, later=self.later)

    def study(self) -> ch.Study:
        return self.fleet().study("ada.weekly", analysis=ANALYSIS)

    def collector(self, settings: str = "", **options: Any) -> UnattendedCollector:
        alerts = None
        if settings:
            path = self.folder / "alerts.toml"
            path.write_text(settings)
            alerts = AlertSender(AlertSettings.load(path), self.clock)
        return UnattendedCollector(self.fleet(), alerts=alerts, **options)

    def states(self) -> list[str]:
        return [str(each.state) for each in Track(self.study(), self.track.number).windows]


@pytest.fixture
def weeks(tmp_path: Path) -> Weeks:
    return Weeks(tmp_path)


def test_every_window_is_collected_once_when_it_closes(weeks: Weeks) -> None:
    said: list[str] = []
    collector = weeks.collector(on_result=said.append)
    assert collector.run_once(seconds=60) == []
    assert said == []
    weeks.clock.advance(WEEK)
    assert collector.run_once(seconds=60) == []
    assert weeks.states() == ["collected", "open", "to come", "to come"]
    weeks.clock.advance(2 * WEEK)
    # A new process resumes.
    assert weeks.collector(on_result=said.append).run_once(seconds=60) == []
    assert weeks.states() == ["collected", "collected", "collected", "open"]
    assert collector.run_once(seconds=60) == []
    assert [text.partition(": ")[0] for text in said] == [
        f"ada.weekly, series 1, window {k}" for k in range(3)
    ]


def test_single_questions_are_collected_as_well(weeks: Weeks) -> None:
    study = weeks.study()
    round_ = study.post(study.histogram(decades(), window="1d", epsilon="0.5"))
    said: list[str] = []
    collector = weeks.collector(on_result=said.append)
    assert collector.run_once(seconds=60) == []
    assert said == []  # its window is open
    weeks.clock.advance(86_400)
    assert collector.run_once(seconds=60) == []
    reports = weeks.study().result(round_.number).n_reports
    assert said == [f"ada.weekly, round {round_.number}: {reports:,} reports"]


def test_a_crash_at_any_moment_loses_nothing(weeks: Weeks, monkeypatch: pytest.MonkeyPatch) -> None:
    weeks.clock.advance(4 * WEEK)

    def crash(*_: object, **__: object) -> None:
        raise ServiceError("the process ends here")

    for owner, name in ((Rehearsal, "collect"), (Rehearsal, "acknowledge")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, crash)
            (left,) = weeks.collector().run_once(seconds=60)
            assert "the process ends here" in left
    before = {
        path.name: path.read_bytes() for path in (weeks.folder / "ada.weekly").glob("window-*")
    }
    assert weeks.collector().run_once(seconds=60) == []
    assert weeks.states() == ["collected"] * 4
    for name, data in before.items():
        assert (weeks.folder / "ada.weekly" / name).read_bytes() == data


def test_two_processes_collect_each_window_once(weeks: Weeks) -> None:
    weeks.clock.advance(4 * WEEK)
    said: list[str] = []
    collectors = [weeks.collector(on_result=said.append) for _ in range(4)]
    left: list[str] = []
    threads = [
        threading.Thread(target=lambda each=each: left.extend(each.run_once(seconds=60)))
        for each in collectors
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert weeks.states() == ["collected"] * 4
    assert all("another process" in each for each in left)
    numbers = [int(text.partition("window ")[2][0]) for text in said]
    assert sorted(set(numbers)) == [0, 1, 2, 3]


def test_a_paused_series_is_left_alone_until_it_is_resumed(weeks: Weeks) -> None:
    weeks.clock.advance(WEEK)
    pause(weeks.track, by="ada")
    pause(weeks.track, by="ben")  # the first one stays
    assert pauses(weeks.study())[1].by == "ada"
    settings = "[[rules]]\nname='all'\nstudy='ada.weekly'\nabove=0\n"
    collector = weeks.collector(settings)
    assert collector.run_once(seconds=60) == []
    assert weeks.states()[0] == "closed"
    resume(weeks.track)
    assert pauses(weeks.study()) == {}
    assert collector.run_once(seconds=60) == []
    assert weeks.states()[0] == "collected"
    assert len(alert_record(weeks.study()).alerts) == 1


def test_no_alert_is_raised_while_paused_and_none_is_lost(weeks: Weeks) -> None:
    settings = "[[rules]]\nname='all'\nstudy='ada.weekly'\nabove=0\n"
    weeks.clock.advance(WEEK)
    weeks.collector().run_once(seconds=60)
    pause(weeks.track, by="ada")
    weeks.collector(settings).run_once(seconds=60)
    assert alert_record(weeks.study()).alerts == []
    resume(weeks.track)
    weeks.collector(settings).run_once(seconds=60)
    assert [alert.window for alert in alert_record(weeks.study()).alerts] == [0]


def test_an_ended_series_is_over(weeks: Weeks) -> None:
    weeks.clock.advance(WEEK + 10)
    weeks.track.end()
    assert weeks.collector().run_once(seconds=60) == []
    assert weeks.states()[1:] == ["ended"] * 3
    weeks.clock.advance(4 * WEEK)
    assert weeks.collector().run_once(seconds=60) == []
    assert weeks.states()[1:] == ["ended"] * 3


def test_levels_and_changes_raise_alerts_once(tmp_path: Path) -> None:
    weeks = Weeks(tmp_path, later=[AGES, OLDER])  # the third window is another
    settings = (
        "[[rules]]\nname='change'\nstudy='ada.weekly'\nchange='previous'\nto=['book']\n"
        "[[rules]]\nname='level'\nstudy='ada.weekly'\nwhere={age='[80, 90)'}\nbelow=0.1\n"
        "to=['book']\n"
        "[[rules]]\nname='other'\nstudy='ada.other'\nabove=0\n"
        "[destinations.book]\nfile='book.jsonl'\n"
    )
    label = weeks.track.trend.names[-1]
    settings = settings.replace("[80, 90)", label)
    for _ in range(4):
        weeks.clock.advance(WEEK)
        for _ in range(2):
            assert weeks.collector(settings).run_once(seconds=60) == []
    lines = [json.loads(line) for line in (tmp_path / "book.jsonl").read_text().splitlines()]
    found = sorted((line["rule"], line["window"]) for line in lines)
    assert found == [("change", 2), ("level", 2), ("level", 3)]
    for line in lines:
        assert "reports" not in json.dumps(line)
        period = weeks.track.recipe.window_at(line["window"])
        assert (line["opens"], line["closes"]) == (period.opens, period.closes)
    shares = {row["labels"]["age"]: row for row in lines[0]["rows"]}
    assert all(row["low"] > 0 or row["high"] < 0 for row in shares.values())


def test_a_crash_between_collecting_and_alerting_delays_the_alert(
    weeks: Weeks, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = "[[rules]]\nname='all'\nstudy='ada.weekly'\nabove=0\n"
    weeks.clock.advance(WEEK)

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for name in ("add", "delivered"):
        with monkeypatch.context() as patch:
            patch.setattr(AlertRecord, name, crash)
            with pytest.raises(KeyboardInterrupt):
                weeks.collector(settings).run_once(seconds=60)
    assert weeks.collector(settings).run_once(seconds=60) == []
    (alert,) = alert_record(weeks.study()).alerts
    assert alert.delivered.keys() == {"log"}


def test_a_change_waits_for_the_window_before_it(tmp_path: Path) -> None:
    """A window that arrives late changes what the next one is compared with: so that one waits."""
    weeks = Weeks(tmp_path, later=[OLDER])
    weeks.clock.advance(3 * WEEK)
    weeks.collector().run_once(seconds=60)
    trend = Track(weeks.study(), 1).trend
    rule = AlertRule(name="change", study="ada.weekly", change="previous")
    record = alert_record(weeks.study())
    late = {number: result for number, result in trend.results.items() if number != 1}
    judge_trend(record, rule, 1, replace(trend, results=late))
    assert record.alerts == []
    assert record.to_judge(rule, 1, range(3)) == [1, 2]
    judge_trend(record, rule, 1, trend)
    assert [each.window for each in record.alerts] == [1]
    # One that will never have a result is passed over.
    other = AlertRecord(tmp_path / "other.json")
    judge_trend(other, rule, 1, replace(trend, results=late, failed={1: "too few"}))
    assert [each.window for each in other.alerts] == [2]


@pytest.mark.parametrize(
    ("where", "why"), [("agee='[10, 20)'", "no column 'agee'"), ("age='[10,20)'", "no age")]
)
def test_a_rule_about_rows_that_can_not_be_is_reported_and_judges_later(
    weeks: Weeks, where: str, why: str
) -> None:
    weeks.clock.advance(WEEK)
    settings = (
        f"[[rules]]\nname='typo'\nstudy='ada.weekly'\nwhere={{{where}}}\nabove=0\n"
        "[[rules]]\nname='all'\nstudy='ada.weekly'\nabove=0\n"
    )
    collector = weeks.collector(settings)
    for _ in range(2):
        (left,) = collector.run_once(seconds=60)
        assert why in left
    record = alert_record(weeks.study())
    assert [alert.rule for alert in record.alerts] == ["all"]
    rule = AlertSettings.load(weeks.folder / "alerts.toml").rules[0]
    assert record.to_judge(rule, 1, [0]) == [0]


def test_a_rule_may_be_about_an_arm(tmp_path: Path) -> None:
    study = series_fleet(folder=tmp_path).study("ada.arms", analysis=ANALYSIS)
    trend = study.track(decades(), every="1w", windows=2, arms=("a", "b")).ask().collect()
    record = alert_record(study)
    rule = AlertRule(name="arm", study="ada.arms", where={"arm": "b"}, above=Decimal(0))
    judge_trend(record, rule, 1, trend)
    found = {row.labels["arm"] for each in record.alerts for row in each.rows}
    assert found == {"b"}
    with pytest.raises(InvalidInput, match="has no arm 'c'; it has: a, b"):
        judge_trend(record, rule.model_copy(update={"where": {"arm": "c"}}), 1, trend)


def test_only_new_windows_are_looked_at(weeks: Weeks, monkeypatch: pytest.MonkeyPatch) -> None:
    weeks.clock.advance(3 * WEEK)
    weeks.collector().run_once(seconds=60)
    trend = Track(weeks.study(), 1).trend
    made: list[WatchedShare] = []

    def count(**fields: Any) -> WatchedShare:
        made.append(WatchedShare(**fields))
        return made[-1]

    monkeypatch.setattr(alerts, "WatchedShare", count)
    for rule in (
        AlertRule(name="level", study="ada.weekly", below=Decimal(0)),
        AlertRule(name="change", study="ada.weekly", change="first", by=Decimal("0.9")),
    ):
        record = alert_record(weeks.study())
        record.add(rule, 1, [0, 1], [])
        made.clear()
        judge_trend(record, rule, 1, trend)
        assert len(made) == len(trend.names)


def test_a_dead_webhook_does_not_stop_collection(weeks: Weeks) -> None:
    with serve(lambda _: Reply(500)) as server:
        settings = (
            f"[destinations.ops]\nwebhook='{server.url}/'\n"
            "[[rules]]\nname='all'\nstudy='ada.weekly'\nabove=0\nto=['ops']\n"
        )
        for k in range(4):
            weeks.clock.advance(WEEK)
            (left,) = weeks.collector(settings).run_once(seconds=60)
            assert left == f"{k + 1} deliveries of alerts: ops: " + (
                "the webhook answers with HTTP status 500"
            )
    assert weeks.states() == ["collected"] * 4
    with serve(lambda _: Reply(200)) as server:
        again = (
            settings.rpartition("webhook='")[0]
            + f"webhook='{server.url}/'\n"
            + ("[[rules]]\nname='all'\nstudy='ada.weekly'\nabove=0\nto=['ops']\n")
        )
        assert weeks.collector(again).run_once(seconds=60) == []
    assert sorted(json.loads(seen.body)["window"] for seen in server.seen) == [0, 1, 2, 3]


def test_watching_notices_windows_as_they_close(
    weeks: Weeks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unattended, "POLL_SECONDS", 0.02)
    stop = threading.Event()
    settings = "[[rules]]\nname='all'\nstudy='ada.weekly'\nabove=0\n"
    collector = weeks.collector(settings)
    thread = threading.Thread(target=collector.watch, args=(stop,))
    thread.start()
    try:
        for k in range(4):
            weeks.clock.advance(WEEK)
            deadline = time.monotonic() + 60
            while len(alert_record(weeks.study()).alerts) <= k:
                assert time.monotonic() < deadline
                time.sleep(0.05)
    finally:
        stop.set()
        thread.join(60)
    assert weeks.states() == ["collected"] * 4


def test_what_is_damaged_is_said_and_holds_up_no_other_study(weeks: Weeks) -> None:
    other = weeks.fleet().study("ada.other", analysis=ANALYSIS)
    other.track(decades(), every="1w", windows=4, epsilon="0.5").ask()
    (weeks.folder / "ada.other" / "alerts.json").write_text("{}")
    settings = (
        "[[rules]]\nname='all'\nstudy='ada.weekly'\nabove=0\n"
        "[[rules]]\nname='rest'\nstudy='ada.other'\nabove=0\n"
    )
    weeks.clock.advance(WEEK)
    (left,) = weeks.collector(settings).run_once(seconds=60)
    assert "alerts about ada.other" in left
    assert len(alert_record(weeks.study()).alerts) == 1


def _paused(folder: Path) -> None:
    (folder / "paused.json").write_text('{"format": "other"}')


def _no_study(folder: Path) -> None:
    (folder / "study.json").write_text("{")


def _foreign(folder: Path) -> None:
    path = folder / "study.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fleet": "another"}))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_paused, "restore it, or delete it"),
        (_no_study, "restore it"),
        (_foreign, "belongs to the fleet"),
    ],
)
def test_a_study_that_can_not_be_used_holds_up_no_other(
    weeks: Weeks, damage: Callable[[Path], None], why: str
) -> None:
    other = weeks.fleet().study("ada.a", analysis=ANALYSIS)  # it comes first
    other.track(decades(), every="1w", windows=4, epsilon="0.5").ask()
    damage(weeks.folder / "ada.a")
    settings = "[[rules]]\nname='all'\nstudy='ada.weekly'\nabove=0\n"
    weeks.clock.advance(WEEK)
    left = weeks.collector(settings).run_once(seconds=60)
    assert left
    assert all("ada.a" in each and why in each for each in left)
    assert weeks.states()[0] == "collected"
    assert len(alert_record(weeks.study()).alerts) == 1


def test_a_round_that_is_damaged_meanwhile_is_reported(weeks: Weeks) -> None:
    weeks.fleet().study("ada.a", analysis=ANALYSIS)
    collector = weeks.collector()
    (weeks.folder / "ada.a" / "round-0001.json").write_text("{")
    assert "can't read" in " ".join(collector.run_once(seconds=60))


@pytest.mark.parametrize("problem", [OSError("the disk is full"), RuntimeError("a bug")])
def test_alerts_that_fail_in_one_study_are_raised_in_others(
    weeks: Weeks, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    weeks.fleet().study("ada.a", analysis=ANALYSIS)
    real = unattended.alert_record

    def fail(study: ch.Study) -> AlertRecord:
        if study.name == "ada.a":
            raise problem
        return real(study)

    monkeypatch.setattr(unattended, "alert_record", fail)
    weeks.clock.advance(WEEK)
    settings = "[[rules]]\nname='all'\nstudy='ada.weekly'\nabove=0\n"
    (left,) = weeks.collector(settings).run_once(seconds=60)
    assert left.startswith("alerts about ada.a: ")
    assert len(alert_record(weeks.study()).alerts) == 1


def test_a_study_without_a_folder_has_nobody_to_collect_it() -> None:
    study = series_fleet().study("ada.weekly", analysis=ANALYSIS)
    track = study.track(decades(), every="1w", windows=4).ask()
    with pytest.raises(InvalidInput, match="without a folder"):
        pause(track, by="ada")
    with pytest.raises(InvalidInput, match="in a folder"):
        alert_record(study)
    assert pauses(study) == {}
