"""The agent: from the public log to an uploaded report, one step after the other.

    prepare   ledger, what a crash left; then wait for the drawn moment
    poll      fetch and verify what is open                                    network
    check     for each recipe: its rules, its query, its budgets; or refuse it
    upload    send what is due                                                 network
    reserve   the time that data may take; nothing is sent before it is over   one transaction
    decide    for each that passed: decline it, or (1) charge it               one transaction each
    answer    for each charged one: (2) query, encode, randomize, shard, seal;
              (3) audit entry and sealed report                                one transaction
    expire    delete events that are older than their retention

The network comes first and data last, so that no request is ever sent later because a query took
longer. For the same reason all recipes are charged, and their upload times drawn, before the first
query runs; and no process sends anything before the reserved time is over
(`chorister.device.schedule`). What a crash left charged is finished at the next start as OOV,
without a query.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from chorister.clock import SECOND, uptime
from chorister.dap.task import task_configuration
from chorister.dap.upload_client import new_report_id
from chorister.device.audit import RecipeSummary
from chorister.device.audit_writer import rule_of
from chorister.device.database import transaction
from chorister.device.databases import Databases
from chorister.device.ledger.budget import Charge
from chorister.device.ledger.ledger_entries import Entry
from chorister.device.outbox import OOV_BIN, QueryOutcome, QueuedReport, make_report
from chorister.device.poll import Listed, LogMemory, Poll, poll
from chorister.device.records import (
    LEDGER,
    Attempt,
    AttemptState,
    Draw,
    pair_subject,
    upload_subject,
)
from chorister.device.run import Hook, Run, RunStep, Tally, no_hook
from chorister.device.sandbox import Sandbox
from chorister.device.schedule import Timing, flip
from chorister.device.transport import LogSource, Transport
from chorister.device.uploader import Uploader
from chorister.device.verifier import (
    permitted_functions,
    verify_encoding,
    verify_keys,
    verifying_query,
)
from chorister.errors import (
    BudgetExceeded,
    ChoristerError,
    LedgerError,
    QueryRefused,
    SandboxUnavailable,
)
from chorister.policy import Policy
from chorister.recipe import Recipe, SignedRecipe, verify_recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ready:
    """A recipe that passed every check, and may be charged."""

    listed: Listed
    number: int  # of the window
    charge: Charge
    question: RecipeSummary
    keys: tuple[bytes, bytes]  # the leader's and the helper's


class _StoppedError(Exception):
    """The person asked to stop, just before a charge."""


class Agent:
    """One run of a device. Everything it uses is passed in; one process at a time may use it."""

    def __init__(
        self,
        *,
        policy: Policy,
        databases: Databases,
        sandbox: Callable[[], Sandbox],
        transport: Transport,
        registry: str,
        timing: Timing,
        wait: Callable[[], None] = lambda: None,
        hook: Hook = no_hook,
        credential: Callable[[], str] | None = None,
        stopping: Callable[[], bool] = lambda: False,
        randbelow: Callable[[int], int] = secrets.randbelow,
    ) -> None:
        """`wait` returns at the moment of the first request."""
        self._policy = policy
        self._db = databases
        self._clock = databases.clock
        self._attempts = databases.attempts
        self._sandbox = sandbox
        self._source = LogSource(transport, registry)
        self._log = LogMemory(databases.settings, databases.clock, policy.log.origin)
        self._timing = timing
        self._wait = wait
        self._in_step = False  # ledger, head and policy
        self._reserved = 0  # until when; 0 if this run has not reserved any time yet
        self._hook = hook
        self._stopping = stopping
        self._randbelow = randbelow
        self._uploader = Uploader(
            policy=policy,
            db=databases,
            transport=transport,
            credential=credential,
            may_send=self._may_send,
            hook=hook,
            randbelow=randbelow,
        )

    # --- One run ---

    def run_once(self) -> Run:
        """Poll, send what is due, and answer what may be answered."""
        tally = Tally()
        try:
            silent = self._go(self._poll, tally)
        finally:
            # Always last, whatever failed, and in time that is reserved whether anything has
            # expired or not: how long it takes depends on data.
            self._reserve(0, tally)
            self._expire(tally)
        return tally.run(silent=silent)

    def upload_due(self) -> Run:
        """Only send what is due, without a poll."""
        tally = Tally()
        silent = self._go(lambda _: Poll.nothing(), tally)
        return tally.run(silent=silent)

    def rest(self, silent: str) -> Run:
        """Send nothing, but delete what has expired."""
        tally = Tally()
        self._reserve(0, tally)
        self._expire(tally)
        return tally.run(silent=silent)

    def _go(self, look: Callable[[Tally], Poll], tally: Tally) -> str | None:
        """Do everything but the deletion; return why nothing was done, if so."""
        # Consent is read before the drawn moment: how long it takes to read the events' database
        # depends on what is in it. From then on a change shows in the ledger's database, or in this
        # process.
        if not self._db.store.consent.opted_in:
            with transaction(self._db.connection):
                tally.dropped += self._db.withdraw()
            return "the person has not opted in"
        self._prepare(tally)
        self._wait()
        if not self._may_send():
            return "the person asked to stop"
        found = look(tally)
        if not self._log.newest():
            return "no cosigned checkpoint was accepted yet"
        try:
            if not self._in_step:
                self._settle()
        except LedgerError as error:
            with transaction(self._db.connection):
                if self._db.refusals.record(LEDGER, type(error).__name__, str(error)):
                    self._db.writer.silent(error)
            return str(error)
        ready = self._check_all(found, tally)
        self._uploader.send_due(
            tally,
            busy_until=lambda: self._timing.busy_until(self._clock.microseconds(), len(ready)),
        )
        if not ready:
            return None
        until = self._reserve(len(ready), tally)
        begun = uptime()
        for number, (recipe, attempt) in enumerate(self._decide(ready, until, tally), start=1):
            if not self._may_go_on():
                break  # the next run drops what was charged, or reports OOV after a pause
            if self._attempts.state(attempt.recipe) is AttemptState.CHARGED:
                share = number * (self._timing.query + self._timing.slack)
                self._answer(recipe, attempt, tally, until=begun + share - self._timing.slack / 2)
        return None

    def _prepare(self, tally: Tally) -> None:
        """Clean up after a crash, which data may have caused, before the drawn moment."""
        with suppress(SandboxUnavailable):
            self._sandbox()  # starts meanwhile
        self._source.prepare()
        if self._log.newest():
            with suppress(LedgerError):  # a poll may still help; then it is raised again
                self._settle()
                self._finish_interrupted(tally)
        with suppress(SandboxUnavailable):  # what is queued leaves without it
            self._sandbox().revive()

    def _reserve(self, queries: int, tally: Tally) -> int:
        """Keep every process quiet for the time that data may take; the first call counts."""
        if not self._reserved:
            with transaction(self._db.connection):
                self._reserved = self._db.schedule.reserve(queries)
            self._uploader.make_way(self._reserved, self._timing.spread, tally)
            tally.busy_until = -(-self._reserved // SECOND)
        return self._reserved

    def _expire(self, tally: Tally) -> None:
        try:
            self._db.store.expire(self._timing.housekeeping / 2)
        except Exception as error:  # of any kind, including a lack of memory
            # Whether there was something to delete must not decide whether the device continues.
            tally.problems.append(f"expired events could not be deleted: {error}")

    def _may_send(self) -> bool:
        """Asked before each request, because another process or thread may change it at any time.

        Reads no events: `opt_out` drops what is queued before it returns.
        """
        return not (self._stopping() or self._db.settings.paused)

    def _may_go_on(self) -> bool:
        """Asked before each step that touches data."""
        return self._may_send() and self._db.store.consent.opted_in

    def _settle(self) -> None:
        """Bring the ledger into step with its head and the policy, or raise."""

        def record(entry: Entry) -> None:
            self._db.writer.settled(entry)
            self._hook(RunStep.SETTLE_WRITTEN)

        self._db.ledger.settle(self._clock.decision_time(), record)
        self._db.refusals.clear(LEDGER)
        self._in_step = True  # until the end of this run: nobody else appends meanwhile

    def _finish_interrupted(self, tally: Tally) -> None:
        """Report OOV for what a crash left charged: its query may have run, and must not again."""
        now = self._clock.now()
        for attempt in self._attempts.unfinished():
            try:
                recipe = SignedRecipe.parse(attempt.jws).recipe
            except ChoristerError as error:
                why = f"it can't be read any more: {error}"
                self._uploader.drop(attempt.recipe, AttemptState.CHARGED, why[:1000], tally)
                continue
            if now >= recipe.window_at(attempt.number).closes:
                self._uploader.drop(
                    attempt.recipe, AttemptState.CHARGED, "its answer period is over", tally
                )
                continue
            self._queue_report(recipe, attempt, OOV_BIN, QueryOutcome.INTERRUPTED, tally)

    # --- Poll ---

    def _poll(self, tally: Tally) -> Poll:
        db = self._db
        next_poll = db.schedule.draw_poll()
        with self._source.one_poll() as source:
            found = poll(
                source,
                policy=self._policy,
                clock=self._clock,
                last=self._log.last(),
                kept=db.files.all,
                forget=db.files.delete,
                fetched=source.close,
            )
        with transaction(db.connection):
            db.schedule.plan_poll(next_poll)
            if found.accepted is not None:
                self._log.remember(found.accepted)
                # By the cosigners' time: after a jump of the clock a coin would be flipped again.
                self._attempts.forget(before=self._clock.decision_time())
            if found.files is not None:
                db.files.replace(found.files)
            if not found.problems:
                recipes = [listed.signed.recipe for listed in found.listed]
                now = self._clock.now()
                answers = [each.answer_id(each.window_open(now) or 0) for each in recipes]
                addresses = [each.address for each in found.unreadable]
                waiting = list(map(upload_subject, db.outbox.recipes()))
                db.refusals.keep_only([LEDGER, *answers, *addresses, *waiting])
            for pair, error in found.problems:
                tally.problems.append(f"{pair}: {error}")
                if db.refusals.record(pair_subject(pair), type(error).__name__, str(error)):
                    db.writer.silent(error, pair=pair)
            for each in found.unreadable:
                if db.refusals.record(each.address, "unreadable", str(each.error)):
                    db.writer.unreadable(each.address, each.error)
            self._hook(RunStep.POLL_WRITTEN)
        return found

    # --- Decide ---

    def _check_all(self, found: Poll, tally: Tally) -> list[_Ready]:
        """Return what may be charged. All slow work is done here, before upload times are drawn."""
        ready: list[_Ready] = []
        for listed in found.listed:
            number = self._attempts.undecided(listed.signed.recipe, self._clock.now())
            if number is None:
                continue
            self._hook(RunStep.RECIPE_ARRIVED)
            if not self._may_send() or len(ready) == self._timing.max_queries:
                break
            try:
                ready.append(self._check(listed, number))
            except SandboxUnavailable as error:
                tally.problems.append(str(error))
                break  # the next poll tries again
            except (QueryRefused, BudgetExceeded, LedgerError) as error:
                self._refuse(listed.signed, number, error, tally)
        return ready

    def _check(self, listed: Listed, number: int) -> _Ready:
        """Check everything that needs no decision; raise the reason to refuse."""
        verify_recipe(listed.signed, self._policy, now=self._clock.now())
        with verifying_query(self._policy, listed.signed.recipe, self._sandbox()) as verify:
            try:
                return self._check_rest(listed, number)
            finally:
                verify()  # if it refuses, too, its reason counts

    def _check_rest(self, listed: Listed, number: int) -> _Ready:
        """Check what another process need not, while that one compiles the query."""
        recipe = listed.signed.recipe
        keys = verify_keys(listed)
        verify_encoding(recipe)
        charge = Charge.of(recipe, number)
        # The charge's transaction makes the binding checks. Here they save the time of a recipe
        # that does not fit.
        self._check_study(recipe)
        self._db.ledger.check(charge, self._clock.decision_time())
        question = RecipeSummary.of(listed.signed, self._policy, number)
        return _Ready(listed=listed, number=number, charge=charge, question=question, keys=keys)

    def _decide(
        self, ready: list[_Ready], busy_until: int, tally: Tally
    ) -> list[tuple[Recipe, Attempt]]:
        """Charge, in a tight loop; uploads are drawn after the time that all queries may take."""
        charged: list[tuple[Recipe, Attempt]] = []
        for each in ready:
            recipe = each.listed.signed.recipe
            try:
                attempt = self._charge(each, busy_until)
            except _StoppedError:
                break
            except (QueryRefused, BudgetExceeded, LedgerError) as error:
                self._refuse(each.listed.signed, each.number, error, tally)
            else:
                if attempt is None:
                    tally.declined.append(recipe.id)
                else:
                    charged.append((recipe, attempt))
        return charged

    def _charge(self, ready: _Ready, busy_until: int) -> Attempt | None:
        """Step (1): check the budgets and commit the charge; return None if the draw says no."""
        signed, charge, question = ready.listed.signed, ready.charge, ready.question
        recipe = signed.recipe
        groups = {
            field: self._policy.group_value(field, self._db.store.profile(field))
            for field in recipe.group_by
        }
        with transaction(self._db.connection):
            if not self._may_go_on():
                raise _StoppedError
            now, decided = self._clock.now(), self._clock.decision_time()
            self._check_study(recipe)
            self._db.ledger.check(charge, decided)
            # Before the draw, because this may refuse: what is drawn once counts.
            upload_at = self._timing.draw_upload(
                recipe, ready.number, busy_until=busy_until, randbelow=self._randbelow
            )
            draw = self._draw(recipe, question, now)
            if draw is None or ready.number not in draw.windows:
                return None
            task = task_configuration(self._policy, recipe, groups, draw.arm, ready.number)
            attempt = Attempt(
                recipe=recipe.answer_id(ready.number),
                number=ready.number,
                question=question,
                jws=signed.jws,
                upload_at=upload_at,
                arm=draw.arm,
                groups=groups,
                report_id=new_report_id(),
                configuration=task.configuration.encode(),
                leader_config=ready.keys[0],
                helper_config=ready.keys[1],
                signers=ready.listed.signers,
            )
            self._attempts.begin(recipe, attempt, now=now)
            self._db.writer.charged(question, charge, attempt.upload_at)
            self._db.ledger.append(charge, decided)
            self._hook(RunStep.CHARGE_WRITTEN)
        self._hook(RunStep.CHARGED)
        return attempt

    def _draw(self, recipe: Recipe, question: RecipeSummary, now: int) -> Draw | None:
        """Draw, once for all windows, whether and in which to answer; None is in none."""
        draw = self._attempts.draw(recipe)
        if draw is not None:
            return draw
        if not flip(recipe.participation.probability, randbelow=self._randbelow):
            self._attempts.decline(recipe, question, now=now)
            self._db.writer.declined(question, recipe)
            return None
        arm = recipe.draw_arm(randbelow=self._randbelow)
        draw = Draw(arm, recipe.draw_windows(randbelow=self._randbelow))
        if recipe.series is not None:
            self._attempts.remember(recipe, question, draw)
            self._db.writer.drawn(question, recipe, draw)
        return draw

    def _check_study(self, recipe: Recipe) -> None:
        if not recipe.participation.once_per_study:
            return
        if self._db.ledger.charged_study(recipe.analysis, recipe.study, but=recipe.digest):
            why = f"a recipe of study {recipe.study} was answered before"
            raise QueryRefused(check="participation", why=why)

    def _refuse(
        self, signed: SignedRecipe, number: int, error: ChoristerError, tally: Tally
    ) -> None:
        subject = signed.recipe.answer_id(number)
        with transaction(self._db.connection):
            if self._db.refusals.record(subject, rule_of(error), str(error)):
                self._db.writer.refused(RecipeSummary.of(signed, self._policy, number), error)
        tally.refused.append(signed.recipe.id)

    # --- Answer ---

    def _answer(self, recipe: Recipe, attempt: Attempt, tally: Tally, *, until: float) -> None:
        """Steps (2) and (3), once for every charge."""
        bin_, outcome = self._query(recipe, attempt.number, until)
        self._hook(RunStep.QUERIED)
        self._queue_report(recipe, attempt, bin_, outcome, tally)

    def _query(self, recipe: Recipe, number: int, until: float) -> tuple[int, QueryOutcome]:
        """Return the bin to report. Whatever fails on the data is OOV, and nobody else learns."""
        analysis = self._policy.analyses[recipe.analysis]
        try:
            donated = recipe.events(number)
            snapshot = self._db.store.snapshot(recipe.reads, until, donated=donated)
            bin_ = self._sandbox().choose(
                recipe.query,
                snapshot,
                functions=permitted_functions(analysis),
                encoding=recipe.encoding,
                selection=recipe.selection,
                until=min(until, uptime() + self._timing.query),
            )
        except Exception:  # of any kind: the point is that nobody sees one
            return OOV_BIN, QueryOutcome.FAILED
        return bin_, QueryOutcome.RAN

    def _queue_report(
        self, recipe: Recipe, attempt: Attempt, bin_: int, outcome: QueryOutcome, tally: Tally
    ) -> None:
        try:
            report = make_report(recipe, attempt, bin_, self._hook)
        except MemoryError:
            return  # reading events may be why: the next run reports OOV instead
        except Exception as error:  # of any kind: the next start would meet it again
            # Nothing known leads here; but what failed once must not be tried forever.
            why = f"no report can be made: {type(error).__name__}, {error}"
            self._uploader.drop(attempt.recipe, AttemptState.CHARGED, why[:1000], tally)
            return
        upload_at, closes = attempt.upload_at, recipe.window_at(attempt.number).closes
        # After the reserved time, also if somebody set the clock during the query.
        earliest = max(self._clock.microseconds(), self._db.schedule.quiet_until)
        if earliest > upload_at and outcome is not QueryOutcome.INTERRUPTED:
            # The machine was suspended. A missed upload must not leave when the query ends.
            upload_at = self._timing.draw_late_upload(earliest, closes, randbelow=self._randbelow)
        queued = QueuedReport(
            recipe=attempt.recipe,
            report_id=attempt.report_id,
            configuration=attempt.configuration,
            report=report.sealed,
            closes=closes,
            next_try=upload_at,
        )
        with transaction(self._db.connection):
            if self._attempts.state(attempt.recipe) is not AttemptState.CHARGED:
                return  # consent was withdrawn meanwhile, and perhaps given again
            self._attempts.move(attempt.recipe, AttemptState.CHARGED, AttemptState.QUEUED)
            self._db.outbox.put(queued)
            self._db.writer.reported(recipe, attempt, report, outcome)
            self._hook(RunStep.QUEUE_WRITTEN)
        self._hook(RunStep.QUEUED)
        tally.answered.append(recipe.id)
