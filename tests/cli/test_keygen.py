"""`chorister keygen`: files for their owner alone, the public half printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chorister._native import HPKEKeypair
from chorister.canonical import b64url_decode, sha256
from chorister.cli import app
from chorister.key_files import read_secret, read_signing_key, read_token


def run(*arguments: str) -> dict[str, str]:
    result = CliRunner().invoke(app, ["keygen", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    printed: dict[str, str] = json.loads(result.output)
    return printed


def test_cosigning(tmp_path: Path) -> None:
    path = tmp_path / "key"
    printed = run("cosigning", str(path))
    own = read_signing_key(path).public_key().public_bytes_raw()
    assert b64url_decode(printed["public_key"]) == own


def test_collector(tmp_path: Path) -> None:
    path = tmp_path / "key"
    printed = run("collector", str(path), "--config-id", "5")
    document = json.loads(path.read_text())
    keys = HPKEKeypair.from_bytes(
        document["config_id"],
        b64url_decode(document["public_key"]),
        b64url_decode(document["private_key"]),
    )
    assert b64url_decode(printed["hpke_config"]) == keys.config
    assert printed["digest"] == sha256(keys.config).hex()
    assert keys.config_id == 5


def test_secret_and_token(tmp_path: Path) -> None:
    run("secret", str(tmp_path / "secret"))
    assert len(read_secret(str(tmp_path / "secret"))) == 32
    printed = run("token", str(tmp_path / "token"))
    token = read_token(str(tmp_path / "token"))
    assert printed["digest"] == sha256(token.encode()).hex()
    assert token not in json.dumps(printed)


@pytest.mark.parametrize("kind", ["cosigning", "collector", "secret", "token"])
def test_files_are_private_and_never_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "key"
    result = CliRunner().invoke(app, ["keygen", kind, str(path)])
    assert result.exit_code == 0, result.output
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    again = CliRunner().invoke(app, ["keygen", kind, str(path)])
    assert again.exit_code == 2
    assert "are never overwritten" in " ".join(again.output.split())
    assert path.read_bytes() == before
