"""Figures that the documentation states and the code decides: one changes with the other."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from decimal import Decimal

import pytest

from chorister.aggregator.jobs.aggregation_job_driver import MAX_PAUSE_SECONDS
from chorister.aggregator.jobs.garbage_collector import KEEP_IDS_SECONDS
from chorister.aggregator.jobs.worker import DEAD_AFTER_SECONDS, MAX_ATTEMPTS
from chorister.aggregator.service import METRICS_SECONDS
from chorister.analyst.rehearsal.real_devices import MAX_DEVICES
from chorister.cli.demo import demo
from chorister.device import Timing
from chorister.privacy.randomizers import MAX_LOCAL_EPSILON, MIN_LOCAL_EPSILON
from chorister.recipe.model import MAX_RECIPE_BYTES
from chorister.transparency.checkpoint import MAX_SKEW
from chorister.transparency.entries import MAX_BODY, MAX_ENTRY
from tests.conftest import REPOSITORY

DEMO = inspect.signature(demo).parameters["devices"].default
APP = len((REPOSITORY / "examples/keyboard/app.py").read_text().splitlines())
LOCAL = (MIN_LOCAL_EPSILON, MAX_LOCAL_EPSILON)


@pytest.mark.parametrize(
    ("page", "words", "found", "stated"),
    [
        ("tutorial", "creates two thousand devices", DEMO, 2000),
        ("howto/rehearse", "at most 5,000 devices", MAX_DEVICES, 5000),
        ("howto/embed-a-device", "all of this in eighty lines", APP // 10 * 10, 80),
        ("reference/recipe", "at most 8,000,000 bytes", MAX_RECIPE_BYTES, 8_000_000),
        ("reference/recipe", "eps0, 0.001 to 20", LOCAL, (Decimal("0.001"), 20)),
        ("reference/log", "An entry has at most 65,535 bytes", MAX_ENTRY, 65_535),
        ("reference/log", "a JWS of at most 11 MiB", MAX_BODY, 11 << 20),
        ("reference/log", "was current within five minutes of its clock", MAX_SKEW, 300),
        ("concepts/budget", "five minutes ahead of it", MAX_SKEW, 300),
        ("concepts/aggregation", "remembered for a year", KEEP_IDS_SECONDS, 366 * 86_400),
        ("concepts/aggregation", "noticed after ten seconds", DEAD_AFTER_SECONDS, 10),
        ("reference/aggregator", "noticed after ten seconds", DEAD_AFTER_SECONDS, 10),
        # A quarter of it more, at random.
        ("reference/aggregator", "at most 40 seconds later", MAX_PAUSE_SECONDS, 30),
        ("reference/aggregator", "fails twenty times because of a bug", MAX_ATTEMPTS, 20),
        ("reference/aggregator", "every 15 seconds", METRICS_SECONDS, 15),
    ],
)
def test_a_figure_in_the_documentation_is_the_codes(
    page: str, words: str, found: object, stated: object
) -> None:
    text = " ".join((REPOSITORY / "docs" / f"{page}.md").read_text().split())
    assert words in text
    assert found == stated


def test_the_documented_timings_are_the_defaults() -> None:
    text = (REPOSITORY / "docs/reference/device.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", text, re.MULTILINE))
    assert table == {each.name: str(each.default) for each in fields(Timing)}


def test_the_readmes_table_is_what_its_code_prints() -> None:
    text = (REPOSITORY / "README.md").read_text()
    code, shown = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)[0]
    run = [sys.executable, "-c", code]
    printed = subprocess.run(run, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert printed.stdout == shown
