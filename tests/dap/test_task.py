"""Tasks, to the byte: configurations, vectors, advertisements and keys."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from chorister._native import Prio3
from chorister.canonical import decimal_text
from chorister.dap.draft import BatchMode, VDAFType
from chorister.dap.task import (
    Group,
    Interval,
    Prio3MultihotCountVec,
    Prio3SumVec,
    Task,
    TaskConfiguration,
    advertise,
    advertised,
    collection_id,
    decode_vdaf,
    optimal_chunk_length,
    task_configuration,
    task_configurations,
    task_id,
    verify_key,
)
from chorister.errors import DecodeError, InvalidInput, QueryRefused, RecipeError
from chorister.recipe import Recipe, check
from tests.keyboard import POLICY, RECIPE, analysis_at, changed, recipe_at, recipe_tree

VECTORS = sorted((Path(__file__).parent.parent / "vectors" / "tasks").glob("*.json"))
ARMS = [{"name": "control", "weight": 1}, {"name": "treated", "weight": 1}]


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_vectors(path: Path) -> None:
    vector: dict[str, Any] = json.loads(path.read_text())
    recipe = Recipe.draft(json.dumps(vector["recipe"]).encode())
    assert recipe.canonical().decode() == vector["recipe_canonical"]
    assert recipe.digest.hex() == vector["recipe_sha256"]
    task = task_configuration(
        POLICY, recipe, vector["group_values"], vector.get("arm"), vector.get("window", 0)
    )
    assert collection_id(recipe, task.group).decode() == vector["collection_id"]
    assert task.configuration.task_info.hex() == vector["task_info"]
    assert task.configuration.encode().hex() == vector["task_configuration"]
    assert task.task_id.hex() == vector["task_id"]


def test_there_are_vectors() -> None:
    assert len(VECTORS) >= 4


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_vectors_without_our_code(path: Path) -> None:
    """The same bytes, put together by hand from the vector's parts."""
    vector: dict[str, Any] = json.loads(path.read_text())
    recipe = vector["recipe"]
    canonical = json.dumps(recipe, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    identity: dict[str, Any] = {"analysis": recipe["analysis"], "groups": vector["group_values"]}
    if "arm" in vector:
        identity["arm"] = vector["arm"]
    collection = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    opens, ends = recipe["window"]["opens"], recipe["window"]["ends"]
    info = b"\x01" + hashlib.sha256(canonical.encode()).digest()
    if "window" in vector:
        info += vector["window"].to_bytes(4, "big")
        opens += vector["window"] * recipe["series"]["every"]
        ends += vector["window"] * recipe["series"]["every"]
    info += hashlib.sha256(collection.encode()).digest()
    precision = ends - opens
    while opens // precision != (ends - 1) // precision:
        precision += 1
    leader = recipe["aggregators"]["leader"].encode()
    helper = recipe["aggregators"]["helper"].encode()
    vdaf = bytes.fromhex(vector["vdaf_configuration"])
    data = (
        bytes([len(info)]) + info
        + len(leader).to_bytes(2, "big") + leader
        + len(helper).to_bytes(2, "big") + helper
        + precision.to_bytes(8, "big")
        + recipe["privacy"]["min_cohort"].to_bytes(8, "big")
        + b"\x01" + b"\x00\x00"
        + (5 if recipe["privacy"]["report"] == "bounded" else 3).to_bytes(4, "big")
        + len(vdaf).to_bytes(2, "big") + vdaf
        + b"\x00\x14" + b"\x00\x01" + b"\x00\x10"
        + (opens // precision).to_bytes(8, "big") + (1).to_bytes(8, "big")
    )  # fmt: skip
    assert data.hex() == vector["task_configuration"]
    salt = hashlib.sha256(b"dap-taskprov task id").digest()
    assert hashlib.sha256(salt + data).hexdigest() == vector["task_id"]


# The DAP-Taskprov header of draft-ietf-ppm-dap-taskprov, section "DAP-Taskprov Structured Header".
HEADER = (
    "BHRlc3QAG2h0dHBzOi8vbGVhZGVyLmV4YW1wbGUuY29tLwAbaHR0cHM6Ly9oZWxwZXIuZXhhbXBsZS5jb20vAAAAAAAA"
    "ADwAAAAAAAAACgEAAAAAAAEAAAAUAAEAEAAAAAAAAAA8AAAAAAAAAGQ="
)


def test_the_example_of_taskprov() -> None:
    data = base64.b64decode(HEADER)
    configuration = TaskConfiguration.decode(data)
    assert configuration == TaskConfiguration(
        task_info=b"test",
        leader_aggregator_endpoint="https://leader.example.com/",
        helper_aggregator_endpoint="https://helper.example.com/",
        time_precision=60,
        min_batch_size=10,
        batch_mode=BatchMode.TIME_INTERVAL,
        vdaf_type=1,
        vdaf_configuration=b"",
        task_interval=Interval(60, 100),
    )
    assert configuration.encode() == data
    with pytest.raises(DecodeError, match="0x00000001"):
        _ = configuration.vdaf  # Prio3Count, which Chorister does not run


def test_one_task_one_bucket_one_batch() -> None:
    task = task_configuration(POLICY, RECIPE, {"user.locale": "en_US"})
    configuration = task.configuration
    assert (
        configuration.task_info
        == b"\x01"
        + RECIPE.digest
        + hashlib.sha256(
            b'{"analysis":"keyboard.next-word","groups":{"user.locale":"en_US"}}'
        ).digest()
    )
    assert configuration.min_batch_size == RECIPE.privacy.min_cohort == 1000
    assert configuration.batch_mode == BatchMode.TIME_INTERVAL
    assert configuration.task_interval is not None
    start = configuration.task_interval.start * configuration.time_precision
    assert configuration.task_interval.duration == 1
    assert start <= RECIPE.window.opens
    assert RECIPE.window.ends <= start + configuration.time_precision
    assert configuration.vdaf == Prio3MultihotCountVec(length=272, chunk_length=19, max_weight=98)


def test_plain_reports() -> None:
    recipe = recipe_at({"privacy/report": "plain", "group_by": []})
    configuration = task_configuration(POLICY, recipe).configuration
    assert configuration.vdaf_type == VDAFType.PRIO3_SUM_VEC
    assert configuration.vdaf == Prio3SumVec(length=272, max_measurement=1, chunk_length=19)
    assert configuration.vdaf_configuration.hex() == "00000110" + "0000000000000001" + "00000013"


def test_all_tasks_of_a_recipe() -> None:
    tasks = list(task_configurations(POLICY, RECIPE))
    assert [dict(task.group.values)["user.locale"] for task in tasks] == [
        "de_DE", "en_GB", "en_US", "fr_FR", "other"
    ]  # fmt: skip
    assert tasks[2] == task_configuration(POLICY, RECIPE, {"user.locale": "en_US"})
    experiment = recipe_at({"arms": ARMS})
    both = list(task_configurations(POLICY, experiment))
    assert len(both) == 10
    assert both[0].group == Group((("user.locale", "de_DE"),), "control")
    assert len({task.task_id for task in [*tasks, *both]}) == 15
    assert len(both) == POLICY.cells(experiment.group_by, len(experiment.arms))
    ungrouped = list(task_configurations(POLICY, recipe_at({"group_by": []})))
    assert [task.group for task in ungrouped] == [Group((), None)]


@pytest.mark.parametrize(
    ("values", "arm", "words"),
    [
        ({"user.locale": "xx_XX"}, None, "user.locale: 'xx_XX' is not in the closed list"),
        ({}, None, "groups by"),
        ({"user.locale": "en_US", "user.age": "7"}, None, "groups by"),
        ({"user.locale": "en_US"}, "control", "arm: 'control'"),
    ],
)
def test_values_outside_their_lists(values: dict[str, str], arm: str | None, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        task_configuration(POLICY, RECIPE, values, arm)
    with pytest.raises(InvalidInput, match="arm: None"):
        task_configuration(POLICY, recipe_at({"arms": ARMS}), {"user.locale": "en_US"})


@pytest.mark.parametrize(
    "changes",
    [
        {"privacy/min_cohort": 1001},
        {"privacy/epsilon": "0.25"},
        {"privacy/crowd": "honest", "privacy/honest_fraction": "9/10"},
        {"query": "SELECT 1"},
        {"window/ends": RECIPE.window.ends + 1},
        {"collector": "ab" * 32},
        {"study": "another"},
    ],
)
def test_any_change_of_a_recipe_is_another_task(changes: dict[str, Any]) -> None:
    values = {"user.locale": "en_US"}
    task = task_configuration(POLICY, RECIPE, values)
    assert task_configuration(POLICY, recipe_at(changes), values).task_id != task.task_id


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"analysis": "keyboard.unknown"}, "analysis"),
        ({"group_by": ["user.age"]}, "groups"),
        ({"arms": [{"name": f"a{i}", "weight": 1} for i in range(1000)]}, "cells"),
        ({"features/1/vocabulary": [f"w{i}" for i in range(5000)]}, "bins"),
    ],
)
def test_nobody_is_made_to_enumerate_too_many_tasks(changes: dict[str, Any], check: str) -> None:
    with pytest.raises(QueryRefused) as caught:
        task_configurations(POLICY, recipe_at(changes))
    assert caught.value.check == check


