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
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import apsw

from chorister.canonical import loads
from chorister.device.audit import Question
from chorister.device.database import upgrade
from chorister.errors import InternalError
from chorister.recipe import Recipe

_MAX_QUESTION: Final = 1_000_000

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
    -- The last thing that was said about a recipe that is not answered: said once, not every poll.
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
    upload_at: int  # microseconds
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

    def next_upload(self) -> int | None:
        """When the first of the unfinished ones is to be sent, in microseconds."""
        found = self._connection.execute(
            "SELECT min(upload_at) FROM attempts WHERE state = ?", (State.CHARGED,)
        ).fetchone()
        return None if found is None else found[0]

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
