"""The work behind the requests: verifying, collecting, deleting; in a server or in workers."""

from __future__ import annotations
