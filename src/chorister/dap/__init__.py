"""The part of the IETF's Distributed Aggregation Protocol (DAP) that Chorister uses."""

from __future__ import annotations
