"""An aggregator put together from its settings: database, keys, tasks, log, jobs, application.

`Service` is opened once, before any loop runs, so that problems with the settings are reported
immediately; its application's lifespan starts and stops the background threads. `server` puts it
on the network, `inprocess` into another program.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import httpx2
from starlette.applications import Starlette
from starlette.routing import Route

from chorister.aggregator.config import AggregatorConfig, HelperConfig, LeaderConfig
from chorister.aggregator.cosigning import Cosigning, cosigner_identity, open_head
from chorister.aggregator.http.app import Lifespan, base_routes, build_starlette
from chorister.aggregator.http.helper_routes import HelperRoutes
from chorister.aggregator.http.leader_routes import LeaderRoutes
from chorister.aggregator.http.report_writer import ReportWriter, UploadQueue
from chorister.aggregator.http.request_checks import (
    BearerTokens,
    TaskLookup,
    upload_credential_checks,
)
from chorister.aggregator.http.upload_route import UploadRoute
from chorister.aggregator.http.witness_routes import WitnessRoutes
from chorister.aggregator.jobs.aggregation_job_driver import AggregationJobDriver
from chorister.aggregator.jobs.collection_job_driver import CollectionJobDriver
from chorister.aggregator.jobs.garbage_collector import GarbageCollector
from chorister.aggregator.jobs.helper import Helper
from chorister.aggregator.jobs.job_loop import JobLoop, Periodic
from chorister.aggregator.jobs.release import CollectedFile
from chorister.aggregator.operations.logs import get_logger
from chorister.aggregator.operations.metrics import DatabaseMetrics, Metrics
from chorister.aggregator.peers import check_peers, helper_tokens, leader_tokens, verify_keys
from chorister.aggregator.storage.database import Database, Sealer
from chorister.aggregator.storage.hpke_keys import KeyRing
from chorister.aggregator.storage.tasks import TaskStore
from chorister.clock import Clock
from chorister.dap.draft import Role
from chorister.dap.helper_client import HelperClient
from chorister.dap.http import HTTPClient
from chorister.key_files import read_secret, read_signing_key
from chorister.policy import Policy

if TYPE_CHECKING:
    from chorister.aggregator.jobs.job_queue import JobQueue

METRICS_SECONDS: Final = 15
"""How often the figures in the metrics are read from the database."""
_ROLES: Final = {"leader": Role.LEADER, "helper": Role.HELPER}


@dataclass(frozen=True, kw_only=True)
class Core:
    """What the database holds, without a server around it: for `chorister tasks` and the like."""

    policies: tuple[Policy, ...]
    database: Database
    tasks: TaskStore
    keys: KeyRing
    queue: JobQueue | None  # if workers run the jobs


def open_core(config: AggregatorConfig, clock: Clock, *, migrate: bool) -> Core:
    """Open an aggregator's database."""
    policies = config.read_policies()
    role = _ROLES[config.role]
    sealer = Sealer(read_secret(config.at_rest_key))
    database = Database.open(config.database, role=role, sealer=sealer, migrate=migrate)
    with contextlib.ExitStack() as stack:
        stack.callback(database.close)
        core = Core(
            policies=policies,
            database=database,
            tasks=TaskStore(database, clock, url=config.url, role=role, policies=policies),
            keys=KeyRing(
                database,
                clock,
                checkpoint_max_age=max(policy.checkpoint_max_age for policy in policies),
            ),
            queue=_open_queue(config, database) if config.workers else None,
        )
        stack.pop_all()
    return core


def _open_queue(config: AggregatorConfig, database: Database) -> JobQueue:
    # Imported here: servers without workers need not load Procrastinate.
    from chorister.aggregator.jobs.job_queue import JobQueue, check_schema

    check_schema(database)
    delay = config.batch_delay_milliseconds / 1000 if isinstance(config, LeaderConfig) else 0.0
    return JobQueue(database, batch_delay=delay)


@dataclass(frozen=True, kw_only=True)
class LeaderJobs:
    """A leader's parts: uploads, aggregation and collection."""

    writer: ReportWriter
    aggregation: AggregationJobDriver
    collection: CollectionJobDriver


