"""Which URLs are spoken to, and how a resource's is put together."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from chorister.errors import InvalidInput

__all__ = ["check_url", "resource_url"]

_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


def check_url(url: str) -> None:
    """Raise unless `url` is https, or http on this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        raise InvalidInput(f"{url!r} is not a URL") from None
    if not host or (parts.scheme != "https" and not (parts.scheme == "http" and host in _LOOPBACK)):
        raise InvalidInput(f"{url!r} must start with https:// (http:// for this machine only)")


def resource_url(endpoint: str, path: str) -> str:
    """A resource below an aggregator's endpoint, which is never spelled anew."""
    return f"{endpoint.removesuffix('/')}/{path}"
