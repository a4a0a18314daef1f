"""The tables of an aggregator: one database a role, the same tables for both.

Every key of what belongs to a task begins with the task's id, so that the tables can be spread over
machines by it. What never changes (`tasks`) is apart from what does (`batches`). `tasks` and
`batches` are written when a recipe is accepted from the log; nothing else ever adds a row to them,
so a task that somebody invented leaves no trace.

Sealed reports are big and short-lived. They lie in `report_blobs`, in the order of arrival and many
to a row; what is updated about them is in `segments`, because SQLite writes a whole row anew when
a column of it changes.
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

__all__ = [
    "BatchState",
    "accumulators",
    "aggregate_shares",
    "aggregation_jobs",
    "batches",
    "collections",
    "counters",
    "helper_jobs",
    "hpke_keys",
    "metadata",
    "properties",
    "report_blobs",
    "report_ids",
    "segments",
    "swept_tasks",
    "tasks",
]

metadata: Final = MetaData()


class BatchState(IntEnum):
    """Only ever forward."""

    OPEN = 0  # reports are taken and added up
    FROZEN = 1  # the leader takes no more; what it has taken is added up, then collected
    COLLECTED = 2  # nothing is ever added again
    ENDING = 3  # the task has ended: what it left is being deleted
    ENDED = 4  # only what protects against replays is left


properties: Final = Table(
    "properties",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)
"""What holds for the whole database: its role, and a check of its at-rest key."""

hpke_keys: Final = Table(
    "hpke_keys",
    metadata,
    Column("config", LargeBinary, primary_key=True),  # the encoded HpkeConfig
    Column("created", BigInteger, nullable=False),
    Column("private_key", LargeBinary),  # sealed; NULL once destroyed
    Column("published", BigInteger),  # since when it is in the log; NULL before
    Column("retired", BigInteger),  # since when a newer one is used
    Column("entry", LargeBinary),  # the one log entry that was ever signed for it
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
"""The one batch of each task: the lock that uploads, jobs and collection meet at."""

swept_tasks: Final = Table(
    "swept_tasks",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("bucket_end", BigInteger, nullable=False),
    Column(
        "sweeps", Integer, nullable=False, server_default="0"
    ),  # that found it due to be forgotten
    sqlite_with_rowid=False,
)
"""Tasks that are gone and must not come back: a clock that jumps there and back can't renew one."""

report_ids: Final = Table(
    "report_ids",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("report_id", LargeBinary, primary_key=True),
    sqlite_with_rowid=False,
)
"""Replay protection: at the leader every report ever taken, at the helper every one added up."""

segments: Final = Table(
    "segments",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("segment_id", LargeBinary, primary_key=True),  # begins with the time of arrival
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
    Column("reports", LargeBinary, nullable=False),  # encoded `Report`s, as they came
)
"""On SQLite with a rowid and this column last: `segments.py` writes into the row in place."""

aggregation_jobs: Final = Table(
    "aggregation_jobs",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("job_id", LargeBinary, primary_key=True),
    Column("created", BigInteger, nullable=False),
    Column("reports", Integer, nullable=False),
    Column("request_digest", LargeBinary),  # SHA-256 of what was sent; never another
    Column("attempts", Integer, nullable=False),
    Column("failure", Text),  # why the last step failed
)
"""The leader's unfinished jobs; the transaction that finishes one deletes it."""

helper_jobs: Final = Table(
    "helper_jobs",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("job_id", LargeBinary, primary_key=True),
    Column("request_digest", LargeBinary, nullable=False),
    Column("response", LargeBinary, nullable=False),
)
"""The helper's answers, so that a leader that lost one gets the same again."""

accumulators: Final = Table(
    "accumulators",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("shard", SmallInteger, primary_key=True),
    Column("reports", BigInteger, nullable=False),
    Column("checksum", LargeBinary, nullable=False),
    Column("share", LargeBinary, nullable=False),  # sealed
)
"""The sum so far, in shards so that several workers can add to it at once."""

collections: Final = Table(
    "collections",
    metadata,
    Column("task_id", LargeBinary, primary_key=True),
    Column("collection_id", LargeBinary, primary_key=True),
    Column("created", BigInteger, nullable=False),
    Column("request", LargeBinary, nullable=False),  # the CollectionJobReq as it came
    Column("response", LargeBinary),  # the CollectionJobResp; NULL until then
    Column("problem", Text),  # what the helper refused it with
    Column("problem_status", Integer),
    Column("failure", Text),  # in words: why there is no result (yet)
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
