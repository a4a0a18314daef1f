"""Signed notes and checkpoints: a published note, round trips, and anything that is not one."""

from __future__ import annotations

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from chorister.errors import (
    DecodeError,
    InvalidInput,
    LogError,
    LogOutdated,
    LogSignatureInvalid,
)
from chorister.transparency.checkpoint import Checkpoint, ListProof, SignedCheckpoint
from chorister.transparency.entries import ListEntry
from chorister.transparency.note import Note, SignatureLine, key_name
from chorister.transparency.tree import Frontier, leaf_hash

# From the documentation of golang.org/x/mod/sumdb/note, the origin of the format.
PUBLISHED_KEY = base64.b64decode("ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW")[1:]
PUBLISHED_NOTE = (
    "If you think cryptography is the answer to your problem,\n"
    "then you don't know what your problem is.\n"
    "\n"
    "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6"
    "KE6RyyBwJnAM=\n"
).encode()

LOG = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
LEADER = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
HELPER = Ed25519PrivateKey.from_private_bytes(bytes(range(2, 34)))


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def a_checkpoint() -> Checkpoint:
    return Checkpoint(
        origin="registry.example/log",
        size=42,
        root=bytes(range(32)),
    )


def test_the_published_note_verifies() -> None:
    note = Note.parse(PUBLISHED_NOTE)
    assert note.check_signature("PeterNeumann", [PUBLISHED_KEY]) == PUBLISHED_KEY
    assert note.encode() == PUBLISHED_NOTE


def test_the_bytes_of_a_checkpoint() -> None:
    assert a_checkpoint().text == (
        "registry.example/log\n42\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n"
    )


def test_signatures_by_role() -> None:
    signed = a_checkpoint().sign(LOG)
    signed = signed.with_cosigner(a_checkpoint().cosign(name="leader", key=LEADER, time=7))
    note = SignedCheckpoint.parse(signed.encode()).note
    note.check_signature("registry.example/log", [public(LEADER), public(LOG)])
    assert note.check_cosignature("leader", [public(LEADER)]).time == 7
    with pytest.raises(LogSignatureInvalid, match="no cosignature of helper"):
        note.check_cosignature("helper", [public(HELPER)])
    with pytest.raises(LogSignatureInvalid, match="no cosignature of leader"):
        note.check_cosignature("leader", [public(HELPER)])


def test_a_log_signature_is_no_cosignature_and_the_other_way_round() -> None:
    """The same key, even the same name: what is signed and the key id both differ by role."""
    text, both = a_checkpoint().text, a_checkpoint().origin
    as_log = a_checkpoint().sign(LOG).note
    with pytest.raises(LogSignatureInvalid):
        as_log.check_cosignature(both, [public(LOG)])
    cosigned = a_checkpoint().cosign(name=both, key=LOG, time=7)
    as_cosigner = Note(text=text, signatures=(cosigned,))
    with pytest.raises(LogSignatureInvalid):
        as_cosigner.check_signature(both, [public(LOG)])
    # Even relabelled with the other role's key id.
    relabelled = SignatureLine(name=both, blob=as_log.signatures[0].blob[:4] + cosigned.blob[12:])
    with pytest.raises(LogSignatureInvalid):
        Note(text=text, signatures=(relabelled,)).check_signature(both, [public(LOG)])


@pytest.mark.parametrize("at", range(3))
def test_any_changed_line_breaks_both_signatures(at: int) -> None:
    signed = a_checkpoint().sign(LOG)
    line = a_checkpoint().cosign(name="leader", key=LEADER, time=7)
    lines = a_checkpoint().text.split("\n")
    lines[at] = lines[at].replace(lines[at][-2], "0" if lines[at][-2] != "0" else "1")
    note = Note(text="\n".join(lines), signatures=(*signed.note.signatures, line))
    with pytest.raises(LogSignatureInvalid):
        note.check_signature("registry.example/log", [public(LOG)])
    with pytest.raises(LogSignatureInvalid):
        note.check_cosignature("leader", [public(LEADER)])


