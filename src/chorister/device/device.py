"""`Device`: what a host app embeds."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import apsw

from chorister.clock import Clock, SystemClock
from chorister.closing import Closing
from chorister.dap.urls import check_url
from chorister.device import lock
from chorister.device.agent import Agent
from chorister.device.attempts import Attempts
from chorister.device.audit import AuditLog, Event
from chorister.device.budget import Charge
from chorister.device.courier import withdraw
from chorister.device.database import open_database, transaction
from chorister.device.deeds import tell_deeds
from chorister.device.device_clock import DeviceClock
from chorister.device.head_store import FileHeadStore, HeadStore, KeyringHeadStore
from chorister.device.journal import Journal
from chorister.device.keys import KeySource, SecretKey
from chorister.device.ledger import Ledger
from chorister.device.outbox import Outbox
from chorister.device.run import Run
from chorister.device.sandbox import Sandbox
from chorister.device.status import Status, read_status
from chorister.device.steps import Hook, Step, pass_by
from chorister.device.store import EventStore
from chorister.device.timing import Timing
from chorister.device.transport import HTTPTransport, Transport
from chorister.device.verifier import verify_query
from chorister.errors import BudgetExceeded, LedgerError, QueryRefused
from chorister.policy import Policy
from chorister.recipe import Check, Recipe, SignedRecipe, check

__all__ = ["Device", "HeadFile", "HeadKeyring"]

EVENTS: Final = "events.db"
LEDGER: Final = "ledger.db"
LOCK: Final = "lock"


@dataclass(frozen=True, slots=True)
class HeadFile:
    """Keep the ledger's head in a file, outside the device's folder."""

    path: str | os.PathLike[str]

    def open(self, key: SecretKey, folder: Path) -> HeadStore:
        """The head store."""
        return FileHeadStore(self.path, key=key, store=folder)


@dataclass(frozen=True, slots=True)
class HeadKeyring:
    """Keep the ledger's head in the system's keyring."""

    name: str

    def open(self, key: SecretKey, folder: Path) -> HeadStore:  # noqa: ARG002 (as HeadFile's)
        """The head store."""
        return KeyringHeadStore(self.name, key=key)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
    """Everything that is open while a device is."""

    connection: apsw.Connection
    store: EventStore
    ledger: Ledger
    audit: AuditLog
    clock: DeviceClock
    attempts: Attempts
    outbox: Outbox
    head: HeadStore | None
    stack: ExitStack


class Device(Closing):
    """One device: its events, its budget, its log, and the agent that answers recipes.

    Its folder holds two encrypted databases; the key and the ledger's head are kept elsewhere. The
    databases open when they are first needed and after `close` once more, so that thousands of
    devices fit into one process. Threads may share a device; of several processes one runs it at a
    time, and all may donate.
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
        hook: Hook = pass_by,
    ) -> None:
        """`upload_credential` is asked before each upload for what the leader's host wants to see.

        It must be the same for many devices, or a blind token: never a name of this one.
        """
        check_url(registry)
        self.folder = Path(folder)
        self.policy = policy
        self.registry = registry
        self._keys = keys
        self._head = head
        self._clock = clock or SystemClock()
        self._transport = transport or HTTPTransport()
        self._sandbox = sandbox
        self._own_sandbox: Sandbox | None = None
        self._timing = timing or Timing()
        self._credential = upload_credential
        self._hook = hook
        self._mutex = threading.RLock()
        self._pausing = threading.Event()  # a run in another thread ends at its next step
        self._open: _Opened | None = None
        if create:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._opened(create=True)

    def __repr__(self) -> str:
        return f"Device({str(self.folder)!r}, policy={self.policy.name!r})"

    def close(self) -> None:
        """Close the databases, and the sandbox if it is its own; what is called next opens them."""
        with self._mutex:
            if self._own_sandbox is not None:
                self._own_sandbox.close()
                self._own_sandbox = None
            if self._open is not None:
                opened, self._open = self._open, None
                opened.stack.close()

    # --- The person's data ---

    def opt_in(self) -> None:
        """The person takes part: donations are kept, and recipes may run."""
        with self._mutex:
            opened = self._opened()
            journal = Journal(opened.audit, opened.clock)
            if not opened.store.consent.opted_in:
                # What was made under an earlier consent never leaves under this one, even if the
                # process ended in the middle of `opt_out`. Nothing is charged until the next line.
                with transaction(opened.connection):
                    withdraw(opened.attempts, opened.outbox, journal)
            opened.store.opt_in()
            self._hook(Step.DEED_DONE)
            self._tell_deeds(opened)

    def opt_out(self, *, purge: bool = True) -> None:
        """The person no longer takes part: nothing runs, nothing waiting is sent any more."""
        opened = self._opened()
        opened.store.opt_out(purge=purge)  # at once, even while another thread runs the device
        self._hook(Step.DEED_DONE)
        self._tell_deeds(opened)

    def donate(self, stream: str, event: Mapping[str, object]) -> bool:
        """Keep one event; False if the person has not opted in."""
        return self._opened().store.donate(stream, event)

    def donate_many(self, stream: str, events: Iterable[Mapping[str, object]]) -> bool:
        """Keep all events, or none; False if the person has not opted in."""
        return self._opened().store.donate_many(stream, events)

    def set_profile(self, profile: str, row: Mapping[str, object]) -> bool:
        """Replace the row of a profile; False if the person has not opted in."""
        return self._opened().store.set_profile(profile, row)

    def purge(self) -> None:
        """Delete every event and profile. What was spent, and the audit log, stay."""
        opened = self._opened()
        opened.store.purge()
        self._hook(Step.DEED_DONE)
        self._tell_deeds(opened)

    # --- At work ---

    def run_once(self) -> Run:
        """Poll, send what is due, answer what may be answered. Raises `DeviceBusy`."""
        return self._run(Agent.run_once)

    def upload_due(self) -> Run:
        """Only send what is due: a device that runs for long does so at the times it drew."""
        return self._run(Agent.upload_due)

    def next_upload(self) -> int | None:
        """When the next report is to be sent."""
        return self._opened().outbox.next_time()

    def pause(self) -> None:
        """Nothing runs until `resume`: no poll, no query, no upload. Donations are kept."""
        self._pausing.set()
        try:
            self._set_paused(Event.PAUSED, "no poll, no query, no upload")
        finally:
            self._pausing.clear()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._set_paused(Event.UNPAUSED, "polls, queries and uploads go on")

    @property
    def paused(self) -> bool:
        """Whether the device is paused."""
        return self._opened().attempts.paused

    # --- Looking ---

    def status(self) -> Status:
        """Consent, budgets, what waits, and what protects this device."""
        with self._mutex:  # of the ledger's chain there is one: a run must not read it meanwhile
            opened = self._opened()
            return read_status(
                policy=self.policy,
                registry=self.registry,
                store=opened.store,
                ledger=opened.ledger,
                clock=opened.clock,
                attempts=opened.attempts,
                outbox=opened.outbox,
                head=opened.head,
                weaknesses=self._started().weaknesses(),
                paused=self.paused,
            )

    def explain(self, recipe: Recipe | SignedRecipe) -> list[Check]:
        """Every rule with its outcome, budgets included: would this device answer now, and why."""
        with self._mutex:
            opened = self._opened()
            body = recipe.recipe if isinstance(recipe, SignedRecipe) else recipe
            found = check(recipe, self.policy, now=opened.clock.now())
            if body.analysis in self.policy.analyses:
                found.append(self._explain_query(body))
                found.append(self._explain_ledger(opened, body))
            return found

    @property
    def audit(self) -> AuditLog:
        """The log of everything that was asked and what became of it."""
        return self._opened().audit

    def verify(self) -> None:
        """Read ledger and audit log from their first entries; raises `LedgerTampered`."""
        with self._mutex:
            opened = self._opened()
            opened.ledger.verify()
            opened.audit.verify()

    # --- Inside ---

    def _run(self, task: Callable[[Agent], Run]) -> Run:
        with self._mutex:
            opened = self._opened()
            self._tell_deeds(opened)
            if self.paused:
                opened.store.expire()  # a pause is no reason to keep anything for longer
                return Run(silent="paused")
            with lock.held(self.folder / LOCK):
                agent = Agent(
                    policy=self.policy,
                    connection=opened.connection,
                    store=opened.store,
                    ledger=opened.ledger,
                    audit=opened.audit,
                    clock=opened.clock,
                    attempts=opened.attempts,
                    outbox=opened.outbox,
                    sandbox=self._started(),
                    transport=self._transport,
                    registry=self.registry,
                    timing=self._timing,
                    hook=self._hook,
                    credential=self._credential,
                    stopping=self._pausing.is_set,
                )
                return task(agent)

    def _started(self) -> Sandbox:
        """The sandbox: the host app's, or one of its own until it is closed."""
        with self._mutex:
            if self._sandbox is not None:
                return self._sandbox
            if self._own_sandbox is None:
                self._own_sandbox = Sandbox()
            return self._own_sandbox

    def _set_paused(self, event: Event, why: str) -> None:
        with self._mutex:
            opened = self._opened()
            with transaction(opened.connection):
                opened.attempts.pause(paused=event is Event.PAUSED)
                Journal(opened.audit, opened.clock).told(event, why)

    def _tell_deeds(self, opened: _Opened) -> None:
        with self._mutex:
            tell_deeds(
                opened.store,
                opened.connection,
                opened.attempts,
                opened.outbox,
                Journal(opened.audit, opened.clock),
                self._hook,
            )

    def _explain_query(self, recipe: Recipe) -> Check:
        try:
            verify_query(self.policy, recipe, self._started())
        except QueryRefused as error:
            return Check(name="query-class", passed=False, why=error.why, field=error.field)
        return Check(name="query-class", passed=True, why="the query is of the permitted class")

    def _explain_ledger(self, opened: _Opened, recipe: Recipe) -> Check:
        try:
            opened.ledger.check(Charge.of(recipe), opened.clock.decision_time())
        except (BudgetExceeded, LedgerError, QueryRefused) as error:
            return Check(name="ledger", passed=False, why=str(error))
        return Check(name="ledger", passed=True, why="every budget has room for it")

    def _opened(self, *, create: bool = False) -> _Opened:
        opened = self._open
        if opened is not None:
            return opened  # without the mutex: apps donate, and people opt out, during a run
        with self._mutex:
            if self._open is None:
                self._open = self._open_all(create=create)
            return self._open

    def _open_all(self, *, create: bool) -> _Opened:
        key = self._keys.obtain(create=create)
        with ExitStack() as stack:
            store = EventStore(self.folder / EVENTS, key, self.policy, self._clock, create=create)
            stack.callback(store.close)
            connection = open_database(self.folder / LEDGER, key.derive("ledger"), create=create)
            stack.callback(connection.close)
            head = None if self._head is None else self._head.open(key, self.folder)
            return _Opened(
                connection=connection,
                store=store,
                ledger=Ledger(connection, self.policy, head),
                audit=AuditLog(connection),
                clock=DeviceClock(connection, self._clock),
                attempts=Attempts(connection),
                outbox=Outbox(connection),
                head=head,
                stack=stack.pop_all(),
            )
