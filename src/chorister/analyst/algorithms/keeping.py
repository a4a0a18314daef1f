"""What an algorithm found, kept as JSON: its rounds and how it asked; all else follows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar, Self

from chorister.analyst.algorithms.reading import as_cohorts
from chorister.analyst.cohorts import Cohorts
from chorister.analyst.files import require_format, write_atomically
from chorister.analyst.result import Result
from chorister.errors import DecodeError, InvalidInput

__all__ = ["Kept"]


class Kept:
    """To a file and back. Settings beyond the rounds are an algorithm's own: `_settings`."""

    FORMAT: ClassVar[str]
    NOUN: ClassVar[str]  # what it is called where it can't be read
    results: Any  # a tuple of `Result`, of a fixed length for some
    cohorts: Cohorts

    def _settings(self) -> dict[str, Any]:
        """JSON values from which `_with_settings` makes arguments."""
        return {}

    @classmethod
    def _with_settings(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Arguments from what `_settings` wrote."""
        del tree
        return {}

    def to_json(self) -> str:
        """Everything, as JSON: the rounds; all else follows from them."""
        document = {
            "format": self.FORMAT,
            "cohorts": self.cohorts,
            **self._settings(),
            "results": [json.loads(result.to_json()) for result in self.results],
        }
        return json.dumps(document, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """What `to_json` wrote; anything else raises `DecodeError`."""
        try:
            tree = json.loads(text)
            require_format(tree, cls.FORMAT)
            arguments: dict[str, Any] = {
                "results": tuple(Result.from_tree(each) for each in tree["results"]),
                "cohorts": as_cohorts(tree["cohorts"]),
                **cls._with_settings(tree),
            }
            return cls(**arguments)
        except DecodeError:
            raise
        except (
            ArithmeticError, InvalidInput, KeyError, RecursionError, TypeError, ValueError,
        ) as error:  # fmt: skip
            raise DecodeError(f"not {cls.NOUN}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file, whole or not at all."""
        write_atomically(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote."""
        try:
            return cls.from_json(Path(path).read_bytes())
        except OSError as error:
            raise InvalidInput(f"can't read {path}: {error.strerror}") from None