def test_a_changed_cosigning_time_breaks_the_cosignature() -> None:
    line = a_checkpoint().cosign(name="leader", key=LEADER, time=7)
    blob = line.blob[:4] + (8).to_bytes(8) + line.blob[12:]
    note = Note(text=a_checkpoint().text, signatures=(SignatureLine(name="leader", blob=blob),))
    with pytest.raises(LogSignatureInvalid):
        note.check_cosignature("leader", [public(LEADER)])


def test_signatures_of_strangers_are_carried_and_not_believed() -> None:
    signed = a_checkpoint().sign(LOG)
    stranger = a_checkpoint().cosign(name="witness", key=HELPER, time=7)
    note = SignedCheckpoint.parse(signed.with_cosigner(stranger).encode()).note
    note.check_signature("registry.example/log", [public(LOG)])
    assert [line.name for line in note.signatures] == ["registry.example/log", "witness"]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("42\n", "042\n"),
        lambda text: text.replace("42\n", "-42\n"),
        lambda text: text.replace("42\n", "9999999999999999999\n"),
        lambda text: text + "time 1767225600\n",
        lambda text: text + "\n",
        lambda text: text.replace("Hh8=", "Hh9="),
        lambda text: text + "more 1\n",
        lambda text: text.replace("registry.example/log\n", ""),
        lambda text: text.replace("registry.example/log", "registry example/log"),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text[:-1],
        lambda text: text[:0],
    ],
)
def test_other_spellings_of_a_checkpoint_are_refused(change: object) -> None:
    assert callable(change)
    with pytest.raises(DecodeError):
        Checkpoint.parse(change(a_checkpoint().text))


def test_impossible_checkpoints_are_refused() -> None:
    for change in ({"size": -1}, {"size": 2**63}, {"root": b""}, {"origin": "a b"}):
        values = {"origin": "log", "size": 1, "root": bytes(32)} | change
        with pytest.raises(InvalidInput):
            Checkpoint(**values)  # type: ignore[arg-type]


def test_a_checkpoint_of_the_former_format_says_what_to_do() -> None:
    with pytest.raises(LogOutdated, match=r"earlier version.*upgrade-the-log\.md"):
        Checkpoint.parse(f"{a_checkpoint().text}time 1\nlist {'00' * 32}\n")


@pytest.mark.parametrize(
    "line",
    [
        "— zeuge.example/Prüfer AAAAAAA=",
        "— 証人 AAAAAAAA",
        "— registry.example/log AAAAAAAA",
        f"— w/x {base64.b64encode(bytes(2424)).decode()}",
        "— w AAAAAAAA\n— w AAAAAAAA",
    ],
)
def test_lines_by_unknown_keys_are_ignored_in_any_valid_form(line: str) -> None:
    data = a_checkpoint().sign(LOG).encode() + f"{line}\n".encode()
    note = Note.parse(data)
    note.check_signature("registry.example/log", [public(LOG)])
    assert note.encode() == data


@pytest.mark.parametrize(
    "line", ["— a+b AAAAAAA=", "— a\u00a0b AAAAAAA=", "— a AAAAA=", "- a AAAAAAA="]
)
def test_lines_that_are_not_valid_are_refused(line: str) -> None:
    with pytest.raises(DecodeError):
        Note.parse(a_checkpoint().sign(LOG).encode() + f"{line}\n".encode())


def test_a_known_key_s_lines_all_have_to_verify() -> None:
    signed = a_checkpoint().sign(LOG)
    good = signed.note.signatures[0]
    twice = Note(text=signed.note.text, signatures=(good, good))
    twice.check_signature("registry.example/log", [public(LOG)])
    forged = SignatureLine(name=good.name, blob=good.blob[:4] + bytes(64))
    for lines in ((good, forged), (forged, good)):
        with pytest.raises(LogSignatureInvalid):
            Note(text=signed.note.text, signatures=lines).check_signature(
                "registry.example/log", [public(LOG)]
            )


