"""Where an analyst's query runs: a process that holds the declared fields, and nothing else.

The layers of defense, from the inside out: the database has only what was declared and allowed;
SQLite's authorizer, limits and deadline; the process has no files, descriptors, environment or
network, and little memory and time; it was forked from one that never held data, and the device
kills it at the deadline.
"""

from __future__ import annotations

from chorister.device.sandbox.sandbox import Sandbox

__all__ = ["Sandbox"]
