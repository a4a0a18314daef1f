"""What all tests share: where real data lies, and that CI skips nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from playwright.sync_api import Page, sync_playwright

REPOSITORY = Path(__file__).parent.parent
SHARED = REPOSITORY.parent / "shared"

# One profile: machines are slow and noisy, so no deadline; failures print how to reproduce them.
settings.register_profile(
    "chorister", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("chorister")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with published vectors and real data; a user's clone has none of it."""
    if not SHARED.is_dir():
        pytest.skip(f"no shared material at {SHARED}")
    return SHARED


@pytest.fixture
def page() -> Generator[Page]:
    """A page of a headless Chromium that reaches no network: whatever it asks for is refused."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        pytest.skip("no Chromium here: 'make browser' installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable,
            args=["--no-sandbox", "--disable-background-networking", "--disable-component-update"],
        )
        with browser.new_context(offline=True) as context:
            yield context.new_page()
        browser.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """CI has everything that a test could need: what is skipped there has failed."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {report.longrepr}"
    return report