def test_the_latest_of_several_cosignatures_counts() -> None:
    lines = [a_checkpoint().cosign(name="w", key=LEADER, time=time) for time in (7, 9, 8)]
    note = Note(text=a_checkpoint().text, signatures=tuple(lines))
    assert note.check_cosignature("w", [public(LEADER)]).time == 9


def test_names_have_no_scheme() -> None:
    assert key_name("https://leader.example.org/dap/") == "leader.example.org/dap"
    assert key_name("http://127.0.0.1:8080/") == "127.0.0.1:8080"


# --- Proofs --------------------------------------------------------------------------------------


def a_proof() -> ListProof:
    entry = ListEntry(time=7, digest=bytes(32))
    before = Frontier().extend(bytes([number]) * 32 for number in range(11))
    root = before.extend([leaf_hash(entry.encode())]).root
    checkpoint = Checkpoint(origin="registry.example/log", size=12, root=root)
    return ListProof(entry=entry, index=11, path=before.next_path, signed=checkpoint.sign(LOG))


def test_the_lines_of_a_proof() -> None:
    proof = a_proof()
    lines = proof.encode().decode().split("\n")
    assert lines[0] == "c2sp.org/tlog-proof@v1"
    assert base64.b64decode(lines[1].removeprefix("extra ")) == proof.entry.encode()
    assert lines[2] == "index 11"
    assert lines[3 : 3 + len(proof.path)] == [base64.b64encode(x).decode() for x in proof.path]
    assert proof.encode().endswith(b"\n\n" + proof.signed.encode())
    assert len(proof.encode()) < 1000
    assert ListProof.parse(proof.encode()) == proof
    proof.check_last()


@given(st.data())
def test_damaged_proofs_never_change_their_meaning(data: st.DataObject) -> None:
    good = a_proof().encode()
    at = data.draw(st.integers(0, len(good) - 1))
    insert = data.draw(st.binary(max_size=2))
    damaged = good[:at] + insert + good[at + data.draw(st.integers(0, 2)) :]
    try:
        proof = ListProof.parse(damaged)
        assert proof.encode() == damaged
        proof.signed.check_log("registry.example/log", [public(LOG)])
        proof.check_last()
    except (DecodeError, LogError):
        return
    assert proof.entry == a_proof().entry


@given(st.binary(max_size=300))
def test_arbitrary_bytes_as_a_proof(data: bytes) -> None:
    for candidate in (data, b"c2sp.org/tlog-proof@v1\n" + data):
        with pytest.raises(DecodeError):
            ListProof.parse(candidate)


@given(st.binary(max_size=400))
def test_arbitrary_bytes_raise_only_decode_errors(data: bytes) -> None:
    for parse in (Note.parse, SignedCheckpoint.parse):
        try:
            value = parse(data)
        except DecodeError:
            continue
        assert value.encode() == data


@given(st.data())
def test_damaged_checkpoints_never_change_their_meaning(data: st.DataObject) -> None:
    """Flip, drop or insert a byte: refused, or the same checkpoint, or its signature fails."""
    good = a_checkpoint().sign(LOG).encode()
    at = data.draw(st.integers(0, len(good) - 1))
    insert = data.draw(st.binary(max_size=2))
    damaged = good[:at] + insert + good[at + data.draw(st.integers(0, 2)) :]
    try:
        signed = SignedCheckpoint.parse(damaged)
        assert signed.encode() == damaged
        signed.note.check_signature("registry.example/log", [public(LOG)])
    except (DecodeError, LogSignatureInvalid):
        return
    assert signed.checkpoint == a_checkpoint()


@given(
    st.builds(
        Checkpoint,
        origin=st.from_regex(r"[!-*,-~]{1,255}", fullmatch=True),
        size=st.integers(0, 2**63 - 1),
        root=st.binary(min_size=32, max_size=32),
    )
)
def test_checkpoints_round_trip(checkpoint: Checkpoint) -> None:
    assert Checkpoint.parse(checkpoint.text) == checkpoint
