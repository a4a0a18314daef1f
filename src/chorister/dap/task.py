"""A recipe and a group's values -> one DAP task, the same on device, aggregators and analyst.

Every parameter that privacy rests on, the minimum cohort before all, is in the `TaskConfiguration`;
the task id is its hash (draft-ietf-ppm-dap-taskprov), and DAP-18 authenticates the configuration
with every report share. So a report made for 10,000 people can't be aggregated as one of 10.

One task, one bucket, one batch: `time_precision` is the length of the recipe's bucket,
`task_interval` is that bucket, and every report carries its number as timestamp.
`tests/vectors/tasks/*.json` pins the bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from chorister.canonical import dumps, sha256
from chorister.dap.codec import Reader, uint8, uint16, uint32, uint64, vector
from chorister.dap.draft import BatchMode, TaskExtensionType
from chorister.dap.vdaf import VDAF, Prio3MultihotCountVec, Prio3SumVec, decode_vdaf
from chorister.errors import InvalidInput
from chorister.policy import Policy
from chorister.recipe import Recipe, verify_size

__all__ = [
    "Group",
    "Interval",
    "Task",
    "TaskConfiguration",
    "collection_id",
    "task_configuration",
    "task_configurations",
    "task_id",
]

_TASK_INFO_VERSION: Final = b"\x01"
_TASK_ID_SALT: Final = sha256(b"dap-taskprov task id")


class Interval(NamedTuple):
    """In units of the task's time precision; the end lies outside."""

    start: int
    duration: int

    def encode(self) -> bytes:
        """struct { Time start; Duration duration; } Interval."""
        return uint64(self.start) + uint64(self.duration)

    @classmethod
    def read(cls, reader: Reader) -> Interval:
        """Read it as a part of a message."""
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
        """The VDAF, if it is one that Chorister runs."""
        return decode_vdaf(self.vdaf_type, self.vdaf_configuration)

    def encode(self) -> bytes:
        """The bytes that everybody must agree on."""
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
        """Parse bytes from outside; any two that decode to the same configuration are equal."""
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
                raise reader.error(f"batch_config is not empty, as {batch_mode.name} requires")
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
    """Extensions are mandatory to support: an unknown one, or one out of order, is refused."""
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
        raise InvalidInput(f"a URL is ASCII, unlike {url!r}") from None


def _text(reader: Reader, url: bytes) -> str:
    try:
        return url.decode("ascii")
    except UnicodeDecodeError:
        raise reader.error("a URL is not ASCII") from None


def task_id(configuration: TaskConfiguration) -> bytes:
    """draft-ietf-ppm-dap-taskprov, section "Deriving the DAP Task ID"."""
    return sha256(_TASK_ID_SALT + configuration.encode())


class Group(NamedTuple):
    """One part of the fleet: a value for each of the recipe's group fields, and an arm."""

    values: tuple[tuple[str, str], ...] = ()
    arm: str | None = None


class Task(NamedTuple):
    """One task of a recipe."""

    group: Group
    configuration: TaskConfiguration
    task_id: bytes


def collection_id(recipe: Recipe, group: Group) -> bytes:
    """What the paper calls a collection id: the analysis, the group's values and the arm."""
    value: dict[str, object] = {"analysis": recipe.analysis, "groups": dict(group.values)}
    if group.arm is not None:
        value["arm"] = group.arm
    return dumps(value)


def task_configuration(
    policy: Policy, recipe: Recipe, values: Mapping[str, str] | None = None, arm: str | None = None
) -> Task:
    """The task of one group and arm. Values are members of the policy's closed lists."""
    return _task(recipe, _group(policy, recipe, values or {}, arm))


def task_configurations(policy: Policy, recipe: Recipe) -> Iterator[Task]:
    """All tasks of a recipe under a policy: every combination of group values and arms.

    Raises `QueryRefused` before the first one where the policy permits fewer groups or bins: nobody
    can make an aggregator enumerate more than that.
    """
    verify_size(recipe, policy)
    return _all_tasks(policy, recipe)


def _all_tasks(policy: Policy, recipe: Recipe) -> Iterator[Task]:
    choices = [
        [(field, value) for value in policy.group_values(field)] for field in recipe.group_by
    ]
    arms: list[str | None] = [arm.name for arm in recipe.arms] or [None]
    for values in itertools.product(*choices):
        for arm in arms:
            yield _task(recipe, Group(values, arm))


def _group(policy: Policy, recipe: Recipe, values: Mapping[str, str], arm: str | None) -> Group:
    if set(values) != set(recipe.group_by):
        raise InvalidInput(
            f"the recipe groups by {list(recipe.group_by)}, values are given for {sorted(values)}"
        )
    for field, value in values.items():
        if value not in policy.group_values(field):
            raise InvalidInput(
                f"{field}: {value!r} is not in the closed list of policy {policy.name}"
            )
    names = [known.name for known in recipe.arms]
    if (arm is None) != (not names) or (arm is not None and arm not in names):
        raise InvalidInput(f"arm: {arm!r} is not among the recipe's arms {names}")
    return Group(tuple((field, values[field]) for field in recipe.group_by), arm)


def _task(recipe: Recipe, group: Group) -> Task:
    bucket = recipe.window.bucket
    vdaf = _vdaf(recipe)
    configuration = TaskConfiguration(
        task_info=_TASK_INFO_VERSION + recipe.digest + sha256(collection_id(recipe, group)),
        leader_aggregator_endpoint=recipe.aggregators.leader,
        helper_aggregator_endpoint=recipe.aggregators.helper,
        time_precision=bucket.length,
        min_batch_size=recipe.privacy.min_cohort,
        batch_mode=BatchMode.TIME_INTERVAL,
        vdaf_type=vdaf.TYPE,
        vdaf_configuration=vdaf.encode(),
        task_interval=Interval(bucket.number, 1),
    )
    return Task(group, configuration, task_id(configuration))


def _vdaf(recipe: Recipe) -> VDAF:
    length = recipe.encoding.size
    if recipe.privacy.report == "plain":
        return Prio3SumVec.plain(length)
    return Prio3MultihotCountVec.bounded(length, recipe.randomizer.max_weight)
