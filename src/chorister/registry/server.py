"""A registry from its settings: opened, published about, and served until told to stop."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import uvicorn
from starlette.applications import Starlette

from chorister.clock import Clock
from chorister.errors import ServiceError, StorageDamaged
from chorister.http_server import Deadlines, guarded_protocol, listen, server_url
from chorister.key_files import read_signing_key
from chorister.registry.app import Limits, build_app
from chorister.registry.config import RegistryConfig
from chorister.registry.folder import LogFolder
from chorister.registry.log import Registry
from chorister.transparency.sources import ABOUT, policy_path
from chorister.transparency.trust import Authority

__all__ = ["open_registry", "serve", "settings"]

_DEADLINES: Final = Deadlines(body=Limits().body_seconds + 5.0)  # the application says why, before


@contextlib.contextmanager
def open_registry(
    config: RegistryConfig, clock: Clock, *, create: bool = False
) -> Iterator[tuple[Registry, LogFolder]]:
    """Open the log that a settings file describes, and publish what it says about itself."""
    key = read_signing_key(Path(config.key))
    policies = config.read_policies()
    own = key.public_key().public_bytes_raw()
    for policy in policies.values():
        if own not in Authority.of([policy]).log_keys:
            raise ServiceError(f"policy {policy.name} does not list this log's key")
        if policy.log.origin != config.origin:
            raise ServiceError(
                f"policy {policy.name} names the log {policy.log.origin}, not {config.origin}"
            )
    path = Path(config.folder)
    if create and not path.parent.is_dir():
        raise ServiceError(f"{path.parent} does not exist; make it first")
    folder = LogFolder.create(path) if create else LogFolder.open(path)
    with contextlib.closing(folder):
        registry = Registry(
            folder,
            origin=config.origin,
            key=key,
            authority=Authority.of(policies.values()),
            clock=clock,
        )
        publish_about(folder, config.origin, policies)
        yield registry, folder


def publish_about(folder: LogFolder, origin: str, policies: Iterable[bytes]) -> None:
    """Publish the policies and a file that names them: what an auditor begins with.

    Policies that were published before stay, as earlier ones: entries were logged under them.
    """
    today = set()
    for document in policies:
        digest = hashlib.sha256(document).digest()
        folder.publish(policy_path(digest), document)
        today.add(digest.hex())
    about = {
        "version": 1,
        "origin": origin,
        "policies": sorted(today),
        "earlier_policies": sorted(_published_before(folder.public / ABOUT) - today),
    }
    folder.publish(ABOUT, json.dumps(about, indent=1).encode() + b"\n")


def _published_before(path: Path) -> set[str]:
    if not path.exists():
        return set()
    try:
        about = json.loads(path.read_bytes())
        return {str(digest) for digest in (*about["policies"], *about["earlier_policies"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageDamaged(f"{path} is damaged; restore it") from error


def serve(
    config: RegistryConfig,
    clock: Clock,
    *,
    host: str,
    port: int,
    create: bool = False,
    ready: Callable[[str, Registry], None],
) -> None:
    """Serve until SIGTERM or SIGINT; requests under way are finished first.

    `ready` is told the URL, for the system chooses the port if `port` is 0.
    """
    with (
        listen(host, port) as listener,
        open_registry(config, clock, create=create) as (registry, folder),
    ):
        app = build_app(registry, folder.public, interval=config.interval)
        ready(server_url("http", host, listener), registry)
        uvicorn.Server(settings(app)).run(sockets=[listener])


def settings(app: Starlette, deadlines: Deadlines = _DEADLINES) -> uvicorn.Config:
    """How the application is served."""
    return uvicorn.Config(
        app,
        http=guarded_protocol(deadlines),
        # No line per request: who asked for what, and when, is nobody's business.
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=512,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=10,
        ws="none",
    )
