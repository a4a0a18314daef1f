"""Whatever is wrong with a settings file is one line with its name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chorister.canonical import Int, Model
from chorister.errors import InvalidInput, ServiceError
from chorister.settings_file import read_settings


class ExampleSettings(Model):
    port: Int


def load(path: Path) -> ExampleSettings:
    with read_settings(path) as values:
        return ExampleSettings.model_validate(values)


def test_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("port = 443\n")
    assert load(path).port == 443


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (None, "can't read"),
        (b"port = 'http'\n", "port"),
        (b"", "port: this field is missing"),
        (b"port = 1\nspeed = 9\n", "speed: unknown field"),
        (b"port = 1\xff\n", "not UTF-8"),
        (b"port = \n", "Invalid value"),
        (b"port = " + b"[" * 5000, "nested too deeply"),
    ],
)
def test_a_bad_one(tmp_path: Path, data: bytes | None, why: str) -> None:
    path = tmp_path / "settings.toml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ServiceError, match=why) as raised:
        load(path)
    assert str(path) in str(raised.value)


def test_what_a_block_has_against_it(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("port = 443\n")
    with pytest.raises(ServiceError, match=r"settings.toml: too high"), read_settings(path):
        raise InvalidInput("too high")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(data)
    try:
        found = load(path)
    except ServiceError as error:
        assert str(path) in str(error)
    else:
        assert isinstance(found, ExampleSettings)
