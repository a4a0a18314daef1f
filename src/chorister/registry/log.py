"""The registry itself: takes entries from those who may, signs candidates, collects cosignatures.

An author proves himself by the signature that his entry carries, under a key that a policy lists.
There is no token beside it: it would be a second secret to lose that protects nothing, for an
entry says the same whoever delivers it, and delivering it twice changes nothing.

At most one candidate waits at a time, so that the cosigners sign the same one. It is replaced when
all have signed, or when it has waited so long that a cosigner would find it old.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import RLock
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from chorister.clock import Clock
from chorister.errors import (
    CheckpointTime,
    DecodeError,
    DuplicateEntry,
    EntryRefused,
    LogSignatureInvalid,
    NotAuthorized,
    ServiceError,
)
from chorister.registry.folder import LogFolder
from chorister.transparency.checkpoint import Checkpoint, SignedCheckpoint
from chorister.transparency.entries import HPKEConfigEntry, RecipeEntry, parse_entry
from chorister.transparency.listing import MAX_LIST
from chorister.transparency.note import SignatureLine
from chorister.transparency.sources import CANDIDATE, CHECKPOINT
from chorister.transparency.state import Logged
from chorister.transparency.tree import leaf_hash
from chorister.transparency.trust import Authority

__all__ = ["CANDIDATE_LIFETIME", "Receipt", "Registry", "Status"]

# Well below the five minutes within which cosigners accept it.
CANDIDATE_LIFETIME: Final = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """Where an entry is in the log."""

    index: int
    address: bytes
    # False if it was there before.
    new: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """What an operator asks first: is it published, and if not, who is waited for."""

    size: int
    published: Checkpoint | None
    candidate: Checkpoint | None
    waiting_for: tuple[str, ...]


class Registry:
    """A log that can be written. Methods may be called from several threads."""

    def __init__(
        self,
        folder: LogFolder,
        *,
        origin: str,
        key: Ed25519PrivateKey,
        authority: Authority,
        clock: Clock,
    ) -> None:
        if key.public_key().public_bytes_raw() not in authority.log_keys:
            raise ServiceError("the log's key is not among the log keys of the policies")
        if origin != authority.origin:
            raise ServiceError(f"the policies name the log {authority.origin}, not {origin}")
        if origin in authority.cosigners:
            raise ServiceError(f"the log's name {origin} is that of a cosigner; choose another")
        self._folder = folder
        self._origin = origin
        self._key = key
        self._authority = authority
        self._clock = clock
        self._lock = RLock()
        self._state = folder.load()
        self._published = folder.read_checkpoint(CHECKPOINT)
        self._candidate = folder.read_checkpoint(CANDIDATE)
        for signed in (self._published, self._candidate):
            if signed is not None and signed.checkpoint.origin != origin:
                raise ServiceError(
                    f"the folder holds the log {signed.checkpoint.origin}, not {origin}"
                )

    def __repr__(self) -> str:
        return f"Registry({self._origin!r}, size={self._state.size})"

    def submit(self, data: bytes) -> Receipt:
        """Add an entry for whoever its signature names; raises `EntryRefused`, `NotAuthorized`.

        Durable when this returns; published with the next checkpoint.
        """
        self._screen(data)
        with self._lock:
            try:
                logged = self._state.check(data)
            except DuplicateEntry as error:
                if self._folder.leaves[error.index] != leaf_hash(data):
                    raise
                return Receipt(index=error.index, address=leaf_hash(data), new=False)
            self._authority.check_entry(logged)
            self._check_timely(logged)
            self._folder.append(data)
            self._state.apply(logged)
            return Receipt(index=logged.index, address=logged.address, new=True)

    def issue(self) -> SignedCheckpoint:
        """The candidate for cosigners to sign: the one that waits, or a new one.

        At most one a second is made; until the next, this is the last one.
        """
        with self._lock:
            now = self._clock.now()
            waiting = self._waiting()
            if waiting is not None and 0 <= now - waiting.checkpoint.time < CANDIDATE_LIFETIME:
                return waiting
            last = self._candidate or self._published
            if last is not None and now == last.checkpoint.time:
                # Of two checkpoints of one second nobody could tell which is the newer one.
                return last
            if last is not None and now < last.checkpoint.time:
                raise CheckpointTime(
                    "the registry's clock is behind the checkpoint that it issued last. Set it "
                    "right; if it was wrong before, and no cosigner signed what waits, stop the "
                    "registry, remove public/candidate and start it again",
                    time=last.checkpoint.time,
                    now=now,
                )
            current = self._state.current(now)
            self._folder.publish_tiles()
            self._folder.publish_list(current.digest, current.encode())
            candidate = Checkpoint(
                origin=self._origin,
                size=self._state.size,
                root=self._state.frontier.root,
                time=now,
                list_digest=current.digest,
            ).sign(self._key)
            self._folder.publish(CANDIDATE, candidate.encode())
            self._candidate = candidate
            return candidate

    def add_cosignature(self, data: bytes) -> tuple[str, ...]:
        """Take a cosigner's signature line; publishes with the last one.

        Returns the cosigners that are still missing.
        """
        try:
            line = SignatureLine.parse(data.decode().removesuffix("\n"))
        except UnicodeDecodeError as error:
            raise DecodeError("a cosignature is one line of UTF-8") from error
        with self._lock:
            if self._candidate is None:
                raise LogSignatureInvalid("there is no candidate to cosign yet")
            keys = self._authority.cosigners.get(line.name)
            if keys is None:
                raise NotAuthorized(f"no policy lists a cosigner {line.name}")
            signed = self._candidate.with_cosigner(line)
            signed.note.check_cosignature(line.name, keys)
            missing = self._authority.missing(signed)
            # The candidate first: whatever was accepted outlives a crash, then all see it.
            self._folder.publish(CANDIDATE, signed.encode())
            self._candidate = signed
            if not missing:
                self._folder.publish(CHECKPOINT, signed.encode())
                self._published = signed
            return missing

    def status(self) -> Status:
        """What is published and who is waited for."""
        with self._lock:
            waiting = self._waiting()
            return Status(
                size=self._state.size,
                published=self._published.checkpoint if self._published else None,
                candidate=waiting.checkpoint if waiting else None,
                waiting_for=self._authority.missing(waiting) if waiting else (),
            )

    def _waiting(self) -> SignedCheckpoint | None:
        """The candidate, unless it is what is published."""
        if self._candidate is None:
            return None
        published = self._published.checkpoint if self._published else None
        return None if self._candidate.checkpoint == published else self._candidate

    def _screen(self, data: bytes) -> None:
        """Turn strangers away before anything of theirs is parsed or waited for."""
        try:
            entry = parse_entry(data)
        except DecodeError as error:
            raise EntryRefused(str(error)) from error
        listed = frozenset[bytes]().union(*self._authority.authors.values())
        if isinstance(entry, RecipeEntry) and entry.author_key not in listed:
            raise NotAuthorized("no policy lists this author's key")

    def _check_timely(self, logged: Logged) -> None:
        """Refuse what could never be current, and what would make the list too long to fetch."""
        now = self._clock.now()
        if logged.recipe is not None and logged.recipe.recipe.window.closes <= now:
            raise EntryRefused("the recipe's answer period is over already")
        if isinstance(logged.entry, HPKEConfigEntry) and logged.entry.not_after <= now:
            raise EntryRefused("the HPKE config has expired already")
        # Ends and revocations only shorten the list: a full one must not keep them out.
        adds = isinstance(logged.entry, RecipeEntry | HPKEConfigEntry)
        if adds and len(self._state.current(now).encode()) > MAX_LIST - 1024:
            raise EntryRefused("the current list is full; end recipes that are no longer asked")
