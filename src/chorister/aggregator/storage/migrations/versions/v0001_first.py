"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create all tables."""
    op.create_table(
        "accumulators",
        sa.Column("task_id", sa.LargeBinary(), nullable=False),
        sa.Column("shard", sa.SmallInteger(), nullable=False),
        sa.Column("reports", sa.BigInteger(), nullable=False),
        sa.Column("checksum", sa.LargeBinary(), nullable=False),
        sa.Column("share", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("task_id", "shard"),
    )
    op.create_table(
        "aggregate_shares",
        sa.Column("task_id", sa.LargeBinary(), nullable=False),
        sa.Column("share_id", sa.LargeBinary(), nullable=False),
        sa.Column("request_digest", sa.LargeBinary(), nullable=False),
        sa.Column("response", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("task_id", "share_id"),
    )
    op.create_table(
        "aggregation_jobs",
        sa.Column("task_id", sa.LargeBinary(), nullable=False),
        sa.Column("job_id", sa.LargeBinary(), nullable=False),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("reports", sa.Integer(), nullable=False),
        sa.Column("request_digest", sa.LargeBinary(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("task_id", "job_id"),
    )
    op.create_table(
        "batches",
        sa.Column("task_id", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("task_id"),
    )
    op.create_table(
        "collections",
        sa.Column("task_id", sa.LargeBinary(), nullable=False),
        sa.Column("collection_id", sa.LargeBinary(), nullable=False),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.Column("response", sa.LargeBinary(), nullable=True),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.Column("problem_status", sa.Integer(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("task_id", "collection_id"),
    )
    op.create_table(
        "counters",
        sa.Column("task_id", sa.LargeBinary(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("shard", sa.SmallInteger(), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("task_id", "name", "shard"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "helper_jobs",
        sa.Column("task_id", sa.LargeBinary(), nullable=False),
        sa.Column("job_id", sa.LargeBinary(), nullable=False),
        sa.Column("request_digest", sa.LargeBinary(), nullable=False),
        sa.Column("response", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("task_id", "job_id"),
    )
    op.create_table(
        "hpke_keys",
        sa.Column("config", sa.LargeBinary(), nullable=False),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("private_key", sa.LargeBinary(), nullable=True),
        sa.Column("published", sa.BigInteger(), nullable=True),
        sa.Column("retired", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("config"),
    )
    op.create_table(
        "properties",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "report_blobs",
        sa.Column("task_id", sa.LargeBinary(), nullable=False),
        sa.Column("segment_id", sa.LargeBinary(), nullable=False),
        sa.Column("reports", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("task_id", "segment_id"),
    )
    op.create_table(
        "report_ids",
        sa.Column("task_id", sa.LargeBinary(), nullable=False),
        sa.Column("report_id", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("task_id", "report_id"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "segments",
        sa.Column("task_id", sa.LargeBinary(), nullable=False),
        sa.Column("segment_id", sa.LargeBinary(), nullable=False),
        sa.Column("reports", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.LargeBinary(), nullable=True),
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
        sa.Column("task_id", sa.LargeBinary(), nullable=False),
        sa.Column("bucket_end", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("task_id"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "tasks",
        sa.Column("task_id", sa.LargeBinary(), nullable=False),
        sa.Column("configuration", sa.LargeBinary(), nullable=False),
        sa.Column("recipe_digest", sa.LargeBinary(), nullable=False),
        sa.Column("policy_digest", sa.LargeBinary(), nullable=False),
        sa.Column("analysis", sa.Text(), nullable=False),
        sa.Column("group", sa.Text(), nullable=False),
        sa.Column("collector", sa.LargeBinary(), nullable=False),
        sa.Column("noise_trials", sa.BigInteger(), nullable=True),
        sa.Column("noise_threshold", sa.BigInteger(), nullable=True),
        sa.Column("opens", sa.BigInteger(), nullable=False),
        sa.Column("closes", sa.BigInteger(), nullable=False),
        sa.Column("ends", sa.BigInteger(), nullable=False),
        sa.Column("bucket_end", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("task_id"),
    )
    op.create_index("tasks_by_end", "tasks", ["ends"], unique=False)
    op.create_index("tasks_of_a_recipe", "tasks", ["recipe_digest"], unique=False)
