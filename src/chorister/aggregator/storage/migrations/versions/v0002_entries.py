"""The signed entry of each HPKE key, and how often a swept task was found due."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add two columns."""
    op.add_column("hpke_keys", sa.Column("entry", sa.LargeBinary()))
    op.add_column(
        "swept_tasks", sa.Column("sweeps", sa.Integer(), nullable=False, server_default="0")
    )
