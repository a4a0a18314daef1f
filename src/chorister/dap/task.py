"""A DAP task: derived from a recipe and a group, the same on device, aggregators and analyst.

Every parameter that privacy rests on, the minimum cohort above all, is in the `TaskConfiguration`.
The task id is its hash (draft-ietf-ppm-dap-taskprov), and DAP-18 authenticates the configuration
with every report share. So a report made for a cohort of 10,000 can't be aggregated in one of 10.

One task, one bucket, one batch: a task belongs to one window of the recipe. `time_precision` is the
length of the window's bucket, `task_interval` is that bucket, and every report carries its number
as the timestamp.
`tests/vectors/tasks/*.json` pins the bytes.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, Protocol, TypeAlias

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from chorister._native import Prio3, TaskBinding
from chorister.canonical import dumps, sha256
from chorister.codec import Reader, uint8, uint16, uint32, uint64, vector
from chorister.dap.draft import (
    TASK_ID_BYTES,
    TASKPROV_HEADER,
    VERSION_TAG,
    BatchMode,
    Role,
    TaskExtensionType,
    VDAFType,
    input_share_info,
)
from chorister.errors import DecodeError, InvalidInput
from chorister.policy import Policy
from chorister.recipe import Recipe, verify_size

VERIFY_KEY_BYTES: Final = 32
"""The length of the aggregators' shared secret, as taskprov demands, and of Prio3's verify key."""
_TASK_INFO_VERSION: Final = b"\x01"
_TASK_ID_SALT: Final = sha256(b"dap-taskprov task id")
_VERIFY_KEY_SALT: Final = sha256(b"dap-taskprov")
_MAX_ADVERTISEMENT_CHARACTERS: Final = 16_384
"""Longer advertisements are not read; two URLs and a VDAF need a tenth of it."""


# --- VDAFs: DAP's section "VDAF Configuration Encodings" ----------------------------------------


def optimal_chunk_length(measurement_length: int) -> int:
    """Return the chunk length with the shortest proof, computed as crate `prio` 0.18.1 does.

    It is part of the task's configuration, so device, aggregators and analyst must agree on it:
    this function and `prio::vdaf::prio3::optimal_chunk_length`, which the native module calls,
    return the same for every length. Of two choices with equally long proofs, the shorter chunk
    wins.
    """
    if measurement_length <= 1:
        return 1
    best, best_length = 0, 0
    for log2 in range((measurement_length + 1).bit_length() - 1, 0, -1):
        calls = 2**log2 - 1
        chunk = -(-measurement_length // calls)
        # In field elements: two wires per chunk element, and the gadget polynomial.
        proof = 2 * chunk + 2 * (2**log2 - 1)
        if not best or proof < best_length:
            best, best_length = chunk, proof
    return best


@dataclass(frozen=True, kw_only=True, slots=True)
class Prio3SumVec:
    """Sums of vectors whose entries are 0..max_measurement. Plain reports use it, with bits."""

    TYPE: ClassVar = VDAFType.PRIO3_SUM_VEC
    length: int
    max_measurement: int
    chunk_length: int

    @classmethod
    def plain(cls, length: int) -> Prio3SumVec:
        """Return the VDAF of plain reports: `length` elements of one bit."""
        return cls(length=length, max_measurement=1, chunk_length=optimal_chunk_length(length))

    def encode(self) -> bytes:
        return uint32(self.length) + uint64(self.max_measurement) + uint32(self.chunk_length)

    def native(self) -> Prio3:
        return Prio3.sum_vec(self.length, self.max_measurement, chunk_length=self.chunk_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prio3MultihotCountVec:
    """Sums of bit vectors with at most max_weight bits set. Bounded reports use it."""

    TYPE: ClassVar = VDAFType.PRIO3_MULTIHOT_COUNT_VEC
    length: int
    chunk_length: int
    max_weight: int

    @classmethod
    def bounded(cls, length: int, max_weight: int) -> Prio3MultihotCountVec:
        """Return the VDAF of bounded reports: the claimed weight's bits follow the vector's."""
        measured = length + max_weight.bit_length()
        return cls(
            length=length, chunk_length=optimal_chunk_length(measured), max_weight=max_weight
        )

    def encode(self) -> bytes:
        return uint32(self.length) + uint32(self.chunk_length) + uint64(self.max_weight)

    def native(self) -> Prio3:
        return Prio3.multihot_count_vec(
            self.length, self.max_weight, chunk_length=self.chunk_length
        )


VDAF: TypeAlias = Prio3SumVec | Prio3MultihotCountVec


def decode_vdaf(vdaf_type: int, configuration: bytes) -> VDAF:
    """Parse a task's VDAF; raise `DecodeError` for one that Chorister does not run."""
    with Reader(configuration, "vdaf_configuration") as reader:
        match vdaf_type:
            case VDAFType.PRIO3_SUM_VEC:
                return Prio3SumVec(
                    length=reader.uint32(),
                    max_measurement=reader.uint64(),
                    chunk_length=reader.uint32(),
                )
            case VDAFType.PRIO3_MULTIHOT_COUNT_VEC:
                return Prio3MultihotCountVec(
                    length=reader.uint32(),
                    chunk_length=reader.uint32(),
                    max_weight=reader.uint64(),
                )
        raise DecodeError(f"VDAF type {vdaf_type:#010x} is not one that Chorister runs")


