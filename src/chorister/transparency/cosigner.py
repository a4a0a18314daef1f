"""What an aggregator does before it cosigns: one honest cosigner is what keeps the log one log.

`Cosigner.cosign` reads the candidate and everything new behind it, and signs only if

1. the log signed it, under a key of the policy and under the name that this cosigner follows;
2. its time is within five minutes of our clock and after the last one that we signed, so that of
   any two that we signed everybody can tell which is the newer one;
3. it is not smaller than the last one we signed, and its root is that of *our* entries followed by
   the new ones, each of them fetched: the two logs are one, and nothing is withheld;
4. every new entry is permitted by the log's rules, its signature included;
5. every new HPKE config in our name is one that we made, and was not logged before;
6. the digest of the current list is that of the list which follows from the entries at its time,
   and the list is within its limits (`listing`), so that no device is made to fetch more.

Then `accept` gets the new recipes (an aggregator enumerates their task ids and stores them), the
checkpoint and the entries are written durably, and only then is the cosignature handed out. A
crash on the way repeats steps, so `accept` has to be idempotent; it never loses one.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from chorister.clock import Clock
from chorister.errors import (
    CheckpointTime,
    EntryRefused,
    ForeignHPKEConfig,
    LogForked,
    LogRewound,
    WrongList,
)
from chorister.recipe import SignedRecipe
from chorister.transparency.checkpoint import Checkpoint, SignedCheckpoint
from chorister.transparency.disk import Disk
from chorister.transparency.entries import HPKEConfigEntry
from chorister.transparency.head import Head
from chorister.transparency.note import MAX_NOTE, Note, SignatureLine
from chorister.transparency.sources import CANDIDATE, Source, read_entry, read_leaves
from chorister.transparency.state import Logged, LogState

__all__ = ["MAX_SKEW", "Cosigner", "CosignerIdentity", "adopt_head", "create_head"]

MAX_SKEW: Final = 300
# What a registry may make a cosigner fetch and keep for one candidate. A log that is further ahead
# is either an attack or a decision for the operator, who can raise the limits.
MAX_NEW_ENTRIES: Final = 100_000
MAX_NEW_BYTES: Final = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class CosignerIdentity:
    """Who cosigns, and which log."""

    # The aggregator's name: its URL as policies spell it.
    name: str
    key: Ed25519PrivateKey
    # The log's name, and the keys under which its signature is accepted.
    origin: str
    log_keys: tuple[bytes, ...]

    def __repr__(self) -> str:
        return f"CosignerIdentity(name={self.name!r}, origin={self.origin!r})"

    def sign(self, checkpoint: Checkpoint, time: int) -> SignatureLine:
        """A cosignature made at `time`."""
        return checkpoint.cosign(name=self.name, key=self.key, time=time)


class Cosigner:
    """Checks candidates and cosigns them, with a memory that outlives the process."""

    def __init__(
        self,
        *,
        identity: CosignerIdentity,
        head: Head,
        clock: Clock,
        own_configs: Callable[[], Collection[bytes]],
        accept: Callable[[Sequence[SignedRecipe]], None],
        max_new_entries: int = MAX_NEW_ENTRIES,
        max_new_bytes: int = MAX_NEW_BYTES,
    ) -> None:
        """`own_configs` gives the encoded HPKE configs that this aggregator ever made."""
        if head.last.checkpoint.origin != identity.origin:
            raise LogForked(
                f"the head is of the log {head.last.checkpoint.origin}, not {identity.origin}"
            )
        self._identity = identity
        self._head = head
        self._clock = clock
        self._own_configs = own_configs
        self._accept = accept
        self._max_new_entries = max_new_entries
        self._max_new_bytes = max_new_bytes
        self._lock = Lock()

    @property
    def last(self) -> Checkpoint:
        """What was signed last."""
        return self._head.last.checkpoint

    def cosign(self, source: Source) -> SignatureLine:
        """Check the candidate and cosign it; raises a `LogError` that says what is wrong.

        Entries are fetched and checked without the lock, which a hostile log could otherwise hold
        for long; what was signed meanwhile is noticed before anything is signed.
        """
        candidate = SignedCheckpoint.parse(source.read(CANDIDATE, limit=MAX_NOTE))
        candidate.check_log(self._identity.origin, self._identity.log_keys)
        while True:
            with self._lock:
                last, old = self._head.last, self._head.state
            if candidate.checkpoint == last.checkpoint:
                return last.note.signatures[-1]
            state, entries = self._checked(candidate, source, last, old)
            with self._lock:
                if self._head.last is last:
                    return self._sign(candidate, state, entries)

    def _checked(
        self, candidate: SignedCheckpoint, source: Source, last: SignedCheckpoint, old: LogState
    ) -> tuple[LogState, list[bytes]]:
        """The state and the entries that the candidate adds to what was signed last."""
        checkpoint = candidate.checkpoint
        self._check_time(checkpoint, last.checkpoint)
        if checkpoint.size < last.checkpoint.size:
            raise LogRewound(
                f"the log had {last.checkpoint.size} entries and now shows {checkpoint.size}"
            )
        state, entries, logged = self._extend(candidate, source, last, old)
        self._check_own_configs(logged, old)
        current = state.current(checkpoint.time)
        if not hmac.compare_digest(current.digest, checkpoint.list_digest):
            raise WrongList("the candidate's list is not the one that follows from the entries")
        current.check_limits()
        self._accept([item.recipe for item in logged if item.recipe is not None])
        return state, entries

    def _sign(
        self, candidate: SignedCheckpoint, state: LogState, entries: Sequence[bytes]
    ) -> SignatureLine:
        checkpoint = candidate.checkpoint
        line = self._identity.sign(checkpoint, self._clock.now())
        # With the log's own signature: if it ever forks, the head is half of the proof.
        own = (old for old in candidate.note.signatures if old.name == checkpoint.origin)
        note = Note(text=checkpoint.text, signatures=(*own, line))
        self._head.commit(SignedCheckpoint(checkpoint=checkpoint, note=note), entries, state)
        return line

    def _check_time(self, checkpoint: Checkpoint, last: Checkpoint) -> None:
        now = self._clock.now()
        if abs(checkpoint.time - now) > MAX_SKEW:
            raise CheckpointTime(
                f"the candidate's time is {checkpoint.time - now:+} s off our clock, "
                f"more than {MAX_SKEW} s",
                time=checkpoint.time,
                now=now,
            )
        if checkpoint.time <= last.time:
            raise LogRewound(
                f"the candidate's time {checkpoint.time} is not after {last.time}, signed before"
            )

    def _extend(
        self, candidate: SignedCheckpoint, source: Source, last: SignedCheckpoint, old: LogState
    ) -> tuple[LogState, list[bytes], list[Logged]]:
        """Our entries followed by the new ones, if that is the tree of the checkpoint."""
        checkpoint = candidate.checkpoint
        if checkpoint.size - old.size > self._max_new_entries:
            raise EntryRefused(
                f"{checkpoint.size - old.size} new entries at once, where a cosigner takes "
                f"{self._max_new_entries}; its operator can raise the limit"
            )
        leaves = list(read_leaves(source, old.size, checkpoint.size))
        # Before any body is fetched: a fork is found without reading what it holds.
        if not hmac.compare_digest(old.frontier.extend(leaves).root, checkpoint.root):
            raise LogForked(
                f"the log of {checkpoint.size} entries does not extend the {old.size} seen before",
                evidence=(last.encode(), candidate.encode()),
            )
        state, room = old.copy(), self._max_new_bytes
        entries, logged = [], []
        for leaf in leaves:
            entry = read_entry(source, leaf)
            room -= len(entry)
            if room < 0:
                raise EntryRefused(
                    f"over {self._max_new_bytes} bytes of new entries at once; "
                    "the cosigner's operator can raise the limit"
                )
            logged.append(state.append(entry))
            entries.append(entry)
        return state, entries, logged

    def _check_own_configs(self, logged: Sequence[Logged], old: LogState) -> None:
        ours = [
            item.entry
            for item in logged
            if isinstance(item.entry, HPKEConfigEntry)
            and item.entry.aggregator == self._identity.name
        ]
        known = set(self._own_configs()) if ours else set()
        before = {each.config for each in old.hpke_entries(self._identity.name)}
        for entry in ours:
            if entry.config in before:
                raise ForeignHPKEConfig(
                    f"an HPKE config of ours ({entry.aggregator}) was logged a second time, which "
                    "would bring back a key that devices have left: we sign one entry for each"
                )
            before.add(entry.config)
            if entry.config not in known:
                raise ForeignHPKEConfig(
                    f"an HPKE config was logged in our name ({entry.aggregator}) that we did not "
                    f"make, signed by key {entry.signer.hex()}: if that key is ours, it is stolen"
                )


def create_head(
    folder: Path, identity: CosignerIdentity, clock: Clock, *, disk: Disk | None = None
) -> Head:
    """Begin to cosign a log that this cosigner never cosigned before: the operator's decision."""
    empty = LogState()
    first = Checkpoint(
        origin=identity.origin,
        size=0,
        root=empty.frontier.root,
        time=0,
        list_digest=empty.current(0).digest,
    )
    line = identity.sign(first, clock.now())
    note = Note(text=first.text, signatures=(line,))
    return Head.create(folder, SignedCheckpoint(checkpoint=first, note=note), disk=disk)


def adopt_head(
    folder: Path,
    identity: CosignerIdentity,
    *,
    checkpoint: SignedCheckpoint,
    source: Source,
    disk: Disk | None = None,
) -> Head:
    """Replace a lost memory by a checkpoint that carries our cosignature: the operator's decision.

    The operator vouches that nothing newer was cosigned. All entries are fetched and verified.
    """
    own = identity.key.public_key().public_bytes_raw()
    checkpoint.check_log(identity.origin, identity.log_keys)
    cosignature = checkpoint.note.check_cosignature(identity.name, [own])
    target, state = checkpoint.checkpoint, LogState()
    entries = [read_entry(source, leaf) for leaf in read_leaves(source, 0, target.size)]
    for entry in entries:
        state.append(entry)
    if not hmac.compare_digest(state.frontier.root, target.root):
        raise LogForked("the log's entries are not those of the checkpoint to adopt")
    line = identity.sign(target, cosignature.time)
    kept = (old for old in checkpoint.note.signatures if old.name == target.origin)
    note = Note(text=target.text, signatures=(*kept, line))
    return Head.create(folder, SignedCheckpoint(checkpoint=target, note=note), entries, disk=disk)
