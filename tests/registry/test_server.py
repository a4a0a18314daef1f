"""The registry's settings file: read as UTF-8, refused with a typed error whatever it holds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.errors import ServiceError
from chorister.key_files import read_signing_key
from chorister.registry.server import RegistryConfig

SETTINGS = """\
origin = "registry.example/log"
folder = "log \N{LATIN SMALL LETTER E WITH ACUTE}"
key = "log.key"
policies = ["policy.toml"]
interval = 1
""".encode()


@pytest.fixture(scope="module")
def file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder).resolve() / "registry.toml"


def load(file: Path, data: bytes) -> RegistryConfig | None:
    """The settings, or None if they are refused; any error but ours fails the test."""
    file.write_bytes(data)
    try:
        return RegistryConfig.load(file)
    except ServiceError as error:
        assert str(file) in str(error)
        return None


def test_settings_are_utf_8_in_every_locale(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locale.getencoding", lambda: "latin-1")
    monkeypatch.setattr("io.text_encoding", lambda encoding, _=2: encoding or "latin-1")
    config = load(file, SETTINGS)
    assert config is not None
    assert config.folder == str(file.parent / "log \N{LATIN SMALL LETTER E WITH ACUTE}")


def test_other_encodings_are_refused(file: Path) -> None:
    for encoding in ("latin-1", "utf-16"):
        file.write_bytes(SETTINGS.decode().encode(encoding))
        with pytest.raises(ServiceError, match="is not UTF-8"):
            RegistryConfig.load(file)


def test_deep_nesting_is_refused(file: Path) -> None:
    for data in (b"a = " + b"[" * 50_000, b"a = " + b"{a = " * 50_000, b"a." * 2_000 + b"a = 1"):
        assert load(file, data) is None


@pytest.mark.parametrize("name", ["folder", "key", "policies"])
def test_names_that_no_file_can_have_are_refused(file: Path, name: str) -> None:
    good = {"folder": b'"log \xc3\xa9"', "key": b'"log.key"', "policies": b'"policy.toml"'}[name]
    file.write_bytes(SETTINGS.replace(good, b'"a\\u0000b"'))
    with pytest.raises(ServiceError, match=name):
        RegistryConfig.load(file)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_as_settings(file: Path, data: bytes) -> None:
    assert load(file, data) is None
    load(file, SETTINGS + data)


@given(st.integers(0, len(SETTINGS)), st.integers(0, 8), st.binary(max_size=6))
def test_damaged_settings(file: Path, at: int, cut: int, insert: bytes) -> None:
    """What is left is refused, or names files that are not there."""
    config = load(file, SETTINGS[:at] + insert + SETTINGS[at + cut :])
    if config is not None:
        with pytest.raises(ServiceError):
            config.read_policies()
        with pytest.raises(ServiceError):
            read_signing_key(Path(config.key))
