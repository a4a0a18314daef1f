"""Fixtures of the console's tests: a server of its own, and a browser that reaches nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from tests.console.world import TOKENS

# The machine may be busy: a page may take longer than the 5 seconds that Playwright waits.
PATIENCE = 120_000
expect.set_options(timeout=PATIENCE)

AXE = Path(__file__).parents[2] / "target" / "axe" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        pytest.skip("no Chromium here: 'make browser' installs it")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=executable,
            args=[
                "--no-sandbox",
                "--disable-background-networking",
                "--disable-component-update",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            ],
        )
        yield found
        found.close()


class WatchedPage:
    """A page of a browser without a network; remembers what it asked others for, and complaints."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.origin = origin
        self.elsewhere: list[str] = []
        self.complaints: list[str] = []
        self.alerts: list[str] = []
        page.on("request", self._see)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._hear)
        page.on("dialog", self._alert)

    def _see(self, request: Request) -> None:
        if not request.url.startswith(self.origin + "/"):
            self.elsewhere.append(request.url)

    def _hear(self, message: object) -> None:
        text = str(getattr(message, "text", ""))
        if getattr(message, "type", "") == "error" and "the server responded" not in text:
            self.complaints.append(text)

    def _alert(self, dialog: object) -> None:
        self.alerts.append(str(getattr(dialog, "message", "")))
        dialog.dismiss()  # type: ignore[attr-defined]

    def sign_in(self, name: str = "ada") -> None:
        self.page.goto(self.origin + "/")
        self.page.fill("#token", TOKENS[name])
        self.page.click("button:has-text('Sign in')")
        self.page.wait_for_selector("text=Begin a study")


def watched(
    browser: Browser, origin: str, *, width: int = 1280, theme: str = "light"
) -> WatchedPage:
    context = browser.new_context(
        viewport={"width": width, "height": 860},
        color_scheme="dark" if theme == "dark" else "light",
    )
    context.set_default_timeout(PATIENCE)
    return WatchedPage(context.new_page(), origin)


def drawn(page: Page, selector: str, *, wait: int = 60_000) -> None:
    """Wait until a picture is there and not empty."""
    for _ in range(wait // 100):
        if page.locator(selector).first.evaluate("img => img.naturalWidth") > 200:
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"{selector} was never drawn")


def fits(page: Page, place: str) -> None:
    too_wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert too_wide <= 0, place


def named(page: Page, place: str) -> None:
    """What a screen reader needs: names of pictures and controls, one heading, ids only once."""
    problems = page.evaluate(
        """() => {
        const found = [];
        for (const img of document.querySelectorAll('img'))
          if (!img.hasAttribute('alt')) found.push('img');
        for (const each of document.querySelectorAll('input:not([type=hidden]), select, textarea'))
          if (!each.labels.length && !each.getAttribute('aria-label')) found.push(each.name);
        for (const each of document.querySelectorAll('a, button'))
          if (!each.textContent.trim() && !each.getAttribute('aria-label')) found.push(each.id);
        if (document.querySelectorAll('h1').length !== 1) found.push('h1');
        const ids = [...document.querySelectorAll('[id]')].map(each => each.id);
        for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) found.push('#' + id);
        return found;
      }"""
    )
    assert problems == [], (place, problems)
    if AXE.exists():
        page.evaluate(AXE.read_text())
        found = page.evaluate("axe.run()")["violations"]
        serious = {
            each["id"]: [node["target"] for node in each["nodes"]]
            for each in found
            if each["impact"] in ("serious", "critical")
        }
        assert serious == {}, place


def download(visitor: WatchedPage, selector: str) -> bytes:
    # The machine may be busy: a report draws every chart.
    with visitor.page.expect_download(timeout=120_000) as found:
        visitor.page.click(selector)
    return Path(found.value.path()).read_bytes()
