"""The registry: accepts entries, signs candidates and collects cosignatures.

Authors are authenticated by the signature of their entry, with a key that a policy lists. There is
no token in addition. It would be one more secret to lose, and protect nothing: an entry means the
same whoever delivers it, and delivering it twice changes nothing.

**Room on the current list.** Every author whom a policy names has the same share of the list for
each analysis: `MAX_OPEN_RECIPES`, or fewer if the policies name so many authors that not all would
fit. So nobody can take anybody else's room, however many recipes they publish. A recipe that is
not published yet counts, even if it has already ended.

**Every batch ends with a list.** Whenever the current list changes, even by time alone, the
registry adds a `ListEntry`, which nobody can submit, and signs a candidate that ends with it. If
nothing has changed, the candidate is the same tree again, without cosignatures: cosigners sign it
with a new time. At most one candidate waits at a time, so that all cosigners sign the same one. It
is replaced when all have signed, or when it has waited for a while.
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
from chorister.policy.witnesses import WitnessKey
from chorister.registry.folder import LogFolder
from chorister.transparency.checkpoint import (
    Checkpoint,
    ClockJumps,
    ListProof,
    SignedCheckpoint,
)
from chorister.transparency.client import CANDIDATE, CHECKPOINT, PROOF, body_path, list_path
from chorister.transparency.entries import (
    MAX_BODY,
    HPKEConfigEntry,
    ListEntry,
    RecipeEntry,
    SignedEntry,
    Submission,
    parse_entry,
)
from chorister.transparency.note import Note, SignatureLine
from chorister.transparency.state import (
    MAX_LIST,
    MAX_OPEN_RECIPES,
    CurrentList,
    ListedRecipe,
    check_quotas,
)
from chorister.transparency.tree import HASH_SIZE, consistency_proof, leaf_hash
from chorister.transparency.trust import Authority

CANDIDATE_LIFETIME: Final = 120
"""Seconds that a candidate waits for cosignatures, well below `MAX_SKEW`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """Where an entry is in the log."""

    index: int
    # The leaf hash.
    leaf: bytes
    # False if it was already there.
    new: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointStatus:
    """A checkpoint and its time: of its oldest cosignature, or when it was issued."""

    checkpoint: Checkpoint
    time: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryStatus:
    """What an operator asks first: is it published, and if not, who has not signed yet?"""

    size: int
    published: CheckpointStatus | None
    candidate: CheckpointStatus | None
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
        last = self._state.last_list
        if self._candidate and last and self._candidate.checkpoint.size != last.index + 1:
            self._candidate = None  # a crash came between a list and its checkpoint
        # When the candidate was issued; a restarted registry issues a new one at once.
        self._issued = 0
        self._jumps = ClockJumps(clock)
        # The time of each cosigner's newest line for the candidate's tree.
        self._cosigned_at: dict[str, int] = {}
        for signed in (self._published, self._candidate):
            if signed is not None and signed.checkpoint.origin != origin:
                raise ServiceError(
                    f"the folder holds the log {signed.checkpoint.origin}, not {origin}"
                )
            if signed and self._candidate and signed.checkpoint == self._candidate.checkpoint:
                self._cosigned_at |= authority.cosigned_at(signed)

    def __repr__(self) -> str:
        return f"Registry({self._origin!r}, size={self._state.size})"

    def submit(self, data: bytes) -> Receipt:
        """Add a submission, which must be signed; raises `EntryRefused` or `NotAuthorized`.

        Durable when this returns; published with the next checkpoint.
        """
        # Before the lock, so that an expensive refusal keeps nobody waiting.
        submission, entry = self._screen(data)
        with self._lock:
            leaf = leaf_hash(submission.entry)
            try:
                logged = self._state.check(submission.entry)
            except DuplicateEntry as error:
                if self._folder.leaves[error.index] != leaf:
                    raise
                return Receipt(index=error.index, leaf=leaf, new=False)
            self._authority.check_entry(logged)
            self._check_timely(entry)
            self._check_room(entry)
            self._folder.append(submission.entry, _files(entry, submission))
            self._state.apply(logged)
            return Receipt(index=logged.index, leaf=leaf, new=True)

    def issue(self) -> SignedCheckpoint:
        """Return the candidate for cosigners to sign: the one that waits, or a new one.

        There is at most one list per second, because the later of two lists is the newer one.
        """
        with self._lock:
            now = self._clock.now()
            waiting = self._waiting()
            if waiting is not None and 0 <= now - self._issued < CANDIDATE_LIFETIME:
                return waiting
            last = self._state.last_list
            if last is not None and now < last.entry.time:
                raise CheckpointTime(
                    "the registry's clock is behind the last list in its log: set the clock. If "
                    "it was ahead before, wait until it is that time",
                    time=last.entry.time,
                    now=now,
                )
            self._jumps.begin(now)
            current = self._state.current(now)
            if not self._state.closed or last is None or current.digest != last.entry.digest:
                if last is not None and now == last.entry.time:
                    if self._candidate is not None:
                        return self._candidate
                    raise CheckpointTime(
                        "the log already has a list of this second: try again in the next",
                        time=last.entry.time,
                        now=now,
                    )
                self._close_batch(current, now)
            elif self._candidate is not None and now == self._issued:
                return self._candidate
            self._folder.publish_tiles()
            checkpoint = Checkpoint(
                origin=self._origin, size=self._state.size, root=self._state.frontier.root
            )
            if self._candidate is None or self._candidate.checkpoint != checkpoint:
                self._cosigned_at = {}
            self._candidate = self._with_witnesses(checkpoint.sign(self._key))
            self._folder.publish({CANDIDATE: self._candidate.encode()}, lasting=False)
            self._issued = now
            return self._candidate

    def _close_batch(self, current: CurrentList, now: int) -> None:
        """Add the list that is current now as the last entry."""
        # The log could not go on before the time of its last list.
        self._jumps.check(now)
        entry = ListEntry(time=now, digest=current.digest).encode()
        logged = self._state.check(entry)
        self._folder.append(entry, {list_path(current.digest): current.encode()})
        self._state.apply(logged)

    def _with_witnesses(self, fresh: SignedCheckpoint) -> SignedCheckpoint:
        """Keep witnesses' lines if the tree is the same: only the aggregators sign again."""
        others = {self._origin, *self._authority.cosigners}
        for before in (self._published, self._candidate):
            if before is not None and before.checkpoint == fresh.checkpoint:
                for line in before.note.signatures:
                    if line.name not in others:
                        fresh = fresh.with_cosigner(line)
        return fresh

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
            if line in self._candidate.note.signatures:
                return self._authority.missing(self._candidate)
            note = Note(text=self._candidate.note.text, signatures=(line,))
            time = note.check_cosignature(line.name, keys).time
            # A tree is signed again and again, and all its lines are public: a stranger who sends
            # an old one must not make the log look old.
            if time <= self._cosigned_at.get(line.name, -1):
                raise LogSignatureInvalid(
                    f"there is a cosignature of {line.name} for this tree that is not older"
                )
            self._cosigned_at[line.name] = time
            return self._add(line)

    def add_witness(self, checkpoint: Checkpoint, line: SignatureLine, key: WitnessKey) -> None:
        """Add a witness's line, unless the log has gone on since it was asked."""
        with self._lock:
            if self._candidate is not None and self._candidate.checkpoint == checkpoint:
                note = Note(text=checkpoint.text, signatures=(line,))
                note.check_cosignature(key.name, [key.key])
                self._add(line)

    def _add(self, line: SignatureLine) -> tuple[str, ...]:
        if self._candidate is None:
            raise ServiceError("there is no candidate to cosign yet")
        signed = self._candidate.with_cosigner(line)
        missing = self._authority.missing(signed)
        last = self._state.last_list
        if missing or last is None:
            # A crash may undo this: a cosigner whose line is not there signs again.
            self._folder.publish({CANDIDATE: signed.encode()}, lasting=False)
        else:
            proof = ListProof(entry=last.entry, index=last.index, path=last.path, signed=signed)
            # The checkpoint last: whoever sees the first one must find a proof, even after a crash.
            self._folder.publish({PROOF: proof.encode(), CANDIDATE: signed.encode()})
            self._folder.publish({CHECKPOINT: signed.encode()})
            self._published = signed
        self._candidate = signed
        return missing

    def to_witness(self, old_size: int) -> tuple[SignedCheckpoint, tuple[bytes, ...]]:
        """Return the newest candidate, and the proof that it extends a log of `old_size`.

        It has our signature only: witnesses accept requests of some kilobytes, which the lines of
        other witnesses would fill.
        """
        with self._lock:
            if self._candidate is None:
                raise ServiceError("there is no candidate to cosign yet")
            checkpoint = self._candidate.checkpoint
            leaves = self._folder.leaves[: checkpoint.size]
        signed = checkpoint.sign(self._key)
        if not 0 < old_size < checkpoint.size:
            return signed, ()
        return signed, consistency_proof(old_size, leaves)

    def status(self) -> RegistryStatus:
        with self._lock:
            waiting, published = self._waiting(), self._published
            return RegistryStatus(
                size=self._state.size,
                published=None
                if published is None
                else CheckpointStatus(
                    checkpoint=published.checkpoint, time=self._authority.oldest(published)
                ),
                candidate=None
                if waiting is None
                else CheckpointStatus(checkpoint=waiting.checkpoint, time=self._issued),
                waiting_for=self._authority.missing(waiting) if waiting else (),
            )

    def _waiting(self) -> SignedCheckpoint | None:
        """Return the candidate, unless it is published with all its cosignatures."""
        if self._candidate is None or self._candidate == self._published:
            return None
        return self._candidate

    def _screen(self, data: bytes) -> tuple[Submission, SignedEntry]:
        """Refuse strangers, first by their key and then by their signatures."""
        try:
            submission = Submission.parse(data)
            entry = parse_entry(submission.entry)
            if isinstance(entry, ListEntry):
                raise EntryRefused("nobody can submit a list: only the log adds it")
            listed = frozenset[bytes]().union(*self._authority.authors.values())
            if isinstance(entry, RecipeEntry) and entry.author_key not in listed:
                raise NotAuthorized("no policy lists this author's key")
            entry.check_signature()
            submission.open()
        except (DecodeError, LogSignatureInvalid) as error:
            raise EntryRefused(str(error)) from error
        return submission, entry

    def _check_timely(self, entry: SignedEntry) -> None:
        """Refuse what could never be current."""
        now = self._clock.now()
        if isinstance(entry, RecipeEntry) and entry.closes <= now:
            raise EntryRefused("the recipe's answer period is already over")
        if isinstance(entry, HPKEConfigEntry) and entry.not_after <= now:
            raise EntryRefused("the HPKE config has already expired")

    def _check_room(self, entry: SignedEntry) -> None:
        """Refuse what would exceed the current list's limits at any later checkpoint.

        Ends and revocations only shorten the list, so they are accepted even if it is full.
        """
        if not isinstance(entry, RecipeEntry | HPKEConfigEntry):
            return
        # Lists only go forward in time, and a closed recipe never opens again: so whatever the
        # clock does, no later list has a recipe that this one does not have.
        last = self._state.last_list
        current = self._state.current(last.entry.time if last else 0)
        recipes = current.recipes
        if isinstance(entry, RecipeEntry):
            new = ListedRecipe.of(entry)
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


def _files(entry: SignedEntry, submission: Submission) -> dict[str, bytes]:
    """Return what devices fetch for an entry, by its path."""
    if isinstance(entry, RecipeEntry):
        return {body_path(entry.body_digest): submission.body}
    if isinstance(entry, HPKEConfigEntry):
        return {body_path(entry.address): submission.entry}
    return {}


def author_share(authority: Authority) -> int:
    """Return how many open recipes per author and analysis always fit on the list."""
    configs = ((name, bytes(HASH_SIZE)) for name in authority.hpke_signers)
    fixed = len(CurrentList.of(hpke_configs=configs, recipes=()).encode())
    one_each = sum(
        len(ListedRecipe(analysis, author_key, bytes(HASH_SIZE), MAX_BODY).encode())
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
