"""The folder of a command-line device: its policy, and where everything else is."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError

from chorister.canonical import Model, first_error
from chorister.device import Device, HeadFile, HeadKeyring, HTTPTransport, KeyFile, KeyringKey
from chorister.errors import InvalidInput
from chorister.http_client import authorities
from chorister.policy import Policy

SETTINGS: Final = "device.json"
POLICY: Final = "policy.toml"


class InFile(Model):
    """Stored in a file outside the folder."""

    kind: Literal["file"] = "file"
    path: str

    def source(self, folder: Path) -> KeyFile:
        return KeyFile(self.path, store=folder)

    def head(self) -> HeadFile:
        return HeadFile(self.path)


class InKeyring(Model):
    """Stored in the system's keyring."""

    kind: Literal["keyring"] = "keyring"
    name: str

    def source(self, folder: Path) -> KeyringKey:  # noqa: ARG002 (as InFile's)
        return KeyringKey(self.name)

    def head(self) -> HeadKeyring:
        return HeadKeyring(self.name)


_Place = Annotated[InFile | InKeyring, Field(discriminator="kind")]


class DeviceSettings(Model):
    """`device.json`, readable by its owner only: a proxy's URL may contain a password."""

    registry: str
    key: _Place
    head: _Place | None = None
    proxy: str | None = None
    ca_bundle: str | None = None

    def transport(self) -> HTTPTransport:
        if self.ca_bundle is None:
            return HTTPTransport(proxy=self.proxy)
        return HTTPTransport(proxy=self.proxy, tls=partial(authorities, Path(self.ca_bundle)))


def create_device(folder: Path, policy: Path, settings: DeviceSettings) -> Device:
    """Create the folder, the key if there is none, and both databases."""
    if (folder / SETTINGS).exists():
        raise InvalidInput(f"{folder} already has a device: choose another folder")
    data = policy.read_bytes() if policy.is_file() else None
    if data is None:
        raise InvalidInput(f"there is no policy at {policy}: check the path")
    Policy.load(data)
    if settings.ca_bundle is not None:
        authorities(Path(settings.ca_bundle))  # fail now, not at the first poll
    _make_folder(folder)
    _write(folder / POLICY, data)
    device = _device(folder, settings, create=True)
    # Last: a folder without settings is unfinished.
    _write(folder / SETTINGS, settings.canonical() + b"\n")
    return device


def open_device(folder: Path) -> Device:
    try:
        settings = DeviceSettings.model_validate_json((folder / SETTINGS).read_bytes())
    except OSError:
        raise InvalidInput(
            f"there is no device in {folder}: create one with `chorister device init`"
        ) from None
    except ValidationError as error:
        field, message = first_error(error)
        raise InvalidInput(f"{folder / SETTINGS}: {field or 'it'}: {message}") from None
    return _device(folder, settings)


def _make_folder(folder: Path) -> None:
    """Create a folder for its owner only, even if it already exists."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise InvalidInput(f"{folder} belongs to another user: choose a folder of your own")
        folder.chmod(0o700)
    except OSError as error:
        raise InvalidInput(f"can't use {folder} as the device's folder: {error.strerror}") from None


def _write(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)  # it may be left over from an interrupted init
            file.write(data)
    except OSError as error:
        raise InvalidInput(f"can't write {path}: {error.strerror}") from None


def _device(folder: Path, settings: DeviceSettings, *, create: bool = False) -> Device:
    return Device(
        folder,
        Policy.load(folder / POLICY),
        settings.key.source(folder),
        registry=settings.registry,
        head=None if settings.head is None else settings.head.head(),
        transport=settings.transport(),
        create=create,
    )
