"""The console's settings: read, refused with a reason, and documented to the last key."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from chorister.console.config import AnalystConfig, ConnectionConfig, ConsoleConfig, FleetConfig
from chorister.errors import ServiceError
from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "reference" / "console.md"
EXAMPLE = PAGE.read_text().split("```toml\n")[1].split("```")[0]


def load(folder: Path, text: str) -> ConsoleConfig:
    path = folder / "console.toml"
    path.write_text(text)
    return ConsoleConfig.load(path)


def test_the_example_is_read(tmp_path: Path) -> None:
    config = load(tmp_path, EXAMPLE)
    assert config.folder == str(tmp_path / "console")
    assert config.connections[0].profile == str(tmp_path / "profile.toml")
    assert config.connections[1].population == str(tmp_path / "people.csv")
    assert not config.secure


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (('name = "ada"', 'name = "a.b"'), "analysts.0.name"),
        (('name = "ada"', 'name = "ada"\ncolour = "red"'), "unknown field"),
        (('name = "live"', 'name = "rehearsal"'), "same name"),
        (('population = "people.csv"', ""), "population"),
        (('profile = "profile.toml"', 'profile = "p"\npolicy = "x"'), "only a rehearsal"),
        (('folder = "console"\n', 'folder = "console"\nhost = "0.0.0.0"\n'), "put TLS in front"),
        (('folder = "console"\n', 'folder = "console"\nurl = "https://x/y"\n'), "url"),
        (('title = "Keyboards"', 'analysts = ["eve"]'), "no analyst 'eve'"),
        (("[[analysts]]", "[[analysts"), "console.toml"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, change: tuple[str, str], why: str) -> None:
    with pytest.raises(ServiceError, match=re.escape(why)):
        load(tmp_path, EXAMPLE.replace(*change, 1))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="can't read"):
        ConsoleConfig.load(tmp_path / "none.toml")


def test_other_machines_come_by_tls(tmp_path: Path) -> None:
    behind = 'host = "0.0.0.0"\nurl = "https://console.example.org"\n' + EXAMPLE
    assert load(tmp_path, behind).secure
    assert not load(tmp_path, 'host = "0.0.0.0"\nallow_plain_http = true\n' + EXAMPLE).secure


def documented(title: str) -> dict[str, str]:
    section = PAGE.read_text().split(f"\n### {title}\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, flags=re.MULTILINE)
    return {name: default.strip() for name, default in rows}


@pytest.mark.parametrize(
    ("title", "model"),
    [
        ("Console", ConsoleConfig),
        ("Analysts", AnalystConfig),
        ("Connections", ConnectionConfig),
        ("Fleet", FleetConfig),
    ],
)
def test_every_setting_is_documented(title: str, model: Any) -> None:
    shown = {}
    for name, field in model.model_fields.items():
        default = field.default
        if field.is_required():
            shown[name] = "required"
        elif default is None:
            shown[name] = "none"
        elif isinstance(default, bool):
            shown[name] = str(default).lower()
        else:
            shown[name] = str(default) if isinstance(default, int) else f"`{default}`"
    assert documented(title) == shown


def test_the_example_is_toml() -> None:
    assert set(tomllib.loads(EXAMPLE)) == {"folder", "analysts", "connections"}
