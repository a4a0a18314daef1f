"""What operators and analysts see of an aggregator: metrics, logs, progress."""

from __future__ import annotations
