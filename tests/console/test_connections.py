"""The page of recipes reads the public log: what is in it is shown, whoever asked."""

from __future__ import annotations

from pathlib import Path

from chorister.console.connections import read_log
from chorister.policy import Policy
from chorister.transparency.client import FolderSource

LOG = Path(__file__).parent.parent / "vectors" / "log"


def _policy() -> Policy:
    [path] = (LOG / "policy").glob("*.toml")
    return Policy.load(path)


def test_all_recipes_with_their_state() -> None:
    page = read_log(FolderSource(LOG), _policy())
    assert page.problem == ""
    assert page.cosignatures == 2
    assert page.size > len(page.questions) > 0
    indexes = [each.index for each in page.questions]
    assert indexes == sorted(indexes, reverse=True)
    assert not any(each.open and each.ended for each in page.questions)


class _Forged(FolderSource):
    """A server that shows one other entry."""

    def read(self, path: str, *, limit: int) -> bytes:
        data = super().read(path, limit=limit)
        return data[:-1] + b"x" if path.startswith("body/") else data


def test_a_log_that_is_wrong_is_not_shown() -> None:
    page = read_log(_Forged(LOG), _policy())
    assert page.problem
    assert page.questions == ()