URLS = st.text(st.characters(codec="ascii"), min_size=1, max_size=20)
CONFIGURATIONS = st.builds(
    TaskConfiguration,
    task_info=st.binary(min_size=1, max_size=255),
    leader_aggregator_endpoint=URLS,
    helper_aggregator_endpoint=URLS,
    time_precision=st.integers(1, 2**64 - 1),
    min_batch_size=st.integers(0, 2**64 - 1),
    batch_mode=st.sampled_from(BatchMode),
    vdaf_type=st.integers(0, 2**32 - 1),
    vdaf_configuration=st.binary(max_size=40),
    task_interval=st.none()
    | st.builds(Interval, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
)


@given(CONFIGURATIONS)
def test_configurations_round_trip(configuration: TaskConfiguration) -> None:
    data = configuration.encode()
    assert TaskConfiguration.decode(data) == configuration
    assert len(task_id(configuration)) == 32
    for wrong in (data[:-1], data + b"\x00"):
        with pytest.raises(DecodeError):
            TaskConfiguration.decode(wrong)


ENCODED = task_configuration(POLICY, RECIPE, {"user.locale": "en_US"}).configuration.encode()


@settings(max_examples=300)
@given(st.integers(0, len(ENCODED) - 1), st.integers(0, len(ENCODED)), st.binary(max_size=6))
def test_fuzzed_configurations(start: int, end: int, junk: bytes) -> None:
    data = ENCODED[:start] + junk + ENCODED[end:]
    try:
        configuration = TaskConfiguration.decode(data)
    except DecodeError:
        return
    assert configuration.encode() == data
    with contextlib.suppress(DecodeError):
        _ = configuration.vdaf


@given(st.sampled_from([*VDAFType, 0, 1, 2**32 - 1]), st.binary(max_size=20))
def test_fuzzed_vdaf_configurations(kind: int, data: bytes) -> None:
    try:
        vdaf = decode_vdaf(kind, data)
    except DecodeError:
        return
    assert (vdaf.TYPE, vdaf.encode()) == (kind, data)


@given(st.binary(max_size=100))
def test_junk_is_no_configuration(data: bytes) -> None:
    with pytest.raises(DecodeError):
        TaskConfiguration.decode(data)


@pytest.mark.parametrize(
    ("extensions", "words"),
    [
        ("0002" + "0000", "unknown task extension 0x0002"),
        ("0001" + "0010" + "00" * 16 + "0001" + "0010" + "00" * 16, "too many"),
        ("0001" + "000f" + "00" * 15, "bytes expected"),
        ("0001" + "0011" + "00" * 17, "too many"),
        ("00", "bytes expected"),
    ],
)
def test_other_extensions(extensions: str, words: str) -> None:
    body = ENCODED[: -2 - 20]
    data = bytes.fromhex(extensions)
    with pytest.raises(DecodeError, match=words):
        TaskConfiguration.decode(body + len(data).to_bytes(2, "big") + data)


def test_what_can_not_be_encoded() -> None:
    task: Task = task_configuration(POLICY, RECIPE, {"user.locale": "en_US"})
    fields = {name: getattr(task.configuration, name) for name in TaskConfiguration.__slots__}
    for name, value in (
        ("task_info", b""),
        ("task_info", bytes(256)),
        ("leader_aggregator_endpoint", "https://é/"),
        ("helper_aggregator_endpoint", ""),
        ("time_precision", 2**64),
        ("min_batch_size", -1),
    ):
        with pytest.raises(InvalidInput):
            TaskConfiguration(**{**fields, name: value}).encode()


@pytest.mark.parametrize(
    ("length", "chunk"),
    [(0, 1), (1, 1), (2, 2), (3, 1), (18, 6), (19, 3), (40, 6), (10_000, 79), (100_000, 393)],
)
def test_chunk_lengths_of_the_crate(length: int, chunk: int) -> None:
    """The values in crate prio's own test of optimal_chunk_length."""
    assert optimal_chunk_length(length) == chunk


@settings(max_examples=50)
@given(st.integers(1, 20_000), st.data())
def test_chunk_lengths_of_the_native_module(length: int, data: st.DataObject) -> None:
    weight = data.draw(st.integers(1, length))
    bounded, plain = Prio3MultihotCountVec.bounded(length, weight), Prio3SumVec.plain(length)
    assert Prio3.multihot_count_vec(length, weight).chunk_length == bounded.chunk_length
    assert Prio3.sum_vec(length, 1).chunk_length == plain.chunk_length
    for vdaf in (bounded, plain):
        assert decode_vdaf(vdaf.TYPE, vdaf.encode()) == vdaf


def test_code_points_of_the_native_module() -> None:
    assert Prio3.multihot_count_vec(5, 2).algorithm_id == VDAFType.PRIO3_MULTIHOT_COUNT_VEC
    assert Prio3.sum_vec(5, 1).algorithm_id == VDAFType.PRIO3_SUM_VEC


def decimals(low: str, high: str) -> st.SearchStrategy[str]:
    """Canonical decimals with as many digits as the wire takes."""
    return st.builds(
        decimal_text, st.decimals(low, high, places=30) | st.decimals(low, high, places=3)
    )


LENIENT = analysis_at(
    {
        "mechanisms": ["asymmetric", "symmetric"],
        "crowds": ["noised", "honest"],
        "honest_fraction": "1/1",
        "report_kinds": ["bounded", "plain"],
        "cohort/smallest": 2,
        "cohort/largest": 20_000,
        "max_bins": 1000,
    }
)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "privacy/local_epsilon": decimals("0.001", "20"),
        "privacy/epsilon": decimals("1e-30", "100"),
        "privacy/delta": decimals("1e-30", "0.1"),
        "privacy/mechanism": st.sampled_from(["asymmetric", "symmetric"]),
        "privacy/report": st.sampled_from(["bounded", "plain"]),
        "privacy/crowd": st.sampled_from(["noised", "honest"]),
        "privacy/honest_fraction": st.sampled_from(["1/1", "9/10", "1/999999999"]),
        "privacy/min_cohort": st.integers(2, 30_000) | st.just(10**9),
        "participation/probability": decimals("1e-30", "1"),
        "window/opens": st.integers(0, 1_794_787_200),
        "window/ends": st.integers(1_795_000_000, 2**40),
        "features/0/edges": st.lists(decimals("-9e19", "9e19"), min_size=2, max_size=9),
        "features/1/vocabulary": st.lists(st.text(min_size=1, max_size=3), max_size=9),
        "analysis": st.just("another"),
        "group_by": st.lists(st.sampled_from(["user.locale", "user.age", "no.where"]), max_size=2),
        "query": st.text(min_size=1, max_size=9),
        "arms": st.just(ARMS),
    },
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.filter_too_much])
@given(CHANGES, st.integers(0, 2**41))
def test_whatever_parses_can_be_judged_and_mapped(changes: dict[str, Any], now: int) -> None:
    """A logged recipe that some check could not finish would stop every cosigner."""
    try:
        recipe = Recipe.draft(json.dumps(changed(recipe_tree(), changes)).encode())
    except RecipeError:
        reject()
    assert check(recipe, LENIENT, now=now)
    with contextlib.suppress(QueryRefused):
        for task in task_configurations(LENIENT, recipe):
            assert TaskConfiguration.decode(task.configuration.encode()) == task.configuration


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
        "from chorister.dap.upload_client import upload;"
        "import chorister.device"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert "http_sf" in sys.modules  # the tests above did need it
