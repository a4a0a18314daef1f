"""The disk cache: versions, damage, concurrent writers, and that enforcement never reads it."""

from __future__ import annotations

import ast
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chorister import privacy
from chorister.privacy import cache
from chorister.privacy.cache import remember


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(cache.DISABLING_VARIABLE, raising=False)
    return tmp_path / "chorister" / "accountant"


class CountedCalls:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, float]:
        self.calls += 1
        return {"upper": 0.5}


def test_an_answer_is_computed_once(folder: Path) -> None:
    compute = CountedCalls()
    for _ in range(3):
        assert remember("epsilon", {"cohort": "586"}, compute) == {"upper": 0.5}
    assert compute.calls == 1
    remember("epsilon", {"cohort": "587"}, compute)
    remember("delta", {"cohort": "586"}, compute)
    assert compute.calls == 3
    assert len(list(folder.iterdir())) == 3


def test_a_new_version_forgets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = CountedCalls()
    remember("epsilon", {}, compute)
    monkeypatch.setattr(cache, "ACCOUNTANT_VERSION", 999)
    remember("epsilon", {}, compute)
    assert compute.calls == 2


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b'{"key": "x", "answer": {}}', b"\xff\xfe", b'{"answer": {"upper": NaN}}'],
)
def test_a_damaged_file_is_computed_again(folder: Path, damage: bytes) -> None:
    compute = CountedCalls()
    remember("epsilon", {}, compute)
    (path,) = folder.iterdir()
    path.write_bytes(damage)
    assert remember("epsilon", {}, compute) == {"upper": 0.5}
    assert compute.calls == 2
    assert json.loads(path.read_bytes())["answer"] == {"upper": 0.5}


def test_a_file_about_something_else_is_not_believed(folder: Path) -> None:
    compute = CountedCalls()
    remember("epsilon", {"cohort": "1"}, compute)
    (path,) = folder.iterdir()
    moved = json.loads(path.read_bytes())
    moved["key"] = moved["key"].replace('"1"', '"2"')
    moved["answer"] = {"upper": 0.001}
    path.write_text(json.dumps(moved))
    assert remember("epsilon", {"cohort": "1"}, compute) == {"upper": 0.5}


def test_concurrent_writers_do_not_mix(folder: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda _: remember("epsilon", {}, lambda: {"upper": 0.25}), range(64))
        )
    assert answers == [{"upper": 0.25}] * 64
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_the_environment_can_forbid_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.DISABLING_VARIABLE, "1")
    compute = CountedCalls()
    remember("epsilon", {}, compute)
    remember("epsilon", {}, compute)
    assert compute.calls == 2
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.delenv(cache.DISABLING_VARIABLE, raising=False)
    assert remember("epsilon", {}, CountedCalls()) == {"upper": 0.5}


def test_nothing_in_the_package_but_the_cache_itself_imports_it() -> None:
    """Whoever can write to a cache folder must not be able to raise what a device believes."""
    for path in Path(privacy.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and path.name != "cache.py":
                assert node.module != "chorister.privacy.cache", path
            if isinstance(node, ast.Attribute | ast.Name) and path.name != "cache.py":
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                assert name not in {"open", "read_text", "read_bytes", "write_text"}, path
