"""The IETF's Distributed Aggregation Protocol, as far as Chorister speaks it."""

from __future__ import annotations
