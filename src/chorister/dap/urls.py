"""Which URLs are spoken to, and how a resource's is put together."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from chorister.errors import InvalidInput, Unreachable

__all__ = ["check_url", "created_resource", "resource_url"]

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


def created_resource(creation_url: str, location: str) -> str:
    """The URL of a resource that a POST to `creation_url` made, from its `Location`.

    Only the identifier and the query are taken from there: a credential never follows a server's
    word to another place, and a server behind a proxy may not know its own address.
    """
    collection = "/".join(creation_url.rsplit("/", 3)[1:])
    found = re.search(
        rf"(?:^|/){re.escape(collection)}/([A-Za-z0-9_-]{{1,200}}(?:\?[!-\"$-~]{{0,200}})?)\Z",
        location,
    )
    if found is None:
        raise Unreachable(f"{creation_url} answers without the location of what it created")
    return f"{creation_url}/{found[1]}"
