"""Alerts: what rules find, the record that survives crashes, and destinations that fail."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
import socket
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.analyst import alert_record
from chorister.analyst.alert_delivery import UNCLAIMED_DAYS, AlertSender, append_line
from chorister.analyst.alert_record import AlertRecord
from chorister.analyst.alerts import (
    Alert,
    AlertDestination,
    AlertRule,
    AlertSettings,
    WatchedShare,
    judge,
)
from chorister.clock import SettableClock
from chorister.errors import ChoristerError, InvalidInput, StudyError
from chorister.recipe import Recipe
from tests.analyst.fleets import decades, series_fleet
from tests.device.loopback import Reply, Seen, serve
from tests.keyboard import ANALYSIS

NASTY = "<script>alert(1)</script>\u202e\x1b[2J"


def settings(tmp_path: Path, text: str) -> AlertSettings:
    path = tmp_path / "alerts.toml"
    path.write_text(text)
    return AlertSettings.load(path)


def rule(**changes: Any) -> AlertRule:
    given = {"name": "crashes", "study": "ada.weekly", "above": "0.02", **changes}
    return AlertRule.model_validate({k: v for k, v in given.items() if v is not None})


def share(low: float, high: float, **labels: str) -> WatchedShare:
    return WatchedShare(
        labels=labels or {"outcome": "crash"}, estimate=(low + high) / 2, low=low, high=high
    )


def judged(found: AlertRule, *shares: WatchedShare, window: int = 3) -> Alert | None:
    return judge(found, shares, series=1, window=window, times=weekly())


@cache
def weekly() -> Recipe:
    """A series of some windows; no alert depends on what was asked."""
    study = series_fleet(windows=6).study("ada.weekly", analysis=ANALYSIS)
    return study.track(decades(), windows=6).question.recipe(number=1, opens=1_000_000)


def words(found: Alert | None) -> str:
    assert found is not None
    return found.text


def record_of(tmp_path: Path, *alerts: Alert) -> AlertRecord:
    record = AlertRecord(tmp_path / "alerts.json")
    record.add(rule(), 1, [each.window for each in alerts], alerts)
    return record


def alert(window: int = 3, *, to: tuple[str, ...] = ("ops",)) -> Alert:
    found = judged(rule(to=to), share(0.03, 0.05), window=window)
    assert found is not None
    return found


# --- Rules --------------------------------------------------------------------------------------


def test_a_level_is_outside_only_if_its_whole_interval_is() -> None:
    assert judged(rule(), share(0.03, 0.05)) is not None
    assert judged(rule(), share(0.02, 0.05)) is None  # the limit itself is inside
    assert judged(rule(), share(0.01, 0.9)) is None
    low = rule(above=None, below="0.5")
    assert judged(low, share(0.4, 0.49)) is not None
    assert judged(low, share(0.4, 0.5)) is None
    both = rule(below="0.01")
    assert "below 1%" in words(judged(both, share(0.001, 0.005)))
    assert "above 2%" in words(judged(both, share(0.03, 0.05)))
    assert judged(both, share(0.005, 0.03)) is None


def test_a_change_is_outside_only_if_its_interval_excludes_it() -> None:
    change = rule(above=None, change="previous")
    assert judged(change, share(-0.01, 0.01)) is None
    assert judged(change, share(0.001, 0.01)) is not None
    assert judged(change, share(-0.1, -0.01)) is not None
    large = rule(above=None, change="first", by="0.05")
    assert judged(large, share(0.01, 0.2)) is None
    assert "since the first window" in words(judged(large, share(0.06, 0.2)))
    assert judged(large, share(-0.2, -0.06)) is not None


def test_a_rule_can_be_about_some_rows() -> None:
    only = rule(where={"outcome": "crash", "group": "beta"})
    assert judged(only, share(0.5, 0.6, outcome="crash", group="stable")) is None
    assert judged(only, share(0.5, 0.6, outcome="crash")) is None
    assert judged(only, share(0.5, 0.6, outcome="crash", group="beta")) is not None


def test_an_alert_is_bounded_and_its_words_are_harmless() -> None:
    rows = [share(0.03, 0.05, word=f"{i} {NASTY}" + "x" * 10_000) for i in range(1_000)]
    found = judged(rule(), *rows)
    assert found is not None
    assert len(found.rows) == 20
    assert found.more == 980
    assert "and 980 more rows" in found.text
    assert len(found.message()) < 64_000
    assert "\u202e" not in found.text
    assert "\x1b" not in found.text
    assert all("\x1b" not in label for row in found.rows for label in row.labels.values())
    assert found.message().isascii()


def test_an_alert_has_three_digits_and_its_interval_still_holds() -> None:
    exact = WatchedShare(
        labels={"outcome": "crash"}, estimate=0.0412345678, low=0.0345678912, high=0.0512345678
    )
    found = judged(rule(), exact)
    assert found is not None
    (row,) = found.rows
    assert (row.estimate, row.low, row.high) == (0.0412, 0.0345, 0.0513)
    assert "is 4.12% (3.45% to 5.13%), above 2%" in found.text
    fall = judged(rule(above=None, change="previous"), share(-0.0412345, -0.0012345))
    assert fall is not None
    assert (fall.rows[0].low, fall.rows[0].high) == (-0.0413, -0.00123)
    # Which limit it is beyond follows from the exact interval.
    near = judged(rule(below="0.01"), share(0.020000001, 0.05))
    assert "above 2%" in words(near)


@given(low=st.floats(-1, 1), width=st.floats(0, 1))
def test_rounding_only_widens_an_interval(low: float, width: float) -> None:
    found = judged(rule(above="0", below="0"), share(low, low + width))
    for row in found.rows if found else ():
        assert row.low <= low
        assert low + width <= row.high


def test_the_id_follows_from_rule_series_and_window() -> None:
    assert alert().id == alert(to=("other",)).id
    assert len({alert(1).id, alert(2).id}) == 2
    other = judged(rule(above="0.01"), share(0.03, 0.05))
    assert other is not None
    assert other.id != alert().id


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[rules]]\nname='a'\nstudy='s'", "limits"),
        ("[[rules]]\nname='a'\nstudy='s'\nabove=0.1\nchange='first'", "limits"),
        ("[[rules]]\nname='a'\nstudy='s'\nabove=1.5", "share"),
        ("[[rules]]\nname='a'\nstudy='s'\nabove=0.1\nbelow=0.2", "larger than above"),
        ("[[rules]]\nname='a'\nstudy='s'\nabove=0.1\nby=0.2", "change"),
        ("[[rules]]\nname='a'\nstudy='s'\nabove=0.1\nto=['x']", "there is no destination"),
        ("[[rules]]\nname='a'\nstudy='s'\nabove=0.1\n" * 2, "same name"),
        ("[destinations.log]\nfile='x'", "built in"),
        ("[destinations.x]\n", "either a webhook or a file"),
        ("[destinations.x]\nfile='x'\ntoken='y'", "only a webhook"),
        ("[destinations.x]\nwebhook='http://example.org/'", "https"),
        ("[destinations.x]\nwebhook='https://user@example.org/'", "https"),
        ("[destinations.x]\nwebhook='https://example.org/a b'", "https"),
        ("[destinations.x]\nwebhook='http://127.0.0.1.example.org/'", "https"),
        ("[destinations.x]\nwebhook='file:///etc/passwd'", "https"),
        ("[destinations.x]\nwebhook='env:a b'", "name of an environment variable"),
        ("[[rules]", "alerts.toml"),
        ("a=1", "a: "),
    ],
)
def test_wrong_settings_say_what_is_wrong(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        settings(tmp_path, text)


def test_settings_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="can't read"):
        AlertSettings.load(tmp_path / "none.toml")


def test_the_guides_settings_are_valid(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "watch-a-series.md"
    (example,) = re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    found = settings(tmp_path, example)
    assert [rule.name for rule in found.rules] == ["crashes", "anything-new"]
    keys = set(re.findall(r"^(\w+) =", example, re.MULTILINE))
    models = (AlertRule, AlertDestination)
    assert keys == {name for each in models for name in each.model_fields} - {"below"}


# --- The record ---------------------------------------------------------------------------------


def test_a_rule_judges_a_window_once_also_after_a_restart(tmp_path: Path) -> None:
    record = record_of(tmp_path, alert(1), alert(2))
    assert record.to_judge(rule(), 1, [1, 2, 3]) == [3]
    again = AlertRecord(tmp_path / "alerts.json")
    assert again.to_judge(rule(), 1, [1, 2, 3]) == [3]
    assert again.to_judge(rule(to=("elsewhere",)), 1, [1, 2, 3]) == [3]
    assert again.to_judge(rule(above="0.5"), 1, [1, 2, 3]) == [1, 2, 3]
    assert again.to_judge(rule(), 2, [1, 2, 3]) == [1, 2, 3]
    assert again.alerts == record.alerts


def test_the_record_keeps_what_is_pending_and_the_newest_of_the_rest(tmp_path: Path) -> None:
    record = AlertRecord(tmp_path / "alerts.json")
    many = [replace(alert(), id=f"{i:032x}", window=i) for i in range(1, 1_200)]
    record.add(rule(), 1, [each.window for each in many], many)
    assert len(record.pending) == 1_199
    for each in many[:1_050]:
        record._alerts[each.id] = replace(each, pending=())
    record.delivered(many[1_050], "ops", 5)
    assert len(record.pending) == 148
    assert len(record.alerts) == 1_148


@given(data=st.binary(max_size=300))
def test_a_damaged_record_is_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("record") / "alerts.json"
    path.write_bytes(data)
    with pytest.raises(StudyError, match="restore it"):
        AlertRecord(path)


@given(
    key=st.sampled_from(["judged", "alerts", "format"]),
    value=st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    ),
)
def test_a_record_with_a_strange_member_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    folder = tmp_path_factory.mktemp("record")
    record_of(folder, alert())
    path = folder / "alerts.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with contextlib.suppress(ChoristerError):
        AlertRecord(path)


# --- Delivery -----------------------------------------------------------------------------------


def test_a_webhook_gets_the_alert_once_with_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPS_TOKEN", "a-token-of-many-characters")
    with serve(lambda _: Reply(204)) as server:
        found = settings(
            tmp_path, f"[destinations.ops]\nwebhook='{server.url}/hook'\ntoken='env:OPS_TOKEN'"
        )
        record = record_of(tmp_path, alert())
        sender = AlertSender(found, SettableClock(7))
        assert sender.deliver(record) == 0
        assert sender.deliver(AlertRecord(tmp_path / "alerts.json")) == 0
    (seen,) = server.seen
    assert seen.method == "POST"
    assert dict(seen.headers)["Authorization"] == "Bearer a-token-of-many-characters"
    tree = json.loads(seen.body)
    assert tree["rows"] == [
        {"labels": {"outcome": "crash"}, "estimate": 0.04, "low": 0.03, "high": 0.05}
    ]
    assert "crash is 4%" in tree["text"]
    assert not {"reports", "n_reports", "pending", "delivered"} & tree.keys()
    assert record.alerts[0].delivered == {"ops": 7}


def test_a_crash_before_it_is_recorded_repeats_it_with_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with serve(lambda _: Reply(200)) as server:
        found = settings(tmp_path, f"[destinations.ops]\nwebhook='{server.url}/'")
        record = record_of(tmp_path, alert())
        with monkeypatch.context() as patch:
            patch.setattr(AlertRecord, "delivered", crash)
            with pytest.raises(KeyboardInterrupt):
                AlertSender(found, SettableClock(0)).deliver(record)
        restored = AlertRecord(tmp_path / "alerts.json")
        assert AlertSender(found, SettableClock(0)).deliver(restored) == 0
    first, second = (json.loads(each.body)["id"] for each in server.seen)
    assert first == second


def test_a_webhook_that_fails_is_tried_again_and_holds_up_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = [True]

    def answer(_: Seen) -> Reply:
        return Reply(503 if broken[0] else 200)

    clock = SettableClock(0)
    with serve(answer) as server:
        found = settings(
            tmp_path,
            f"[destinations.ops]\nwebhook='{server.url}/s3cret'\n"
            "[destinations.book]\nfile='book.jsonl'",
        )
        record = record_of(tmp_path, *(alert(i, to=("ops", "book")) for i in range(5)))
        sender = AlertSender(found, clock)
        assert sender.deliver(record) == 5
        assert len(server.seen) == 1  # one attempt, not one per alert
        assert len((tmp_path / "book.jsonl").read_text().splitlines()) == 5
        assert sender.problems == {"ops": "the webhook answers with HTTP status 503"}
        assert sender.deliver(record) == 5
        assert len(server.seen) == 1  # not before its time
        clock.advance(31)
        assert sender.deliver(record) == 5
        assert len(server.seen) == 2
        clock.advance(31)
        assert sender.deliver(record) == 5
        assert len(server.seen) == 2  # and each time later
        broken[0] = False
        clock.advance(3_600)
        assert sender.deliver(record) == 0
        assert sender.problems == {}
        assert len(server.seen) == 7
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("status", [301, 307, 400, 404, 500])
def test_only_success_counts_and_nobody_is_redirected(tmp_path: Path, status: int) -> None:
    with serve(lambda _: Reply(status, {"Location": "/elsewhere"})) as server:
        found = settings(tmp_path, f"[destinations.ops]\nwebhook='{server.url}/'")
        assert AlertSender(found, SettableClock(0)).deliver(record_of(tmp_path, alert())) == 1
    assert len(server.seen) == 1


def test_a_webhook_that_never_answers_takes_a_bounded_time(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        found = settings(tmp_path, f"[destinations.ops]\nwebhook='http://127.0.0.1:{port}/s3cret'")
        sender = AlertSender(found, SettableClock(0), timeout=0.5)
        begun = time.monotonic()
        assert sender.deliver(record_of(tmp_path, *(alert(i) for i in range(5)))) == 5
        assert time.monotonic() - begun < 30
        assert "s3cret" not in str(sender.problems)


def test_an_endless_answer_is_cut_off(tmp_path: Path) -> None:
    with serve(lambda _: Reply(200, body=b"x" * 1_000_000)) as server:
        found = settings(tmp_path, f"[destinations.ops]\nwebhook='{server.url}/'")
        sender = AlertSender(found, SettableClock(0))
        assert sender.deliver(record_of(tmp_path, alert())) == 1
        assert "TooLong" in sender.problems["ops"]


def test_the_log_and_what_is_no_longer_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = record_of(tmp_path, alert(to=("log", "gone")))
    clock = SettableClock(0)
    with caplog.at_level(logging.WARNING, logger="chorister.alerts"):
        assert AlertSender(AlertSettings(), clock).deliver(record) == 1
        clock.advance(UNCLAIMED_DAYS * 86_400)
        again = AlertRecord(tmp_path / "alerts.json")
        assert AlertSender(AlertSettings(), clock).deliver(again) == 0
    assert "outcome crash is 4%" in caplog.text
    assert "no longer exists" in caplog.text
    assert AlertRecord(tmp_path / "alerts.json").pending == []


def test_a_process_with_other_settings_leaves_an_alert_to_those_who_know_where(
    tmp_path: Path,
) -> None:
    record = record_of(tmp_path, alert(to=("book",)))
    clock = SettableClock(1_000)
    other = AlertSender(AlertSettings(), clock)
    assert other.deliver(record) == 1
    assert "no such destination" in other.problems["book"]
    assert "unclaimed" not in json.loads(record.alerts[0].message())
    clock.advance((UNCLAIMED_DAYS - 1) * 86_400)
    assert other.deliver(AlertRecord(tmp_path / "alerts.json")) == 1
    found = settings(tmp_path, "[destinations.book]\nfile='book.jsonl'")
    assert AlertSender(found, clock).deliver(AlertRecord(tmp_path / "alerts.json")) == 0
    assert len((tmp_path / "book.jsonl").read_text().splitlines()) == 1
    assert other.deliver(AlertRecord(tmp_path / "alerts.json")) == 0
    assert other.problems == {}


def test_a_record_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    record = record_of(tmp_path, alert())
    path = tmp_path / "alerts.json"
    tree = json.loads(path.read_text())
    del tree["alerts"][0]["unclaimed"]
    path.write_text(json.dumps(tree))
    assert AlertRecord(path).alerts == record.alerts


def test_a_variable_that_is_no_webhook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(tmp_path, "[destinations.ops]\nwebhook='env:OPS_HOOK'")
    record = record_of(tmp_path, alert())
    for value in ("http://example.org/", ""):
        monkeypatch.setenv("OPS_HOOK", value)
        sender = AlertSender(found, SettableClock(0))
        assert sender.deliver(record) == 1
        assert "OPS_HOOK" in sender.problems["ops"]


def test_a_file_that_can_not_be_written_is_tried_again(tmp_path: Path) -> None:
    found = settings(tmp_path, "[destinations.ops]\nfile='folder/book.jsonl'")
    clock = SettableClock(0)
    record, sender = record_of(tmp_path, alert()), AlertSender(found, clock)
    assert sender.deliver(record) == 1
    (tmp_path / "folder").mkdir()
    clock.advance(60)
    assert sender.deliver(record) == 0


def test_a_full_disk_repeats_an_alert_no_more_often_than_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    clock = SettableClock(0)
    with serve(lambda _: Reply(200)) as server:
        found = settings(tmp_path, f"[destinations.ops]\nwebhook='{server.url}/'")
        sender = AlertSender(found, clock)
        record_of(tmp_path, alert())
        with monkeypatch.context() as patch:
            patch.setattr(alert_record, "write_atomically", full)
            for _ in range(10):  # as often as a collector looks
                assert sender.deliver(AlertRecord(tmp_path / "alerts.json")) == 1
                clock.advance(5)
            assert sender.problems == {"ops": "No space left on device"}
        assert len(server.seen) == 2
        clock.advance(3_600)
        assert sender.deliver(AlertRecord(tmp_path / "alerts.json")) == 0
    assert len({json.loads(each.body)["id"] for each in server.seen}) == 1


def test_a_line_that_a_crash_cut_off_stays_apart(tmp_path: Path) -> None:
    path = tmp_path / "book.jsonl"
    path.write_bytes(b'{"whole": 1}\n{"cut')
    append_line(path, b'{"next": 2}')
    assert path.read_bytes() == b'{"whole": 1}\n{"cut\n{"next": 2}\n'
