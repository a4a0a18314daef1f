"""The device: the guardian of its person's data, budget and log."""

from __future__ import annotations
