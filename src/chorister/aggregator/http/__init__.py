"""The aggregators over HTTP: DAP's resources, and a few of our own."""

from __future__ import annotations
