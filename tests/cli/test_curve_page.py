"""The accountant's figure as a web page, in a real browser without a network."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page

from chorister.cli.curve import Point, draw
from chorister.privacy import Mechanism, Method


def test_the_page_draws_itself_offline(page: Page, tmp_path: Path) -> None:
    points = [
        Point(local_epsilon=3, cohort=cohort, method=method, epsilon=30 / cohort**0.5)
        for cohort in (100, 1000, 10_000)
        for method in Method
    ]
    drawn = tmp_path / "curve.html"
    draw(points, drawn, delta="1e-6", mechanism=Mechanism.ASYMMETRIC)

    complaints: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(drawn.as_uri())
    chart = page.locator("svg, canvas").first
    chart.wait_for(timeout=20_000)
    box = chart.bounding_box()

    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert box is not None
    assert box["width"] > 200
    assert box["height"] > 200
