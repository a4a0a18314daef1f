"""A keyring that a test can watch, lock and rank."""

from __future__ import annotations

from keyring.backend import KeyringBackend
from keyring.errors import KeyringLocked


class MemoryKeyring(KeyringBackend):
    """Keeps secrets in memory, unless it is forgetful."""

    def __init__(self, *, priority: float = 5, forgetful: bool = False) -> None:
        self.kept: dict[tuple[str, str], str] = {}
        self.rank = priority
        self.forgetful = forgetful
        self.locked = False

    @property
    def priority(self) -> float:
        return self.rank

    def get_password(self, service: str, username: str) -> str | None:
        self._unlocked()
        return self.kept.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        self._unlocked()
        if not self.forgetful:
            self.kept[service, username] = password

    def delete_password(self, service: str, username: str) -> None:
        del self.kept[service, username]

    def _unlocked(self) -> None:
        if self.locked:
            raise KeyringLocked("locked")
