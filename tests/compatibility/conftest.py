"""Every test runs on each set of fixtures that was ever kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compatibility.opening import FIXTURES


@pytest.fixture(params=sorted(path.name for path in FIXTURES.iterdir() if path.is_dir()))
def kept(request: pytest.FixtureRequest) -> Path:
    """The folder of one set."""
    return FIXTURES / str(request.param)
