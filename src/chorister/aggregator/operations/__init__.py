"""What operators see of an aggregator: metrics and logs."""

from __future__ import annotations
