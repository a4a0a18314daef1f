"""The registry itself: takes entries from those who may, signs candidates, collects cosignatures.

An author proves himself by the signature that his entry carries, under a key that a policy lists.
There is no token beside it: it would be a second secret to lose that protects nothing, for an
entry says the same whoever delivers it, and delivering it twice changes nothing.

**Room on the current list.** Every author whom a policy names has, for each analysis, the same
share of the list: `MAX_OPEN_RECIPES`, or fewer if the policies name so many authors that the list
would not hold them all. So nobody can take the place of anybody else, however many recipes they
publish. What is not published yet counts even if it has ended already.

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
    QuotaExceeded,
    ServiceError,
)
from chorister.registry.folder import LogFolder
from chorister.transparency.checkpoint import Checkpoint, SignedCheckpoint
from chorister.transparency.entries import (
    MAX_ENTRY,
    HPKEConfigEntry,
    RecipeEntry,
    open_recipe,
    parse_entry,
)
from chorister.transparency.listing import (
    MAX_LIST,
    MAX_OPEN_RECIPES,
    CurrentList,
    ListedRecipe,
    check_quotas,
)
from chorister.transparency.note import SignatureLine
from chorister.transparency.sources import CANDIDATE, CHECKPOINT
from chorister.transparency.state import Logged
from chorister.transparency.tree import HASH_SIZE, leaf_hash
from chorister.transparency.trust import Authority

__all__ = ["CANDIDATE_LIFETIME", "Receipt", "Registry", "Status", "author_share"]

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
        self._share = author_share(authority)
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
        self._screen(data)  # before the lock: what is expensive to refuse keeps nobody waiting
        with self._lock:
            try:
                logged = self._state.check(data)
            except DuplicateEntry as error:
                if self._folder.leaves[error.index] != leaf_hash(data):
                    raise
                return Receipt(index=error.index, address=leaf_hash(data), new=False)
            self._authority.check_entry(logged)
            self._check_timely(logged)
            self._check_room(logged)
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
        keys = self._authority.cosigners.get(line.name)
        if keys is None:
            raise NotAuthorized(f"no policy lists a cosigner {line.name}")
        with self._lock:
            if self._candidate is None:
                raise LogSignatureInvalid("there is no candidate to cosign yet")
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
        """Turn strangers away: by the key that they show, then by the signature under it."""
        try:
            entry = parse_entry(data)
            if not isinstance(entry, RecipeEntry):
                entry.check_signature()
                return
            listed = frozenset[bytes]().union(*self._authority.authors.values())
            if entry.author_key not in listed:
                raise NotAuthorized("no policy lists this author's key")
            open_recipe(entry)
        except (DecodeError, LogSignatureInvalid) as error:
            raise EntryRefused(str(error)) from error

    def _check_timely(self, logged: Logged) -> None:
        """Refuse what could never be current."""
        now = self._clock.now()
        if logged.recipe is not None and logged.recipe.recipe.window.closes <= now:
            raise EntryRefused("the recipe's answer period is over already")
        if isinstance(logged.entry, HPKEConfigEntry) and logged.entry.not_after <= now:
            raise EntryRefused("the HPKE config has expired already")

    def _check_room(self, logged: Logged) -> None:
        """Refuse what would break the current list's limits at the next checkpoint or a later one.

        Ends and revocations only shorten the list: a full one must not keep them out.
        """
        if not isinstance(logged.entry, RecipeEntry | HPKEConfigEntry):
            return
        # Checkpoints only go forward in time, and a recipe that has closed does not open again: so
        # no later list holds a recipe that this one does not, whatever becomes of the clock.
        last = self._candidate or self._published
        current = self._state.current(last.checkpoint.time if last else 0)
        recipes = current.recipes
        if logged.recipe is not None and isinstance(logged.entry, RecipeEntry):
            new = ListedRecipe.of(logged.recipe.recipe.analysis, logged.entry)
            recipes = (*recipes, new)
            # Ended or not, or an author who publishes and ends by turns would fill the log faster
            # than cosigners take entries.
            published = self._published.checkpoint.size if self._published else 0
            counted = {*recipes, *self._state.recipes_since(published)}
            own = (each for each in counted if each[:2] == new[:2])
            check_quotas(own, max_recipes=self._share)
        # Every aggregator has its line, whether it has published a config yet or not.
        configs = dict.fromkeys(self._authority.hpke_signers, bytes(HASH_SIZE))
        configs |= dict(current.hpke_configs)
        longest = CurrentList.of(hpke_configs=configs.items(), recipes=recipes)
        if len(longest.encode()) > MAX_LIST:
            raise QuotaExceeded(
                "the current list is full: end recipes that are no longer asked, or wait until "
                "they close"
            )


def author_share(authority: Authority) -> int:
    """How many open recipes each author may have for each analysis, so that all fit on the list."""
    configs = ((name, bytes(HASH_SIZE)) for name in authority.hpke_signers)
    fixed = len(CurrentList.of(hpke_configs=configs, recipes=()).encode())
    one_each = sum(
        len(ListedRecipe(analysis, author_key, bytes(HASH_SIZE), MAX_ENTRY).encode())
        for analysis, author_keys in authority.authors.items()
        for author_key in author_keys
    )
    share = (MAX_LIST - fixed) // one_each
    if share < 1:
        raise ServiceError(
            "the policies name more authors and aggregators than one current list has room for: "
            "distribute them over several registries"
        )
    return min(share, MAX_OPEN_RECIPES)
