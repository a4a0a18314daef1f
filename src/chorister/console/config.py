"""The settings of the console: a TOML file, documented in docs/reference/console.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self, TypeAlias, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, model_validator

from chorister.canonical import Bool, FieldError, Hex32, Int, Model
from chorister.settings_file import read_settings

Text: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=1000, strict=True)
]
# Without a dot, which separates the owner's name from the rest in the name of a study.
Name: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9_][a-z0-9_-]{0,31}$", strict=True)
]
_Origin: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^https?://[a-z0-9.:\[\]-]+$", max_length=255, strict=True)
]
_Suggestion: TypeAlias = Annotated[
    str, StringConstraints(min_length=1, max_length=20_000, strict=True)
]
_AnyModel = TypeVar("_AnyModel", bound=Model)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class AnalystConfig(Model):
    """Who may sign in."""

    name: Name
    """What colleagues see. The names of this analyst's studies begin with it."""
    token_digest: Hex32
    """SHA-256 of the token, as `chorister keygen token` prints it."""


class ConnectionConfig(Model):
    """A fleet to ask: a live one with a profile, or a rehearsal."""

    name: Name
    title: Text | None = None
    """Its title on the pages; its name if left out."""
    profile: Text | None = None
    """For a live fleet: an analyst's profile (TOML)."""
    policy: Text | None = None
    """For a rehearsal: the policy."""
    population: Text | None = None
    """For a rehearsal: a table of events or counts, .csv or .parquet."""
    populations: dict[Text, Text] | None = None
    """For a rehearsal: instead, one such table for each stream and profile."""
    devices: Annotated[Int, Field(ge=1)] | None = None
    """For a rehearsal: the number of devices, including those without data."""
    fill_seconds: Annotated[Int, Field(ge=0, le=3600)] = 4
    """For a rehearsal: how long a cohort takes to fill."""
    folder: Text | None = None
    """For a rehearsal: where its studies are kept."""
    analysts: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """Who may use it; all analysts if left out."""
    suggestions: dict[Text, _Suggestion] | None = None
    """What forms begin with, by field ("user.age"); "map" has the box of a map."""

    @model_validator(mode="after")
    def _one_kind(self) -> ConnectionConfig:
        if self.profile is not None:
            for name in ("policy", "population", "populations", "devices", "folder"):
                if getattr(self, name) is not None:
                    raise FieldError(
                        name, "only a rehearsal has it; a live connection has a profile"
                    )
            return self
        if self.policy is None or self.folder is None:
            raise FieldError("profile", "give a profile, or a policy and a folder for a rehearsal")
        if (self.population is None) == (self.populations is None):
            raise FieldError("population", "a rehearsal needs either population or populations")
        return self


class FleetConfig(Model):
    """The local fleet of simulated devices, whose audit logs the console shows."""

    folder: Text
    """Where the simulated devices are."""
    policy: Text
    """Their policy."""


class ConsoleConfig(Model):
    """The settings of `chorister serve console`. Paths are relative to the file."""

    host: Text = "127.0.0.1"
    """The address to listen on."""
    port: Annotated[Int, Field(ge=0, le=65_535)] = 8090
    """The port; 0 lets the system choose."""
    url: _Origin | None = None
    """Its URL, if a proxy with TLS is in front: https://console.example.org"""
    folder: Text
    """Where the console keeps permissions and runs of algorithms."""
    analysts: Annotated[tuple[AnalystConfig, ...], Field(min_length=1, max_length=1000)]
    connections: Annotated[tuple[ConnectionConfig, ...], Field(min_length=1, max_length=100)]
    fleet: FleetConfig | None = None
    """The local simulated fleet, whose audit logs are shown."""
    alerts: Text | None = None
    """Rules about series and where their alerts go (TOML)."""
    session_hours: Annotated[Int, Field(ge=1, le=168)] = 12
    """How long an analyst stays signed in."""
    allow_plain_http: Bool = False
    """Serve other machines without TLS: tokens are sent in the clear."""

    @model_validator(mode="after")
    def _consistent(self) -> ConsoleConfig:
        for field in ("analysts", "connections"):
            names = [each.name for each in getattr(self, field)]
            if len(set(names)) != len(names):
                raise FieldError(field, "two of them have the same name")
        digests = [each.token_digest for each in self.analysts]
        if len(set(digests)) != len(digests):
            raise FieldError("analysts", "two of them have the same token")
        known = {each.name for each in self.analysts}
        for connection in self.connections:
            if unknown := set(connection.analysts or ()) - known:
                raise FieldError("connections", f"there is no analyst {min(unknown)!r}")
        if self.url is not None and urlsplit(self.url).hostname is None:
            raise FieldError("url", "has no host")
        if self.host not in _LOOPBACK and not self.secure and not self.allow_plain_http:
            raise FieldError(
                "url",
                "other machines can reach this address: put TLS in front and give its https URL",
            )
        return self

    @property
    def secure(self) -> bool:
        """Whether browsers connect with TLS."""
        return self.url is not None and self.url.startswith("https://")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a settings file; its paths become absolute."""
        with read_settings(path) as values:
            config = cls.model_validate(values)
        return config._at(path.resolve().parent)

    def _at(self, base: Path) -> Self:
        connections = tuple(
            _moved(each, base, "profile", "policy", "population", "populations", "folder")
            for each in self.connections
        )
        fleet = None if self.fleet is None else _moved(self.fleet, base, "folder", "policy")
        moved = _moved(self, base, "folder", "alerts")
        return moved.model_copy(update={"connections": connections, "fleet": fleet})


def _moved(model: _AnyModel, base: Path, *names: str) -> _AnyModel:
    """Return a copy whose paths, which are relative to a folder, are absolute."""

    def absolute(value: str | dict[str, str]) -> str | dict[str, str]:
        if isinstance(value, dict):
            return {name: str(base / path) for name, path in value.items()}
        return str(base / value)

    given = {name: getattr(model, name) for name in names}
    update = {name: absolute(value) for name, value in given.items() if value is not None}
    return model.model_copy(update=update)
