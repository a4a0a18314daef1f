"""How many connections one address may have to a server, so that no address takes all places."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import MutableMapping
from typing import Any, Protocol


class _Connection(Protocol):
    transport: asyncio.Transport
    connections: set[Any]  # of the whole server


class AddressLimit:
    """Counts the connections of each IPv4 address and each IPv6 network of 64 bits.

    When an address has as many as it may, the one of its own that has waited longest for its client
    makes room for a new one. So a busy household behind one address is served, and only connections
    beyond the limit that are all being answered at once are refused.
    """

    def __init__(self, limit: int | None, waiting: MutableMapping[object, None]) -> None:
        """`waiting` has the server's connections that wait for their client."""
        self._limit = limit
        self._waiting = waiting
        self._open: dict[str, dict[_Connection, None]] = {}

    def admit(self, connection: _Connection) -> bool:
        """Count a connection; False if its address has too many and none of them waits."""
        if self._limit is None:
            return True
        own = self._open.setdefault(_network(connection.transport), {})
        while len(own) >= self._limit:
            oldest = next((each for each in own if each in self._waiting), None)
            if oldest is None:
                return False
            del own[oldest], self._waiting[oldest]
            oldest.connections.discard(oldest)  # now: it ends only when the event loop goes on
            oldest.transport.abort()
        own[connection] = None
        return True

    def release(self, connection: _Connection) -> None:
        """Stop counting a connection that has ended."""
        network = _network(connection.transport)
        own = self._open.get(network, {})
        own.pop(connection, None)
        if not own:
            self._open.pop(network, None)


def _network(transport: asyncio.BaseTransport) -> str:
    """What a connection counts for: whoever has one IPv6 address has 2^64 of them."""
    peer = transport.get_extra_info("peername")
    host = str(peer[0]) if isinstance(peer, tuple) else ""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    mapped = address.ipv4_mapped
    return str(mapped) if mapped else address.packed[:8].hex()
