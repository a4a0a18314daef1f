"""An aggregator put together from its settings: database, keys, tasks, log, jobs, application.

`Service` is opened once, before any loop runs, so that whatever is wrong with the settings is said
at once; its application's lifespan starts and stops what runs beside the requests. `server` puts it
on the network, `inprocess` into another program.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final

import anyio
import httpx2

from chorister.aggregator.app import base_routes
from chorister.aggregator.asgi import ASGIApp
from chorister.aggregator.auth import Bearers, credential_of
from chorister.aggregator.collected_file import CollectedFile
from chorister.aggregator.config import AggregatorConfig, HelperConfig, LeaderConfig
from chorister.aggregator.cosigning import Cosigning, cosigner_identity, network, open_head
from chorister.aggregator.database import Database
from chorister.aggregator.figures import Figures
from chorister.aggregator.gate import Gate
from chorister.aggregator.helper import Helper
from chorister.aggregator.hpke_keys import KeyRing
from chorister.aggregator.leader import Leader, UploadPlan
from chorister.aggregator.logs import get_logger
from chorister.aggregator.loop import JobLoop, Periodic
from chorister.aggregator.metrics import Metrics
from chorister.aggregator.queue import WorkersQueue
from chorister.aggregator.routes_helper import HelperRoutes, helper_app
from chorister.aggregator.routes_leader import LeaderApp, LeaderRoutes
from chorister.aggregator.routes_upload import UploadRoute
from chorister.aggregator.sealing import Sealer
from chorister.aggregator.secret_files import read_secret, read_token
from chorister.aggregator.tasks import TaskRegister
from chorister.aggregator.upload_queue import UploadQueue
from chorister.clock import Clock
from chorister.dap.draft import Role
from chorister.dap.helper_client import HelperClient
from chorister.dap.http import HTTPClient
from chorister.dap.messages import UploadErrors
from chorister.transparency.key_file import load_key

__all__ = ["Core", "Service", "open_core"]

_WATCH_EVERY: Final = 15
_ROLES: Final = {"leader": Role.LEADER, "helper": Role.HELPER}


@dataclass(frozen=True, kw_only=True)
class Core:
    """What the database holds, without a server around it: for `chorister tasks`."""

    database: Database
    tasks: TaskRegister
    keys: KeyRing


def open_core(config: AggregatorConfig, clock: Clock, *, migrate: bool) -> Core:
    """Open the database of an aggregator."""
    policies = config.read_policies()
    role = _ROLES[config.role]
    sealer = Sealer(read_secret(config.at_rest_key))
    database = Database.open(config.database, role=role, sealer=sealer, migrate=migrate)
    return Core(
        database=database,
        tasks=TaskRegister(database, clock, url=config.url, role=role, policies=policies),
        keys=KeyRing(
            database,
            clock,
            checkpoint_max_age=max(policy.checkpoint_max_age for policy in policies),
        ),
    )


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
        with contextlib.ExitStack() as stack:
            self.core = open_core(config, clock, migrate=True)
            stack.callback(self.core.database.close)
            if config.cosign:
                self.cosigning = self._open_log(begin_log, adopt)
                stack.callback(self.cosigning.close)
                self.cosigning.enumerate_open()
            self.app: ASGIApp
            if isinstance(config, LeaderConfig):
                self.leader = self._leader(config)
                self.app = self._leader_app(config, self.leader)
            else:
                self.helper = self._helper(config)
                self.app = self._helper_app(config, self.helper)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Close what is open; the application has ended before."""
        self._stack.close()

    def _open_log(self, begin: bool, adopt: Path | None) -> Cosigning:
        config = self.config
        transport = self._transport or network(_path(config.ca_bundle))
        identity = cosigner_identity(
            config.url, load_key(Path(config.cosigning_key)), config.read_policies()
        )
        head = open_head(
            Path(config.head),
            identity,
            self._clock,
            registry=config.registry,
            transport=transport,
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
            transport=transport,
        )

    @property
    def _runs_jobs(self) -> bool:
        return self.config.run_jobs and not self.config.workers

    def _collectors(self) -> dict[bytes, bytes]:
        return {each.digest: each.config for each in self.config.collectors}

    def _collected(self) -> CollectedFile:
        return CollectedFile(Path(self.config.collected_file or f"{self.config.head}.collected"))

    # --- the two roles --------------------------------------------------------------------------

    def _leader(self, config: LeaderConfig) -> Leader:
        http = HTTPClient(
            token=read_token(config.helper_token),
            timeout=config.helper_seconds,
            ca_file=_path(config.ca_bundle),
            transport=self._transport,
            answered=self._compare_clocks,
        )
        return Leader(
            self.core.database,
            self.core.tasks,
            self.core.keys,
            self._clock,
            verify_key_init=read_secret(config.verify_key),
            helper=HelperClient(http, clock=self._clock),
            collectors=self._collectors(),
            threads=config.threads,
            queue=WorkersQueue(linger=config.linger_milliseconds / 1000)
            if config.workers
            else None,
            collected=self._collected(),
        )

    def _compare_clocks(self, headers: Mapping[str, str]) -> None:
        """The helper's clock, as it is written on each of its answers."""
        with contextlib.suppress(ValueError, OverflowError, OSError):
            theirs = parsedate_to_datetime(headers.get("date", "")).timestamp()
            self.metrics.skew.labels("helper").set(theirs - self._clock.now())

    def _leader_app(self, config: LeaderConfig, leader: Leader) -> ASGIApp:
        at_once, in_thread = credential_of(
            config.upload_credential, config.upload_credential_digests
        )
        if self._runs_jobs:
            self.loop = JobLoop(
                leader,
                self.metrics,
                in_flight=config.jobs_in_flight,
                linger=config.linger_milliseconds / 1000,
            )
        loop = self.loop

        def stored(count: int, seconds: float) -> None:
            self.metrics.commit_uploads.observe(count)
            self.metrics.commit_seconds.observe(seconds)
            if loop is not None:
                loop.reports_arrived()

        queue: UploadQueue[UploadPlan, UploadErrors] = UploadQueue(
            leader.store_uploads,
            max_waiting=config.waiting_uploads,
            max_bytes=config.waiting_bytes,
            stored=stored,
        )
        self.metrics.waiting.set_function(lambda: queue.waiting)
        gate = Gate(self.core.tasks, self._clock)
        self.uploads = UploadRoute(
            leader=leader,
            gate=gate,
            queue=queue,
            metrics=self.metrics,
            prefix=config.prefix,
            upload_bytes=config.upload_bytes,
            held_bytes=config.waiting_bytes,
            credential=at_once,
            slow_credential=in_thread,
        )
        routes = LeaderRoutes(
            leader=leader,
            gate=gate,
            collectors=Bearers(
                {
                    bytes.fromhex(token): each.digest
                    for each in config.collectors
                    for token in each.token_digests
                }
            ),
            metrics=self.metrics,
            prefix=config.prefix,
            collection_asked=loop.collection_asked if loop is not None else lambda: None,
        )

        @contextlib.asynccontextmanager
        async def lifespan() -> AsyncIterator[None]:
            async with self._beside(leader.sweep):
                if loop is not None:
                    loop.start()
                try:
                    yield
                finally:
                    await queue.close()  # first: whoever waits gets an answer
                    if loop is not None:
                        await anyio.to_thread.run_sync(loop.stop)

        return LeaderApp(routes, self.uploads, self._common(config), lifespan)

    def _helper(self, config: HelperConfig) -> Helper:
        return Helper(
            self.core.database,
            self.core.tasks,
            self.core.keys,
            self._clock,
            verify_key_init=read_secret(config.verify_key),
            collectors=self._collectors(),
            threads=config.threads,
            collected=self._collected(),
        )

    def _helper_app(self, config: HelperConfig, helper: Helper) -> ASGIApp:
        routes = HelperRoutes(
            helper=helper,
            gate=Gate(self.core.tasks, self._clock),
            leaders=Bearers({bytes.fromhex(token): True for token in config.leader_token_digests}),
            metrics=self.metrics,
            prefix=config.prefix,
            job_bytes=config.job_bytes,
            jobs_at_once=config.jobs_at_once,
        )
        return helper_app(routes, self._common(config), lambda: self._beside(helper.sweep))

    def watch(self) -> Periodic:
        """What the operator's metrics show of the database, looked at now and then."""
        figures = Figures(self.core.database, self._clock, self.metrics, queue=self.config.workers)
        return Periodic("looking at the database", _WATCH_EVERY, figures.look)

    # --- both -----------------------------------------------------------------------------------

    def _common(self, config: AggregatorConfig) -> list[Any]:
        def alive() -> Mapping[str, object]:
            with self.core.database.read() as connection:
                connection.exec_driver_sql("SELECT 1")
            return {"ok": True, "role": config.role}

        return base_routes(
            config.prefix,
            keys=self.core.keys,
            alive=alive,
            metrics=self.metrics,
            cache_seconds=config.config_cache,
        )

    @contextlib.asynccontextmanager
    async def _beside(self, sweep: Callable[[], Any]) -> AsyncIterator[None]:
        """What runs beside the requests: cosigning and sweeping."""
        threads = []
        if self.cosigning is not None:
            look = self.cosigning.look
            threads.append(Periodic("cosigning", self.config.cosign_every, look))
        if self._runs_jobs:
            threads.append(Periodic("sweeping", self.config.sweep_every, sweep))
        if self.config.metrics_port is not None:
            threads.append(self.watch())
        for thread in threads:
            thread.start()
        get_logger().info("started", aggregator=self.config.url, kind=self.config.role)
        try:
            yield
        finally:
            for thread in threads:
                await anyio.to_thread.run_sync(thread.stop)
            get_logger().info("stopped", aggregator=self.config.url, kind=self.config.role)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
