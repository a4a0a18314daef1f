"""One module per version of the schema."""

from __future__ import annotations
