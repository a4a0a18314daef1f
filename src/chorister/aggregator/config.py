"""An aggregator's settings: one TOML file and the environment; docs/reference/aggregator.md.

`CHORISTER_LEADER__PORT=9000` overrides `port` of a leader's file, `CHORISTER_HELPER__...` that of
a helper's. A value is read as TOML where it is TOML, and as text where it is not. Paths are
relative to the file.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, model_validator

from chorister.aggregator.secret_files import check_reference
from chorister.canonical import Bool, Complaint, Hex32, Int, Model, b64url_decode, sha256
from chorister.errors import ChoristerError, DecodeError, InvalidInput, ServiceError
from chorister.policy import Policy
from chorister.policy.values import URL, Duration
from chorister.settings_file import read_settings

__all__ = ["AggregatorConfig", "CollectorConfig", "HelperConfig", "LeaderConfig", "load_config"]

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
    """An analyst who may collect: recipes name him by the SHA-256 of his HPKE config."""

    name: Text
    """For the operator's eyes."""
    hpke_config: Text
    """The encoded HpkeConfig in base64url, as `chorister keygen collector` prints it."""
    token_digests: Annotated[tuple[Hex32, ...], Field(max_length=16)] = ()
    """SHA-256 of his bearer tokens; only the leader needs them."""

    @model_validator(mode="after")
    def _decodes(self) -> CollectorConfig:
        try:
            b64url_decode(self.hpke_config)
        except DecodeError as error:
            raise Complaint("hpke_config", str(error)) from None
        return self

    @property
    def config(self) -> bytes:
        """The encoded HpkeConfig."""
        return b64url_decode(self.hpke_config)

    @property
    def digest(self) -> bytes:
        """What recipes call him."""
        return sha256(self.config)


class AggregatorConfig(Model):
    """What both roles need to know."""

    role: Literal["leader", "helper"]
    """Which of the two this is."""
    url: URL
    """Its URL as policies spell it; resources lie below its path."""
    host: Text = "127.0.0.1"
    """The address to listen on."""
    port: _Port = 8443
    """The port to listen on; 0 lets the system choose."""
    tls_certificate: Text | None = None
    """Certificate chain, PEM. Without it the server speaks plain HTTP, for a proxy in front."""
    tls_key: Text | None = None
    """The certificate's private key, PEM."""
    ca_bundle: Text | None = None
    """Authorities for the servers that this one calls, PEM; the system's if it is not given."""

    database: Text
    """`sqlite:///FILE`, or `postgresql+psycopg://...`."""
    at_rest_key: Text
    """32 bytes that encrypt secrets in the database: a file of `keygen secret`, or `env:NAME`."""
    verify_key: Text
    """32 bytes that leader and helper share, from which tasks' verification keys are derived."""

    policies: Annotated[tuple[Text, ...], Field(min_length=1, max_length=1000)]
    """The policies that are served; recipes of other analyses are refused."""
    registry: Text
    """The URL of the public log."""
    cosigning_key: Text
    """The Ed25519 private key of this aggregator, PEM; policies list its public half."""
    head: Text
    """Folder for what was cosigned last. Losing it needs the operator's decision."""
    collected_file: Text | None = None
    """Which batches were released; `head` with `.collected` behind it if it is not given."""
    cosign: Bool = True
    """Whether this process cosigns; of several web processes, one does."""
    cosign_every: Duration = 10
    """How often the log's candidate is looked at."""
    hpke_lifetime: Duration = 30 * 86_400
    """How long devices seal to one HPKE key before the next is published."""
    config_cache: Duration = 86_400
    """How long others may cache `hpke_config`."""

    collectors: Annotated[tuple[CollectorConfig, ...], Field(max_length=1000)] = ()
    """The analysts whose results may be sealed; a recipe for any other can't be collected."""

    upload_bytes: _Bytes = 16 << 20
    """The longest upload."""
    job_bytes: _Bytes = 64 << 20
    """The longest request of a leader; every full job is far below it."""
    header_seconds: _Seconds = 10
    """Within which a request's head has to arrive."""
    body_seconds: _Seconds = 30
    """Within which a request's body has to arrive, however slowly it trickles."""
    answer_seconds: _Seconds = 300
    """Within which a request is answered, or its connection is cut."""
    connections: Annotated[Int, Field(ge=1, le=1_000_000)] = 4096
    """Connections at once; more are answered 503."""

    run_jobs: Bool = True
    """Whether this process runs jobs itself (aggregation, collection, sweeping)."""
    workers: Bool = False
    """Whether `chorister worker` processes run the jobs, and no server does; PostgreSQL only."""
    sweep_every: Duration = 60
    """How often what has expired is deleted."""
    threads: Annotated[Int, Field(ge=0, le=1024)] = 0
    """Threads of one native call; 0 for one a core."""

    metrics_host: Text = "127.0.0.1"
    """The address of the operator's listener."""
    metrics_port: _Port | None = None
    """Its port: Prometheus metrics, apart from the public listener. Without it there are none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """From which level on lines are written to stderr."""
    log_format: Literal["json", "text"] = "json"
    """One JSON object a line, or text for people."""

    @model_validator(mode="after")
    def _consistent(self) -> AggregatorConfig:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise Complaint("tls_key", "certificate and key come together")
        names = [collector.digest for collector in self.collectors]
        if len(set(names)) != len(names):
            raise Complaint("collectors", "an HPKE config is listed twice")
        digests = [digest for each in self.collectors for digest in each.token_digests]
        if len(set(digests)) != len(digests):
            raise Complaint("collectors", "a token digest is listed twice")
        if self.workers and not self.database.startswith("postgresql"):
            raise Complaint("workers", "workers need PostgreSQL; with SQLite the server runs jobs")
        for field in ("at_rest_key", "verify_key"):
            check_reference(field, getattr(self, field))
        return self

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Without the password of the database."""
        for name, value in super().__repr_args__():
            yield name, _PASSWORD.sub("//***@", value) if name == "database" else value

    @property
    def prefix(self) -> str:
        """The path below which resources lie, "/" at both ends."""
        return urlsplit(self.url).path

    def read_policies(self) -> tuple[Policy, ...]:
        """The policies that are served."""
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
    """What only a leader needs."""

    role: Literal["leader"]
    helper_token: Text
    """What proves this leader to its helper: a file of `keygen token`, or `env:NAME`."""
    helper_seconds: _Seconds = 60
    """How long the helper may take over one request."""
    upload_credential: _Hook | None = None
    """`module:function`: gets an upload's `Chorister-Upload-Credential`, returns True if good."""
    upload_credential_digests: Annotated[tuple[Hex32, ...], Field(max_length=10_000)] = ()
    """SHA-256 of the upload credentials that are accepted."""
    waiting_uploads: Annotated[Int, Field(ge=1, le=1_000_000)] = 4096
    """Uploads that may wait for the disk; more are answered 503."""
    waiting_bytes: _Bytes = 256 << 20
    """Their bytes, all together; as many again may be in bodies that are still arriving."""
    jobs_in_flight: Annotated[Int, Field(ge=1, le=64)] = 3
    """Jobs at once: while the helper verifies one, the leader prepares another."""
    linger_milliseconds: Annotated[Int, Field(ge=0, le=60_000)] = 200
    """How long reports may wait for others before a job that is not full begins."""

    @model_validator(mode="after")
    def _one_kind_of_credential(self) -> LeaderConfig:
        if self.upload_credential is not None and self.upload_credential_digests:
            raise Complaint("upload_credential", "a function or digests, not both")
        check_reference("helper_token", self.helper_token)
        return self


