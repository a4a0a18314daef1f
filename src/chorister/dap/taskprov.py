"""draft-ietf-ppm-dap-taskprov: a task is advertised with each request, its verify key derived."""

from __future__ import annotations

import base64
from typing import Final, Protocol

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from chorister.canonical import sha256
from chorister.dap.draft import TASK_ID_BYTES, TASKPROV_HEADER
from chorister.dap.task import TaskConfiguration
from chorister.errors import DecodeError, InvalidInput

__all__ = ["VERIFY_KEY_BYTES", "AdvertisedTask", "advertise", "advertised", "verify_key"]

VERIFY_KEY_BYTES: Final = 32
"""Both of the pre-shared secret, as taskprov demands, and of Prio3's verification key."""
_LONGEST: Final = 16_384
"""Of an advertisement that is read at all; two URLs and a VDAF need a tenth of it."""
_VERIFY_KEY_SALT: Final = sha256(b"dap-taskprov")


class AdvertisedTask(Protocol):
    """A task as requests need it: `dap.task.Task`, or whatever an aggregator knows of one."""

    @property
    def task_id(self) -> bytes:
        """Its 32 bytes."""
        ...

    @property
    def configuration(self) -> TaskConfiguration:
        """What the id is the hash of."""
        ...


def advertise(configuration: bytes) -> dict[str, str]:
    """The header field that advertises an encoded `TaskConfiguration`: an RFC 9651 byte sequence.

    Base64 between colons: a device writes it without a library that servers need to read it.
    """
    return {TASKPROV_HEADER: f":{base64.b64encode(configuration).decode('ascii')}:"}


def advertised(value: str | None) -> TaskConfiguration | None:
    """What a `DAP-Taskprov` field says; None for one that is absent or must be ignored."""
    # Anybody may send anything, and the parser takes its time over long text that is no bytes.
    if value is None or len(value) > _LONGEST or not value.lstrip(" ").startswith(":"):
        return None
    import http_sf  # of the `server` extra: no device gets here

    try:
        item = http_sf.parse(value.encode("latin-1"), tltype="item")
    except (http_sf.StructuredFieldError, UnicodeEncodeError):
        return None
    # An item and its parameters, which don't count.
    sequence = item[0] if isinstance(item, tuple) else None
    if not isinstance(sequence, bytes):
        return None
    try:
        return TaskConfiguration.decode(sequence)
    except DecodeError:
        return None


def verify_key(verify_key_init: bytes, task_id: bytes) -> bytes:
    """The VDAF verification key of a task, from the secret that the two aggregators share."""
    if len(verify_key_init) != VERIFY_KEY_BYTES:
        raise InvalidInput(
            f"verify_key_init has {VERIFY_KEY_BYTES} bytes, not {len(verify_key_init)}"
        )
    if len(task_id) != TASK_ID_BYTES:
        raise InvalidInput(f"a task id has {TASK_ID_BYTES} bytes, not {len(task_id)}")
    derivation = HKDF(SHA256(), VERIFY_KEY_BYTES, salt=_VERIFY_KEY_SALT, info=task_id)
    return derivation.derive(verify_key_init)
