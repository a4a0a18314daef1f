"""What pages answer instead of a page."""

from __future__ import annotations

__all__ = ["Forbidden", "NotFound", "SignInNeeded", "TooLarge"]


class NotFound(Exception):
    """There is no such page for this analyst: another's study looks just the same."""


class Forbidden(Exception):
    """A request that did not come from one of our own pages; the message says why."""


class SignInNeeded(Exception):
    """Nobody is signed in."""


class TooLarge(Exception):
    """A form with more than it may have."""