class HelperConfig(AggregatorConfig):
    """What only a helper needs."""

    role: Literal["helper"]
    leader_token_digests: Annotated[tuple[Hex32, ...], Field(min_length=1, max_length=16)]
    """SHA-256 of the bearer tokens of the leader; several for rotation."""
    jobs_at_once: Annotated[Int, Field(ge=1, le=64)] = 3
    """Aggregation jobs that are verified at once; more wait."""


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
_SECRETS: Final = ("at_rest_key", "verify_key", "helper_token")


def load_config(
    path: Path, environ: Mapping[str, str] | None = None
) -> LeaderConfig | HelperConfig:
    """Read a settings file and what the environment overrides; paths come back absolute."""
    with read_settings(path) as values:
        role = _role(values)
        values |= _overrides(role, os.environ if environ is None else environ)
        return _KINDS[role].model_validate(_absolute(values, path.resolve().parent))


def _role(values: Mapping[str, Any]) -> str:
    role = values.get("role")
    if role not in _KINDS:
        raise InvalidInput('role is "leader" or "helper"')
    return str(role)


def _overrides(role: str, environ: Mapping[str, str]) -> dict[str, Any]:
    prefix = f"{_PREFIX}{role.upper()}__"
    found = {}
    for name, text in environ.items():
        if name.startswith(prefix):
            field = name.removeprefix(prefix).lower()
            if field == "role" or field not in _KINDS[role].model_fields:
                raise InvalidInput(f"the environment's {name} is no setting of a {role}")
            found[field] = _value(text)
    return found


def _value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _absolute(values: dict[str, Any], base: Path) -> dict[str, Any]:
    """The same with every path absolute; what is no text is left for the model to refuse."""
    changed = dict(values)
    for field in _PATHS + _SECRETS:
        text = values.get(field)
        if isinstance(text, str) and not (field in _SECRETS and text.startswith("env:")):
            changed[field] = str(base / text)
    policies = values.get("policies")
    if isinstance(policies, list):
        changed["policies"] = [str(base / p) if isinstance(p, str) else p for p in policies]
    database = values.get("database")
    if isinstance(database, str) and database.startswith(_SQLITE):
        changed["database"] = _SQLITE + str(base / database.removeprefix(_SQLITE))
    return changed
