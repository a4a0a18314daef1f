"""Alembic's migrations of an aggregator's database, part of the installed package."""

from __future__ import annotations
