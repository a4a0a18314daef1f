"""The console of `chorister up` over a small live fleet: ask, watch it fill, start it again.

And an analyst's whole day with what is installed: a policy of `chorister policy new`, a rehearsal
of it in `chorister serve console`, a live study with an algorithm, an exhausted budget, exports.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from playwright.sync_api import Browser, Page, expect
from typer.testing import CliRunner

from chorister.cli import app
from chorister.fleet.deployment import Deployment
from tests.console.conftest import AXE, WatchedPage, download, drawn, fits, named, watched

RUNNER = CliRunner()
WAIT = 240_000  # the machine may be busy, and devices take their time
DEVICES = 60
LOOKS = {"light": (1280, "light"), "dark": (1280, "dark"), "narrow": (390, "light")}


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


def sign_in(visitor: WatchedPage, token: str | Path) -> None:
    page = visitor.page
    page.goto(visitor.origin + "/")
    page.fill("#token", Path(token).read_text().strip())
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
    sign_in(visitor, up["token"])
    page.fill("#name", "ages")
    purpose = page.locator("#about option", has_text="user.profile").get_attribute("value")
    page.select_option("#about", purpose)
    page.click("button:has-text('Begin')")
    page.wait_for_selector("h1:has-text('ages')")
    expect(page.locator(".tag.live")).to_have_text("live fleet")
    expect(page.locator("main")).to_contain_text("One operator runs both aggregators")
    page.click("text=Ask a question")
    ask_ages(page, "10, 40, 96")
    expect(page.locator("#round-1")).to_contain_text("Why is there no result yet?")
    page.evaluate("window.sameDocument = true")
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
    sign_in(visitor, up["token"])
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


@contextlib.contextmanager
def rehearsal_console(folder: Path) -> Iterator[tuple[str, Path]]:
    """A rehearsal of people.csv under a policy of `chorister policy new`; its URL and its token."""
    rows = [f"{age},{city},{900 - 8 * age}" for age in range(10, 90) for city in ("Rome", "Oslo")]
    (folder / "people.csv").write_text("age,city,count\n" + "\n".join(rows) + "\n")
    made = call(
        "policy", "new", str(folder / "new"), "--from", str(folder / "people.csv"),
        "--purpose", "See how old people are", "--epsilon", "4", "--reports", "4",
    )  # fmt: skip
    assert call("policy", "check", made["policy"])["consistent"]
    token = folder / "ada.token"
    digest = call("keygen", "token", str(token))["digest"]
    (folder / "console.toml").write_text(
        f"""
        folder = "console"
        [[analysts]]
        name = "ada"
        token_digest = "{digest}"
        [[connections]]
        name = "rehearsal"
        policy = "{made["policy"]}"
        population = "people.csv"
        folder = "rehearsal"
        fill_seconds = 1
        [connections.suggestions]
        "people.age" = "10 to 90 by 20"
        """
    )
    command = [sys.executable, "-m", "chorister.cli", "serve", "console", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"}
    process = subprocess.Popen(
        [*command, "--config", str(folder / "console.toml")],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", line := process.stdout.readline())
        assert found is not None, line
        yield found[0].rstrip("/"), token
    finally:
        process.terminate()
        process.communicate(timeout=60)


def look_at(page: Page, pages: dict[str, str], pictures: Path) -> None:
    """See every page in every look: it fits, is accessible, and is there to be looked at."""
    for look, (width, theme) in LOOKS.items():
        page.set_viewport_size({"width": width, "height": 860})
        page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
        for name, url in pages.items():
            page.goto(url)
            if page.locator("main img.chart").count():
                drawn(page, "main img.chart", wait=WAIT)
            fits(page, f"{name}, {look}")
            named(page, f"{name}, {look}")
            page.screenshot(path=pictures / f"{name}-{look}.png", full_page=True)
    page.set_viewport_size({"width": 1280, "height": 860})
    page.emulate_media(color_scheme="light")


def export_all(visitor: WatchedPage) -> None:
    rows = download(visitor, ".downloads >> text=CSV").decode().splitlines()
    frame = pl.read_parquet(io.BytesIO(download(visitor, ".downloads >> text=Parquet")))
    assert frame.height == len(rows) - 1 > 0
    assert json.loads(download(visitor, ".downloads >> text=JSON"))
    report = download(visitor, ".downloads >> text=Report").decode()
    assert "<svg" in report
    assert "<script" not in report


def test_a_whole_day_from_a_new_policy_to_a_live_algorithm(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    # Made from a table, the policy is rehearsed with that table.
    with rehearsal_console(tmp_path) as (url, token):
        visitor = watched(browser, url)
        page = visitor.page
        page.set_default_timeout(WAIT)
        sign_in(visitor, token)
        page.fill("#name", "dry-run")
        page.click("button:has-text('Begin')")
        page.wait_for_selector("h1:has-text('dry-run')")
        study = page.url
        page.click("text=Ask a question")
        page.check("input[name='use:people.age']")
        expect(page.locator("input[name='edges:people.age']")).to_have_value(
            "10 to 90 by 20", timeout=WAIT
        )
        page.click(".ask-button")
        expect(page.locator("#round-1 img.chart")).to_be_visible(timeout=WAIT)
        page.goto(study + "/rounds/1")
        export_all(visitor)
        look_at(page, {"rehearsed": study, "rehearsed-round": study + "/rounds/1"}, tmp_path)
        assert visitor.complaints == []
        assert visitor.elsewhere == []

    # The same steps with devices and servers. A form that is filled in shows its plan at once.
    up = call("up", str(folder), "--fleet", str(DEVICES))
    await_fleet(folder, starts=1)
    visitor = watched(browser, up["console"])
    page = visitor.page
    page.set_default_timeout(WAIT)
    sign_in(visitor, up["token"])
    page.fill("#name", "day")
    purpose = page.locator("#about option", has_text="user.profile").get_attribute("value")
    page.select_option("#about", purpose)
    page.click("button:has-text('Begin')")
    page.wait_for_selector("h1:has-text('day')")
    study = page.url
    # The policy does not permit what the queries of this one call, so it is not offered.
    assert page.locator("main >> text=Discover words").count() == 0
    page.goto(study + "/run/distribution")
    expect(page.locator("#plan")).to_contain_text("no device spends more than", timeout=WAIT)
    page.fill("#in-epsilon", "5")
    page.fill("#in-target", "0.8")
    expect(page.locator("#plan")).to_contain_text("ε 5", timeout=WAIT)
    page.click("#plan .ask-button")
    expect(page.locator("#run-1 .tag").first).to_have_text("finished", timeout=WAIT)
    page.goto(study + "/runs/1")
    drawn(page, "main img.chart", wait=WAIT)
    export_all(visitor)

    # What is left does not suffice for as much again, which is said in words and has no button.
    page.goto(study + "/ask")
    page.check("input[name='use:user.age']")
    page.fill("input[name='edges:user.age']", "10, 40, 96")
    page.fill("#epsilon", "5")
    exhausted = page.locator("#cost .notice.bad")
    expect(exhausted).to_contain_text(
        "the budget allows the analysis user.profile epsilon 6", timeout=WAIT
    )
    assert page.locator(".ask-button").count() == 0
    fits(page, "exhausted")
    named(page, "exhausted")
    page.screenshot(path=tmp_path / "exhausted.png", full_page=True)
    page.goto(study + "/run/crosstab")
    page.fill("#in-epsilon", "5")
    expect(page.locator("#plan .notice.bad")).to_contain_text("the budget allows", timeout=WAIT)
    assert page.locator("#plan .ask-button").count() == 0

    places = ("studies", "recipes", "privacy", "devices", "devices/1")
    pages = {name.replace("/", "-"): f"{visitor.origin}/{name}" for name in places}
    pages["studies"] = visitor.origin + "/"
    pages |= {"study": study, "run": study + "/runs/1", "round": study + "/rounds/1"}
    pages |= {"ask": study + "/ask", "form": study + "/run/ngrams"}
    look_at(page, pages, tmp_path)
    assert visitor.complaints == []
    assert visitor.elsewhere == []
    if not AXE.exists():
        pytest.skip("all but axe-core's checks passed; `make browser` installs it (with npm)")
