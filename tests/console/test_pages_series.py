"""The page of a series: what it shows, who may change it, and that it is never lost in between."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import polars as pl
import pytest
from playwright.sync_api import Browser, expect

import chorister as ch
from chorister.analyst import trend_changes, unattended
from chorister.analyst.alerts import AlertRule, judge_trend
from chorister.analyst.rounds import RoundState
from chorister.analyst.series import Track
from chorister.analyst.unattended import alert_record
from chorister.console.workspace import Permission, StudyView, Workspace
from chorister.errors import InvalidInput
from tests.console.conftest import AXE, drawn, fits, named, watched
from tests.console.test_pages_results import signed_in, text_of
from tests.console.world import NASTY, PHRASES, ConsoleWorld, open_workspace, running
from tests.keyboard import ANALYSIS

WAIT = 120_000


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unattended, "POLL_SECONDS", 0.1)


def asked(world: ConsoleWorld, name: str = "weekly", windows: int = 4) -> tuple[StudyView, Track]:
    view = world.workspace.create("ada", "rehearsal", name, ANALYSIS)
    words = ch.categories("ngram", [phrase for phrase, _ in PHRASES])
    track = view.study.track(words, every="1w", windows=windows, epsilon="0.6").ask()
    return view, track


def collected(track: Track, number: int) -> None:
    deadline = time.monotonic() + 120
    while len(track.trend.results) < number:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def stands_still(track: Track, seconds: float) -> int:
    """How many windows have a result, once none is added; some may have been under way."""
    for _ in range(3):
        before = len(track.trend.results)
        time.sleep(seconds)  # longer than a window takes
        if len(track.trend.results) == before:
            return before
    raise AssertionError("windows are still collected")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ConsoleWorld]:
    with running(tmp_path) as found:
        yield found


def form(client: httpx2.Client, page: str) -> dict[str, str]:
    return {"csrf": client.get(page).text.partition('name="csrf" value="')[2].partition('"')[0]}


def test_the_console_collects_every_window_by_itself(world: ConsoleWorld) -> None:
    view, track = asked(world)
    collected(track, 4)
    with signed_in(world) as client:
        page = client.get(f"{view.path}/series/1")
        assert page.status_code == 200
        text = text_of(page.text)
        assert "4 of 4 windows" in text
        assert "4 of 4 windows have a result" in text
        assert NASTY not in page.text
        part = client.get(f"{view.path}/series/1", headers={"hx-request": "true"}).text
        assert "<html" not in part
        assert "4 of 4 windows" in part
        assert "Series 1" in text_of(client.get(view.path).text)
        chart = client.get(f"{view.path}/series/1/chart.svg?theme=dark&width=narrow")
        assert chart.headers["content-type"].startswith("image/svg+xml")
        # A round that is a series leads to its page.
        assert client.get(f"{view.path}/rounds/1").headers["location"].endswith("/series/1")
        rows = client.get(f"{view.path}/series/1/result.csv").text.splitlines()
        assert len(rows) == 1 + len(track.trend)
        frame = pl.read_parquet(client.get(f"{view.path}/series/1/result.parquet").content)
        assert frame.height == len(track.trend)
        assert json.loads(client.get(f"{view.path}/series/1/result.json").text)["windows"] == 4
        report = client.get(f"{view.path}/series/1/result.html").text
        assert "<script" not in report
        assert "<svg" in report


def test_what_does_not_exist_is_not_found(world: ConsoleWorld) -> None:
    view, _ = asked(world)
    view.study.histogram(ch.categories("ngram", ["how are you"]), epsilon="0.6").run()
    with signed_in(world) as client:
        for path in (
            "series/2",
            "series/9",
            "series/x",
            "series/1/result.exe",
            "series/2/chart.svg",
        ):
            assert client.get(f"{view.path}/{path}").status_code == 404, path
    with signed_in(world, "ben") as client:
        assert client.get(f"{view.path}/series/1").status_code == 404


def test_pausing_resuming_and_ending(tmp_path: Path) -> None:
    with running(tmp_path, fill_seconds=2) as world:
        view, track = asked(world, windows=26)
        collected(track, 1)
        path = f"{view.path}/series/1"
        with signed_in(world) as client:
            assert client.post(f"{path}/pause").status_code == 403  # no secret of the session
            data = form(client, path)
            assert client.post(f"{path}/pause", data=data).status_code == 303
            text = text_of(client.get(path).text)
            assert "Paused by ada since" in text
            assert "Devices continue to answer" in text
            assert "is lost if it is not collected within" in text
            before = stands_still(track, 5.0)
            assert client.post(f"{path}/resume", data=data).status_code == 303
            collected(track, before + 1)
            # Ending needs one more click, and is for ever.
            assert client.post(f"{path}/end", data=data).status_code == 422
            assert client.post(f"{path}/end", data={**data, "sure": "yes"}).status_code == 303
            assert client.post(f"{path}/end", data={**data, "sure": "yes"}).status_code == 303
            page = client.get(path).text
            assert "series ended" in text_of(page)
            assert f"{path}/end" not in page
        stands_still(track, 3.0)


def test_a_series_is_not_cancelled_as_a_round(tmp_path: Path) -> None:
    with running(tmp_path, fill_seconds=60) as world:
        view, track = asked(world)
        with signed_in(world) as client:
            data = form(client, f"{view.path}/series/1")
            refused = client.post(f"{view.path}/rounds/1/cancel", data=data)
            assert refused.status_code == 422
            assert "end it on its own page" in text_of(refused.text)
        assert track.round.state is RoundState.ASKED


def test_who_may_only_look_changes_nothing(world: ConsoleWorld) -> None:
    view, track = asked(world)
    collected(track, 1)
    world.workspace.permissions.grant("rehearsal", view.study.name, "ben", Permission.LOOK)
    path = f"{view.path}/series/1"
    with signed_in(world, "ben") as client:
        page = client.get(path).text
        assert "Pause collecting" not in page
        assert "End the series" not in page
        data = form(client, "/")
        for change in ("pause", "resume", "end"):
            given = {**data, "sure": "yes"}
            assert client.post(f"{path}/{change}", data=given).status_code == 403


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_the_page_in_a_browser(browser: Browser, tmp_path: Path, width: int, theme: str) -> None:
    with running(tmp_path, fill_seconds=5) as world:
        view, track = asked(world, windows=26)
        collected(track, 2)
        rule = AlertRule.model_validate({"name": "any", "study": view.study.name, "above": "0.01"})
        with world.fleet.archive.alerting(view.study.name):
            judge_trend(alert_record(view.study), rule, 1, track.trend)
        visitor = watched(browser, world.url, width=width, theme=theme)
        page = visitor.page
        visitor.sign_in()
        page.goto(world.url + view.path)
        drawn(page, "#series-1 img.chart")
        fits(page, "study")
        named(page, "study")
        page.screenshot(path=tmp_path / f"study-{width}-{theme}.png", full_page=True)
        page.click("#series-1 h2 a")
        drawn(page, "img.chart")
        expect(page.locator("h1")).to_have_text("Series 1")
        # What arrives shows without a reload.
        collected(track, 4)
        expect(page.locator("#chart-title")).not_to_contain_text("2 of", timeout=WAIT)
        drawn(page, "img.chart")
        fits(page, "series")
        named(page, "series")
        page.screenshot(path=tmp_path / f"series-{width}-{theme}.png", full_page=True)
        page.click("button:has-text('Pause')")
        expect(page.locator(".notice").first).to_contain_text("Paused by ada")
        fits(page, "paused")
        named(page, "paused")
        page.screenshot(path=tmp_path / f"paused-{width}-{theme}.png", full_page=True)
        page.click("button:has-text('Resume')")
        expect(page.locator("button:has-text('Pause')")).to_be_visible()
        assert visitor.complaints == []
        assert visitor.elsewhere == []
    if not AXE.exists():
        pytest.skip("all but axe-core's checks passed; `make browser` installs it (with npm)")


def test_a_series_of_many_bins_has_a_page_too(world: ConsoleWorld) -> None:
    """Where all pairs of windows would be too many comparisons."""
    view = world.workspace.create("ada", "rehearsal", "fine", ANALYSIS)
    cells = ch.intervals("age", range(2_500))
    track = view.study.track(cells, every="1w", windows=26, epsilon="0.6").ask()
    collected(track, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trend_changes, "_MAX_ROWS", 1_000)
        with signed_in(world) as client:
            page = client.get(f"{view.path}/series/1")
            assert page.status_code == 200
            assert "all windows from each one on with all before it" in page.text
            assert client.get(f"{view.path}/series/1/result.html").status_code == 200


def test_rules_are_for_live_fleets_alone(tmp_path: Path) -> None:
    (tmp_path / "alerts.toml").write_text("[[rules]]\nname='a'\nstudy='ada.x'\nabove=0.1\n")
    workspace, _ = open_workspace(tmp_path)
    (connection,) = workspace.connections.values()
    config = workspace.config.model_copy(update={"alerts": str(tmp_path / "alerts.toml")})
    both = Workspace(config, [connection, replace(connection, name="live", live=True)])
    assert both.collectors["rehearsal"]._alerts is None
    assert both.collectors["live"]._alerts is not None
    wrong = config.model_copy(update={"alerts": str(tmp_path / "missing.toml")})
    with pytest.raises(InvalidInput, match="can't read"):
        Workspace(wrong, [connection])
