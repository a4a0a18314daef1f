"""Rows of PostgreSQL as the server has them: as text, each byte would be made two digits and back.

Reading a job's reports was most of what a worker did beside the native calls.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.pq import Format

__all__ = ["BinaryCursor"]


class BinaryCursor(psycopg.Cursor[Any]):
    """One that asks for binary rows; it runs one statement at a time only."""

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - the driver's own
        super().__init__(*args, **options)
        self.format = Format.BINARY
