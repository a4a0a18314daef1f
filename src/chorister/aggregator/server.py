"""An aggregator's processes: a server on the network, and workers for its jobs.

SIGTERM and SIGINT stop both: requests under way are answered, waiting uploads are written, jobs
under way finish their step, and the next process continues with the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import uvicorn

from chorister.aggregator.config import HelperConfig, LeaderConfig
from chorister.aggregator.operations.logs import configure_logs, get_logger
from chorister.aggregator.operations.metrics import metrics_app
from chorister.aggregator.service import Service
from chorister.clock import Clock
from chorister.errors import ServiceError
from chorister.http_client import authorities
from chorister.http_server import Deadlines, listen, server_config, server_url
from chorister.http_server_tls import limit_handshakes

if TYPE_CHECKING:
    from chorister.aggregator.jobs.worker import Worker

_SHUTDOWN_SECONDS: Final = 30
_OTHER_FILES: Final = 512
"""Open files in addition to client connections: database, helper, listeners."""
_METRICS_CONNECTIONS: Final = 64
_GC_THRESHOLDS: Final = (50_000, 20, 50)
_SWITCH_SECONDS: Final = 0.0005
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def serve(
    config: LeaderConfig | HelperConfig,
    clock: Clock,
    *,
    begin_log: bool = False,
    adopt: Path | None = None,
    ready: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT. `ready` gets the address: the system may choose the port."""
    configure_logs(level=config.log_level, form=config.log_format)
    check_tls(config)
    allow_connections(config.connections)
    # A thread that returns from the database waits this long for the event loop to release the
    # interpreter, for every statement; Python's default of 5 ms would be most of a transaction.
    sys.setswitchinterval(_SWITCH_SECONDS)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(config.host, config.port))
        metrics = None
        if config.metrics_port is not None:
            metrics = stack.enter_context(listen(config.metrics_host, config.metrics_port))
        service = Service(config, clock, begin_log=begin_log, adopt=adopt)
        stack.callback(service.close)
        server = _Server(_settings(config, service))
        _relax_garbage_collection()
        scheme = "https" if config.tls_certificate is not None else "http"
        ready(server_url(scheme, config.host, listener))
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(_serve(server, listener, service, metrics))


async def _serve(
    server: uvicorn.Server,
    listener: socket.socket,
    service: Service,
    metrics: socket.socket | None,
) -> None:
    limit_handshakes(service.config.header_seconds)
    async with metrics_listener(service, metrics):
        await server.serve(sockets=[listener])


@contextlib.asynccontextmanager
async def metrics_listener(service: Service, listener: socket.socket | None) -> AsyncIterator[None]:
    """Serve metrics on a listener that only the operator can reach."""
    if listener is None:
        yield
        return
    app = metrics_app(service.metrics)
    server = _SecondServer(
        server_config(app, connections=_METRICS_CONNECTIONS, log_config=None, lifespan="off")
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


class _Server(uvicorn.Server):
    """Returns after a signal, so that everything is closed before the process ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals; uvicorn's own method raises them again, which ends the process."""
        before = {each: signal.signal(each, self.handle_exit) for each in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _SecondServer(uvicorn.Server):
    """Another server in the same process, which leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _settings(config: LeaderConfig | HelperConfig, service: Service) -> uvicorn.Config:
    deadlines = Deadlines(
        header=config.header_seconds,
        body=config.body_seconds,
        answer=config.answer_seconds,
        per_address=config.connections_per_address,
    )
    return server_config(
        service.app,
        connections=config.connections,
        deadlines=deadlines,
        direct=service.uploads,
        log_config=None,
        backlog=2048,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        lifespan="on",
        ssl_certfile=config.tls_certificate,
        ssl_keyfile=config.tls_key,
    )


def _relax_garbage_collection() -> None:
    """Make Python's garbage collector run less often: requests and jobs leave hardly any cycles.

    What exists when the process starts stays, and need not be visited again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def allow_connections(connections: int) -> None:
    """Raise the limit on open files to what so many connections need, if the system allows it."""
    if sys.platform == "win32":  # no such limit
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ServiceError(
            f"connections: {connections} need {needed} open files and the system allows {hard}; "
            f"raise the limit (ulimit -n, LimitNOFILE=), or set connections to at most "
            f"{max(hard - _OTHER_FILES, 1)}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def check_tls(config: LeaderConfig | HelperConfig) -> None:
    """Report problems with certificates now, before uvicorn or a client runs into them."""
    if config.ca_bundle is not None:
        authorities(Path(config.ca_bundle))
    if config.tls_certificate is None or config.tls_key is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            config.tls_certificate, config.tls_key
        )
    except (OSError, ssl.SSLError) as error:
        raise ServiceError(
            f"{config.tls_certificate} and {config.tls_key} are not a certificate and its key: "
            f"{error}"
        ) from error


# --- workers ------------------------------------------------------------------------------------


def run_worker(
    config: LeaderConfig | HelperConfig,
    clock: Clock,
    *,
    jobs: int | None = None,
    metrics_port: int | None = None,
    ready: Callable[[], None],
) -> None:
    """Run an aggregator's jobs until SIGTERM or SIGINT."""
    configure_logs(level=config.log_level, form=config.log_format)
    # Its messages quote what failed, including addresses; we log what matters ourselves.
    logging.getLogger("procrastinate").setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        metrics = None
        if metrics_port is not None:  # the port in the settings is the server's
            metrics = stack.enter_context(listen(config.metrics_host, metrics_port))
        # Only servers cosign.
        service = Service(config.model_copy(update={"cosign": False}), clock)
        stack.callback(service.close)
        worker = make_worker(service)
        at_once = jobs or (config.jobs_in_flight if isinstance(config, LeaderConfig) else 1)
        _relax_garbage_collection()
        anyio.run(_work, service, worker, at_once, metrics, ready)


def make_worker(service: Service) -> Worker:
    """Return a worker for an aggregator whose settings say `workers = true`."""
    # Imported here: servers need not load Procrastinate.
    from chorister.aggregator.jobs.worker import Worker

    config, core = service.config, service.core
    if core.queue is None:
        raise ServiceError("the settings do not have `workers = true`: the server runs the jobs")
    leader, helper_seconds = None, 0
    if isinstance(config, LeaderConfig):
        leader = (service.leader.aggregation, service.leader.collection)
        helper_seconds = config.helper_seconds
    return Worker(
        core.database.conninfo,
        core.queue,
        service.garbage_collector,
        service.metrics,
        delete_seconds=config.sweep_every,
        leader=leader,
        helper_seconds=helper_seconds,
    )


async def _work(
    service: Service,
    worker: Worker,
    jobs: int,
    metrics: socket.socket | None,
    ready: Callable[[], None],
) -> None:
    stop = asyncio.Event()
    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with metrics_listener(service, metrics):
        get_logger().info("started", aggregator=service.config.url, kind="worker")
        ready()
        updater = service.metrics_updater() if metrics is not None else None
        if updater is not None:
            updater.start()
        await worker.run(stop, jobs=jobs)
        if updater is not None:
            await anyio.to_thread.run_sync(updater.stop)
        get_logger().info("stopped", aggregator=service.config.url, kind="worker")
