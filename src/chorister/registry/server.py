"""A registry from its settings file: opened, and served until stopped."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final, Self

import uvicorn
from pydantic import AfterValidator, Field, StringConstraints
from starlette.applications import Starlette

from chorister.canonical import Int, Model
from chorister.clock import Clock
from chorister.errors import ChoristerError, ServiceError, StorageDamaged
from chorister.http_server import Deadlines, listen, server_config, server_url
from chorister.key_files import read_signing_key
from chorister.policy import Policy
from chorister.policy.witnesses import parse_vkey
from chorister.registry.app import Limits, build_app
from chorister.registry.folder import LogFolder
from chorister.registry.registry import Registry
from chorister.registry.witnessing import Witnessing
from chorister.settings_file import read_settings
from chorister.transparency.client import ABOUT, policy_path
from chorister.transparency.note import check_key_name
from chorister.transparency.trust import Authority
from chorister.transparency.witness import Witness

_CONNECTIONS: Final = 512

# Without control characters, which the operating system may not accept in file names.
_Text = Annotated[
    str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=1000, strict=True)
]


def _vkey(text: str) -> str:
    parse_vkey(text)
    return text


class WitnessConfig(Model):
    """A further witness that is asked to cosign."""

    key: Annotated[_Text, AfterValidator(_vkey)]
    """Its verifier key, NAME+HASH+BASE64, as the witness publishes it."""
    url: _Text
    """Its submission prefix: checkpoints go to `add-checkpoint` below it."""
    interval: Annotated[Int, Field(ge=1, le=86_400)] = 60
    """Seconds between two checkpoints for it."""


class RegistryConfig(Model):
    """The settings in TOML: docs/reference/registry.md. Paths are relative to the file."""

    origin: _Text
    """The log's name: a URL without its scheme. It never changes."""
    folder: _Text
    """Where the log is stored."""
    key: _Text
    """The log's Ed25519 private key, PEM (PKCS #8)."""
    policies: Annotated[tuple[_Text, ...], Field(min_length=1, max_length=1000)]
    """The policies whose authors may publish and whose aggregators cosign."""
    interval: Annotated[Int, Field(ge=1, le=3600)] = 60
    """Seconds between checkpoints."""
    connections_per_address: Annotated[Int, Field(ge=1, le=1_000_000)] = 128
    """Connections of one IPv4 address or IPv6 /64 network; behind a proxy, at least 512."""
    witnesses: Annotated[tuple[WitnessConfig, ...], Field(max_length=32)] = ()
    """Further witnesses, asked in addition to the aggregators."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a settings file; its paths become absolute."""
        with read_settings(path) as values:
            config = cls.model_validate(values)
            check_key_name(config.origin)
        base = path.resolve().parent
        return config.model_copy(
            update={
                "folder": str(base / config.folder),
                "key": str(base / config.key),
                "policies": tuple(str(base / policy) for policy in config.policies),
            }
        )

    def read_policies(self) -> dict[bytes, Policy]:
        """Return the policies by their documents, which are published as they are."""
        policies = {}
        for name in self.policies:
            try:
                data = Path(name).read_bytes()
                policies[data] = Policy.load(data)
            except OSError as error:
                raise ServiceError(f"can't read {name}: {error.strerror}") from error
            except ChoristerError as error:
                raise ServiceError(f"{name}: {error}") from error
        return policies


@contextlib.contextmanager
def open_registry(
    config: RegistryConfig, clock: Clock, *, create: bool = False
) -> Iterator[tuple[Registry, LogFolder]]:
    """Open the log of a settings file, and publish its policies."""
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
        raise ServiceError(f"{path.parent} does not exist: create it first")
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
    """Publish the policies and a file that names them, with which auditors start.

    Policies that were published before stay as earlier ones, because entries were logged under
    them.
    """
    documents = {hashlib.sha256(document).digest(): document for document in policies}
    folder.publish({policy_path(digest): document for digest, document in documents.items()})
    today = {digest.hex() for digest in documents}
    about = {
        "version": 1,
        "origin": origin,
        "policies": sorted(today),
        "earlier_policies": sorted(_published_before(folder.public / ABOUT) - today),
    }
    folder.publish({ABOUT: json.dumps(about, indent=1).encode() + b"\n"})


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
    """Serve until SIGTERM or SIGINT, and finish open requests first.

    `ready` gets the URL, because the system chooses the port if `port` is 0.
    """
    with (
        listen(host, port) as listener,
        open_registry(config, clock, create=create) as (registry, folder),
    ):
        witnesses = [
            Witnessing(witness=Witness(parse_vkey(each.key), each.url), interval=each.interval)
            for each in config.witnesses
        ]
        app = build_app(registry, folder.public, interval=config.interval, witnesses=witnesses)
        ready(server_url("http", host, listener), registry)
        deadlines = Deadlines(
            # Later than the application's own deadline, which tells the sender why.
            body=Limits().body_seconds + 5.0,
            per_address=config.connections_per_address,
        )
        uvicorn.Server(uvicorn_config(app, deadlines)).run(sockets=[listener])


def uvicorn_config(app: Starlette, deadlines: Deadlines) -> uvicorn.Config:
    return server_config(
        app,
        connections=_CONNECTIONS,
        deadlines=deadlines,
        log_level="warning",
        timeout_graceful_shutdown=10,
    )
