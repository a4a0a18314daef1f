"""HPKE against the independent `pyhpke`, in both directions."""

from __future__ import annotations

import os

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given
from hypothesis import strategies as st
from pyhpke import AEADId, CipherSuite, KDFId, KEMId, KEMKey

from chorister._native import HPKEKeypair, hpke_seal
from chorister.errors import DecodeError, HPKEError, UnsupportedSuite
from tests.native.pair import opaque16, opaque32

PYHPKE = CipherSuite.new(KEMId.DHKEM_X25519_HKDF_SHA256, KDFId.HKDF_SHA256, AEADId.AES128_GCM)
KEYS = HPKEKeypair.generate(17)


def parts(ciphertext: bytes) -> tuple[int, bytes, bytes]:
    enc_end = 3 + int.from_bytes(ciphertext[1:3], "big")
    assert int.from_bytes(ciphertext[enc_end : enc_end + 4], "big") == len(ciphertext) - enc_end - 4
    return ciphertext[0], ciphertext[3:enc_end], ciphertext[enc_end + 4 :]


@given(st.binary(), st.binary(), st.binary())
def test_pyhpke_opens_what_we_seal(info: bytes, aad: bytes, plaintext: bytes) -> None:
    config_id, enc, payload = parts(hpke_seal(KEYS.config, info, aad, plaintext))
    assert config_id == 17
    private = KEMKey.from_pyca_cryptography_key(
        X25519PrivateKey.from_private_bytes(KEYS.private_key())
    )
    opened = PYHPKE.create_recipient_context(enc, private, info=info).open(payload, aad=aad)
    assert opened == plaintext


@given(st.binary(), st.binary(), st.binary())
def test_we_open_what_pyhpke_seals(info: bytes, aad: bytes, plaintext: bytes) -> None:
    public = KEMKey.from_pyca_cryptography_key(X25519PublicKey.from_public_bytes(KEYS.public_key))
    enc, context = PYHPKE.create_sender_context(public, info=info)
    ciphertext = b"\x11" + opaque16(enc) + opaque32(context.seal(plaintext, aad=aad))
    assert KEYS.open(ciphertext, info, aad) == plaintext


def test_vector_of_the_rfc_opens() -> None:
    """RFC 9180, appendix A.1.1: the first message."""
    keys = HPKEKeypair.from_bytes(
        1,
        bytes.fromhex("3948cfe0ad1ddb695d780e59077195da6c56506b027329794ab02bca80815c4d"),
        bytes.fromhex("4612c550263fc8ad58375df3f557aac531d26850903e55a9f23f21d8534e8ac8"),
    )
    enc = bytes.fromhex("37fda3567bdbd628e88668c3c8d7e97d1d1253b6d4ea6d44c150f741f1bf4431")
    payload = bytes.fromhex(
        "f938558b5d72f1a23810b4be2ab4f84331acc02fc97babc53a52ae8218a355a96d8770ac83d07bea87e13c512a"
    )
    opened = keys.open(
        b"\x01" + opaque16(enc) + opaque32(payload), b"Ode on a Grecian Urn", b"Count-0"
    )
    assert opened == b"Beauty is truth, truth beauty"


def test_processes_that_fork_never_share_an_ephemeral_key() -> None:
    """The library's generator lives in this process's memory: a copy of it must not repeat it."""
    before = hpke_seal(KEYS.config, b"", b"", b"")
    read, write = os.pipe()
    for _ in range(8):
        child = os.fork()
        if child == 0:
            os.write(write, parts(hpke_seal(KEYS.config, b"", b"", b""))[1])
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    os.close(write)
    sealed = [os.read(read, 32) for _ in range(8)]
    os.close(read)
    sealed += [parts(before)[1], parts(hpke_seal(KEYS.config, b"", b"", b""))[1]]
    assert len(set(sealed)) == 10


@given(st.data())
def test_altered_bytes_do_not_open(data: st.DataObject) -> None:
    ciphertext = bytearray(hpke_seal(KEYS.config, b"info", b"aad", b"a secret"))
    place = data.draw(st.integers(0, len(ciphertext) - 1))
    ciphertext[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises((HPKEError, DecodeError)):
        KEYS.open(bytes(ciphertext), b"info", b"aad")


def test_other_info_aad_or_key_does_not_open() -> None:
    ciphertext = hpke_seal(KEYS.config, b"info", b"aad", b"a secret")
    with pytest.raises(HPKEError, match="another key, or altered"):
        KEYS.open(ciphertext, b"other", b"aad")
    with pytest.raises(HPKEError, match="another key, or altered"):
        KEYS.open(ciphertext, b"info", b"other")
    with pytest.raises(HPKEError, match="another key, or altered"):
        HPKEKeypair.generate(17).open(ciphertext, b"info", b"aad")
    with pytest.raises(HPKEError, match="sealed to configuration 17, this key pair is 3"):
        HPKEKeypair.generate(3).open(ciphertext, b"info", b"aad")


@pytest.mark.parametrize(
    ("suite", "name"),
    [
        ("0010 0001 0001", r"DHKEM\(P-256\) / HKDF-SHA256 / AES-128-GCM"),
        ("0020 0002 0001", "X25519 / HKDF-SHA384 / AES-128-GCM"),
        ("0020 0001 0003", "X25519 / HKDF-SHA256 / ChaCha20Poly1305"),
        ("0099 0001 0001", "KEM 0x0099"),
    ],
)
def test_other_suites_are_refused_by_name(suite: str, name: str) -> None:
    config = b"\x05" + bytes.fromhex(suite) + opaque16(bytes(32))
    with pytest.raises(UnsupportedSuite, match=name):
        hpke_seal(config, b"", b"", b"")


def test_config_encodes_as_the_draft_says() -> None:
    assert KEYS.config == bytes.fromhex("11 0020 0001 0001 0020") + KEYS.public_key


def test_keys_survive_storage_and_do_not_print() -> None:
    again = HPKEKeypair.from_bytes(17, KEYS.public_key, KEYS.private_key())
    assert again.open(hpke_seal(KEYS.config, b"", b"", b"x"), b"", b"") == b"x"
    assert repr(KEYS) == "HPKEKeypair(config_id=17)"


@pytest.mark.parametrize("point", [bytes(32), b"\1" + bytes(31)])
def test_points_of_low_order_are_refused(point: bytes) -> None:
    """Sealing to them would give everybody the same shared secret."""
    config = b"\x05" + bytes.fromhex("0020 0001 0001") + opaque16(point)
    with pytest.raises(HPKEError, match="cannot seal"):
        hpke_seal(config, b"", b"", b"a secret")


def test_keys_that_are_no_pair_are_refused() -> None:
    other = HPKEKeypair.generate(1)
    with pytest.raises(HPKEError, match="does not belong"):
        HPKEKeypair.from_bytes(17, KEYS.public_key, other.private_key())
    with pytest.raises(HPKEError, match="32 bytes, got 31"):
        HPKEKeypair.from_bytes(17, bytes(31), KEYS.private_key())
