"""The first schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def _column(kind: Callable[[], sa.types.TypeEngine[Any]]) -> Callable[..., sa.Column[Any]]:
    return lambda name, null=False: sa.Column(name, kind(), nullable=null)


_blob, _text = _column(sa.LargeBinary), _column(sa.Text)
_small, _int, _big = _column(sa.SmallInteger), _column(sa.Integer), _column(sa.BigInteger)


# fmt: off
def upgrade() -> None:
    """Create all tables."""
    op.create_table(
        "accumulators",
        _blob("task_id"), _small("shard"), _big("reports"), _blob("checksum"), _blob("share"),
        sa.PrimaryKeyConstraint("task_id", "shard"),
    )
    op.create_table(
        "aggregate_shares",
        _blob("task_id"), _blob("share_id"), _blob("request_digest"), _blob("response"),
        sa.PrimaryKeyConstraint("task_id", "share_id"),
    )
    op.create_table(
        "aggregation_jobs",
        _blob("task_id"), _blob("job_id"), _big("created"), _int("reports"),
        _blob("request_digest", null=True), _int("attempts"), _text("failure", null=True),
        sa.PrimaryKeyConstraint("task_id", "job_id"),
    )
    op.create_table(
        "batches",
        _blob("task_id"), _small("state"),
        sa.PrimaryKeyConstraint("task_id"),
    )
    op.create_table(
        "collections",
        _blob("task_id"), _blob("collection_id"), _big("created"), _blob("request"),
        _blob("response", null=True), _text("problem", null=True),
        _int("problem_status", null=True), _text("failure", null=True),
        sa.PrimaryKeyConstraint("task_id", "collection_id"),
    )
    op.create_table(
        "counters",
        _blob("task_id"), _text("name"), _small("shard"), _big("value"),
        sa.PrimaryKeyConstraint("task_id", "name", "shard"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "helper_jobs",
        _blob("task_id"), _blob("job_id"), _blob("request_digest"), _blob("response"),
        sa.PrimaryKeyConstraint("task_id", "job_id"),
    )
    op.create_table(
        "hpke_keys",
        _blob("config"), _big("created"), _blob("private_key", null=True),
        _big("published", null=True), _big("retired", null=True),
        sa.PrimaryKeyConstraint("config"),
    )
    op.create_table(
        "properties",
        _text("name"), _blob("value"),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "report_blobs",
        _blob("task_id"), _blob("segment_id"), _blob("reports"),
        sa.PrimaryKeyConstraint("task_id", "segment_id"),
    )
    op.create_table(
        "report_ids",
        _blob("task_id"), _blob("report_id"),
        sa.PrimaryKeyConstraint("task_id", "report_id"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "segments",
        _blob("task_id"), _blob("segment_id"), _int("reports"), _blob("job_id", null=True),
        sa.PrimaryKeyConstraint("task_id", "segment_id"),
        sqlite_with_rowid=False,
    )
    op.create_index("segments_of_a_job", "segments", ["task_id", "job_id"], unique=False)
    op.create_index(
        "segments_waiting",
        "segments",
        ["task_id", "segment_id"],
        unique=False,
        sqlite_where=sa.text("job_id IS NULL"),
        postgresql_where=sa.text("job_id IS NULL"),
    )
    op.create_table(
        "swept_tasks",
        _blob("task_id"), _big("bucket_end"),
        sa.PrimaryKeyConstraint("task_id"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "tasks",
        _blob("task_id"), _blob("configuration"), _blob("recipe_digest"), _blob("policy_digest"),
        _text("analysis"), _text("group"), _blob("collector"), _big("noise_trials", null=True),
        _big("noise_threshold", null=True), _big("opens"), _big("closes"), _big("ends"),
        _big("bucket_end"),
        sa.PrimaryKeyConstraint("task_id"),
    )
    op.create_index("tasks_by_end", "tasks", ["ends"], unique=False)
    op.create_index("tasks_of_a_recipe", "tasks", ["recipe_digest"], unique=False)
