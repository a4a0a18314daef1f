"""The uploader sends sealed reports from the outbox to the leader.

Whatever a leader answers, no second report is made: a refused one is dropped, and what it cost
stays spent.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from chorister.canonical import b64url_encode
from chorister.clock import SECOND
from chorister.dap.task import TaskConfiguration
from chorister.dap.upload_client import MAX_ANSWER_BYTES, check_answer, upload
from chorister.device.database import transaction
from chorister.device.databases import Databases
from chorister.device.outbox import QueuedReport, wait_after
from chorister.device.records import AttemptState, upload_subject
from chorister.device.run import Hook, RunStep, Tally, no_hook
from chorister.device.transport import Transport
from chorister.errors import DecodeError, Unreachable, UploadFailed
from chorister.policy import Policy

CREDENTIAL_HEADER: Final = "Chorister-Upload-Credential"
_CREDENTIAL: Final = re.compile(r"[!-~]([ -~]{0,8190}[!-~])?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Uploader:
    """Sends, postpones and drops reports, each with its audit entry in one transaction."""

    policy: Policy
    db: Databases
    transport: Transport
    credential: Callable[[], str] | None  # the host app's, for its leader
    may_send: Callable[[], bool]  # asked before each report: consent may be withdrawn meanwhile
    hook: Hook = no_hook
    randbelow: Callable[[int], int] = secrets.randbelow

    def send_due(self, tally: Tally, *, busy_until: Callable[[], int]) -> None:
        """Send what is due or would be too late afterwards; drop what no leader accepts."""
        now = self.db.clock.microseconds()
        for queued in self.db.outbox.expired(self.db.clock.now() * SECOND):
            self.drop(queued.recipe, AttemptState.QUEUED, "its answer period is over", tally)
        tried: set[bytes] = set()
        # A leader may be slow: whatever would then be too late afterwards is sent as well.
        while queued_reports := [
            queued
            for queued in self.db.outbox.due(now, closing=busy_until() + SECOND)
            if queued.recipe not in tried
        ]:
            tried.update(queued.recipe for queued in queued_reports)
            if not self._send(queued_reports, tally):
                return

    def _send(self, queued_reports: list[QueuedReport], tally: Tally) -> bool:
        """Send these, one after the other; return False if the person asked to stop."""
        for queued in queued_reports:
            if not self.may_send():
                return False
            if self.db.attempts.state(queued.recipe) is not AttemptState.QUEUED:
                continue  # consent was withdrawn meanwhile, and perhaps given again
            why = self._forbidden(queued)
            if why is None:
                self._upload_one(queued, tally)
            else:
                self.drop(queued.recipe, AttemptState.QUEUED, why, tally)
        return True

    def make_way(self, busy_until: int, spread: int, tally: Tally) -> None:
        """Move reports that would fall due while data is touched: waiting would reveal how long.

        They are sent at a random time afterwards, which depends on the reserved time alone.
        """
        for queued in self.db.outbox.due(busy_until):
            room = min(spread * SECOND, queued.closes * SECOND - 1 - busy_until)
            if room > 0:
                with transaction(self.db.connection):
                    until = busy_until + 1 + self.randbelow(room)
                    self.db.outbox.delay(queued, until=until)
        for queued in self.db.outbox.expired(busy_until + SECOND):
            why = "its answer period ends before it could be tried again"
            self.drop(queued.recipe, AttemptState.QUEUED, why, tally)

    def _forbidden(self, queued: QueuedReport) -> str | None:
        """Return why a report may no longer leave: the policy may have changed since its charge."""
        question = self.db.attempts.question(queued.recipe)
        analysis = self.policy.analyses.get(question.analysis)
        if analysis is None or question.collector not in analysis.collectors:
            return "the policy no longer has this analysis, or no longer with this collector"
        if not analysis.fields.keys() >= set(question.fields):
            return "the policy no longer opens a field that it was made from to this analysis"
        try:
            task = TaskConfiguration.decode(queued.configuration)
        except DecodeError as error:
            return f"its task can't be read any more: {error}"
        urls = (task.leader_aggregator_endpoint, task.helper_aggregator_endpoint)
        signers = self.db.attempts.signers(queued.recipe)
        keys = (b64url_encode(signers[:32]), b64url_encode(signers[32:]))
        for pair in self.policy.pairs(analysis):
            sides = (pair.leader, pair.helper)
            if tuple(side.url for side in sides) == urls and all(
                key in side.cosigning_keys for key, side in zip(keys, sides, strict=True)
            ):
                return None
        return "the policy no longer trusts this pair of aggregators, or the keys it is sealed to"

    def _upload_one(self, queued: QueuedReport, tally: Tally) -> None:
        """Step (4): send the same bytes each time, whatever the last answer was."""
        request = upload(queued.configuration, queued.report)
        self.hook(RunStep.UPLOADING)
        try:
            headers = {**request.headers, **self._credential()}
            answer = self.transport.post(
                request.url, headers=headers, body=request.body, limit=MAX_ANSWER_BYTES
            )
            self.hook(RunStep.ANSWERED)
            check_answer(
                queued.report_id,
                status=answer.status,
                content_type=answer.content_type,
                body=answer.body,
            )
        except (UploadFailed, Unreachable) as error:
            self._not_taken(queued, error, tally)
        else:
            with transaction(self.db.connection):
                self.db.outbox.remove(queued.recipe)
                if (
                    self.db.attempts.state(queued.recipe) is AttemptState.QUEUED
                ):  # else withdrawn meanwhile
                    self.db.attempts.move(queued.recipe, AttemptState.QUEUED, AttemptState.SENT)
                self.db.writer.uploaded(self.db.attempts.question(queued.recipe), queued.tries + 1)
            tally.uploaded += 1
        self.hook(RunStep.NOTED)

    def _credential(self) -> dict[str, str]:
        if self.credential is None:
            return {}
        try:
            value = self.credential()
        except Exception as error:  # from the host app's code: the report waits, the device goes on
            raise Unreachable(
                f"the app has no upload credential: {type(error).__name__}"
            ) from error
        if not _CREDENTIAL.fullmatch(value):
            raise Unreachable("the app's upload credential is not a valid header value")
        return {CREDENTIAL_HEADER: value}

    def _not_taken(
        self, queued: QueuedReport, error: UploadFailed | Unreachable, tally: Tally
    ) -> None:
        if isinstance(error, UploadFailed) and error.final:
            self.drop(queued.recipe, AttemptState.QUEUED, str(error), tally)
            return
        now = self.db.clock.now()
        wait = wait_after(queued.tries + 1, left=queued.closes - now, randbelow=self.randbelow)
        until = (now + wait - 1) * SECOND + 1 + self.randbelow(SECOND)
        with transaction(self.db.connection):
            self.db.outbox.postpone(queued, until=until)
            kind = str(error) if isinstance(error, UploadFailed) else type(error).__name__
            if self.db.refusals.record(upload_subject(queued.recipe), kind[:1000], str(error)):
                self.db.writer.postponed(self.db.attempts.question(queued.recipe), error)
        tally.postponed += 1

    def drop(self, recipe: bytes, state: AttemptState, why: str, tally: Tally) -> None:
        """Record that the report of a charged recipe will never be sent."""
        with transaction(self.db.connection):
            if self.db.attempts.state(recipe) is not state:
                return  # consent was withdrawn meanwhile
            self.db.outbox.remove(recipe)
            self.db.attempts.move(recipe, state, AttemptState.DROPPED)
            self.db.writer.dropped(self.db.attempts.question(recipe), why)
        tally.dropped += 1
