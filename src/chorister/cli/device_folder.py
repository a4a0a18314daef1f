"""A device's folder as the command line keeps it: the policy, and where everything else is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError

from chorister.canonical import Model, culprit
from chorister.device import Device, HeadFile, HeadKeyring, HTTPTransport, KeyFile, KeyringKey
from chorister.errors import InvalidInput
from chorister.policy import Policy

__all__ = ["DeviceSettings", "create_device", "open_device"]

SETTINGS: Final = "device.json"
POLICY: Final = "policy.toml"


class InFile(Model):
    """Kept in a file outside the folder."""

    kind: Literal["file"] = "file"
    path: str

    def source(self, folder: Path) -> KeyFile:
        """The key's source."""
        return KeyFile(self.path, store=folder)

    def head(self) -> HeadFile:
        """The head's place."""
        return HeadFile(self.path)


class InKeyring(Model):
    """Kept in the system's keyring."""

    kind: Literal["keyring"] = "keyring"
    name: str

    def source(self, folder: Path) -> KeyringKey:  # noqa: ARG002 (as InFile's)
        """The key's source."""
        return KeyringKey(self.name)

    def head(self) -> HeadKeyring:
        """The head's place."""
        return HeadKeyring(self.name)


_Place = Annotated[InFile | InKeyring, Field(discriminator="kind")]


class DeviceSettings(Model):
    """`device.json`, for its owner alone: a proxy's URL may hold a password."""

    registry: str
    key: _Place
    head: _Place | None = None
    proxy: str | None = None


def create_device(folder: Path, policy: Path, settings: DeviceSettings) -> Device:
    """Make the folder, the key if there is none, and both databases."""
    if (folder / SETTINGS).exists():
        raise InvalidInput(f"{folder} holds a device already: choose another folder")
    data = policy.read_bytes() if policy.is_file() else None
    if data is None:
        raise InvalidInput(f"there is no policy at {policy}")
    Policy.load(data)
    _make_folder(folder)
    _write(folder / POLICY, data)
    device = _device(folder, settings, create=True)
    # Last: a folder without settings is one that was never finished.
    _write(folder / SETTINGS, settings.canonical() + b"\n")
    return device


def open_device(folder: Path) -> Device:
    """The device in a folder."""
    try:
        settings = DeviceSettings.model_validate_json((folder / SETTINGS).read_bytes())
    except OSError:
        raise InvalidInput(
            f"there is no device in {folder}: make one with `chorister device init`"
        ) from None
    except ValidationError as error:
        field, message = culprit(error)
        raise InvalidInput(f"{folder / SETTINGS}: {field or 'it'}: {message}") from None
    return _device(folder, settings)


def _make_folder(folder: Path) -> None:
    """For its owner alone, even if it was there before."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise InvalidInput(f"{folder} belongs to another user: choose a folder of your own")
        folder.chmod(0o700)
    except OSError as error:
        raise InvalidInput(f"{folder} can't be the device's folder: {error.strerror}") from None


def _write(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)  # it may be left from an init that was interrupted
            file.write(data)
    except OSError as error:
        raise InvalidInput(f"{path} can't be written: {error.strerror}") from None


def _device(folder: Path, settings: DeviceSettings, *, create: bool = False) -> Device:
    return Device(
        folder,
        Policy.load(folder / POLICY),
        settings.key.source(folder),
        registry=settings.registry,
        head=None if settings.head is None else settings.head.head(),
        transport=HTTPTransport(proxy=settings.proxy),
        create=create,
    )
