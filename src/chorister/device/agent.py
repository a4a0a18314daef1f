"""The agent: from the public log to an uploaded report, one step after the other.

    poll      fetch and verify what is open                                    network
    check     for each recipe: its rules, its query, its budgets; or refuse it
    upload    send what is due                                                 network
    decide    for each that passed: decline it, or (1) charge it               one transaction each
    answer    for each charged one: (2) query, encode, randomize, shard, seal;
              (3) audit entry and sealed report                                one transaction

The network comes first and data last, so that no request is ever sent later because a query took
longer. For the same reason all recipes are charged, and their upload times drawn, before the first
query runs; and nothing is sent, old reports and polls included, before the last query's deadline.
What a crash leaves charged is finished at the next start as OOV, without a query.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import apsw

from chorister.dap.client import check_hpke_config, new_report_id
from chorister.dap.task import task_configuration
from chorister.device.attempts import Attempt, Attempts, State
from chorister.device.audit import AuditLog, Question
from chorister.device.budget import Charge
from chorister.device.courier import Courier
from chorister.device.database import transaction
from chorister.device.device_clock import DeviceClock
from chorister.device.entries import Charged, Entry
from chorister.device.journal import Journal
from chorister.device.ledger import Ledger
from chorister.device.outbox import Outbox, Parcel, reason_key
from chorister.device.poll import Listed, Poll, poll
from chorister.device.report import OOV_BIN, Outcome, choose_bin, make_report, prepare
from chorister.device.run import Run, Tally
from chorister.device.sandbox import Sandbox
from chorister.device.steps import Hook, Step, pass_by
from chorister.device.store import EXPIRE_SECONDS, EventStore
from chorister.device.timing import Timing, flip
from chorister.device.transport import LogSource, Transport
from chorister.device.verifier import permitted_functions, verify_query
from chorister.errors import (
    BudgetExceeded,
    ChoristerError,
    DecodeError,
    HPKEError,
    LedgerError,
    QueryRefused,
)
from chorister.policy import Policy
from chorister.recipe import Recipe, SignedRecipe, verify_recipe

__all__ = ["Agent"]


_LEDGER = b"ledger"
"""Stands for the ledger where refusals are remembered by recipe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ready:
    """A recipe that passed every check, and may be charged."""

    listed: Listed
    charge: Charge
    question: Question
    groups: dict[str, str]
    configs: tuple[bytes, bytes]  # the leader's and the helper's


class _StoppedError(Exception):
    """The person said stop, just before a charge."""


