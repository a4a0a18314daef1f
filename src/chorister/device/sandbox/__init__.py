"""Where an analyst's query runs: a process that holds the declared fields, and nothing else.

Walls, from the inside out: the database holds only what was declared and allowed; SQLite's
authorizer, limits and deadline; the process has no files, descriptors, environment or network, and
little memory and time; its parent was forked before any data came, and the device kills it at the
deadline.
"""

from __future__ import annotations

from chorister.device.sandbox.sandbox import Sandbox

__all__ = ["Sandbox"]
