"""The queue of jobs for workers, on PostgreSQL: Procrastinate's own tables and functions.

SQLite has no workers, and so no queue. A later Procrastinate that changes its tables needs a
revision of its own here, with that version's migration; a test compares what is installed.
"""

from __future__ import annotations

from alembic import op

from chorister.errors import InternalError

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the queue's tables, in the same transaction as everything else."""
    connection = op.get_bind()
    if connection.dialect.name != "postgresql":
        return
    from procrastinate.schema import SchemaManager

    # Many statements in one text: only the driver itself takes that, and without parameters.
    raw = connection.connection.dbapi_connection
    if raw is None:
        raise InternalError("a connection in use without its driver's")
    raw.cursor().execute(SchemaManager.get_schema())
