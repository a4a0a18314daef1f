"""The console of `chorister up` over a small live fleet: ask, watch it fill, start it again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from typer.testing import CliRunner

from chorister.cli import app
from chorister.fleet.deployment import Deployment
from tests.console.conftest import Watched, drawn, watched

RUNNER = CliRunner()
WAIT = 240_000  # the machine may be busy, and devices take their time
DEVICES = 60


def call(*arguments: str) -> dict[str, Any]:
    run = RUNNER.invoke(app, [*arguments, "--json"])
    assert run.exit_code == 0, run.output + run.stderr
    answer: dict[str, Any] = json.loads(run.stdout)
    return answer


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "here"
    yield folder
    if Deployment.exists(folder):
        RUNNER.invoke(app, ["down", str(folder)])


def await_fleet(folder: Path, *, starts: int) -> None:
    """The sample policy's windows are short: ask when the devices are ready."""
    log = Deployment.open(folder).log("fleet")
    deadline = time.monotonic() + WAIT / 1000
    while log.read_text().count("devices are ready") < starts:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def sign_in(visitor: Watched, up: dict[str, Any]) -> None:
    page = visitor.page
    page.goto(visitor.origin + "/")
    page.fill("#token", Path(up["token"]).read_text().strip())
    page.click("button:has-text('Sign in')")
    page.wait_for_selector("text=Begin a study", timeout=WAIT)


def ask_ages(page: Page, edges: str) -> None:
    page.check("input[name='use:user.age']")
    page.fill("input[name='edges:user.age']", edges)
    page.fill("#target", str(DEVICES * 8 // 10))
    page.click(".ask-button", timeout=WAIT)


def alternative_text(page: Page) -> str | None:
    """The first round's picture in words."""
    return page.locator("#round-1 img.chart").get_attribute("alt")


def test_a_live_study_from_sign_in_to_the_chart_and_on_after_a_restart(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    up = call("up", str(folder), "--fleet", str(DEVICES))
    await_fleet(folder, starts=1)
    visitor = watched(browser, up["console"])
    page = visitor.page
    page.set_default_timeout(WAIT)
    sign_in(visitor, up)
    page.fill("#name", "ages")
    purpose = page.locator("#about option", has_text="user.profile").get_attribute("value")
    page.select_option("#about", purpose)
    page.click("button:has-text('Begin')")
    page.wait_for_selector("h1:has-text('ages')")
    expect(page.locator(".tag.live")).to_have_text("live fleet")
    expect(page.locator("main")).to_contain_text("One operator runs both aggregators")
    page.click("text=Ask a question")
    ask_ages(page, "10, 40, 96")
    page.evaluate("window.sameDocument = true")
    expect(page.locator("#round-1")).to_contain_text("Why is there no result yet?")
    page.screenshot(path=tmp_path / "filling.png", full_page=True)
    expect(page.locator("#round-1 img.chart")).to_be_visible(timeout=WAIT)
    assert page.evaluate("window.sameDocument") is True
    page.screenshot(path=tmp_path / "result.png", full_page=True)
    study, largest = page.url.partition("#")[0], alternative_text(page)

    # The public log has the question, and a device's owner reads about it.
    page.click("nav >> text=Recipes")
    expect(page.locator("main")).to_contain_text("cosigned by 2 aggregators")
    expect(page.locator(".recipe")).to_contain_text("of the log, signed by")
    page.screenshot(path=tmp_path / "recipes.png", full_page=True)
    page.goto(visitor.origin + "/devices/1")
    expect(page.locator("main")).to_contain_text("user.age")
    expect(page.locator(".budget")).to_contain_text("The whole device")
    page.screenshot(path=tmp_path / "device.png", full_page=True)
    assert visitor.complaints == []

    # Stopped and started again, it goes on where it was: at the same address, with all it knew.
    page.goto(study)
    assert call("down", str(folder)) == {"stopped": True}
    expect(page.locator("#stale")).to_be_visible(timeout=WAIT)
    page.goto("about:blank")  # or it would go to where one signs in at a time of its own
    visitor.complaints.clear()  # that nobody answered
    assert call("up", str(folder)) == {**up, "new": False}
    await_fleet(folder, starts=2)
    sign_in(visitor, up)
    page.click(".study >> text=ages")
    page.wait_for_url(study)
    expect(page.locator("#round-1 .tag")).to_have_text("result", timeout=WAIT)
    drawn(page, "#round-1 img.chart")
    assert alternative_text(page) == largest
    expect(page.locator(".budget .analysis")).to_contain_text("1 of 6 reports", timeout=WAIT)
    page.click("text=Ask a finer question")
    expect(page.locator("input[name='edges:user.age']")).to_have_value("10, 40, 96", timeout=WAIT)
    ask_ages(page, "10, 30, 50, 96")
    expect(page.locator("#round-2 img.chart")).to_be_visible(timeout=WAIT)
    expect(page.locator(".budget .analysis")).to_contain_text("2 of 6 reports", timeout=WAIT)
    page.screenshot(path=tmp_path / "restarted.png", full_page=True)
    assert visitor.complaints == []
    assert visitor.elsewhere == []
