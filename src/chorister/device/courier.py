"""The courier: takes sealed reports from the outbox to the leader, and nothing back.

Whatever a leader answers, no report is made anew: one that it refuses is dropped, and what it cost
stays spent.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import apsw

from chorister.canonical import b64url_encode
from chorister.clock import Clock
from chorister.dap.client import MAX_ANSWER, check_answer, upload
from chorister.dap.task import TaskConfiguration
from chorister.device.attempts import Attempts, State
from chorister.device.database import transaction
from chorister.device.journal import Journal
from chorister.device.outbox import Outbox, Parcel, reason_key, wait_after
from chorister.device.run import Tally
from chorister.device.steps import Hook, Step, pass_by
from chorister.device.transport import Transport
from chorister.errors import Unreachable, UploadFailed
from chorister.policy import Policy

__all__ = ["CREDENTIAL_HEADER", "Courier", "withdraw"]

CREDENTIAL_HEADER: Final = "Chorister-Upload-Credential"
_CREDENTIAL: Final = re.compile(r"[!-~]([ -~]{0,8190}[!-~])?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Courier:
    """Sends, postpones and drops; each with its audit entry in one transaction."""

    policy: Policy
    connection: apsw.Connection
    attempts: Attempts
    outbox: Outbox
    journal: Journal
    clock: Clock
    transport: Transport
    credential: Callable[[], str] | None  # the host app's, for its leader
    consent: Callable[[], bool]  # asked before each report: it may be withdrawn meanwhile
    hook: Hook = pass_by
    randbelow: Callable[[int], int] = secrets.randbelow

    def send_due(self, tally: Tally, *, busy_until: int = 0) -> None:
        """Send what is due, or has no time left afterwards; what no leader takes is dropped."""
        now = self.clock.now()
        for parcel in self.outbox.expired(now):
            self.drop(parcel.recipe, State.QUEUED, "its answer period is over", tally)
        for parcel in self.outbox.due(now, closing=busy_until + 1):
            if not self.consent():
                return
            if self.attempts.state(parcel.recipe) is not State.QUEUED:
                continue  # consent was withdrawn meanwhile, and perhaps given again
            why = self._forbidden(parcel)
            if why is None:
                self._upload_one(parcel, tally)
            else:
                self.drop(parcel.recipe, State.QUEUED, why, tally)

    def make_way(self, busy_until: int, spread: int, tally: Tally) -> None:
        """Nothing falls due while queries run: it would wait for them, and tell how long they took.

        What would is sent at a random time afterwards, which depends on their number alone.
        """
        for parcel in self.outbox.due(busy_until):
            room = min(spread, parcel.closes - 1 - busy_until)
            if room > 0:
                with transaction(self.connection):
                    until = busy_until + 1 + self.randbelow(room)
                    self.outbox.delay(parcel, until=until)
        for parcel in self.outbox.expired(busy_until + 1):
            why = "its answer period ends before it could be tried again"
            self.drop(parcel.recipe, State.QUEUED, why, tally)

    def _forbidden(self, parcel: Parcel) -> str | None:
        """Why it may not leave any more: the policy may be another one than when it was charged."""
        question = self.attempts.question(parcel.recipe)
        analysis = self.policy.analyses.get(question.analysis)
        if analysis is None or question.collector not in analysis.collectors:
            return "the policy no longer has this analysis, or no longer with this collector"
        if not analysis.fields.keys() >= set(question.fields):
            return "the policy no longer opens a field that it was made from to this analysis"
        task = TaskConfiguration.decode(parcel.configuration)
        urls = (task.leader_aggregator_endpoint, task.helper_aggregator_endpoint)
        signers = self.attempts.signers(parcel.recipe)
        keys = (b64url_encode(signers[:32]), b64url_encode(signers[32:]))
        for pair in self.policy.pairs(analysis):
            sides = (pair.leader, pair.helper)
            if tuple(side.url for side in sides) == urls and all(
                key in side.cosigning_keys for key, side in zip(keys, sides, strict=True)
            ):
                return None
        return "the policy no longer trusts this pair of aggregators, or the keys it is sealed to"

    def _upload_one(self, parcel: Parcel, tally: Tally) -> None:
        """Step (4): the same bytes each time, whatever was answered the last time."""
        request = upload(parcel.configuration, parcel.report)
        self.hook(Step.UPLOADING)
        try:
            headers = {**request.headers, **self._credential()}
            answer = self.transport.post(
                request.url, headers=headers, body=request.body, limit=MAX_ANSWER
            )
            self.hook(Step.ANSWERED)
            check_answer(
                parcel.report_id,
                status=answer.status,
                content_type=answer.content_type,
                body=answer.body,
            )
        except (UploadFailed, Unreachable) as error:
            self._not_taken(parcel, error, tally)
        else:
            with transaction(self.connection):
                self.outbox.remove(parcel.recipe)
                if self.attempts.state(parcel.recipe) is State.QUEUED:  # else withdrawn meanwhile
                    self.attempts.move(parcel.recipe, State.QUEUED, State.SENT)
                self.journal.uploaded(self.attempts.question(parcel.recipe), parcel.tries + 1)
            tally.uploaded += 1
        self.hook(Step.NOTED)

    def _credential(self) -> dict[str, str]:
        if self.credential is None:
            return {}
        try:
            value = self.credential()
        except Exception as error:  # the host app's code: the report waits, the device goes on
            raise Unreachable(
                f"the app has no upload credential: {type(error).__name__}"
            ) from error
        if not _CREDENTIAL.fullmatch(value):
            raise Unreachable("the app's upload credential is no header value")
        return {CREDENTIAL_HEADER: value}

    def _not_taken(self, parcel: Parcel, error: UploadFailed | Unreachable, tally: Tally) -> None:
        if isinstance(error, UploadFailed) and error.final:
            self.drop(parcel.recipe, State.QUEUED, str(error), tally)
            return
        now = self.clock.now()
        wait = wait_after(parcel.tries + 1, left=parcel.closes - now, randbelow=self.randbelow)
        with transaction(self.connection):
            self.outbox.postpone(parcel, until=now + wait)
            kind = str(error) if isinstance(error, UploadFailed) else type(error).__name__
            if self.attempts.refuse(reason_key(parcel.recipe), kind[:1000], str(error)):
                self.journal.postponed(self.attempts.question(parcel.recipe), error)
        tally.postponed += 1

    def drop(self, recipe: bytes, state: State, why: str, tally: Tally) -> None:
        """A charged recipe whose report will never be sent."""
        with transaction(self.connection):
            if self.attempts.state(recipe) is not state:
                return  # consent was withdrawn meanwhile
            self.outbox.remove(recipe)
            self.attempts.move(recipe, state, State.DROPPED)
            self.journal.dropped(self.attempts.question(recipe), why)
        tally.dropped += 1

    def withdraw(self, tally: Tally) -> None:
        """Without consent nothing leaves any more, what was ready to leave included."""
        with transaction(self.connection):
            tally.dropped += withdraw(self.attempts, self.outbox, self.journal)


def withdraw(attempts: Attempts, outbox: Outbox, journal: Journal) -> int:
    """Drop every report that has not left, inside the caller's transaction; how many they were."""
    waiting = [(attempt.recipe, State.CHARGED) for attempt in attempts.unfinished()]
    waiting += [(parcel.recipe, State.QUEUED) for parcel in outbox.all()]
    for recipe, state in waiting:
        outbox.remove(recipe)
        attempts.move(recipe, state, State.DROPPED)
        journal.dropped(attempts.question(recipe), "the person opted out")
    return len(waiting)
