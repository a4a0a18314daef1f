"""Head stores: what comes back is what was saved, and everything else is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import keyring
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keyring.backends import fail, null

from chorister.device.keys import SecretKey
from chorister.device.ledger import Ledger
from chorister.device.ledger.head_store import FileHeadStore, HeadStore, KeyringHeadStore
from chorister.errors import HeadUnavailable
from tests.device.ledgers import KEY, SLOW, START, Place, policy
from tests.device.memory_keyring import MemoryKeyring


@pytest.fixture
def backend() -> Iterator[MemoryKeyring]:
    before = keyring.get_keyring()
    memory = MemoryKeyring()
    keyring.set_keyring(memory)
    yield memory
    keyring.set_keyring(before)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.make(tmp_path)


@pytest.fixture(params=["file", "keyring"])
def store(request: pytest.FixtureRequest, place: Place, backend: MemoryKeyring) -> HeadStore:
    return place.head() if request.param == "file" else KeyringHeadStore("test", key=KEY)


def test_what_is_saved_comes_back(store: HeadStore) -> None:
    assert store.load() is None
    for entry in (b"{}", b"second", b"x" * 100_000):
        store.save(entry)
        assert store.load() == entry
    assert store.kind in ("file", "keyring")


def test_nothing_of_it_can_be_read(place: Place, backend: MemoryKeyring) -> None:
    entry = b"keyboard.next-word " * 10
    place.head().save(entry)
    KeyringHeadStore("test", key=KEY).save(entry)
    assert b"keyboard" not in place.head_file.read_bytes()
    assert not any("keyboard" in text for text in backend.kept.values())
    assert place.head_file.stat().st_mode & 0o777 == 0o600


def test_another_key_does_not_open_it(place: Place) -> None:
    place.head().save(b"entry")
    other = FileHeadStore(place.head_file, key=SecretKey(bytes(32)), store=place.store)
    with pytest.raises(HeadUnavailable, match="does not open"):
        other.load()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_changed_byte_is_accepted(place: Place, data: st.DataObject) -> None:
    place.head().save(b"an entry of the ledger")
    sealed = bytearray(place.head_file.read_bytes())
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    place.head_file.write_bytes(sealed)
    with pytest.raises(HeadUnavailable):
        place.head().load()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([b"", b"chorister-head-1\n"]), st.binary(max_size=60))
def test_junk_is_refused(place: Place, magic: bytes, junk: bytes) -> None:
    place.head_file.write_bytes(magic + junk)
    with pytest.raises(HeadUnavailable):
        place.head().load()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=60))
def test_junk_in_a_keyring_is_refused(backend: MemoryKeyring, junk: str) -> None:
    backend.kept["chorister-head", "test"] = junk
    with pytest.raises(HeadUnavailable):
        KeyringHeadStore("test", key=KEY).load()


def test_a_locked_keyring(backend: MemoryKeyring) -> None:
    store = KeyringHeadStore("test", key=KEY)
    store.save(b"entry")
    backend.locked = True
    with pytest.raises(HeadUnavailable, match="unlock"):
        store.load()
    with pytest.raises(HeadUnavailable, match="unlock"):
        store.save(b"next")


def test_a_system_without_a_keyring(backend: MemoryKeyring) -> None:
    keyring.set_keyring(fail.Keyring())  # type: ignore[no-untyped-call]
    with pytest.raises(HeadUnavailable):
        KeyringHeadStore("test", key=KEY).load()


@pytest.mark.parametrize("priority", [-1, 0.5])
def test_a_keyring_that_keeps_plain_text_or_nothing_is_refused(
    backend: MemoryKeyring, monkeypatch: pytest.MonkeyPatch, priority: float
) -> None:
    store = KeyringHeadStore("test", key=KEY)
    monkeypatch.setattr(MemoryKeyring, "priority", priority)
    with pytest.raises(HeadUnavailable, match="in a file"):
        store.load()
    with pytest.raises(HeadUnavailable, match="in a file"):
        store.save(b"entry")
    assert not backend.kept
    keyring.set_keyring(null.Keyring())  # type: ignore[no-untyped-call]
    with pytest.raises(HeadUnavailable, match="in a file"):
        store.load()


@pytest.mark.parametrize("before", [False, True])
def test_a_keyring_that_forgets_ends_in_silence(
    place: Place, backend: MemoryKeyring, before: bool
) -> None:
    """Not in a ledger that restarts without end."""
    alone = Ledger(place.connect(), policy(), None, clock=SLOW)
    alone.settle(START)
    entries = alone.entries()
    store = KeyringHeadStore("test", key=KEY)
    if before:
        store.save(entries[0].canonical())
    backend.forgetful = True
    ledger = place.ledger(policy(), store)
    with pytest.raises(HeadUnavailable, match="does not keep"):
        ledger.settle(START + 1)
    assert ledger.entries() == entries


def test_a_file_that_forgets_is_noticed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.head().save(b"first")
    monkeypatch.setattr(FileHeadStore, "_write", lambda *_: None)
    with pytest.raises(HeadUnavailable, match="does not keep"):
        place.head().save(b"second")


def test_never_in_the_stores_folder(place: Place) -> None:
    inside = FileHeadStore(place.store / "head", key=KEY, store=place.store)
    with pytest.raises(HeadUnavailable, match="elsewhere"):
        inside.save(b"entry")
    with pytest.raises(HeadUnavailable, match="elsewhere"):
        inside.load()
    (place.elsewhere / "back").symlink_to(place.store)
    through_a_link = FileHeadStore(place.elsewhere / "back" / "head", key=KEY, store=place.store)
    with pytest.raises(HeadUnavailable, match="elsewhere"):
        through_a_link.load()


def test_a_missing_folder_is_no_missing_head(place: Place) -> None:
    place.elsewhere.rmdir()
    with pytest.raises(HeadUnavailable, match="is missing"):
        place.head().load()
    with pytest.raises(HeadUnavailable):
        place.head().save(b"entry")


def test_only_a_regular_file_is_a_head(place: Place) -> None:
    (place.elsewhere / "real").write_bytes(b"x")
    place.head_file.symlink_to(place.elsewhere / "real")
    with pytest.raises(HeadUnavailable):
        place.head().load()
    place.head_file.unlink()
    os.mkfifo(place.head_file)
    with pytest.raises(HeadUnavailable, match="not a regular file"):
        place.head().load()
    place.head_file.unlink()
    place.head_file.mkdir()
    with pytest.raises(HeadUnavailable):
        place.head().load()
    with pytest.raises(HeadUnavailable):
        place.head().save(b"entry")


def test_a_draft_left_by_a_crash_is_replaced(place: Place) -> None:
    place.head().save(b"first")
    (place.elsewhere / ".head.draft").write_bytes(b"half")
    assert place.head().load() == b"first"
    place.head().save(b"second")
    assert place.head().load() == b"second"
    assert [path.name for path in place.elsewhere.iterdir()] == ["head"]
