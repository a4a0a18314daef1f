"""A world with something published, for every test that wants one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.logworld import World, a_world


@pytest.fixture
def world(tmp_path: Path) -> World:
    return a_world(tmp_path)
