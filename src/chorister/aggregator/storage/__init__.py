"""An aggregator's database: tables, migrations, and every SQL statement.

Nothing outside this package imports SQLAlchemy. Functions that take a `Transaction` run inside the
caller's transaction; those that take only a `Database` open their own.
"""

from __future__ import annotations
