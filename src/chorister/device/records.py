"""What a device remembers between runs: decisions about recipes, refusals, polled files, settings.

**Attempts.** Each recipe is answered at most once, a series at most once in each window that was
drawn for it. A row of `attempts` is written in the
transaction that charges the budget, before any data is touched. It has everything that a report
needs except the data, so that a device can finish after a crash without asking anybody. Its
`state` only ever moves forward:

    declined                      the coin came up no; nothing was charged
    charged -> queued -> sent     the life of a report
                      -> dropped  refused permanently by the leader, too late, or consent withdrawn

`charged` found at a start means that there was a crash: the query may have run, so it never runs
again.

All writes belong in the caller's transaction.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final, NamedTuple

import apsw

from chorister.canonical import loads
from chorister.device.audit import RecipeSummary
from chorister.device.database import upgrade
from chorister.errors import InternalError
from chorister.recipe import Recipe

LEDGER: Final = b"ledger"
"""The ledger, as the subject of a refusal."""
_PAUSED: Final = "paused"
_MAX_QUESTION_BYTES: Final = 1_000_000

_SCHEMA: Final = (
    """
    CREATE TABLE attempts (
        recipe BLOB PRIMARY KEY,          -- digest
        question BLOB NOT NULL,           -- JSON, for the audit log
        closes INTEGER NOT NULL,          -- when the answer period ends
        decided INTEGER NOT NULL,         -- when the coin was flipped
        state TEXT NOT NULL,
        upload_at INTEGER,                -- drawn before the query; see the last step
        arm TEXT,
        groups TEXT,                      -- JSON, field -> value
        report_id BLOB,
        configuration BLOB,               -- the task's
        -- What a report is made from; emptied once it is sealed.
        jws BLOB, leader_config BLOB, helper_config BLOB
    ) STRICT, WITHOUT ROWID;
    -- The last reason given for a recipe that is not answered: recorded once, not at every poll.
    CREATE TABLE refusals (
        recipe BLOB PRIMARY KEY,
        name TEXT NOT NULL,
        why TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
    -- Files of the log, by their digest: those of the last complete poll.
    CREATE TABLE bodies (path TEXT PRIMARY KEY, body BLOB NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE memory (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
    """,
    # The cosigning keys that vouch for the keys to which the report is sealed.
    "ALTER TABLE attempts ADD COLUMN signers BLOB",
    # In microseconds, like all times at which something is sent.
    "UPDATE attempts SET upload_at = upload_at * 1000000",
    # The number of the window; of a series it is also in the last bytes of `recipe`.
    """
    ALTER TABLE attempts ADD COLUMN number INTEGER NOT NULL DEFAULT 0;
    CREATE TABLE draws (
        recipe BLOB PRIMARY KEY,          -- digest of a series
        question BLOB NOT NULL,           -- JSON
        closes INTEGER NOT NULL,          -- when its last window closes
        arm TEXT,
        windows TEXT NOT NULL             -- JSON: those to answer in, number -> when it opens
    ) STRICT, WITHOUT ROWID;
    """,
)


# --- Attempts -------------------------------------------------------------------------------------


class AttemptState(StrEnum):
    """What was decided about a recipe (see above)."""

    DECLINED = "declined"
    CHARGED = "charged"
    QUEUED = "queued"
    SENT = "sent"
    DROPPED = "dropped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A charged recipe without a report yet, and everything drawn or read for it."""

    recipe: bytes  # `Recipe.answer_id`: the digest; of a series, with the window's number
    number: int = 0
    question: RecipeSummary
    jws: bytes
    upload_at: int  # microseconds
    arm: str | None
    groups: dict[str, str]
    report_id: bytes
    configuration: bytes  # the task's, of this group and arm
    leader_config: bytes  # from the cosigned log
    helper_config: bytes
    signers: bytes  # the cosigning keys that vouch for the two


_ATTEMPT_COLUMNS: Final = tuple(column.name for column in fields(Attempt))


class Draw(NamedTuple):
    """What was drawn about a recipe, once for all its windows."""

    arm: str | None
    windows: tuple[int, ...]  # in which to answer


class Attempts:
    """Decisions about recipes: one for each, or for each window of a series, and the draws."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        upgrade(connection, "attempts", _SCHEMA)

    def state(self, recipe: bytes) -> AttemptState | None:
        """Return what was decided about a recipe; None if nothing was."""
        found = self._connection.execute(
            "SELECT state FROM attempts WHERE recipe = ?", (recipe,)
        ).fetchone()
        return None if found is None else AttemptState(found[0])

    def draw(self, recipe: Recipe) -> Draw | None:
        """Return what was drawn about a series; None if nothing was."""
        found = self._connection.execute(
            "SELECT arm, windows FROM draws WHERE recipe = ?", (recipe.digest,)
        ).fetchone()
        return None if found is None else Draw(found[0], tuple(map(int, json.loads(found[1]))))

    def remember(self, recipe: Recipe, question: RecipeSummary, draw: Draw) -> None:
        """Store what was drawn about a series. A second draw would violate the primary key."""
        opens = {number: recipe.window_at(number).opens for number in draw.windows}
        self._connection.execute(
            "INSERT INTO draws VALUES (?, ?, ?, ?, ?)",
            (recipe.digest, question.canonical(), recipe.closes, draw.arm, json.dumps(opens)),
        )

    def coming(self, now: int) -> list[tuple[RecipeSummary, tuple[int, ...]]]:
        """Return the series with windows to answer in that open later, and when they do."""
        rows = self._connection.execute("SELECT question, windows FROM draws ORDER BY recipe")
        drawn = [(_question(row[0]), json.loads(row[1]).values()) for row in rows]
        later = [(question, tuple(t for t in times if t > now)) for question, times in drawn]
        return [(question, times) for question, times in later if times]

    def undecided(self, recipe: Recipe, now: int) -> int | None:
        """Return the window to decide about now; None if there is none."""
        number = recipe.window_open(now)
        if number is None:
            if recipe.series is not None:
                return None  # between two windows
            number = 0  # the checks say why it is not open
        if self.state(recipe.digest) or self.state(recipe.answer_id(number)):
            return None
        draw = self.draw(recipe)
        return number if draw is None or number in draw.windows else None

    def decline(self, recipe: Recipe, question: RecipeSummary, *, now: int) -> None:
        """Remember that the coin came up no."""
        self._connection.execute(
            "INSERT INTO attempts (recipe, question, closes, decided, state)"
            " VALUES (?, ?, ?, ?, ?)",
            (recipe.digest, question.canonical(), recipe.closes, now, AttemptState.DECLINED),
        )

    def begin(self, recipe: Recipe, attempt: Attempt, *, now: int) -> None:
        """Store the attempt. A second one for the same recipe would violate the primary key."""
        row = {name: getattr(attempt, name) for name in _ATTEMPT_COLUMNS} | {
            "question": attempt.question.canonical(),
            "groups": json.dumps(attempt.groups),
            "closes": recipe.window_at(attempt.number).closes,
            "decided": now,
            "state": AttemptState.CHARGED,
        }
        self._connection.execute(
            f"INSERT INTO attempts ({', '.join(row)}) VALUES (:{', :'.join(row)})",  # noqa: S608
            row,
        )

    def question(self, recipe: bytes) -> RecipeSummary:
        """Return the question of a recipe that was decided about."""
        found = self._connection.execute(
            "SELECT question FROM attempts WHERE recipe = ?", (recipe,)
        ).fetchone()
        if found is None:
            raise InternalError(f"nothing was decided about recipe {recipe.hex()}")
        return _question(found[0])

    def signers(self, recipe: bytes) -> bytes:
        """Return the cosigning keys that vouched for the keys to which its report is sealed."""
        found = self._connection.execute(
            "SELECT signers FROM attempts WHERE recipe = ?", (recipe,)
        ).fetchone()
        return b"" if found is None else bytes(found[0] or b"")

    def unfinished(self) -> list[Attempt]:
        """Return charged attempts without a report: after a crash, or while it is being made."""
        rows = self._connection.execute(
            f"SELECT {', '.join(_ATTEMPT_COLUMNS)} FROM attempts"  # noqa: S608
            " WHERE state = ? ORDER BY upload_at",
            (AttemptState.CHARGED,),
        )
        return [_attempt(row) for row in rows]

    def next_upload(self) -> int | None:
        """Return when the first unfinished attempt is to be uploaded, in microseconds."""
        found = self._connection.execute(
            "SELECT min(upload_at) FROM attempts WHERE state = ?", (AttemptState.CHARGED,)
        ).fetchone()
        return None if found is None else found[0]

    def move(self, recipe: bytes, old: AttemptState, new: AttemptState) -> None:
        """Move to the next state; raise if another process was faster."""
        # No state leads back to `charged`, so what the report was made from is no longer needed.
        self._connection.execute(
            "UPDATE attempts SET state = ?, jws = NULL, leader_config = NULL, helper_config = NULL,"
            " configuration = NULL, groups = NULL WHERE recipe = ? AND state = ?",
            (new, recipe, old),
        )
        if self._connection.changes() != 1:
            raise InternalError(f"recipe {recipe.hex()} is no longer {old}; nothing was changed")

    def forget(self, *, before: int) -> None:
        """Delete draws for recipes that can no longer be answered. Charged attempts stay."""
        self._connection.execute(
            "DELETE FROM attempts WHERE state = ? AND closes < ?", (AttemptState.DECLINED, before)
        )
        self._connection.execute("DELETE FROM draws WHERE closes < ?", (before,))

    def counts(self) -> dict[AttemptState, int]:
        """Return the number of recipes in each state."""
        rows = self._connection.execute("SELECT state, count(*) FROM attempts GROUP BY state")
        return {AttemptState(state): int(count) for state, count in rows}


def _attempt(row: tuple[Any, ...]) -> Attempt:
    found = dict(zip(_ATTEMPT_COLUMNS, row, strict=True))
    found["question"] = _question(found["question"])
    found["groups"] = json.loads(found["groups"])
    found["signers"] = found["signers"] or b""
    return Attempt(**found)


def _question(data: bytes) -> RecipeSummary:
    return RecipeSummary.model_validate(loads(data, max_bytes=_MAX_QUESTION_BYTES))


# --- Refusals -------------------------------------------------------------------------------------


def pair_subject(name: str) -> bytes:
    """Return the subject for a pair of aggregators whose log is refused."""
    return name.encode()


def upload_subject(recipe: bytes) -> bytes:
    """Return the subject for a queued report that its leader does not accept."""
    return b"upload " + recipe


class Refusals:
    """The last reason that the audit log has for each subject: recorded once, not at every poll.

    A subject is the digest of a recipe, the address of an entry that is not a recipe, `LEDGER`, or
    what the two functions above return.
    """

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def record(self, subject: bytes, name: str, why: str) -> bool:
        """Remember a refusal; return whether it is new, and belongs in the audit log."""
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


# --- Files and settings ---------------------------------------------------------------------------


class PolledFiles:
    """The files of the last complete poll, by their digest."""

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
