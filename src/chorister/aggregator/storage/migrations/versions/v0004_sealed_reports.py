"""PostgreSQL no longer tries to compress sealed reports, which takes longer than storing them.

Reports that are already stored stay as they are, until their task no longer needs them.
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Change the catalogue; no row is touched."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE report_blobs ALTER COLUMN reports SET STORAGE EXTERNAL")
