"""What is used in a `with` block, and closed at its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

__all__ = ["Closing"]


class Closing(ABC):
    """A context manager that is closed, however its block ends."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; a second time nothing happens."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
