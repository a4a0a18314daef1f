"""The device's key: where it may lie, and that it never shows."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import keyring
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.device.keys import GivenKey, KeyFile, KeyringKey, SecretKey
from chorister.errors import DecodeError, InvalidInput, KeyUnavailable
from tests.device.memory_keyring import MemoryKeyring

UseKeyring: TypeAlias = Callable[[MemoryKeyring], MemoryKeyring]


@pytest.fixture
def use_keyring(monkeypatch: pytest.MonkeyPatch) -> UseKeyring:
    def use(backend: MemoryKeyring) -> MemoryKeyring:
        monkeypatch.setattr(keyring, "get_keyring", lambda: backend)
        return backend

    return use


def test_a_key_never_prints_and_is_not_pickled() -> None:
    key = SecretKey(bytes(range(32)))
    for shown in (repr(key), str(key), f"{key}", repr(GivenKey(bytes(range(32))))):
        assert "0102" not in shown
        assert "\\x01" not in shown
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(key)
    with pytest.raises(TypeError):
        hash(key)


def test_keys_compare_by_their_bytes() -> None:
    assert SecretKey(bytes(32)) == SecretKey(bytes(32))
    assert SecretKey(bytes(32)) != SecretKey(bytes([1] * 32))
    assert SecretKey(bytes(32)) != bytes(32)


@pytest.mark.parametrize("length", [0, 16, 31, 33, 64])
def test_a_key_has_32_bytes(length: int) -> None:
    with pytest.raises(InvalidInput, match="32 bytes"):
        SecretKey(bytes(length))


def test_every_database_has_a_key_of_its_own() -> None:
    device = SecretKey(bytes(32))
    assert device.derive("events") != device.derive("ledger")
    assert device.derive("events") == SecretKey(bytes(32)).derive("events")
    # Pinned: whoever changes the derivation loses every store.
    assert device.derive("events").reveal().hex().startswith("578043be974aa8eb")


def test_a_key_file_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    source = KeyFile(tmp_path / "keys" / "device.key", store=tmp_path / "store")
    key = source.obtain(create=True)
    assert source.path.stat().st_mode & 0o777 == 0o600
    assert source.obtain(create=True) == key
    assert source.obtain(create=False) == key
    assert [path.name for path in source.path.parent.iterdir()] == ["device.key"]
    assert key.reveal().hex() not in repr(source)


def test_two_threads_that_create_a_key_file_at_once_get_one_key(tmp_path: Path) -> None:
    source = KeyFile(tmp_path / "device.key", store=tmp_path / "store")
    keys: list[SecretKey] = []
    threads = [
        threading.Thread(target=lambda: keys.append(source.obtain(create=True))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(key == keys[0] for key in keys)
    assert len(keys) == 8


@pytest.mark.parametrize("where", ["device.key", "below/device.key", "../store/device.key"])
def test_a_key_file_in_the_stores_folder_is_refused(where: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with pytest.raises(KeyUnavailable, match="store's folder"):
        KeyFile(store / where, store=store).obtain(create=True)


def test_a_link_into_the_stores_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "elsewhere").symlink_to(tmp_path / "store")
    with pytest.raises(KeyUnavailable, match="store's folder"):
        KeyFile(tmp_path / "elsewhere" / "key", store=tmp_path / "store").obtain(create=True)


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    source = KeyFile(tmp_path / "device.key", store=tmp_path / "store")
    source.obtain(create=True)
    source.path.chmod(0o640)
    with pytest.raises(KeyUnavailable, match="chmod 600"):
        source.obtain(create=False)


def test_a_missing_key_file_is_not_replaced_unasked(tmp_path: Path) -> None:
    source = KeyFile(tmp_path / "device.key", store=tmp_path / "store")
    with pytest.raises(KeyUnavailable, match="No such file"):
        source.obtain(create=False)
    assert not source.path.exists()


def test_a_folder_in_place_of_the_key_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "device.key").mkdir()
    with pytest.raises(KeyUnavailable):
        KeyFile(tmp_path / "device.key", store=tmp_path / "store").obtain(create=True)


@pytest.mark.parametrize("content", [b"", b"\xff" * 90, b"chorister-device-key-1:" + b"0" * 63])
def test_a_damaged_key_file_is_never_replaced_and_never_shown(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "device.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(KeyUnavailable, match="has no key") as caught:
        KeyFile(path, store=tmp_path / "store").obtain(create=True)
    assert "000" not in str(caught.value)
    assert path.read_bytes() == content


@given(st.text(max_size=120))
def test_any_text_is_a_key_in_its_one_spelling_or_a_typed_error(text: str) -> None:
    try:
        key = SecretKey.parse(text)
    except DecodeError:
        return
    assert key.text() == text


@given(st.binary(min_size=32, max_size=32))
def test_a_key_survives_its_text(material: bytes) -> None:
    assert SecretKey.parse(SecretKey(material).text()).reveal() == material


def test_a_keyring_keeps_the_key(use_keyring: UseKeyring) -> None:
    backend = use_keyring(MemoryKeyring())
    with pytest.raises(KeyUnavailable, match="device init"):
        KeyringKey("phone").obtain(create=False)
    key = KeyringKey("phone").obtain(create=True)
    assert KeyringKey("phone").obtain(create=False) == key
    assert list(backend.kept) == [("chorister", "phone")]


@pytest.mark.parametrize("priority", [-1, 0, 0.5])
def test_a_keyring_that_keeps_plain_text_or_nothing_is_refused(
    priority: float, use_keyring: UseKeyring
) -> None:
    backend = use_keyring(MemoryKeyring(priority=priority))
    with pytest.raises(KeyUnavailable, match="not safe"):
        KeyringKey("phone").obtain(create=True)
    assert not backend.kept


def test_a_keyring_that_forgets_is_noticed_before_a_store_is_lost(use_keyring: UseKeyring) -> None:
    use_keyring(MemoryKeyring(forgetful=True))
    with pytest.raises(KeyUnavailable, match="has no"):
        KeyringKey("phone").obtain(create=True)


def test_a_locked_keyring_says_so(use_keyring: UseKeyring) -> None:
    use_keyring(MemoryKeyring()).locked = True
    with pytest.raises(KeyUnavailable, match="unlock"):
        KeyringKey("phone").obtain(create=True)


def test_a_keyring_entry_that_is_no_key_is_refused(use_keyring: UseKeyring) -> None:
    backend = use_keyring(MemoryKeyring())
    backend.kept["chorister", "phone"] = "hunter2"
    with pytest.raises(KeyUnavailable) as caught:
        KeyringKey("phone").obtain(create=True)
    assert "hunter2" not in str(caught.value)