class Service:
    """One aggregator, open until `close`."""

    def __init__(
        self,
        config: LeaderConfig | HelperConfig,
        clock: Clock,
        *,
        begin_log: bool = False,
        adopt: Path | None = None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """`transport` replaces the network, to the registry and to the helper."""
        self.config = config
        self.metrics = Metrics()
        self.cosigning: Cosigning | None = None
        self.loop: JobLoop | None = None
        self.uploads: UploadRoute | None = None
        self._clock = clock
        self._transport = transport
        self._stack = contextlib.ExitStack()
        check_peers(config, config.read_policies())
        with contextlib.ExitStack() as stack:
            self.core = open_core(config, clock, migrate=True)
            stack.callback(self.core.database.close)
            self.garbage_collector = GarbageCollector(
                self.core.database, self.core.tasks, self.core.keys, clock
            )
            if config.cosign:
                self.cosigning = self._open_log(begin_log, adopt)
                stack.callback(self.cosigning.close)
                self.cosigning.accept_open_recipes()
            self.app: Starlette
            if isinstance(config, LeaderConfig):
                self.leader = self._leader_jobs(config)
                self.app = self._leader_app(config, self.leader)
            else:
                self.helper = self._helper(config)
                self.app = self._helper_app(config, self.helper)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Close everything, after the application has ended."""
        self._stack.close()

    def _open_log(self, begin: bool, adopt: Path | None) -> Cosigning:
        config = self.config
        ca_bundle = _path(config.ca_bundle)
        identity = cosigner_identity(
            config.url, read_signing_key(Path(config.cosigning_key)), self.core.policies
        )
        head = open_head(
            Path(config.head),
            identity,
            self._clock,
            registry=config.registry,
            ca_bundle=ca_bundle,
            transport=self._transport,
            begin=begin,
            adopt=adopt,
        )
        return Cosigning(
            identity=identity,
            head=head,
            keys=self.core.keys,
            accept=self.core.tasks.accept,
            registry=config.registry,
            clock=self._clock,
            metrics=self.metrics,
            hpke_lifetime=config.hpke_lifetime,
            max_new_entries=config.new_log_entries,
            max_new_bytes=config.new_log_bytes,
            ca_bundle=ca_bundle,
            transport=self._transport,
        )

    @property
    def _runs_jobs(self) -> bool:
        return self.config.run_jobs and not self.config.workers

    def _collectors(self) -> dict[bytes, bytes]:
        return {each.digest: each.config for each in self.config.collectors}

    def _collected(self) -> CollectedFile:
        return CollectedFile(Path(self.config.collected_file or f"{self.config.head}.collected"))

    # --- the leader -----------------------------------------------------------------------------

    def _leader_jobs(self, config: LeaderConfig) -> LeaderJobs:
        core, clock = self.core, self._clock
        token_for = helper_tokens(config)

        @functools.cache
        def http(url: str) -> HTTPClient:
            return HTTPClient(
                token=token_for(url),
                timeout=config.helper_seconds,
                ca_bundle=_path(config.ca_bundle),
                transport=self._transport,
                answered=self._compare_clocks,
            )

        helper = HelperClient(http, clock=clock)
        return LeaderJobs(
            writer=ReportWriter(core.database, core.keys, clock, queue=core.queue),
            aggregation=AggregationJobDriver(
                core.database,
                core.tasks,
                core.keys,
                clock,
                verify_key_init=verify_keys(config),
                helper=helper,
                queue=core.queue,
                threads=config.threads,
            ),
            collection=CollectionJobDriver(
                core.database,
                core.tasks,
                clock,
                helper=helper,
                collectors=self._collectors(),
                queue=core.queue,
                collected=self._collected(),
            ),
        )

    def _compare_clocks(self, headers: Mapping[str, str]) -> None:
        """Compare our clock with the helper's, which dates each of its responses."""
        with contextlib.suppress(ValueError, OverflowError, OSError):
            theirs = parsedate_to_datetime(headers.get("date", "")).timestamp()
            self.metrics.skew.labels("helper").set(theirs - self._clock.now())

    def _leader_app(self, config: LeaderConfig, jobs: LeaderJobs) -> Starlette:
        at_once, in_thread = upload_credential_checks(
            config.upload_credential, config.upload_credential_digests
        )
        if self._runs_jobs:
            self.loop = JobLoop(
                jobs.aggregation,
                jobs.collection,
                self.metrics,
                in_flight=config.jobs_in_flight,
                batch_delay=config.batch_delay_milliseconds / 1000,
            )
        loop = self.loop

        def stored(count: int, seconds: float) -> None:
            self.metrics.commit_uploads.observe(count)
            self.metrics.commit_seconds.observe(seconds)
            if loop is not None:
                loop.reports_stored()

        queue = UploadQueue(
            jobs.writer.store,
            max_waiting=config.waiting_uploads,
            max_bytes=config.waiting_bytes,
            # PostgreSQL works on one transaction while the next one is prepared.
            threads=1 if self.core.database.is_sqlite else 2,
            stored=stored,
        )
        self.metrics.waiting.set_function(lambda: queue.waiting)
        lookup = TaskLookup(self.core.tasks, self._clock)
        self.uploads = UploadRoute(
            writer=jobs.writer,
            lookup=lookup,
            queue=queue,
            metrics=self.metrics,
            prefix=config.prefix,
            upload_bytes=config.upload_bytes,
            held_bytes=config.waiting_bytes,
            credential=at_once,
            slow_credential=in_thread,
        )
        routes = LeaderRoutes(
            collection=jobs.collection,
            database=self.core.database,
            tasks=self.core.tasks,
            clock=self._clock,
            lookup=lookup,
            collectors=BearerTokens(
                {
                    bytes.fromhex(token): each.digest
                    for each in config.collectors
                    for token in each.token_digests
                }
            ),
            metrics=self.metrics,
            prefix=config.prefix,
            on_collection=loop.collection_created if loop is not None else lambda: None,
        )

        @contextlib.asynccontextmanager
        async def lifespan() -> AsyncIterator[None]:
            async with self._background():
                if loop is not None:
                    loop.start()
                try:
                    yield
                finally:
                    await queue.close()  # first: waiting clients get a response
                    if loop is not None:
                        await anyio.to_thread.run_sync(loop.stop)

        return self._build_app([self.uploads.route(), *routes.routes()], lifespan)

    # --- the helper -----------------------------------------------------------------------------

    def _helper(self, config: HelperConfig) -> Helper:
        return Helper(
            self.core.database,
            self.core.keys,
            self._clock,
            verify_key_init=verify_keys(config),
            collectors=self._collectors(),
            threads=config.threads,
            collected=self._collected(),
        )

    def _helper_app(self, config: HelperConfig, helper: Helper) -> Starlette:
        routes = HelperRoutes(
            helper=helper,
            lookup=TaskLookup(self.core.tasks, self._clock),
            leaders=BearerTokens(leader_tokens(config)),
            metrics=self.metrics,
            prefix=config.prefix,
            job_bytes=config.job_bytes,
            jobs_at_once=config.jobs_at_once,
        )
        return self._build_app(routes.routes(), self._background)

    # --- both -----------------------------------------------------------------------------------

    def _build_app(self, routes: Sequence[Route], lifespan: Lifespan) -> Starlette:
        base = base_routes(
            self.config.prefix,
            role=self.config.role,
            database=self.core.database,
            keys=self.core.keys,
            metrics=self.metrics,
            cache_seconds=self.config.config_cache,
        )
        if self.cosigning is not None:
            base += WitnessRoutes(self.cosigning, self.metrics, self.config.prefix).routes()
        return build_starlette([*base, *routes], self.metrics, lifespan)

    def metrics_updater(self) -> Periodic:
        """Return the thread that reads the metrics' figures from the database."""
        queue = self.core.queue
        figures = DatabaseMetrics(
            self.core.database,
            self._clock,
            self.metrics,
            dead_jobs=None if queue is None else lambda: len(queue.dead_jobs()),
        )
        return Periodic("reading the metrics", METRICS_SECONDS, figures.update)

    @contextlib.asynccontextmanager
    async def _background(self) -> AsyncIterator[None]:
        """Run the background threads: cosigning, deletion, metrics."""
        config = self.config
        threads = []
        if self.cosigning is not None:
            threads.append(Periodic("cosigning", config.cosign_every, self.cosigning.run))
        if self._runs_jobs:
            delete = self.garbage_collector.run
            threads.append(Periodic("deleting ended tasks", config.sweep_every, delete))
        if config.metrics_port is not None:
            threads.append(self.metrics_updater())
        for thread in threads:
            thread.start()
        get_logger().info("started", aggregator=config.url, kind=config.role)
        try:
            yield
        finally:
            for thread in threads:
                await anyio.to_thread.run_sync(thread.stop)
            get_logger().info("stopped", aggregator=config.url, kind=config.role)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
