"""The advertisement both ways, and the key that two aggregators derive alone."""

from __future__ import annotations

import base64
import hashlib
import hmac
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.dap.task import TaskConfiguration, task_configuration, task_id
from chorister.dap.taskprov import advertise, advertised, verify_key
from chorister.errors import InvalidInput
from tests.dap.test_task import HEADER
from tests.keyboard import POLICY, RECIPE

EXAMPLE = f":{HEADER}:"
CONFIGURATION = TaskConfiguration.decode(base64.b64decode(HEADER))


def test_the_draft_s_example_both_ways() -> None:
    assert advertised(EXAMPLE) == CONFIGURATION
    assert advertise(CONFIGURATION.encode()) == {"DAP-Taskprov": EXAMPLE}


def test_our_own_task_both_ways() -> None:
    task = task_configuration(POLICY, RECIPE, {"user.locale": "de_DE"})
    (value,) = advertise(task.configuration.encode()).values()
    found = advertised(value)
    assert found == task.configuration
    assert found is not None
    assert task_id(found) == task.task_id


@pytest.mark.parametrize("value", [f"{EXAMPLE};a=1;b", f"  {EXAMPLE} "])
def test_parameters_and_spaces_don_t_count(value: str) -> None:
    assert advertised(value) == CONFIGURATION


IGNORED = [
    None,
    "",
    HEADER,  # a token, or nothing at all
    f'"{HEADER}"',  # a string
    "17",
    "1.5",
    "?1",
    "@1659578233",
    '%"f%c3%bc"',
    f"{EXAMPLE}, {EXAMPLE}",  # a list, as two fields are
    f"({EXAMPLE})",
    f"a={EXAMPLE}",
    ":AAAA:",  # a byte sequence, but no task
    "::",
    EXAMPLE[:-1],
    f":{HEADER[4:]}:",
    f":{base64.b64encode(CONFIGURATION.encode() + bytes(1)).decode()}:",
    ":Ж:",
    ":ü:",
    ":!:",
]


@pytest.mark.parametrize("value", IGNORED)
def test_what_is_ignored(value: str | None) -> None:
    assert advertised(value) is None


@given(
    st.one_of(
        st.text(max_size=60),
        st.binary(max_size=60).map(lambda data: f":{base64.b64encode(data).decode()}:"),
        st.text(alphabet=':=;,"?@%()AB+/ \t', max_size=30),
    )
)
def test_any_field_is_a_task_or_nothing(value: str) -> None:
    found = advertised(value)
    if found is not None:
        assert advertised(advertise(found.encode())["DAP-Taskprov"]) == found


def test_the_key_is_the_draft_s_hkdf() -> None:
    """HKDF-Extract and HKDF-Expand (RFC 5869) spelled out; 32 bytes are one block."""
    secret, task = bytes(range(32)), bytes(range(32, 64))
    extracted = hmac.digest(hashlib.sha256(b"dap-taskprov").digest(), secret, "sha256")
    assert verify_key(secret, task) == hmac.digest(extracted, task + b"\x01", "sha256")


def test_the_key_depends_on_both() -> None:
    keys = {verify_key(bytes([a]) * 32, bytes([b]) * 32) for a in range(2) for b in range(2)}
    assert len(keys) == 4


@pytest.mark.parametrize(("secret", "task"), [(31, 32), (33, 32), (0, 32), (32, 16), (32, 0)])
def test_lengths_are_fixed(secret: int, task: int) -> None:
    with pytest.raises(InvalidInput):
        verify_key(bytes(secret), bytes(task))


def test_a_device_needs_no_library_of_servers() -> None:
    code = (
        "import sys; sys.modules['http_sf'] = None;"
        "from chorister.dap.client import upload;"
        "import chorister.device"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert "http_sf" in sys.modules  # the tests above did need it
