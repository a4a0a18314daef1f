"""What a device has decided about recipes, for good: each is answered at most once.

A row of `attempts` is written in the transaction that charges the budget, before any data is
touched, and holds all that a report needs except the data: so that a crash can be finished without
asking anything of anybody. Its `state` only ever moves forward:

    declined                      the coin said no; nothing was charged
    charged -> queued -> sent     the way of a report
                      -> dropped  refused by the leader for good, too late, or consent withdrawn

`charged` found at a start means a crash in between: the query may have run, so it never runs again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import apsw

from chorister.canonical import loads
from chorister.device.audit import Question
from chorister.device.database import upgrade
from chorister.errors import InternalError
from chorister.recipe import Recipe

__all__ = ["Attempt", "Attempts", "State"]

_PAUSED: Final = "paused"
_MAX_QUESTION: Final = 1_000_000

_SCHEMA: Final = (
    """
    CREATE TABLE attempts (
        recipe BLOB PRIMARY KEY,          -- digest
        question BLOB NOT NULL,           -- JSON, for the audit log
        closes INTEGER NOT NULL,          -- when the answer period ends
        decided INTEGER NOT NULL,         -- when the coin was flipped
        state TEXT NOT NULL,
        upload_at INTEGER,                -- drawn before the query
        arm TEXT,
        groups TEXT,                      -- JSON, field -> value
        report_id BLOB,
        configuration BLOB,               -- the task's
        -- What a report is made from; emptied once it is sealed.
        jws BLOB, leader_config BLOB, helper_config BLOB
    ) STRICT, WITHOUT ROWID;
    -- The last thing that was said about a recipe that is not answered: said once, not every poll.
    CREATE TABLE refusals (
        recipe BLOB PRIMARY KEY,
        name TEXT NOT NULL,
        why TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
    -- Files of the log, by their digest: fetched once.
    CREATE TABLE bodies (path TEXT PRIMARY KEY, body BLOB NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE memory (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
    """,
    # The cosigning keys that vouch for the keys to which the report is sealed.
    "ALTER TABLE attempts ADD COLUMN signers BLOB",
)


class State(StrEnum):
    """See the module's docstring."""

    DECLINED = "declined"
    CHARGED = "charged"
    QUEUED = "queued"
    SENT = "sent"
    DROPPED = "dropped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A charged recipe whose report is still to be made; all of it was drawn or read before."""

    recipe: bytes  # digest
    question: Question
    jws: bytes
    upload_at: int
    arm: str | None
    groups: dict[str, str]
    report_id: bytes
    configuration: bytes  # the task's, of this group and arm
    leader_config: bytes  # from the cosigned log
    helper_config: bytes
    signers: bytes  # the cosigning keys that vouch for the two


class Attempts:
    """The tables of decisions. Whatever writes belongs into the caller's transaction."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        upgrade(connection, "attempts", _SCHEMA)

    def state(self, recipe: bytes) -> State | None:
        """What was decided about a recipe."""
        found = self._connection.execute(
            "SELECT state FROM attempts WHERE recipe = ?", (recipe,)
        ).fetchone()
        return None if found is None else State(found[0])

    def decline(self, recipe: Recipe, question: Question, *, now: int) -> None:
        """Remember that the coin said no."""
        self._connection.execute(
            "INSERT INTO attempts (recipe, question, closes, decided, state)"
            " VALUES (?, ?, ?, ?, ?)",
            (recipe.digest, question.canonical(), recipe.window.closes, now, State.DECLINED),
        )

    def begin(self, recipe: Recipe, attempt: Attempt, *, now: int) -> None:
        """Mark the attempt. A second one for the same recipe breaks the primary key."""
        self._connection.execute(
            "INSERT INTO attempts (recipe, question, closes, decided, state, upload_at, arm,"
            " groups, report_id, configuration, jws, leader_config, helper_config,"
            " signers) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(recipe.digest, attempt.question.canonical(), recipe.window.closes, now),
                *(
                    State.CHARGED,
                    attempt.upload_at,
                    attempt.arm,
                    json.dumps(attempt.groups),
                    attempt.report_id,
                ),
                *(attempt.configuration, attempt.jws),
                *(attempt.leader_config, attempt.helper_config, attempt.signers),
            ),
        )

    def question(self, recipe: bytes) -> Question:
        """What was asked, of a recipe that was decided about."""
        found = self._connection.execute(
            "SELECT question FROM attempts WHERE recipe = ?", (recipe,)
        ).fetchone()
        if found is None:
            raise InternalError(f"nothing was decided about recipe {recipe.hex()}")
        return _question(found[0])

    def signers(self, recipe: bytes) -> bytes:
        """The cosigning keys that vouched for the keys to which its report is sealed."""
        found = self._connection.execute(
            "SELECT signers FROM attempts WHERE recipe = ?", (recipe,)
        ).fetchone()
        return b"" if found is None else bytes(found[0] or b"")

    def unfinished(self) -> list[Attempt]:
        """Charged, and no report in the outbox: there was a crash, or it is being made now."""
        rows = self._connection.execute(
            "SELECT recipe, question, jws, upload_at, arm, groups, report_id, configuration,"
            " leader_config, helper_config, signers FROM attempts WHERE state = ?"
            " ORDER BY upload_at",
            (State.CHARGED,),
        )
        return [_attempt(row) for row in rows]

    def move(self, recipe: bytes, old: State, new: State) -> None:
        """Go on to the next state, or raise: then another process was there first."""
        # No state leads back to `charged`: what the report was made from is not needed any more.
        self._connection.execute(
            "UPDATE attempts SET state = ?, jws = NULL, leader_config = NULL, helper_config = NULL,"
            " configuration = NULL, groups = NULL WHERE recipe = ? AND state = ?",
            (new, recipe, old),
        )
        if self._connection.changes() != 1:
            raise InternalError(f"recipe {recipe.hex()} is not {old} any more; nothing was changed")

    def forget(self, *, before: int) -> None:
        """Coins and refusals of recipes that can't be answered any more. Charged ones stay."""
        self._connection.execute(
            "DELETE FROM attempts WHERE state = ? AND closes < ?", (State.DECLINED, before)
        )

    # --- What was said about recipes that are not answered ---

    def refuse(self, recipe: bytes, name: str, why: str) -> bool:
        """Remember a refusal; whether it is a new one, to be written into the audit log."""
        said = self._connection.execute(
            "SELECT name FROM refusals WHERE recipe = ?", (recipe,)
        ).fetchone()
        if said == (name,):
            return False
        self._connection.execute(
            "INSERT INTO refusals VALUES (?, ?, ?) ON CONFLICT (recipe)"
            " DO UPDATE SET name = excluded.name, why = excluded.why",
            (recipe, name, why),
        )
        return True

    def unrefuse(self, recipe: bytes) -> None:
        """It is over: said again if it comes back."""
        self._connection.execute("DELETE FROM refusals WHERE recipe = ?", (recipe,))

    def keep_refusals(self, recipes: Iterable[bytes]) -> None:
        """Forget refusals of recipes that are no longer listed."""
        kept = set(recipes)
        known = [row[0] for row in self._connection.execute("SELECT recipe FROM refusals")]
        for recipe in known:
            if recipe not in kept:
                self._connection.execute("DELETE FROM refusals WHERE recipe = ?", (recipe,))

    # --- Files of the log, numbers to remember ---

    def body(self, path: str) -> bytes | None:
        """A file of the log that was fetched before."""
        found = self._connection.execute(
            "SELECT body FROM bodies WHERE path = ?", (path,)
        ).fetchone()
        return None if found is None else bytes(found[0])

    def keep_bodies(self, files: dict[str, bytes]) -> None:
        """Keep these files, and no others."""
        known = {row[0] for row in self._connection.execute("SELECT path FROM bodies")}
        for path in known - files.keys():
            self._connection.execute("DELETE FROM bodies WHERE path = ?", (path,))
        for path in files.keys() - known:
            self._connection.execute("INSERT INTO bodies VALUES (?, ?)", (path, files[path]))

    def recall(self, name: str) -> int:
        """A remembered number; 0 if there is none."""
        found = self._connection.execute(
            "SELECT value FROM memory WHERE name = ?", (name,)
        ).fetchone()
        return 0 if found is None else int(found[0])

    def remember(self, name: str, value: int) -> None:
        """Remember a number."""
        self._connection.execute(
            "INSERT INTO memory VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (name, value),
        )

    def disremember(self, name: str) -> None:
        """It is 0 again."""
        self._connection.execute("DELETE FROM memory WHERE name = ?", (name,))

    @property
    def paused(self) -> bool:
        """Whether the device is paused, by whichever process."""
        return self.recall(_PAUSED) != 0

    def pause(self, *, paused: bool) -> None:
        """Remember it."""
        self.remember(_PAUSED, int(paused))

    def counts(self) -> dict[State, int]:
        """How many recipes are in which state."""
        rows = self._connection.execute("SELECT state, count(*) FROM attempts GROUP BY state")
        return {State(state): int(count) for state, count in rows}


def _attempt(row: tuple[Any, ...]) -> Attempt:
    recipe, question, jws, upload_at, arm, groups, report_id, configuration, *keys = row
    return Attempt(
        recipe=recipe,
        question=_question(question),
        jws=jws,
        upload_at=upload_at,
        arm=arm,
        groups=json.loads(groups),
        report_id=report_id,
        configuration=configuration,
        leader_config=keys[0],
        helper_config=keys[1],
        signers=keys[2] or b"",
    )


def _question(data: bytes) -> Question:
    return Question.model_validate(loads(data, max_bytes=_MAX_QUESTION))
