"""The tables of an aggregator: one database per role, the same tables for both.

Every primary key of per-task data begins with the task's id, so that the tables can be partitioned
by it. Immutable data (`tasks`) is kept apart from mutable data (`batches`). Rows are added to
`tasks` and `batches` only when a recipe is accepted from the log, so an invented task leaves no
trace.

Sealed reports are large and short-lived. They are stored in `report_blobs`, in order of arrival and
many per row; what changes about them is in `segments`, because SQLite rewrites a whole row when one
of its columns changes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    text,
)

metadata: Final = MetaData()


class BatchState(IntEnum):
    """The state of a batch; it only ever moves forward."""

    OPEN = 0  # reports are accepted and added up
    FROZEN = 1  # the leader accepts no more; what it has is added up, then collected
    COLLECTED = 2  # nothing is ever added again
    ENDING = 3  # the task has ended, and its data is being deleted
    ENDED = 4  # only replay protection is left


properties: Final = Table(
    "properties",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)
"""Facts about the whole database: its role, and a check value for its at-rest key."""

hpke_keys: Final = Table(
    "hpke_keys",
    metadata,
    Column("config", LargeBinary, primary_key=True),  # the encoded HpkeConfig
    Column("created", BigInteger, nullable=False),
    Column("private_key", LargeBinary),  # sealed; NULL once destroyed
    Column("published", BigInteger),  # when it was found in the log; NULL before
    Column("retired", BigInteger),  # when a newer key replaced it
    Column("entry", LargeBinary),  # the only log entry ever signed for it
)

tasks: Final = Table(
    "tasks",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("configuration", LargeBinary, nullable=False),  # DAP's TaskConfiguration
    Column("recipe_digest", LargeBinary, nullable=False),
    Column("policy_digest", LargeBinary, nullable=False),
    Column("analysis", Text, nullable=False),
    Column("group", Text, nullable=False),  # canonical JSON: {"arm"?, "groups"}
    Column("collector", LargeBinary, nullable=False),  # SHA-256 of its HpkeConfig
    Column("noise_trials", BigInteger),  # NULL where the recipe asks for no noise
    Column("noise_threshold", BigInteger),
    Column("opens", BigInteger, nullable=False),
    Column("closes", BigInteger, nullable=False),
    Column("ends", BigInteger, nullable=False),
    Column("bucket_end", BigInteger, nullable=False),
    Index("tasks_of_a_recipe", "recipe_digest"),
    Index("tasks_by_end", "ends"),
)

batches: Final = Table(
    "batches",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("state", SmallInteger, nullable=False),
)
"""The only batch of each task: the row that uploads, jobs and collection lock."""

swept_tasks: Final = Table(
    "swept_tasks",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("bucket_end", BigInteger, nullable=False),
    # Runs of the garbage collector that found the row due for deletion.
    Column("sweeps", Integer, nullable=False, server_default="0"),
    sqlite_with_rowid=False,
)
"""Ids of deleted tasks: a clock that jumps forward and back must not revive one."""

report_ids: Final = Table(
    "report_ids",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("report_id", LargeBinary, primary_key=True),
    sqlite_with_rowid=False,
)
"""Replay protection: every report the leader accepted, or the helper added up."""

segments: Final = Table(
    "segments",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("segment_id", LargeBinary, primary_key=True),  # starts with the time of arrival
    Column("reports", Integer, nullable=False),
    Column("job_id", LargeBinary),  # NULL while the reports wait for a job
    sqlite_with_rowid=False,
)
Index(
    "segments_waiting",
    segments.c.task_id,
    segments.c.segment_id,
    sqlite_where=text("job_id IS NULL"),
    postgresql_where=text("job_id IS NULL"),
)
Index("segments_of_a_job", segments.c.task_id, segments.c.job_id)

report_blobs: Final = Table(
    "report_blobs",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("segment_id", LargeBinary, primary_key=True),
    Column("reports", LargeBinary, nullable=False),  # encoded `Report`s, unchanged
)
"""With a rowid and this column last on SQLite: `reports.py` writes into the row in place."""

aggregation_jobs: Final = Table(
    "aggregation_jobs",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("job_id", LargeBinary, primary_key=True),
    Column("created", BigInteger, nullable=False),
    Column("reports", Integer, nullable=False),
    Column("request_digest", LargeBinary),  # SHA-256 of the only request ever sent
    Column("attempts", Integer, nullable=False),
    Column("failure", Text),  # why the last attempt failed
)
"""The leader's unfinished jobs; finishing a job deletes it."""

helper_jobs: Final = Table(
    "helper_jobs",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("job_id", LargeBinary, primary_key=True),
    Column("request_digest", LargeBinary, nullable=False),
    Column("response", LargeBinary, nullable=False),
)
"""The helper's responses, so that a leader that lost one gets the same again."""

accumulators: Final = Table(
    "accumulators",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("shard", SmallInteger, primary_key=True),
    Column("reports", BigInteger, nullable=False),
    Column("checksum", LargeBinary, nullable=False),
    Column("share", LargeBinary, nullable=False),  # sealed
)
"""The sum so far, sharded so that several workers can add to it at the same time."""

collections: Final = Table(
    "collections",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("collection_id", LargeBinary, primary_key=True),
    Column("created", BigInteger, nullable=False),
    Column("request", LargeBinary, nullable=False),  # the CollectionJobReq, unchanged
    Column("response", LargeBinary),  # the CollectionJobResp; NULL until then
    Column("problem", Text),  # the problem type of the helper's refusal
    Column("problem_status", Integer),
    Column("failure", Text),  # why there is no result, for people
)

aggregate_shares: Final = Table(
    "aggregate_shares",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("share_id", LargeBinary, primary_key=True),
    Column("request_digest", LargeBinary, nullable=False),
    Column("response", LargeBinary, nullable=False),  # the AggregateShare
)

counters: Final = Table(
    "counters",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("shard", SmallInteger, primary_key=True),
    Column("value", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
