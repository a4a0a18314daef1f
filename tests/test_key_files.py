"""Key files: created once, private, and never quoted in an error."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from chorister import key_files
from chorister.canonical import b64url_encode
from chorister.errors import ServiceError

Reader = Callable[[Path], object]
READERS: dict[str, Reader] = {
    "secret": lambda path: key_files.read_secret(str(path)),
    "token": lambda path: key_files.read_token(str(path)),
    "signing": key_files.read_signing_key,
    "collector": key_files.read_collector_key,
}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    public = key_files.write_signing_key(tmp_path / "signing.key")
    signing = key_files.read_signing_key(tmp_path / "signing.key")
    assert b64url_encode(signing.public_key().public_bytes_raw()) == public
    config = key_files.write_collector_key(tmp_path / "collector.json", config_id=7)
    assert key_files.read_collector_key(tmp_path / "collector.json").config == config
    assert config[0] == 7
    secret = key_files.new_secret()
    key_files.write_private(tmp_path / "token", f"{secret}\n".encode())
    assert key_files.read_token(str(tmp_path / "token")) == secret
    assert b64url_encode(key_files.read_secret(str(tmp_path / "token"))) == secret
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())


def test_no_key_is_ever_replaced(tmp_path: Path) -> None:
    key_files.write_signing_key(tmp_path / "key")
    before = (tmp_path / "key").read_bytes()
    for write in (key_files.write_signing_key, key_files.write_collector_key):
        with pytest.raises(ServiceError, match="never overwritten"):
            write(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == before


@pytest.mark.parametrize("kind", READERS)
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "key"
    path.write_text(key_files.new_secret())
    path.chmod(0o640)
    with pytest.raises(ServiceError, match="others can read"):
        READERS[kind](path)


@pytest.mark.parametrize("kind", READERS)
def test_a_missing_file_says_how_to_make_one(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ServiceError, match="chorister keygen"):
        READERS[kind](tmp_path / "key")


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("content", ["hush hush", '{"config_id": 1, "private_key": "hush hush"}'])
def test_no_error_quotes_a_damaged_key(tmp_path: Path, kind: str, content: str) -> None:
    path = tmp_path / "key"
    key_files.write_private(path, content.encode())
    with pytest.raises(ServiceError) as caught:
        READERS[kind](path)
    assert "hush" not in "".join(traceback.format_exception(caught.value))
