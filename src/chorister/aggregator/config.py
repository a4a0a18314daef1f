"""An aggregator's settings: one TOML file and the environment; docs/reference/aggregator.md.

`CHORISTER_LEADER__PORT=9000` overrides `port` in a leader's file, `CHORISTER_HELPER__...` in a
helper's. A value is read as TOML if it is valid TOML, and as text if not. Paths are relative to the
file.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, model_validator

from chorister.canonical import Bool, FieldError, Hex32, Int, Model, b64url_decode, sha256
from chorister.errors import ChoristerError, DecodeError, InvalidInput, ServiceError
from chorister.key_files import check_reference
from chorister.policy import Policy
from chorister.policy.values import URL, Duration
from chorister.settings_file import read_settings
from chorister.transparency.cosigner import MAX_NEW_BYTES, MAX_NEW_ENTRIES

_PREFIX: Final = "CHORISTER_"
_PASSWORD: Final = re.compile(r"//.*@")
_SQLITE: Final = "sqlite:///"

Text: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=1000, strict=True)
]
_Bytes: TypeAlias = Annotated[Int, Field(ge=1024, le=1 << 32)]
_Seconds: TypeAlias = Annotated[Int, Field(ge=1, le=3600)]
_Port: TypeAlias = Annotated[Int, Field(ge=0, le=65_535)]
_Hook: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", max_length=200, strict=True)
]


class CollectorConfig(Model):
    """An analyst who may collect; recipes name them by the SHA-256 of their HPKE config."""

    name: Text
    """A name for the operator; it has no other meaning."""
    hpke_config: Text
    """The encoded HpkeConfig in base64url, as `chorister keygen collector` prints it."""
    token_digests: Annotated[tuple[Hex32, ...], Field(max_length=16)] = ()
    """SHA-256 of their bearer tokens; only the leader needs them."""

    @model_validator(mode="after")
    def _decodes(self) -> CollectorConfig:
        try:
            b64url_decode(self.hpke_config)
        except DecodeError as error:
            raise FieldError("hpke_config", str(error)) from None
        return self

    @property
    def config(self) -> bytes:
        return b64url_decode(self.hpke_config)

    @property
    def digest(self) -> bytes:
        """How recipes name the collector."""
        return sha256(self.config)


class HelperPeer(Model):
    """A further helper of a leader."""

    url: URL
    """Its URL as policies spell it."""
    token: Text
    """What proves this leader to it, as `helper_token`."""
    verify_key: Text
    """32 bytes that only this leader and it share, as `verify_key`."""

    @model_validator(mode="after")
    def _references(self) -> HelperPeer:
        for field in ("token", "verify_key"):
            check_reference(field, getattr(self, field))
        return self


class LeaderPeer(Model):
    """A further leader of a helper."""

    url: URL
    """Its URL as policies spell it."""
    token_digests: Annotated[tuple[Hex32, ...], Field(min_length=1, max_length=16)]
    """SHA-256 of its bearer tokens, as `leader_token_digests`."""
    verify_key: Text
    """32 bytes that only it and this helper share, as `verify_key`."""

    @model_validator(mode="after")
    def _references(self) -> LeaderPeer:
        check_reference("verify_key", self.verify_key)
        return self


class AggregatorConfig(Model):
    """The settings of both roles."""

    role: Literal["leader", "helper"]
    """Which of the two aggregators this is."""
    url: URL
    """Its URL as policies spell it; resources are below its path."""
    host: Text = "127.0.0.1"
    """The address to listen on."""
    port: _Port = 8443
    """The port to listen on; 0 for any free port."""
    tls_certificate: Text | None = None
    """Certificate chain, PEM. Without it the server speaks plain HTTP, behind a proxy."""
    tls_key: Text | None = None
    """The certificate's private key, PEM."""
    ca_bundle: Text | None = None
    """The only authorities to trust for servers that this one calls, PEM; default: the system's."""

    database: Text
    """`sqlite:///FILE`, or `postgresql+psycopg://...`."""
    at_rest_key: Text
    """32 bytes that encrypt secrets in the database: a file from `keygen secret`, or `env:NAME`."""
    verify_key: Text
    """32 bytes that one leader and one helper share, to derive each task's verification key."""

    policies: Annotated[tuple[Text, ...], Field(min_length=1, max_length=1000)]
    """The served policies; recipes of other analyses are ignored."""
    registry: Text
    """The URL of the public log."""
    cosigning_key: Text
    """The Ed25519 private key of this aggregator, PEM; policies list the public key."""
    head: Text
    """Folder that remembers what was cosigned last. If it is lost, the operator must decide."""
    collected_file: Text | None = None
    """The file that lists released batches; default: the value of `head` plus `.collected`."""
    cosign: Bool = True
    """Whether this process cosigns; exactly one of several web processes must."""
    cosign_every: Duration = 10
    """How often the log's newest tree is checked and cosigned."""
    new_log_entries: Annotated[Int, Field(ge=1, le=1_000_000_000)] = MAX_NEW_ENTRIES
    """How many new entries of the log are fetched at once; a log that is further ahead waits."""
    new_log_bytes: _Bytes = MAX_NEW_BYTES
    """Their total size, with their bodies, which are in memory until they are checked."""
    hpke_lifetime: Duration = 30 * 86_400
    """How long devices use one HPKE key before the next is published."""
    config_cache: Duration = 86_400
    """How long clients may cache `hpke_config`."""

    collectors: Annotated[tuple[CollectorConfig, ...], Field(max_length=1000)] = ()
    """The analysts who may collect; recipes for anyone else can't be collected."""

    upload_bytes: _Bytes = 16 << 20
    """The size limit of an upload."""
    job_bytes: _Bytes = 64 << 20
    """The size limit of a leader's request; a full job is far smaller."""
    header_seconds: _Seconds = 10
    """The time limit for a TLS handshake, and for a request's headers to arrive."""
    body_seconds: _Seconds = 30
    """The time limit for a request's whole body to arrive."""
    answer_seconds: _Seconds = 300
    """The time limit for answering a request; then the connection is closed."""
    connections: Annotated[Int, Field(ge=1, le=1_000_000)] = 4096
    """The maximum number of connections; the one idle for longest makes room for a new one."""
    connections_per_address: Annotated[Int, Field(ge=1, le=1_000_000)] = 512
    """The same for one IPv4 address or IPv6 /64 network; behind a proxy, as many as for all."""

    run_jobs: Bool = True
    """Whether this process runs jobs itself (aggregation, collection, deletion)."""
    workers: Bool = False
    """Whether `chorister worker` processes run the jobs instead; PostgreSQL only."""
    sweep_every: Duration = 60
    """How often the data of ended tasks is deleted."""
    threads: Annotated[Int, Field(ge=0, le=1024)] = 0
    """Threads per native call; 0 for one per core."""

    metrics_host: Text = "127.0.0.1"
    """The address of the operator's listener, for metrics."""
    metrics_port: _Port | None = None
    """Its port, apart from the public listener. Without it there are no metrics."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is written to stderr."""
    log_format: Literal["json", "text"] = "json"
    """One JSON object per line, or text for people."""

    @model_validator(mode="after")
    def _consistent(self) -> AggregatorConfig:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise FieldError("tls_key", "set both the certificate and its key, or neither")
        names = [collector.digest for collector in self.collectors]
        if len(set(names)) != len(names):
            raise FieldError("collectors", "an HPKE config is listed twice")
        digests = [digest for each in self.collectors for digest in each.token_digests]
        if len(set(digests)) != len(digests):
            raise FieldError("collectors", "a token digest is listed twice")
        if self.workers and not self.database.startswith("postgresql"):
            raise FieldError(
                "workers", "workers need PostgreSQL; with SQLite the server runs the jobs"
            )
        for field in ("at_rest_key", "verify_key"):
            check_reference(field, getattr(self, field))
        return self

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Hide the database's password."""
        for name, value in super().__repr_args__():
            yield name, _PASSWORD.sub("//***@", value) if name == "database" else value

    @property
    def prefix(self) -> str:
        """The path that resources are below, with "/" at both ends."""
        return urlsplit(self.url).path

    def read_policies(self) -> tuple[Policy, ...]:
        policies = []
        for name in self.policies:
            try:
                policies.append(Policy.load(Path(name)))
            except OSError as error:
                raise ServiceError(f"can't read {name}: {error.strerror}") from error
            except ChoristerError as error:
                raise ServiceError(f"{name}: {error}") from error
        return tuple(policies)


