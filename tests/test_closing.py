"""What is closed at the end of a block."""

from __future__ import annotations

import pytest

from chorister.closing import Closing


class Door(Closing):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def close(self) -> None:
        self.heard.append("closed")


def test_closed_however_the_block_ends() -> None:
    with Door() as door:
        assert door.heard == []
    assert door.heard == ["closed"]
    with pytest.raises(KeyError), Door() as door:
        raise KeyError
    assert door.heard == ["closed"]


def test_nothing_without_a_way_to_close() -> None:
    class Wall(Closing):
        pass

    with pytest.raises(TypeError, match="close"):
        Wall()  # type: ignore[abstract]
