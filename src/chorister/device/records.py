"""Small things that a device remembers between runs, apart from what it decided about recipes.

Their tables are part of the schema of `chorister.device.attempts`. Whatever writes belongs into the
caller's transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import apsw

LEDGER: Final = b"ledger"
"""The ledger, as the subject of a refusal."""
_PAUSED: Final = "paused"


def pair_subject(name: str) -> bytes:
    """Return what stands for a pair of aggregators whose log is refused."""
    return name.encode()


def upload_subject(recipe: bytes) -> bytes:
    """Return what stands for a queued report that its leader does not take."""
    return b"upload " + recipe


class Refusals:
    """The last reason that the audit log gives for a subject: written once, not at every poll.

    A subject is the digest of a recipe, the address of an entry that is not a recipe, or one of
    those above.
    """

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def record(self, subject: bytes, name: str, why: str) -> bool:
        """Remember a refusal. Returns whether it is new, and belongs into the audit log."""
        known = self._connection.execute(
            "SELECT name FROM refusals WHERE recipe = ?", (subject,)
        ).fetchone()
        if known == (name,):
            return False
        self._connection.execute(
            "INSERT INTO refusals VALUES (?, ?, ?) ON CONFLICT (recipe)"
            " DO UPDATE SET name = excluded.name, why = excluded.why",
            (subject, name, why),
        )
        return True

    def clear(self, subject: bytes) -> None:
        """Forget a refusal: if it comes back, it is recorded again."""
        self._connection.execute("DELETE FROM refusals WHERE recipe = ?", (subject,))

    def keep_only(self, subjects: Iterable[bytes]) -> None:
        """Forget the refusals of all other subjects."""
        kept = set(subjects)
        known = [row[0] for row in self._connection.execute("SELECT recipe FROM refusals")]
        for subject in known:
            if subject not in kept:
                self.clear(subject)


class PolledFiles:
    """Files of the log by their digest: those of the last complete poll."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def all(self) -> list[bytes]:
        return [bytes(row[0]) for row in self._connection.execute("SELECT body FROM bodies")]

    def replace(self, files: Mapping[str, bytes]) -> None:
        """Keep these files, and no others."""
        known = {row[0] for row in self._connection.execute("SELECT path FROM bodies")}
        for path in known - files.keys():
            self._connection.execute("DELETE FROM bodies WHERE path = ?", (path,))
        for path in files.keys() - known:
            self._connection.execute("INSERT INTO bodies VALUES (?, ?)", (path, files[path]))

    def delete(self) -> None:
        """Keep none. In its own transaction: a poll that is interrupted must not undo it."""
        self._connection.execute("DELETE FROM bodies")


class Settings:
    """Numbers by name; one that was never set is 0."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def get(self, name: str) -> int:
        found = self._connection.execute(
            "SELECT value FROM memory WHERE name = ?", (name,)
        ).fetchone()
        return 0 if found is None else int(found[0])

    def set(self, name: str, value: int) -> None:
        self._connection.execute(
            "INSERT INTO memory VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (name, value),
        )

    def delete(self, name: str) -> None:
        self._connection.execute("DELETE FROM memory WHERE name = ?", (name,))

    @property
    def paused(self) -> bool:
        """Whether the device is paused, by whichever process."""
        return self.get(_PAUSED) != 0

    def set_paused(self, *, paused: bool) -> None:
        self.set(_PAUSED, int(paused))