class LeaderConfig(AggregatorConfig):
    """A leader's settings."""

    role: Literal["leader"]
    helper_token: Text
    """The token that authenticates this leader: a file from `keygen token`, or `env:NAME`."""
    helpers: Annotated[tuple[HelperPeer, ...], Field(max_length=100)] = ()
    """Further helpers; `helper_token` and `verify_key` are for the one that is not listed."""
    helper_seconds: _Seconds = 60
    """How long to wait for the helper's response."""
    upload_credential: _Hook | None = None
    """`module:function` that takes an upload's `Chorister-Upload-Credential`; True accepts it."""
    upload_credential_digests: Annotated[tuple[Hex32, ...], Field(max_length=10_000)] = ()
    """SHA-256 of the accepted upload credentials."""
    waiting_uploads: Annotated[Int, Field(ge=1, le=1_000_000)] = 4096
    """How many uploads may wait to be written; more get status 503."""
    waiting_bytes: _Bytes = 256 << 20
    """Their total size; bodies that are still arriving may take as much again."""
    jobs_in_flight: Annotated[Int, Field(ge=1, le=64)] = 3
    """How many jobs run at once: while the helper verifies one, the leader prepares another."""
    batch_delay_milliseconds: Annotated[Int, Field(ge=0, le=60_000)] = 200
    """How long reports wait for others before a job that is not full starts."""

    @model_validator(mode="after")
    def _one_kind_of_credential(self) -> LeaderConfig:
        if self.upload_credential is not None and self.upload_credential_digests:
            raise FieldError("upload_credential", "set a function or digests, not both")
        check_reference("helper_token", self.helper_token)
        _check_urls("helpers", self.helpers)
        return self

    @property
    def peers(self) -> tuple[HelperPeer, ...]:
        """The other aggregators that are listed."""
        return self.helpers


