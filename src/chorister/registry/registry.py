"""The registry: accepts entries, signs candidates and collects cosignatures.

Authors are authenticated by the signature of their entry, with a key that a policy lists. There is
no token in addition. It would be one more secret to lose, and protect nothing: an entry means the
same whoever delivers it, and delivering it twice changes nothing.

**Room on the current list.** Every author whom a policy names has the same share of the list for
each analysis: `MAX_OPEN_RECIPES`, or fewer if the policies name so many authors that not all would
fit. So nobody can take anybody else's room, however many recipes they publish. A recipe that is
not published yet counts, even if it has already ended.

At most one candidate waits at a time, so that all cosigners sign the same one. It is replaced when
all have signed, or when it has waited so long that a cosigner would soon refuse it as too old.
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
from chorister.transparency.checkpoint import Checkpoint, SignatureLine, SignedCheckpoint
from chorister.transparency.client import CANDIDATE, CHECKPOINT, list_path
from chorister.transparency.entries import (
    MAX_ENTRY,
    HPKEConfigEntry,
    RecipeEntry,
    open_recipe,
    parse_entry,
)
from chorister.transparency.state import (
    MAX_LIST,
    MAX_OPEN_RECIPES,
    CurrentList,
    ListedRecipe,
    Logged,
    check_quotas,
)
from chorister.transparency.tree import HASH_SIZE, leaf_hash
from chorister.transparency.trust import Authority

CANDIDATE_LIFETIME: Final = 120
"""Seconds, well below `MAX_SKEW`, within which cosigners accept it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """Where an entry is in the log."""

    index: int
    address: bytes
    # False if it was already there.
    new: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryStatus:
    """What an operator asks first: is it published, and if not, who has not signed yet?"""

    size: int
    published: Checkpoint | None
    candidate: Checkpoint | None
    waiting_for: tuple[str, ...]


class Registry:
    """A log to write to. Its methods are thread-safe."""

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
            raise ServiceError(f"{origin} is the name of a cosigner: choose another for the log")
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
        """Add an entry, which must be signed; raises `EntryRefused` or `NotAuthorized`.

        Durable when this returns; published with the next checkpoint.
        """
        self._screen(data)  # before the lock, so that an expensive refusal keeps nobody waiting
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
        """Return the candidate for cosigners to sign: the one that waits, or a new one.

        There is at most one per second.
        """
        with self._lock:
            now = self._clock.now()
            waiting = self._waiting()
            if waiting is not None and 0 <= now - waiting.checkpoint.time < CANDIDATE_LIFETIME:
                return waiting
            last = self._candidate or self._published
            if last is not None and now == last.checkpoint.time:
                # Nobody could tell which of two checkpoints of the same second is newer.
                return last
            if last is not None and now < last.checkpoint.time:
                raise CheckpointTime(
                    "the registry's clock is behind its last checkpoint: set the clock. If it was "
                    "ahead before, and no cosigner has signed the candidate, stop the registry, "
                    "remove public/candidate and start it again",
                    time=last.checkpoint.time,
                    now=now,
                )
            current = self._state.current(now)
            self._folder.publish_tiles()
            self._folder.publish(list_path(current.digest), current.encode())
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
        """Add a cosigner's signature line; the last missing one publishes the checkpoint.

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
            # The candidate first: an accepted cosignature must survive a crash.
            self._folder.publish(CANDIDATE, signed.encode())
            self._candidate = signed
            if not missing:
                self._folder.publish(CHECKPOINT, signed.encode())
                self._published = signed
            return missing

    def status(self) -> RegistryStatus:
        with self._lock:
            waiting = self._waiting()
            return RegistryStatus(
                size=self._state.size,
                published=self._published.checkpoint if self._published else None,
                candidate=waiting.checkpoint if waiting else None,
                waiting_for=self._authority.missing(waiting) if waiting else (),
            )

    def _waiting(self) -> SignedCheckpoint | None:
        """Return the candidate, unless it is already published."""
        if self._candidate is None:
            return None
        published = self._published.checkpoint if self._published else None
        return None if self._candidate.checkpoint == published else self._candidate

    def _screen(self, data: bytes) -> None:
        """Refuse strangers, first by their key and then by their signature."""
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
            raise EntryRefused("the recipe's answer period is already over")
        if isinstance(logged.entry, HPKEConfigEntry) and logged.entry.not_after <= now:
            raise EntryRefused("the HPKE config has already expired")

    def _check_room(self, logged: Logged) -> None:
        """Refuse what would exceed the current list's limits at any later checkpoint.

        Ends and revocations only shorten the list, so they are accepted even if it is full.
        """
        if not isinstance(logged.entry, RecipeEntry | HPKEConfigEntry):
            return
        # Checkpoints only go forward in time, and a closed recipe never opens again: so whatever
        # the clock does, no later list has a recipe that this one does not have.
        last = self._candidate or self._published
        current = self._state.current(last.checkpoint.time if last else 0)
        recipes = current.recipes
        if logged.recipe is not None and isinstance(logged.entry, RecipeEntry):
            new = ListedRecipe.of(logged.recipe.recipe.analysis, logged.entry)
            recipes = (*recipes, new)
            # Ended or not: otherwise an author who publishes and ends recipes in turn would fill
            # the log faster than cosigners take entries.
            published = self._published.checkpoint.size if self._published else 0
            counted = {*recipes, *self._state.recipes_since(published)}
            own = (each for each in counted if each[:2] == new[:2])
            check_quotas(own, max_recipes=self._share)
        # Keep a line for every aggregator, even if it has not published a config yet.
        configs = dict.fromkeys(self._authority.hpke_signers, bytes(HASH_SIZE))
        configs |= dict(current.hpke_configs)
        longest = CurrentList.of(hpke_configs=configs.items(), recipes=recipes)
        if len(longest.encode()) > MAX_LIST:
            raise QuotaExceeded(
                "the current list is full: end recipes that you no longer need, or wait until they "
                "close"
            )


def author_share(authority: Authority) -> int:
    """Return how many open recipes per author and analysis always fit on the list."""
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
