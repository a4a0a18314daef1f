"""The queue of jobs for workers, on PostgreSQL: Procrastinate's own tables and functions.

SQLite has no workers, and so no queue. If a later Procrastinate changes its tables, it needs
another revision here with that version's migration; a test compares the installed schema, and
servers refuse to start with tables that do not fit (`jobs/job_queue.py`).
"""

from __future__ import annotations

from alembic import op

from chorister.errors import InternalError

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the queue's tables, in the same transaction as everything else."""
    connection = op.get_bind()
    if connection.dialect.name != "postgresql":
        return
    from procrastinate.schema import SchemaManager

    # Many statements in one string: only the driver accepts that, and without parameters.
    raw = connection.connection.dbapi_connection
    if raw is None:
        raise InternalError("a connection without its driver")
    raw.cursor().execute(SchemaManager.get_schema())