class HelperConfig(AggregatorConfig):
    """A helper's settings."""

    role: Literal["helper"]
    leader_token_digests: Annotated[tuple[Hex32, ...], Field(min_length=1, max_length=16)]
    """SHA-256 of the leader's bearer tokens; several for rotation."""
    leaders: Annotated[tuple[LeaderPeer, ...], Field(max_length=100)] = ()
    """Further leaders; `leader_token_digests` and `verify_key` are for the one not listed."""
    jobs_at_once: Annotated[Int, Field(ge=1, le=64)] = 3
    """How many aggregation jobs are verified at once; more wait."""

    @model_validator(mode="after")
    def _one_token_one_leader(self) -> HelperConfig:
        _check_urls("leaders", self.leaders)
        digests = [*self.leader_token_digests]
        for peer in self.leaders:
            digests += peer.token_digests
        if len(set(digests)) != len(digests):
            raise FieldError("leaders", "a token digest is listed twice")
        return self

    @property
    def peers(self) -> tuple[LeaderPeer, ...]:
        """The other aggregators that are listed."""
        return self.leaders


def _check_urls(field: str, peers: Sequence[HelperPeer | LeaderPeer]) -> None:
    if len({peer.url for peer in peers}) != len(peers):
        raise FieldError(field, "a URL is listed twice")


_KINDS: Final[dict[str, type[LeaderConfig] | type[HelperConfig]]] = {
    "leader": LeaderConfig,
    "helper": HelperConfig,
}
_PATHS: Final = (
    "tls_certificate",
    "tls_key",
    "ca_bundle",
    "cosigning_key",
    "head",
    "collected_file",
)
_SECRETS: Final = ("at_rest_key", "verify_key", "helper_token", "token")
_FORMER_NAMES: Final = {"linger_milliseconds": "batch_delay_milliseconds"}


def load_config(
    path: Path, environ: Mapping[str, str] | None = None
) -> LeaderConfig | HelperConfig:
    """Read a settings file and apply the environment's overrides; makes paths absolute."""
    with read_settings(path) as values:
        role = _role(values)
        settings = _with_new_names(values)
        settings |= _overrides(role, os.environ if environ is None else environ)
        return _KINDS[role].model_validate(_absolute(settings, path.resolve().parent))


def _with_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Accept settings by the names that they had in earlier versions."""
    for former, name in _FORMER_NAMES.items():
        if former in values and name in values:
            raise InvalidInput(f"{former} is the former name of {name}: set one of them")
    return {_FORMER_NAMES.get(name, name): value for name, value in values.items()}


def _role(values: Mapping[str, Any]) -> str:
    role = values.get("role")
    if role not in _KINDS:
        raise InvalidInput('role must be "leader" or "helper"')
    return str(role)


def _overrides(role: str, environ: Mapping[str, str]) -> dict[str, Any]:
    prefix = f"{_PREFIX}{role.upper()}__"
    found = {}
    for name, text in environ.items():
        if name.startswith(prefix):
            field = name.removeprefix(prefix).lower()
            known = _FORMER_NAMES.get(field, field) in _KINDS[role].model_fields
            if field == "role" or not known:
                raise InvalidInput(f"the environment variable {name} is not a setting of a {role}")
            found[field] = _value(text)
    return _with_new_names(found)


def _value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _absolute(values: dict[str, Any], base: Path) -> dict[str, Any]:
    """Make every path absolute; values that are not text are left for the model to refuse."""
    changed = dict(values)
    for field in _PATHS + _SECRETS:
        text = values.get(field)
        if isinstance(text, str) and not (field in _SECRETS and text.startswith("env:")):
            changed[field] = str(base / text)
    for field in ("helpers", "leaders"):
        peers = values.get(field)
        if isinstance(peers, list):
            changed[field] = [_absolute(p, base) if isinstance(p, dict) else p for p in peers]
    policies = values.get("policies")
    if isinstance(policies, list):
        changed["policies"] = [str(base / p) if isinstance(p, str) else p for p in policies]
    database = values.get("database")
    if isinstance(database, str) and database.startswith(_SQLITE):
        changed["database"] = _SQLITE + str(base / database.removeprefix(_SQLITE))
    return changed
