"""The console in a real browser: from signing in to the next question, and what is refused."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.console.conftest import WatchedPage, drawn, watched
from tests.console.world import NASTY, TOKENS, WORDS, running
from tests.keyboard import ANALYSIS

WAIT = 60_000  # the machine may be busy


def begin(visitor: WatchedPage, name: str = "first-look") -> str:
    visitor.page.fill("#name", name)
    visitor.page.click("button:has-text('Begin')")
    path = f"{visitor.origin}/studies/rehearsal/ada/{name}"
    visitor.page.wait_for_url(path)
    return path


def choose_ages(page: Page, edges: str = "10 to 80 by 10") -> None:
    page.check("input[name='use:user.age']")
    page.fill("input[name='edges:user.age']", edges)


def ask(page: Page) -> None:
    page.click(".ask-button", timeout=WAIT)


def test_a_study_from_the_first_question_to_the_next(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, fill_seconds=1) as world:
        filled, progress = [0.2], world.fleet.progress
        monkeypatch.setattr(
            world.fleet, "progress", lambda round_: replace(progress(round_), filled=filled[0])
        )
        visitor = watched(browser, world.url)
        page = visitor.page
        visitor.sign_in()
        path = begin(visitor)
        page.click("text=Ask a question")
        choose_ages(page)
        expect(page.locator("#cost")).to_contain_text("Needs", timeout=WAIT)
        expect(page.locator("#cost")).to_contain_text("24,49")
        page.screenshot(path=tmp_path / "ask.png", full_page=True)
        ask(page)

        # The cohort fills, and the result comes, without the page being loaded again.
        page.wait_for_url(f"{path}#round-1")
        page.evaluate("window.sameDocument = true")
        bar = page.locator(".fill progress")
        for filled[0] in (0.3, 0.7):
            expect(bar).to_have_attribute("value", str(filled[0]))
        filled[0] = 1.0
        chart = page.locator("#round-1 img.chart")
        expect(chart).to_be_visible(timeout=WAIT)
        drawn(page, "#round-1 img.chart")
        assert page.evaluate("window.sameDocument") is True
        expect(page.locator(".tag.collected").first).to_have_text("result")
        expect(page.locator(".budget")).to_contain_text("1 of 6 reports")
        page.screenshot(path=tmp_path / "result.png", full_page=True)

        # The next question begins as this one was.
        page.click("text=Ask a finer question")
        expect(page.locator("input[name='use:user.age']")).to_be_checked()
        page.fill("input[name='edges:user.age']", "10 to 80 by 5")
        expect(page.locator("#cost")).to_contain_text("Bins", timeout=WAIT)
        expect(page.locator("#cost")).to_contain_text("15 (", timeout=WAIT)
        ask(page)
        expect(page.locator("#round-2 img.chart")).to_be_visible(timeout=WAIT)

        page.click("#round-2 >> text=Table, explanation and downloads")
        expect(page.locator("table")).to_contain_text("[30, 35)")
        expect(page.locator("main")).to_contain_text("Intervals reflect the noise")
        assert visitor.complaints == []
        assert visitor.elsewhere == []


def test_a_page_is_live_however_late_its_scripts_come(browser: Browser, tmp_path: Path) -> None:
    with running(tmp_path, fill_seconds=3) as world:
        visitor = watched(browser, world.url)
        page = visitor.page
        visitor.sign_in()
        begin(visitor)
        page.click("text=Ask a question")
        choose_ages(page)
        expect(page.locator(".ask-button")).to_be_visible(timeout=WAIT)

        def late(route: Route) -> None:
            time.sleep(0.7)  # longer than a page takes to be read
            route.continue_()

        page.route(re.compile(r"/static/(hx-sse|console)"), late)
        ask(page)
        expect(page.locator("#round-1 img.chart")).to_be_visible(timeout=WAIT)
        assert visitor.complaints == []


def test_a_page_says_when_it_is_no_longer_live(browser: Browser, tmp_path: Path) -> None:
    with running(tmp_path) as world:
        visitor = watched(browser, world.url)
        page = visitor.page
        visitor.sign_in()
        with page.expect_response(re.compile(r"/events$")):
            begin(visitor)
        expect(page.locator("#stale")).to_be_hidden()
        page.context.set_offline(True)
        world.clock.set(world.clock.now() + 1_000_000)  # the session is over
        expect(page.locator("#stale")).to_be_visible(timeout=WAIT)

        # Whoever is no longer signed in gets to sign in, instead of a page that stands still.
        page.context.set_offline(False)
        page.wait_for_url(f"{world.url}/sign-in", timeout=WAIT)


def test_a_refused_question_says_why(browser: Browser, tmp_path: Path) -> None:
    with running(tmp_path, reports=1) as world:
        visitor = watched(browser, world.url)
        page = visitor.page
        visitor.sign_in()
        path = begin(visitor)
        page.goto(path + "/ask")
        choose_ages(page, "0 to 80 by 0.001")
        expect(page.locator("#cost")).to_contain_text("the limit is 10,000", timeout=WAIT)
        assert page.locator(".ask-button").count() == 0

        page.fill("input[name='edges:user.age']", "10 to 80 by 10")
        page.fill("#target", "3")
        expect(page.locator("#cost")).to_contain_text("below the minimum cohort", timeout=WAIT)
        page.fill("#target", "")
        ask(page)
        expect(page.locator("#round-1 img.chart")).to_be_visible(timeout=WAIT)
        page.goto(path + "/ask")
        choose_ages(page, "10 to 80 by 5")
        expect(page.locator("#cost")).to_contain_text("Devices would refuse it", timeout=WAIT)
        expect(page.locator("#cost")).to_contain_text("the budget allows")
        page.screenshot(path=tmp_path / "refused.png", full_page=True)
        assert world.fleet.archive.rounds("ada.first-look")[-1].number == 1
        assert visitor.complaints == []


def test_nasty_labels_are_shown_and_never_run(browser: Browser, tmp_path: Path) -> None:
    with running(tmp_path) as world:
        visitor = watched(browser, world.url)
        page = visitor.page
        visitor.sign_in()
        page.fill("#name", NASTY)
        page.click("button:has-text('Begin')")
        expect(page.locator("[role=alert]")).to_contain_text("can't be the name of a study")
        expect(page.locator("[role=alert]")).to_contain_text("<img src=x onerror=alert(1)>")
        path = begin(visitor, "nasty")
        expect(page.locator("h1 + p")).to_contain_text("<img src=x onerror=alert(1)>")
        page.click("text=Ask a question")
        page.check("input[name='use:keyboard.ngram']")
        page.fill("textarea[name='values:keyboard.ngram']", f"how are you\n{NASTY}\nthe cat sat")
        ask(page)
        chart = page.locator("#round-1 img.chart")
        expect(chart).to_be_visible(timeout=WAIT)
        assert NASTY in (chart.get_attribute("alt") or "")
        page.goto(path + "/rounds/1")
        expect(page.locator("tbody")).to_contain_text(NASTY)
        page.goto(path + "/ask?like=1")
        expect(page.locator("textarea[name='values:keyboard.ngram']")).to_have_value(
            re.compile(re.escape(NASTY))
        )
        page.goto(world.url + "/recipes")
        page.click("summary")
        expect(page.locator("pre")).to_contain_text("onerror=alert(1)")
        page.goto(world.url + "/")
        assert page.locator("img[src='x']").count() == 0
        assert visitor.alerts == []
        assert visitor.complaints == []
        assert visitor.elsewhere == []


def test_an_algorithm_runs_to_its_picture(browser: Browser, tmp_path: Path) -> None:
    with running(tmp_path, reports=8) as world:
        visitor = watched(browser, world.url)
        page = visitor.page
        visitor.sign_in()
        path = begin(visitor)
        page.click("text=Discover phrases")
        page.fill("#in-vocabulary", "\n".join(WORDS))
        page.fill("#in-max_n", "2")
        page.fill("#in-epsilon", "4")
        expect(page.locator("#plan")).to_contain_text("rounds", timeout=90_000)
        ask(page)
        expect(page.locator("#run-1 .tag")).to_have_text("finished", timeout=90_000)
        page.goto(path + "/runs/1")
        expect(page.locator("main")).to_contain_text("2-grams:")
        drawn(page, "img.chart")
        assert visitor.complaints == []


@pytest.mark.parametrize(("width", "theme"), [(1280, "dark"), (390, "light")])
def test_every_page_fits(browser: Browser, tmp_path: Path, width: int, theme: str) -> None:
    with running(tmp_path) as world:
        view = world.workspace.create("ada", "rehearsal", "a-rather-long-name.of-a-study", ANALYSIS)
        visitor = watched(browser, world.url, width=width, theme=theme)
        visitor.sign_in()
        page = visitor.page
        page.goto(world.url + view.path + "/ask")
        choose_ages(page)
        ask(page)
        expect(page.locator("#round-1 img.chart")).to_be_visible(timeout=WAIT)
        places = ["", "/ask", "/rounds/1", "/run/ngrams", "/run/heatmap"]
        for place in ["/", "/recipes", "/privacy", *(view.path + each for each in places)]:
            page.goto(world.url + place)
            name = place.strip("/").replace("/", "-") or "studies"
            page.screenshot(path=tmp_path / f"{name}-{width}-{theme}.png", full_page=True)
            too_wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert too_wide <= 0, place
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        darkness = sum(int(part) for part in re.findall(r"\d+", background)[:3])
        assert (darkness < 200) == (theme == "dark")
        assert visitor.complaints == []


def test_it_works_by_keyboard_alone(browser: Browser, tmp_path: Path) -> None:
    with running(tmp_path) as world:
        visitor = watched(browser, world.url)
        page = visitor.page
        page.goto(world.url)
        expect(page.locator("#token")).to_be_focused()
        page.keyboard.type(TOKENS["ada"])
        page.keyboard.press("Enter")
        page.wait_for_selector("text=Begin a study")
        page.focus("#name")
        page.keyboard.type("keys")
        page.keyboard.press("Enter")
        page.wait_for_selector("h1:has-text('keys')")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.goto(page.url + "/ask")
        page.focus("input[name='use:user.age']")
        page.keyboard.press("Space")
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.keyboard.type("10, 40, 80")
        page.wait_for_selector(".ask-button", timeout=WAIT)
        page.keyboard.press("Enter")
        expect(page.locator("#round-1 img.chart")).to_be_visible(timeout=WAIT)


def test_the_privacy_page_follows_its_sliders(browser: Browser, tmp_path: Path) -> None:
    with running(tmp_path) as world:
        visitor = watched(browser, world.url)
        page = visitor.page
        visitor.sign_in()
        page.click("nav >> text=Privacy")
        before = page.locator("#figure .big").inner_text()
        assert "10,000 devices" in before
        page.locator("#cohort").fill("5")
        expect(page.locator("#figure .big")).to_contain_text("100,000 devices", timeout=WAIT)
        after = page.locator("#figure .big").inner_text()
        epsilons = [float(text.split()[1]) for text in (before, after)]
        assert 0 < epsilons[1] < epsilons[0] / 2
        drawn(page, "img.chart")
        assert visitor.complaints == []
