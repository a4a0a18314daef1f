"""`Device`: what a host app embeds."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from chorister.clock import SECOND, Clock, SystemClock
from chorister.closing import Closing
from chorister.dap.http import check_url
from chorister.device.agent import Agent
from chorister.device.audit import AuditLog, Event
from chorister.device.database import transaction
from chorister.device.databases import Databases, open_databases
from chorister.device.files import run_lock
from chorister.device.keys import KeySource
from chorister.device.ledger.budget import Charge
from chorister.device.ledger.head_store import HeadFile, HeadKeyring
from chorister.device.records import Draw
from chorister.device.run import Hook, Run, RunStep, no_hook
from chorister.device.sandbox import Sandbox
from chorister.device.schedule import SendTimes, Timing
from chorister.device.status import Status, read_status
from chorister.device.transport import HTTPTransport, Transport
from chorister.device.verifier import verify_query
from chorister.errors import BudgetExceeded, LedgerError, QueryRefused
from chorister.policy import Policy
from chorister.recipe import Check, Recipe, SignedRecipe, check

_MAX_WAIT: Final = 120 * SECOND
"""The longest wait for a drawn moment, because it holds the device's lock."""


class Device(Closing):
    """One device: its events, its budget, its audit log, and the agent that answers recipes.

    Its folder holds two encrypted databases; the key and the ledger's head are kept elsewhere. The
    databases open when they are needed, also after `close`, so that thousands of devices fit into
    one process. Threads may share a device. One process at a time runs it, and any may donate.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        policy: Policy,
        keys: KeySource,
        *,
        registry: str,
        head: HeadFile | HeadKeyring | None = None,
        create: bool = False,
        clock: Clock | None = None,
        transport: Transport | None = None,
        sandbox: Sandbox | None = None,
        timing: Timing | None = None,
        upload_credential: Callable[[], str] | None = None,
        hook: Hook = no_hook,
    ) -> None:
        """`upload_credential` is called before each upload, for what the leader demands to see.

        It must be the same for many devices, or a blind token. It must never identify this one.
        """
        check_url(registry)
        self.folder = Path(folder)
        self.policy = policy
        self.registry = registry
        self._keys = keys
        self._head = head
        self.clock = clock or SystemClock()
        self._transport = transport or HTTPTransport()
        self._sandbox = sandbox
        self._own_sandbox: Sandbox | None = None
        self.timing = timing or Timing()
        self._credential = upload_credential
        self._hook = hook
        self._mutex = threading.RLock()
        self._starting = threading.Lock()
        self._pausing = threading.Event()  # a run in another thread ends at its next step
        self._leaving = threading.Event()  # the same, permanently: the person opted out
        self._open: Databases | None = None
        if create:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._opened(create=True)

    def __repr__(self) -> str:
        return f"Device({str(self.folder)!r}, policy={self.policy.name!r})"

    def close(self) -> None:
        """Close the databases, and the sandbox unless it was passed in. Later calls reopen them."""
        with self._mutex:
            if self._own_sandbox is not None:
                self._own_sandbox.close()
                self._own_sandbox = None
            if self._open is not None:
                opened, self._open = self._open, None
                opened.stack.close()

    # --- The person's data ---

    def opt_in(self) -> None:
        """Let the person take part: donations are kept, and recipes may run."""
        with self._databases() as opened:
            if not opened.store.consent.opted_in:
                # A report made under an earlier consent never leaves under this one, even if the
                # process ended in the middle of `opt_out`. Nothing is charged before `opt_in`.
                with transaction(opened.connection):
                    opened.withdraw()
            opened.store.opt_in()
            self._leaving.clear()
            self._hook(RunStep.CONSENT_CHANGED)
            opened.record_consent_events(self._hook)

    def opt_out(self, *, purge: bool = True) -> None:
        """End the person's participation: nothing runs, and reports that wait are dropped."""
        self._leaving.set()
        self._opened().store.opt_out(purge=purge)  # at once, though another thread runs the device
        self._hook(RunStep.CONSENT_CHANGED)
        with self._databases() as opened:
            opened.record_consent_events(self._hook)

    def donate(self, stream: str, event: Mapping[str, object]) -> bool:
        """Store one event; return False if the person has not opted in."""
        return self._opened().store.donate(stream, event)

    def donate_many(self, stream: str, events: Iterable[Mapping[str, object]]) -> bool:
        """Store all events, or none; return False if the person has not opted in."""
        return self._opened().store.donate_many(stream, events)

    def set_profile(self, profile: str, row: Mapping[str, object]) -> bool:
        """Replace the row of a profile; return False if the person has not opted in."""
        return self._opened().store.set_profile(profile, row)

    def purge(self) -> None:
        """Delete every event and profile. What was spent, and the audit log, stay."""
        self._opened().store.purge()
        self._hook(RunStep.CONSENT_CHANGED)
        with self._databases() as opened:
            opened.record_consent_events(self._hook)

    # --- At work ---

    def run_once(self, *, at: int | None = None, hold: bool = True) -> Run:
        """Poll, send what is due, answer what may be answered. Raises `DeviceBusy`.

        The first request leaves at the time `at`, in microseconds. If `at` is None, that moment is
        drawn now, some seconds ahead (`Timing.settle`). It does not depend on how long opening and
        reading the databases takes. While data may be touched (`Run.busy_until`) this does nothing,
        and `Run.waiting` is true.

        It returns when the time reserved for data is over, so that whatever the app does next does
        not reveal how long the work took. `hold=False` returns as soon as the work is done, for
        callers whose next steps have drawn times too.
        """
        return self._run(Agent.run_once, at, hold=hold)

    def upload_due(self, *, at: int | None = None) -> Run:
        """Only send what is due, without a poll; `at` is as in `run_once`."""
        return self._run(Agent.upload_due, at, hold=True)

    def next_upload(self) -> float | None:
        """Return when the next report is to be sent, in seconds."""
        planned = self._opened().next_upload()
        return None if planned is None else planned / SECOND

    def plan(self) -> SendTimes:
        """Return when to poll and when to send next."""
        opened = self._opened()
        upload_at, quiet_until = opened.next_upload(), opened.schedule.quiet_until
        if quiet_until <= self.clock.microseconds():
            quiet_until = 0
        return SendTimes(
            poll_at=max(opened.schedule.next_poll, quiet_until),
            upload_at=None if upload_at is None else max(upload_at, quiet_until),
        )

    def quiet_seconds(self) -> float:
        """Return for how many seconds nothing may be sent, because data may be touched."""
        with self._databases() as opened:
            return max(0, opened.schedule.quiet_until - opened.clock.microseconds()) / SECOND

    def pause(self) -> None:
        """Stop until `resume`: no poll, no query, no upload. Donations are kept."""
        self._pausing.set()
        try:
            self._set_paused(Event.PAUSED, "no poll, no query, no upload")
        finally:
            self._pausing.clear()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._set_paused(Event.UNPAUSED, "polls, queries and uploads continue")

    @property
    def paused(self) -> bool:
        return self._opened().settings.paused

    # --- Looking ---

    def status(self) -> Status:
        """Return consent, budgets, what waits, and what this system does not protect against."""
        with self._databases() as opened:
            return read_status(
                policy=self.policy,
                registry=self.registry,
                databases=opened,
                weaknesses=self._started().weaknesses(),
            )

    def explain(self, recipe: Recipe | SignedRecipe) -> list[Check]:
        """Return every check with its outcome, budgets included: would this device answer now?"""
        with self._databases() as opened:
            body = recipe.recipe if isinstance(recipe, SignedRecipe) else recipe
            found = check(recipe, self.policy, now=opened.clock.now())
            if body.analysis in self.policy.analyses:
                found.append(self._explain_query(body))
                found.append(self._explain_ledger(opened, body))
            if (draw := opened.attempts.draw(body)) is not None:
                found.append(_explain_draw(body, draw, opened.clock.now()))
            return found

    @property
    def audit(self) -> AuditLog:
        """The log of everything that was asked, decided and sent."""
        return self._opened().audit

    def verify(self) -> None:
        """Verify ledger and audit log from the first entry; raises `LedgerTampered`."""
        with self._databases() as opened:
            opened.ledger.verify()
            opened.audit.verify()

    # --- Inside ---

    def _run(self, task: Callable[[Agent], Run], at: int | None, *, hold: bool) -> Run:
        # Drawn before the databases are opened, which takes a time that depends on what is in them.
        moment = self.timing.draw_start(self.clock.microseconds()) if at is None else at
        # Asked before the mutex and the lock, which are held for as long as data is touched, and
        # again once they are held: another thread or process may have been quicker.
        with self._databases() as opened:
            if (waiting := _keep_quiet(opened)) is not None:
                return waiting
        try:
            with self._mutex:
                return self._run_alone(task, moment)
        finally:
            # Whether this run touched data, or waited for another thread that did.
            if hold and self.timing.settle and (seconds := self.quiet_seconds()):
                self.clock.sleep(seconds)

    def _run_alone(self, task: Callable[[Agent], Run], moment: int) -> Run:
        opened = self._opened()
        if (waiting := _keep_quiet(opened)) is not None:
            return waiting
        opened.record_consent_events(self._hook)
        with run_lock(self.folder):
            if (waiting := _keep_quiet(opened)) is not None:
                return waiting
            agent = Agent(
                policy=self.policy,
                databases=opened,
                sandbox=self._started,
                transport=self._transport,
                registry=self.registry,
                timing=self.timing,
                wait=lambda: self._wait_until(moment),
                hook=self._hook,
                credential=self._credential,
                stopping=lambda: self._pausing.is_set() or self._leaving.is_set(),
            )
            return agent.rest("paused") if self.paused else task(agent)

    def _wait_until(self, moment: int) -> None:
        """Sleep until the drawn moment. If it has passed, draw a new one instead of catching up."""
        now = self.clock.microseconds()
        if not now <= moment <= now + _MAX_WAIT:  # or the clock was set back
            moment = self.timing.draw_missed(min(moment, now), now)
        if moment > now:
            self.clock.sleep((moment - now) / SECOND)

    @contextmanager
    def _databases(self) -> Iterator[Databases]:
        """Provide the databases to a call of the app: a second set while a run uses the first.

        An app that had to wait for a run would reveal how long the run takes.
        """
        if self._mutex.acquire(blocking=False):
            try:
                yield self._opened()
            finally:
                self._mutex.release()
            return
        others = self._open_all(create=False)
        with others.stack:
            yield others

    def _started(self) -> Sandbox:
        """Return the sandbox that was passed in, or start one, which `close` ends."""
        with self._starting:
            if self._sandbox is not None:
                return self._sandbox
            if self._own_sandbox is None:
                self._own_sandbox = Sandbox(wait=False)
            return self._own_sandbox

    def _set_paused(self, event: Event, why: str) -> None:
        with self._databases() as opened, transaction(opened.connection):
            opened.settings.set_paused(paused=event is Event.PAUSED)
            opened.writer.record(event, why)

    def _explain_query(self, recipe: Recipe) -> Check:
        try:
            verify_query(self.policy, recipe, self._started())
        except QueryRefused as error:
            return Check(name="query-class", passed=False, why=error.why, field=error.field)
        return Check(name="query-class", passed=True, why="the query is in its class")

    def _explain_ledger(self, opened: Databases, recipe: Recipe) -> Check:
        try:
            number = recipe.window_open(opened.clock.now()) or 0
            opened.ledger.check(Charge.of(recipe, number), opened.clock.decision_time())
        except (BudgetExceeded, LedgerError, QueryRefused) as error:
            return Check(name="ledger", passed=False, why=str(error))
        return Check(name="ledger", passed=True, why="every budget has room for it")

    def _opened(self, *, create: bool = False) -> Databases:
        opened = self._open
        if opened is not None:
            return opened  # without the mutex: apps donate, and people opt out, during a run
        with self._mutex:
            if self._open is None:
                self._open = self._open_all(create=create)
            return self._open

    def _open_all(self, *, create: bool) -> Databases:
        key = self._keys.obtain(create=create)
        head = None if self._head is None else self._head.open(key, self.folder)
        return open_databases(
            self.folder, self.policy, key, self.clock, self.timing, head, create=create
        )


def _explain_draw(recipe: Recipe, draw: Draw, now: int) -> Check:
    """Whether a window of a series is open that this device drew."""
    drawn = ", ".join(str(number + 1) for number in draw.windows)
    why = f"of {recipe.window_count:,} windows this device drew {drawn}"
    return Check(name="draw", passed=recipe.window_open(now) in draw.windows, why=why)


def _keep_quiet(opened: Databases) -> Run | None:
    """Return the result of a run that may not send now; None if it may."""
    until = opened.schedule.quiet_until
    if (wait := until - opened.clock.microseconds()) <= 0:
        return None
    why = f"nothing is sent for another {-(-wait // SECOND)} s: data may be touched"
    return Run(silent=why, waiting=True, busy_until=-(-until // SECOND))