# --- The configuration --------------------------------------------------------------------------


class Interval(NamedTuple):
    """A stretch of time in units of the task's time precision; the end lies outside."""

    start: int
    duration: int

    def encode(self) -> bytes:
        """struct { Time start; Duration duration; } Interval."""
        return uint64(self.start) + uint64(self.duration)

    @classmethod
    def read(cls, reader: Reader) -> Interval:
        return cls(reader.uint64(), reader.uint64())


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfiguration:
    """DAP's section "Task Configuration"; the time-interval and leader-selected modes."""

    task_info: bytes
    leader_aggregator_endpoint: str
    helper_aggregator_endpoint: str
    time_precision: int  # seconds
    min_batch_size: int
    batch_mode: BatchMode
    vdaf_type: int
    vdaf_configuration: bytes
    task_interval: Interval | None

    @property
    def vdaf(self) -> VDAF:
        """The VDAF; raises `DecodeError` for one that Chorister does not run."""
        return decode_vdaf(self.vdaf_type, self.vdaf_configuration)

    def encode(self) -> bytes:
        """Return the bytes that all parties must agree on."""
        extensions = b""
        if self.task_interval is not None:
            extensions = uint16(TaskExtensionType.TASK_INTERVAL)
            extensions += vector(self.task_interval.encode(), prefix=2)
        return b"".join(
            (
                vector(self.task_info, prefix=1, least=1),
                vector(_ascii(self.leader_aggregator_endpoint), prefix=2, least=1),
                vector(_ascii(self.helper_aggregator_endpoint), prefix=2, least=1),
                uint64(self.time_precision),
                uint64(self.min_batch_size),
                uint8(self.batch_mode),
                vector(b"", prefix=2),  # batch_config: empty in both modes
                uint32(self.vdaf_type),
                vector(self.vdaf_configuration, prefix=2),
                vector(extensions, prefix=2),
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> TaskConfiguration:
        """Parse bytes from outside. Each configuration has one encoding only."""
        with Reader(data, "TaskConfiguration") as reader:
            task_info = reader.vector(prefix=1, least=1)
            leader = _text(reader, reader.vector(prefix=2, least=1))
            helper = _text(reader, reader.vector(prefix=2, least=1))
            time_precision = reader.uint64()
            if not time_precision:
                raise reader.error("time_precision is 0")
            min_batch_size = reader.uint64()
            try:
                batch_mode = BatchMode(reader.uint8())
            except ValueError:
                raise reader.error("unknown batch mode") from None
            if reader.vector(prefix=2):
                raise reader.error(f"batch_config must be empty in the mode {batch_mode.name}")
            return cls(
                task_info=task_info,
                leader_aggregator_endpoint=leader,
                helper_aggregator_endpoint=helper,
                time_precision=time_precision,
                min_batch_size=min_batch_size,
                batch_mode=batch_mode,
                vdaf_type=reader.uint32(),
                vdaf_configuration=reader.vector(prefix=2),
                task_interval=_decode_extensions(reader.vector(prefix=2)),
            )


def _decode_extensions(data: bytes) -> Interval | None:
    """Extensions are mandatory to support, so unknown ones and wrong orders are refused."""
    if not data:
        return None
    with Reader(data, "TaskConfiguration.extensions") as reader:
        if (kind := reader.uint16()) != TaskExtensionType.TASK_INTERVAL:
            raise reader.error(f"unknown task extension {kind:#06x}")
        with Reader(reader.vector(prefix=2), "task_interval") as body:
            return Interval.read(body)


def _ascii(url: str) -> bytes:
    try:
        return url.encode("ascii")
    except UnicodeEncodeError:
        raise InvalidInput(f"a URL must be ASCII, not {url!r}") from None


def _text(reader: Reader, url: bytes) -> str:
    try:
        return url.decode("ascii")
    except UnicodeDecodeError:
        raise reader.error("a URL is not ASCII") from None


def task_id(configuration: TaskConfiguration) -> bytes:
    """Hash a configuration, as taskprov's section "Deriving the DAP Task ID" says."""
    return sha256(_TASK_ID_SALT + configuration.encode())


# --- From recipes to tasks ----------------------------------------------------------------------


class Group(NamedTuple):
    """One part of the fleet: a value for each of the recipe's group fields, and an arm."""

    values: tuple[tuple[str, str], ...] = ()
    arm: str | None = None


class Task(NamedTuple):
    """One task of a recipe."""

    group: Group
    configuration: TaskConfiguration
    task_id: bytes
    number: int = 0  # of the window


def collection_id(recipe: Recipe, group: Group) -> bytes:
    """Return the paper's collection id: the analysis, the group's values and the arm."""
    value: dict[str, object] = {"analysis": recipe.analysis, "groups": dict(group.values)}
    if group.arm is not None:
        value["arm"] = group.arm
    return dumps(value)


def task_configuration(
    policy: Policy,
    recipe: Recipe,
    values: Mapping[str, str] | None = None,
    arm: str | None = None,
    number: int = 0,
) -> Task:
    """Return the task of one window, group and arm. Values must be in the policy's closed lists."""
    return _task(recipe, _group(policy, recipe, values or {}, arm), number)


def task_configurations(
    policy: Policy, recipe: Recipe, numbers: Iterable[int] | None = None
) -> Iterator[Task]:
    """Iterate over the tasks of some windows, or of all: each combination of values and arms.

    Raises `QueryRefused` first if the recipe has more windows, groups or bins than the policy
    permits, so nobody can make an aggregator enumerate more than that.
    """
    verify_size(recipe, policy)
    return _all_tasks(policy, recipe, range(recipe.window_count) if numbers is None else numbers)


def _all_tasks(policy: Policy, recipe: Recipe, numbers: Iterable[int]) -> Iterator[Task]:
    choices = [
        [(field, value) for value in policy.group_values(field)] for field in recipe.group_by
    ]
    arms: list[str | None] = [arm.name for arm in recipe.arms] or [None]
    for number in numbers:
        for values in itertools.product(*choices):
            for arm in arms:
                yield _task(recipe, Group(values, arm), number)


def _group(policy: Policy, recipe: Recipe, values: Mapping[str, str], arm: str | None) -> Group:
    if set(values) != set(recipe.group_by):
        raise InvalidInput(
            f"the recipe groups by {list(recipe.group_by)}, but the values are for {sorted(values)}"
        )
    for field, value in values.items():
        if value not in policy.group_values(field):
            raise InvalidInput(
                f"{field}: {value!r} is not in the closed list of policy {policy.name}"
            )
    names = [known.name for known in recipe.arms]
    if (arm is None) != (not names) or (arm is not None and arm not in names):
        raise InvalidInput(f"arm: {arm!r} is not one of the recipe's arms {names}")
    return Group(tuple((field, values[field]) for field in recipe.group_by), arm)


def _task(recipe: Recipe, group: Group, number: int) -> Task:
    bucket = recipe.window_at(number).bucket
    vdaf = _vdaf(recipe)
    window = b"" if recipe.series is None else uint32(number)
    collection = sha256(collection_id(recipe, group))
    configuration = TaskConfiguration(
        task_info=_TASK_INFO_VERSION + recipe.digest + window + collection,
        leader_aggregator_endpoint=recipe.aggregators.leader,
        helper_aggregator_endpoint=recipe.aggregators.helper,
        time_precision=bucket.length,
        min_batch_size=recipe.privacy.min_cohort,
        batch_mode=BatchMode.TIME_INTERVAL,
        vdaf_type=vdaf.TYPE,
        vdaf_configuration=vdaf.encode(),
        task_interval=Interval(bucket.number, 1),
    )
    return Task(group, configuration, task_id(configuration), number)


def _vdaf(recipe: Recipe) -> VDAF:
    length = recipe.encoding.size
    if recipe.privacy.report == "plain":
        return Prio3SumVec.plain(length)
    return Prio3MultihotCountVec.bounded(length, recipe.randomizer.max_weight)


# --- Advertising a task, and its keys: draft-ietf-ppm-dap-taskprov ------------------------------


class AdvertisedTask(Protocol):
    """What requests need to know of a task: a `Task`, or an aggregator's record of one."""

    @property
    def task_id(self) -> bytes: ...

    @property
    def configuration(self) -> TaskConfiguration: ...


def advertise(configuration: bytes) -> dict[str, str]:
    """Return the header field that advertises an encoded `TaskConfiguration`.

    It is an RFC 9651 byte sequence: base64 between colons. A device needs no library to write it;
    servers use one to read it.
    """
    return {TASKPROV_HEADER: f":{base64.b64encode(configuration).decode('ascii')}:"}


def advertised(value: str | None) -> TaskConfiguration | None:
    """Parse a `DAP-Taskprov` field; None if it is absent or must be ignored."""
    # Anyone may send anything, and the parser is slow on long text that is not a byte sequence.
    if (
        value is None
        or len(value) > _MAX_ADVERTISEMENT_CHARACTERS
        or not value.lstrip(" ").startswith(":")
    ):
        return None
    import http_sf  # from the `server` extra: devices never get here

    try:
        item = http_sf.parse(value.encode("latin-1"), tltype="item")
    except (http_sf.StructuredFieldError, UnicodeEncodeError):
        return None
    # An item with its parameters, which don't matter.
    sequence = item[0] if isinstance(item, tuple) else None
    if not isinstance(sequence, bytes):
        return None
    try:
        return TaskConfiguration.decode(sequence)
    except DecodeError:
        return None


def verify_key(verify_key_init: bytes, task_id: bytes) -> bytes:
    """Derive a task's VDAF verification key from the secret that the two aggregators share."""
    if len(verify_key_init) != VERIFY_KEY_BYTES:
        raise InvalidInput(
            f"verify_key_init must have {VERIFY_KEY_BYTES} bytes, not {len(verify_key_init)}"
        )
    if len(task_id) != TASK_ID_BYTES:
        raise InvalidInput(f"a task id must have {TASK_ID_BYTES} bytes, not {len(task_id)}")
    derivation = HKDF(SHA256(), VERIFY_KEY_BYTES, salt=_VERIFY_KEY_SALT, info=task_id)
    return derivation.derive(verify_key_init)


def task_binding(task: TaskConfiguration) -> TaskBinding:
    """Return what every share of every report is bound to, for the native module.

    The VDAF's application context is the version tag and the task id; the associated data of a
    sealed share begins with the task id and the whole configuration (section "Client Behavior").
    """
    identifier = task_id(task)
    return TaskBinding(
        task.vdaf.native(),
        context=VERSION_TAG + identifier,
        aad=identifier + task.encode(),
        leader_info=input_share_info(Role.LEADER),
        helper_info=input_share_info(Role.HELPER),
    )
