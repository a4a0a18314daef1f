"""An aggregator on the network: uvicorn, TLS, the operator's listener, an orderly end.

SIGTERM and SIGINT stop it: requests under way are answered, uploads that wait are written, jobs
under way finish their step, and what is left is gone on with at the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final

import uvicorn

from chorister.aggregator.config import HelperConfig, LeaderConfig
from chorister.aggregator.connections import Deadlines, guarded_protocol
from chorister.aggregator.logs import configure_logs
from chorister.aggregator.metrics import metrics_app
from chorister.aggregator.service import Service
from chorister.clock import Clock
from chorister.errors import ServiceError

__all__ = ["listen", "operators_listener", "serve"]

_GRACE: Final = 30
_OTHER_FILES: Final = 512
"""Open files beside the clients' connections: the database's, those to the helper, listeners."""
_COLLECT: Final = (50_000, 20, 50)
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
    """Serve until told to stop. `ready` is told the address, for the system may choose the port."""
    configure_logs(level=config.log_level, form=config.log_format)
    check_tls(config)
    allow_connections(config.connections)
    # A thread that comes back from the database waits this long for the event loop to let go of
    # the interpreter, statement by statement; Python's own 5 ms would be most of a transaction.
    sys.setswitchinterval(_SWITCH_SECONDS)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(config.host, config.port))
        operators = None
        if config.metrics_port is not None:
            operators = stack.enter_context(listen(config.metrics_host, config.metrics_port))
        service = Service(config, clock, begin_log=begin_log, adopt=adopt)
        stack.callback(service.close)
        server = _Server(_settings(config, service))
        _calm_collector()
        scheme = "https" if config.tls_certificate is not None else "http"
        ready(f"{scheme}://{_address(config.host, listener)}")
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(_serve(server, listener, service, operators))


async def _serve(
    server: uvicorn.Server,
    listener: socket.socket,
    service: Service,
    operators: socket.socket | None,
) -> None:
    async with operators_listener(service, operators):
        await server.serve(sockets=[listener])


@contextlib.asynccontextmanager
async def operators_listener(
    service: Service, listener: socket.socket | None
) -> AsyncIterator[None]:
    """Metrics, on a listener that only the operator reaches."""
    if listener is None:
        yield
        return
    server = _Quiet(
        uvicorn.Config(
            metrics_app(service.metrics), access_log=False, log_config=None, lifespan="off"
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


class _Server(uvicorn.Server):
    """Ends when it is told to, and then returns: what is open is closed before the process ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn's own raises the signal again, which would end the process at once."""
        before = {each: signal.signal(each, self.handle_exit) for each in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Quiet(uvicorn.Server):
    """A second server in one process: signals are the first one's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


def _settings(config: LeaderConfig | HelperConfig, service: Service) -> uvicorn.Config:
    deadlines = Deadlines(
        header=config.header_seconds, body=config.body_seconds, answer=config.answer_seconds
    )
    return uvicorn.Config(
        service.app,
        http=guarded_protocol(deadlines, service.uploads),
        # No line per request: who asked for what, and when, is nobody's business.
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=config.connections,
        backlog=2048,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=_GRACE,
        ws="none",
        lifespan="on",
        ssl_certfile=config.tls_certificate,
        ssl_keyfile=config.tls_key,
    )


def _calm_collector() -> None:
    """Requests leave hardly any cycles behind, and the collector would walk all modules for them.

    What is there when the server starts stays for ever; after that it looks now and then.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT)


def allow_connections(connections: int) -> None:
    """Raise the limit on open files to what so many connections need, or say that it can't be."""
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
    """Say now what uvicorn would say with a traceback."""
    if config.tls_certificate is None or config.tls_key is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            config.tls_certificate, config.tls_key
        )
    except (OSError, ssl.SSLError) as error:
        raise ServiceError(
            f"{config.tls_certificate} and {config.tls_key} are no certificate with its key: "
            f"{error}"
        ) from error


def listen(host: str, port: int) -> socket.socket:
    """A listening socket."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ServiceError(f"can't listen on {host}:{port}: {error}") from error


def _address(host: str, listener: socket.socket) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"{name}:{listener.getsockname()[1]}"