class Agent:
    """One device at work. Everything it uses is passed in; one process at a time may use it."""

    def __init__(
        self,
        *,
        policy: Policy,
        connection: apsw.Connection,
        store: EventStore,
        ledger: Ledger,
        audit: AuditLog,
        clock: DeviceClock,
        attempts: Attempts,
        outbox: Outbox,
        sandbox: Sandbox,
        transport: Transport,
        registry: str,
        timing: Timing | None = None,
        hook: Hook = pass_by,
        credential: Callable[[], str] | None = None,
        stopping: Callable[[], bool] = lambda: False,
        randbelow: Callable[[int], int] = secrets.randbelow,
    ) -> None:
        self._policy = policy
        self._connection = connection
        self._store = store
        self._ledger = ledger
        self._clock = clock
        self._sandbox = sandbox
        self._source = LogSource(transport, registry)
        # A size counts for the log of that name only: a policy update may name another.
        self._log_size = f"size of {policy.log.origin}"
        self._timing = timing or Timing()
        self._hook = hook
        self._stopping = stopping
        self._randbelow = randbelow
        self.attempts = attempts
        self.outbox = outbox
        self._journal = Journal(audit, clock)
        self._courier = Courier(
            policy=policy,
            connection=connection,
            attempts=self.attempts,
            outbox=self.outbox,
            journal=self._journal,
            clock=clock,
            transport=transport,
            credential=credential,
            consent=self._may_go_on,
            hook=hook,
            randbelow=randbelow,
        )

    # --- One run ---

    def run_once(self) -> Run:
        """Everything that is to be done now."""
        return self._run(self._poll)

    def upload_due(self) -> Run:
        """Only send what is due, without a poll."""
        return self._run(lambda _: Poll.nothing())

    def _run(self, look: Callable[[Tally], Poll]) -> Run:
        run = self._go(look)
        # Whether a query ran or not, and last: how long it takes depends on data. So nothing may be
        # due meanwhile; the run that sends it comes back here.
        upload_at = self.outbox.next_time()
        if upload_at is None or upload_at > self._clock.now() + math.ceil(2 * EXPIRE_SECONDS):
            self._store.expire()
        return run

    def _go(self, look: Callable[[Tally], Poll]) -> Run:
        tally = Tally.empty()
        if not self._store.consent.opted_in:
            self._courier.withdraw(tally)
            return tally.run(silent="the person has not opted in")
        found = look(tally)
        if not self._newest_checkpoint():
            return tally.run(silent="no cosigned checkpoint was accepted yet")
        try:
            self._settle()
        except LedgerError as error:
            with transaction(self._connection):
                if self.attempts.refuse(_LEDGER, type(error).__name__, str(error)):
                    self._journal.silent(error)
            return tally.run(silent=str(error))
        self._finish_interrupted(tally)
        ready = self._check_all(found, tally)
        self._courier.send_due(
            tally, busy_until=self._timing.busy_until(self._clock.now(), len(ready))
        )
        for recipe, attempt in self._decide(ready, tally):
            if not self._may_go_on():
                break  # the next run drops what was charged, or reports OOV after a pause
            if self.attempts.state(attempt.recipe) is State.CHARGED:
                self._answer(recipe, attempt, tally)
        return tally.run()

    def _may_go_on(self) -> bool:
        """Asked before each step, for another process or thread may change it at any time."""
        if self._stopping() or self.attempts.paused:
            return False
        return self._store.consent.opted_in

    def _settle(self) -> None:
        """Bring the ledger into step with its head and the policy, or raise."""

        def tell(entry: Entry) -> None:
            self._journal.settled(entry)
            self._hook(Step.SETTLE_WRITTEN)

        self._ledger.settle(self._clock.decision_time(), tell)
        self.attempts.unrefuse(_LEDGER)

    def _finish_interrupted(self, tally: Tally) -> None:
        """What a crash left charged becomes OOV: the query may have run, so it never runs again."""
        now = self._clock.now()
        for attempt in self.attempts.unfinished():
            recipe = SignedRecipe.parse(attempt.jws).recipe
            if now >= recipe.window.closes:
                self._courier.drop(
                    attempt.recipe, State.CHARGED, "its answer period is over", tally
                )
                continue
            self._send_off(recipe, attempt, OOV_BIN, Outcome.INTERRUPTED, tally)

    # --- Poll ---

    def _poll(self, tally: Tally) -> Poll:
        found = poll(
            self._source,
            policy=self._policy,
            clock=self._clock,
            not_before=self._newest_checkpoint(),
            not_smaller=self.attempts.recall(self._log_size),
            kept=self.attempts.body,
        )
        with transaction(self._connection):
            if found.checkpoint is not None:
                self._clock.accept_checkpoint(found.checkpoint.time)
                self.attempts.remember(self._log_size, found.checkpoint.size)
                # By the cosigners' time: after a jump of the clock a coin would be flipped again.
                self.attempts.forget(before=self._clock.decision_time())
            if not found.problems:
                self.attempts.keep_bodies(found.files)
                digests = [listed.signed.digest for listed in found.listed]
                addresses = [each.address for each in found.unreadable]
                waiting = [reason_key(parcel.recipe) for parcel in self.outbox.all()]
                self.attempts.keep_refusals([_LEDGER, *digests, *addresses, *waiting])
            for pair, error in found.problems:
                tally.problems.append(f"{pair}: {error}")
                if self.attempts.refuse(pair.encode(), type(error).__name__, str(error)):
                    self._journal.silent(error, pair=pair)
            for each in found.unreadable:
                if self.attempts.refuse(each.address, "unreadable", str(each.error)):
                    self._journal.unreadable(each.address, each.error)
            self._hook(Step.POLL_WRITTEN)
        return found

    def _newest_checkpoint(self) -> int:
        """The time of the newest checkpoint that was ever accepted."""
        try:
            return self._clock.decision_time()
        except LedgerError:
            return 0

    # --- Decide ---

    def _check_all(self, found: Poll, tally: Tally) -> list[_Ready]:
        """What may be charged; all that takes time is done here, before upload times are drawn."""
        ready: list[_Ready] = []
        for listed in found.listed:
            recipe = listed.signed.recipe
            if self.attempts.state(listed.signed.digest) is not None:
                continue
            self._hook(Step.RECIPE_ARRIVED)
            if not self._may_go_on():
                break
            try:
                ready.append(self._check(listed))
            except (QueryRefused, BudgetExceeded, LedgerError) as error:
                self._refuse(listed.signed, error)
                tally.refused.append(recipe.id)
        return ready

    def _decide(self, ready: list[_Ready], tally: Tally) -> list[tuple[Recipe, Attempt]]:
        """Charge, in a tight loop; every time counts from its beginning."""
        charged: list[tuple[Recipe, Attempt]] = []
        now = self._clock.now()
        for each in ready:
            recipe = each.listed.signed.recipe
            try:
                attempt = self._charge(each, now=now, queries=len(ready))
            except _StoppedError:
                break
            except (QueryRefused, BudgetExceeded, LedgerError) as error:
                self._refuse(each.listed.signed, error)
                tally.refused.append(recipe.id)
            else:
                if attempt is None:
                    tally.declined.append(recipe.id)
                else:
                    charged.append((recipe, attempt))
        if charged:
            # By the number that was checked, as for the times drawn, not by what coins said.
            tally.busy_until = self._timing.busy_until(now, len(ready))
            self._courier.make_way(tally.busy_until, self._timing.spread, tally)
        return charged

    def _check(self, listed: Listed) -> _Ready:
        """Everything that can be said without a decision; raises the reason to refuse."""
        recipe = listed.signed.recipe
        verify_recipe(listed.signed, self._policy, now=self._clock.now())
        verify_query(self._policy, recipe, self._sandbox)
        if listed.leader_config is None or listed.helper_config is None:
            raise QueryRefused(check="keys", why="no accepted checkpoint lists this pair's keys")
        for config in (listed.leader_config, listed.helper_config):
            _check_key(config)
        prepare(recipe)
        charge = Charge.of(recipe)
        # Decided on for good inside the charge's transaction; here, so that what has no room
        # delays nobody.
        self._check_study(recipe)
        self._ledger.check(charge, self._clock.decision_time())
        groups = {
            field: self._policy.group_value(field, self._store.profile(field))
            for field in recipe.group_by
        }
        return _Ready(
            listed=listed,
            charge=charge,
            question=Question.of(listed.signed, self._policy),
            groups=groups,
            configs=(listed.leader_config, listed.helper_config),
        )

    def _charge(self, ready: _Ready, *, now: int, queries: int) -> Attempt | None:
        """Step (1): check the budgets and commit the charge; None if the coin says no."""
        signed, charge, question = ready.listed.signed, ready.charge, ready.question
        recipe, groups = signed.recipe, ready.groups
        with transaction(self._connection):
            if not self._may_go_on():
                raise _StoppedError
            decided = self._clock.decision_time()
            self._check_study(recipe)
            self._ledger.check(charge, decided)
            # Before the coin, for it may refuse: a coin is flipped once, and then it counts.
            upload_at = self._timing.draw_upload(
                recipe, now=now, before=queries - 1, randbelow=self._randbelow
            )
            if not flip(recipe.participation.probability, randbelow=self._randbelow):
                self.attempts.decline(recipe, question, now=now)
                self._journal.declined(question, recipe)
                return None
            arm = recipe.draw_arm(randbelow=self._randbelow)
            task = task_configuration(self._policy, recipe, groups, arm)
            attempt = Attempt(
                recipe=recipe.digest,
                question=question,
                jws=signed.jws,
                upload_at=upload_at,
                arm=arm,
                groups=groups,
                report_id=new_report_id(),
                configuration=task.configuration.encode(),
                leader_config=ready.configs[0],
                helper_config=ready.configs[1],
                signers=ready.listed.signers,
            )
            self.attempts.begin(recipe, attempt, now=now)
            self._journal.charged(question, charge, attempt.upload_at)
            self._ledger.append(charge, decided)
            self._hook(Step.CHARGE_WRITTEN)
        self._hook(Step.CHARGED)
        return attempt

    def _check_study(self, recipe: Recipe) -> None:
        """Inside the transaction: another process may have been quicker."""
        if not recipe.participation.once_per_study:
            return
        for entry in self._ledger.entries():
            if isinstance(entry, Charged) and (entry.charge.analysis, entry.charge.study) == (
                recipe.analysis,
                recipe.study,
            ):
                why = f"a recipe of study {recipe.study} was answered before"
                raise QueryRefused(check="participation", why=why)

    def _refuse(self, signed: SignedRecipe, error: ChoristerError) -> None:
        name = type(error).__name__
        if isinstance(error, QueryRefused):
            name = error.check
        elif isinstance(error, BudgetExceeded):
            name = error.field
        with transaction(self._connection):
            if self.attempts.refuse(signed.digest, name, str(error)):
                self._journal.refused(Question.of(signed, self._policy), error)

    # --- Answer ---

    def _answer(self, recipe: Recipe, attempt: Attempt, tally: Tally) -> None:
        """Steps (2) and (3), once for every charge."""
        bin_, outcome = self._query(recipe)
        self._hook(Step.QUERIED)
        self._send_off(recipe, attempt, bin_, outcome, tally)

    def _query(self, recipe: Recipe) -> tuple[int, Outcome]:
        """The bin to report. Whatever fails on the data is OOV, and nobody else learns of it."""
        analysis = self._policy.analyses[recipe.analysis]
        try:
            snapshot = self._store.snapshot(recipe.reads)
            until = time.monotonic() + self._timing.query
            answer = self._sandbox.run(
                recipe.query,
                snapshot,
                functions=permitted_functions(analysis),
                deadline=self._timing.query,
                columns=recipe.encoding.columns,
            )
            bin_ = choose_bin(recipe, answer.columns, until=until, randbelow=self._randbelow)
        except Exception:  # of whatever kind: that there is none to see is the point
            return OOV_BIN, Outcome.FAILED
        return bin_, Outcome.RAN

    def _send_off(
        self, recipe: Recipe, attempt: Attempt, bin_: int, outcome: Outcome, tally: Tally
    ) -> None:
        try:
            report = make_report(recipe, attempt, bin_, self._hook)
        except Exception as error:  # of whatever kind: the next start would meet it again
            # Nothing known leads here; but what failed once must not be tried for ever.
            why = f"no report can be made: {type(error).__name__}, {error}"
            self._courier.drop(attempt.recipe, State.CHARGED, why[:1000], tally)
            return
        parcel = Parcel(
            recipe=attempt.recipe,
            report_id=attempt.report_id,
            configuration=attempt.configuration,
            report=report.sealed,
            closes=recipe.window.closes,
            next_try=attempt.upload_at,
        )
        with transaction(self._connection):
            if self.attempts.state(attempt.recipe) is not State.CHARGED:
                return  # consent was withdrawn meanwhile, and perhaps given again
            self.attempts.move(attempt.recipe, State.CHARGED, State.QUEUED)
            self.outbox.put(parcel)
            self._journal.reported(recipe, attempt, report, outcome)
            self._hook(Step.QUEUE_WRITTEN)
        self._hook(Step.QUEUED)
        tally.answered.append(recipe.id)


def _check_key(config: bytes) -> None:
    """A key that nothing can be sealed to is found before the charge, not after it."""
    try:
        check_hpke_config(config)
    except (DecodeError, HPKEError) as error:
        raise QueryRefused(check="keys", why=f"an aggregator's HPKE key: {error}") from None
