"""What an aggregator checks before it cosigns. One honest cosigner prevents a second log.

An aggregator is a cosigner with additional statements (c2sp.org/tlog-cosignature): beyond what a
witness checks, it vouches that the log's rules hold and that its last entry is the current list.
`Cosigner.cosign` reads all new entries and bodies of a checkpoint, and signs only if

1. the log signed it, with a key of the policy, under the name that this cosigner follows;
2. it is not smaller than the last one that we signed, and its root is that of *our* entries
   followed by the new ones, all of them fetched: it is the same log, and nothing is withheld;
3. the log's rules allow every new entry, its signature verifies, and every body is what its entry
   says: so each list is the one that follows from the entries before it, at a time after that of
   the list before, and within the limits (`state`), so that no device has to fetch more;
4. every new HPKE config in our name is one that we created, and was not logged before;
5. its last entry is a list, at most five minutes ahead of our clock, which has not changed by time
   alone until five minutes before our clock.

The same tree may be signed again and again, each time with a new time and after checking 5 again:
that is how a device knows that the list of an old checkpoint is still current.

Then `accept` gets the new recipes (an aggregator stores their task ids), checkpoint and entries are
written durably, and only then is the cosignature handed out. After a crash on the way some steps
are repeated and none is skipped, so `accept` must be idempotent.

**The head** is what a cosigner remembers, in a folder with two files (and `fork`, with the two
checkpoints that prove one, if it ever saw one). `head` is the last checkpoint
with the cosigner's own cosignature, always replaced as a whole. `entries` has the entries that it
covers with their bodies, each after its length in four bytes; any more were fetched for a
checkpoint that was never cosigned, and are cut off. Entries are synced before the head, and the
head before the cosignature is handed out. A folder without a head is not an empty log but a lost
memory: `Head.open` raises `HeadLost`, and only the operator can create a new one. A cosigner that
silently started over would sign the second half of a fork.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from chorister.clock import Clock
from chorister.errors import (
    CheckpointTime,
    DecodeError,
    EntryRefused,
    ForeignHPKEConfig,
    HeadLost,
    LogError,
    LogForked,
    LogRewound,
    StorageDamaged,
)
from chorister.recipe import SignedRecipe
from chorister.transparency.checkpoint import Checkpoint, ClockJumps, SignedCheckpoint
from chorister.transparency.client import CANDIDATE, read_body
from chorister.transparency.disk import Disk, locked
from chorister.transparency.entries import (
    MAX_HPKE_CONFIG_ENTRY,
    Entry,
    HPKEConfigEntry,
    RecipeEntry,
    Submission,
)
from chorister.transparency.note import (
    LOG_SIGNATURE,
    MAX_NOTE,
    Note,
    SignatureLine,
    note_key_id,
)
from chorister.transparency.state import Logged, LogState
from chorister.transparency.tiles import Source, read_entries
from chorister.transparency.tree import leaf_hash

_LENGTH_BYTES: Final = 4
MAX_NEW_ENTRIES: Final = 100_000
MAX_NEW_BYTES: Final = 256 << 20
"""With their bodies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CosignerIdentity:
    """Who cosigns, and which log."""

    # The aggregator's name: its URL without the scheme (`note.key_name`).
    name: str
    key: Ed25519PrivateKey
    # The log's name, and the keys that may sign for it.
    origin: str
    log_keys: tuple[bytes, ...]

    def __repr__(self) -> str:
        return f"CosignerIdentity(name={self.name!r}, origin={self.origin!r})"

    def sign(self, checkpoint: Checkpoint, time: int) -> SignatureLine:
        return checkpoint.cosign(name=self.name, key=self.key, time=time)

    def head(self, signed: SignedCheckpoint, time: int) -> SignedCheckpoint:
        """Return what to remember: the log's signature, which helps prove a fork, and then ours."""
        checkpoint = signed.checkpoint
        ids = {note_key_id(self.origin, LOG_SIGNATURE, each) for each in self.log_keys}
        log = (
            old for old in signed.note.signatures if old.name == self.origin and old.blob[:4] in ids
        )
        note = Note(text=checkpoint.text, signatures=(*log, self.sign(checkpoint, time)))
        return SignedCheckpoint(checkpoint=checkpoint, note=note)


class _Extension(NamedTuple):
    """What a checked candidate adds to a tree, and the state with it."""

    tree: Checkpoint
    state: LogState
    entries: list[Submission]


@dataclass(kw_only=True, eq=False, slots=True)
class Cosigner:
    """Checks candidates and cosigns them; its memory outlives the process."""

    identity: CosignerIdentity
    head: Head
    clock: Clock
    # Returns every encoded HPKE config that this aggregator has created.
    own_configs: Callable[[], Collection[bytes]]
    accept: Callable[[Sequence[SignedRecipe]], None]
    # What a registry may make a cosigner fetch and store for one candidate. A log that is further
    # ahead is either an attack or something for the operator to decide, who can raise the limits.
    max_new_entries: int = MAX_NEW_ENTRIES
    max_new_bytes: int = MAX_NEW_BYTES
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)
    _jumps: ClockJumps = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._jumps = ClockJumps(self.clock)
        if self.last.origin != self.identity.origin:
            raise LogForked(
                f"the head is of the log {self.last.origin}, not {self.identity.origin}"
            )

    @property
    def last(self) -> Checkpoint:
        """The checkpoint that was signed last."""
        return self.head.last.checkpoint

    def cosign(self, source: Source, candidate: SignedCheckpoint | None = None) -> SignatureLine:
        """Check a checkpoint and cosign it; raises a `LogError` that says what is wrong.

        Without `candidate` it is the one that the log shows. Entries are fetched and checked
        without the lock, which a hostile log could otherwise hold for a long time; if a larger
        checkpoint was signed meanwhile, they are checked again. If it was the same tree with a new
        time, only our time is: anybody may ask for that every second, forever.
        """
        if candidate is None:
            candidate = SignedCheckpoint.parse(source.read(CANDIDATE, limit=MAX_NOTE))
        candidate.check_log(self.identity.origin, self.identity.log_keys)
        checked: _Extension | None = None
        while True:
            with self._lock:
                last, old = self.head.last, self.head.state
            if checked is None or checked.tree != last.checkpoint:
                checked, time = self._check(candidate, source, last, old)
            else:
                time = self._current(checked.state, last)
            with self._lock:
                if self.head.last is last:
                    signed = self.identity.head(candidate, time)
                    # Anybody may ask for the same one again and again: once per second is enough.
                    if signed != last:
                        self.head.commit(signed, checked.entries, checked.state)
                    return signed.note.signatures[-1]

    def _now(self, last: SignedCheckpoint) -> int:
        """Return the time to sign with: devices refuse one that is before an earlier one."""
        now = self.clock.now()
        own = self.identity.key.public_key().public_bytes_raw()
        before = last.note.cosignature(self.identity.name, [own])
        if before is not None and now < before.time:
            raise CheckpointTime(
                f"our clock is {before.time - now} s behind the time of our last cosignature: "
                "set the clock",
                time=before.time,
                now=now,
            )
        self._jumps.check(now)
        return now

    def _current(self, state: LogState, last: SignedCheckpoint) -> int:
        """Require that the list is current; return the time at which it is."""
        now = self._now(last)
        state.check_current(now)
        return now

    def _check(
        self, candidate: SignedCheckpoint, source: Source, last: SignedCheckpoint, old: LogState
    ) -> tuple[_Extension, int]:
        """Check a candidate; return what it adds, and when it held."""
        checkpoint = candidate.checkpoint
        if checkpoint.size < last.checkpoint.size:
            raise LogRewound(
                f"the log had {last.checkpoint.size} entries and now shows {checkpoint.size}"
            )
        state, entries, logged, recipes = self._extend(candidate, source, last, old)
        self._check_own_configs(logged, old)
        # What is signed is that the list was current at this time, however long the rest takes.
        now = self._current(state, last)
        self.accept(recipes)
        return _Extension(last.checkpoint, state, entries), now

    def _extend(
        self, candidate: SignedCheckpoint, source: Source, last: SignedCheckpoint, old: LogState
    ) -> tuple[LogState, list[Submission], list[Logged], list[SignedRecipe]]:
        """Fetch the new entries and append them to ours, if that is the checkpoint's tree."""
        checkpoint = candidate.checkpoint
        if checkpoint.size - old.size > self.max_new_entries:
            raise EntryRefused(
                f"there are {checkpoint.size - old.size} new entries, but a cosigner takes at most "
                f"{self.max_new_entries} at once; its operator can raise new_log_entries"
            )
        room, new = self.max_new_bytes, []
        for data in read_entries(source, old.size, checkpoint.size):
            room = self._take(room, len(data))
            new.append(data)
        # Before any body is fetched: a fork shows without them.
        root = old.frontier.extend(leaf_hash(data) for data in new).root
        if not hmac.compare_digest(root, checkpoint.root):
            evidence = last.encode(), candidate.encode()
            self.head.keep_evidence(evidence)
            raise LogForked(
                f"the log of {checkpoint.size} entries does not extend the {old.size} seen before",
                evidence=evidence,
            )
        state = old.copy() if new else old
        entries, logged, recipes = [], [], []
        for data in new:
            logged.append(state.append(data))
            body = fetch_body(source, logged[-1].entry)
            room = self._take(room, len(body))
            entries.append(Submission(data, body))
            recipe = check_body(logged[-1], body)
            if recipe is not None:
                recipes.append(recipe)
        return state, entries, logged, recipes

    def _take(self, room: int, size: int) -> int:
        if size > room:
            raise EntryRefused(
                f"over {self.max_new_bytes} bytes of new entries at once; "
                "the cosigner's operator can raise new_log_bytes"
            )
        return room - size

    def _check_own_configs(self, logged: Sequence[Logged], old: LogState) -> None:
        name = self.identity.name
        entries = [item.entry for item in logged if isinstance(item.entry, HPKEConfigEntry)]
        ours = [entry for entry in entries if entry.aggregator == name]
        if not ours:
            return
        known = set(self.own_configs())
        before = {each.config for each in old.hpke_entries(name)}
        for entry in ours:
            if entry.config in before:
                raise ForeignHPKEConfig(
                    f"an HPKE config of ours ({name}) was logged a second time, which would bring "
                    "back a key that devices no longer use: we sign one entry for each"
                )
            before.add(entry.config)
            if entry.config not in known:
                raise ForeignHPKEConfig(
                    f"an HPKE config was logged in our name ({name}) that we did not create, "
                    f"signed by key {entry.signer.hex()}: if that key is ours, it is stolen"
                )


def fetch_body(source: Source, entry: Entry) -> bytes:
    """Return a recipe's body; empty for other entries.

    An HPKE config has its own entry as its body, which devices fetch: it has to be there, too.
    """
    if isinstance(entry, RecipeEntry):
        return read_body(source, entry.body_digest, limit=entry.body_size)
    if isinstance(entry, HPKEConfigEntry):
        read_body(source, entry.address, limit=MAX_HPKE_CONFIG_ENTRY)
    return b""


def check_body(logged: Logged, body: bytes) -> SignedRecipe | None:
    """Return the recipe of an entry that is one; its body has to be what the entry says."""
    if not isinstance(logged.entry, RecipeEntry):
        return None
    try:
        return logged.entry.open_body(body)
    except DecodeError as error:
        raise EntryRefused(f"entry {logged.index}: {error}") from error


# --- What a cosigner remembers ------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Head:
    """A cosigner's memory on disk, used by one process at a time."""

    _folder: Path
    _disk: Disk
    _lock: ExitStack
    last: SignedCheckpoint
    state: LogState
    # Where the entries of `last` end in their file.
    _end: int
    _broken: bool = False

    def __repr__(self) -> str:
        return f"Head({str(self._folder)!r}, size={self.last.checkpoint.size})"

    @classmethod
    def create(
        cls,
        folder: Path,
        first: SignedCheckpoint,
        entries: Sequence[Submission] = (),
        *,
        disk: Disk | None = None,
    ) -> Self:
        """Start a memory with this checkpoint and its entries. Only an operator decides this."""
        disk = disk or Disk()
        disk.make_folder(folder)
        if (folder / "head").exists():
            raise HeadLost(f"{folder} already holds a head; it is not replaced")
        # The head comes last: if interrupted before it, the memory still counts as lost.
        disk.replace(folder / "entries", _framed(entries))
        disk.replace(folder / "head", first.encode())
        return cls.open(folder, disk=disk)

    @classmethod
    def open(cls, folder: Path, *, disk: Disk | None = None) -> Self:
        """Load what was signed last; check that the entries are those that it covers."""
        disk = disk or Disk()
        if not (folder / "head").is_file():
            raise HeadLost(
                f"{folder} holds no head: this cosigner does not know what it signed last. "
                "Create one if it never cosigned this log (--begin-log), or else adopt the newest "
                "checkpoint that has its cosignature (--adopt-checkpoint)."
            )
        with ExitStack() as stack:
            stack.enter_context(locked(folder / "lock"))
            try:
                last = SignedCheckpoint.parse((folder / "head").read_bytes())
            except (DecodeError, OSError) as error:
                raise StorageDamaged(
                    f"{folder / 'head'} is damaged ({error}); restore the folder, or have the "
                    "operator adopt a checkpoint"
                ) from error
            state, end = _replay(folder / "entries", last, disk)
            return cls(folder, disk, stack.pop_all(), last, state, end)

    def close(self) -> None:
        self._lock.close()

    def entries(self) -> Iterator[Submission]:
        """Yield the entries that the head covers, with their bodies, in the log's order."""
        return _frames(self._folder / "entries", self.last.checkpoint.size)

    def keep_evidence(self, checkpoints: Sequence[bytes]) -> None:
        """Write down the checkpoints that prove the first fork: the log may never show them again.

        Only the first, so that a log with a fork for every look does not fill the disk.
        """
        folder = self._folder / "fork"
        if folder.exists():
            return
        try:
            self._disk.make_folder(folder)
            paths = {folder / f"{n}": data for n, data in enumerate(checkpoints, start=1)}
            self._disk.replace_all(paths)
        except OSError:
            return  # refusing the fork matters more

    def commit(
        self, last: SignedCheckpoint, entries: Sequence[Submission], state: LogState
    ) -> None:
        """Remember a checkpoint and its new entries. Durable when this returns."""
        if self._broken:
            raise StorageDamaged("an earlier write failed; restart the cosigner to recover")
        framed = _framed(entries)
        path = self._folder / "entries"
        try:
            if framed:
                # Remove what an interrupted commit left behind: its entries never counted.
                self._disk.truncate(path, self._end)
                self._disk.append(path, framed)
            head = {self._folder / "head": last.encode()}
            self._disk.replace_all(head, appended=[path] if framed else [])
        except OSError as error:
            # Nobody knows what is on disk now, so nothing more is signed.
            self._broken = True
            raise StorageDamaged(f"{self._folder} can't be written: {error}") from error
        self._end += len(framed)
        self.last = last
        self.state = state


def create_head(
    folder: Path, identity: CosignerIdentity, clock: Clock, *, disk: Disk | None = None
) -> Head:
    """Start to cosign a log that this cosigner never cosigned before: the operator's decision."""
    empty = LogState()
    first = Checkpoint(origin=identity.origin, size=0, root=empty.frontier.root)
    unsigned = SignedCheckpoint(checkpoint=first, note=Note(text=first.text, signatures=()))
    return Head.create(folder, identity.head(unsigned, clock.now()), disk=disk)


def adopt_head(
    folder: Path,
    identity: CosignerIdentity,
    *,
    checkpoint: SignedCheckpoint,
    source: Source,
) -> Head:
    """Replace a lost memory by a checkpoint with our cosignature: the operator's decision.

    The operator vouches that nothing newer was cosigned. All entries are fetched and verified.
    """
    own = identity.key.public_key().public_bytes_raw()
    checkpoint.check_log(identity.origin, identity.log_keys)
    cosignature = checkpoint.note.check_cosignature(identity.name, [own])
    target, state = checkpoint.checkpoint, LogState()
    entries = []
    for data in read_entries(source, 0, target.size):
        logged = state.append(data)
        body = fetch_body(source, logged.entry)
        check_body(logged, body)
        entries.append(Submission(data, body))
    if not hmac.compare_digest(state.frontier.root, target.root):
        raise LogForked("the log's entries are not those of the checkpoint to adopt")
    return Head.create(folder, identity.head(checkpoint, cosignature.time), entries)


def _replay(path: Path, last: SignedCheckpoint, disk: Disk) -> tuple[LogState, int]:
    """Return the state after the head's entries, and where they end; cut off any after them."""
    state, end = LogState(), 0
    try:
        for submission in _frames(path, last.checkpoint.size):
            state.append(submission.entry)
            end += _LENGTH_BYTES + len(submission.encode())
    except (OSError, LogError, DecodeError) as error:
        raise StorageDamaged(
            f"{path} is damaged ({error}); restore the folder, or have the operator adopt a "
            "checkpoint"
        ) from error
    if (state.size, state.frontier.root) != (last.checkpoint.size, last.checkpoint.root):
        raise StorageDamaged(
            f"{path} holds {state.size} entries that are not the {last.checkpoint.size} of the "
            "head; restore both files, or have the operator adopt a checkpoint"
        )
    disk.truncate(path, end)
    disk.sync(path)
    return state, end


def _frames(path: Path, count: int) -> Iterator[Submission]:
    with path.open("rb") as file:
        for _ in range(count):
            prefix = file.read(_LENGTH_BYTES)
            size = int.from_bytes(prefix)
            framed = file.read(size)
            if len(prefix) != _LENGTH_BYTES or len(framed) != size:
                return
            yield Submission.parse(framed)


def _framed(entries: Sequence[Submission]) -> bytes:
    encoded = (entry.encode() for entry in entries)
    return b"".join(len(each).to_bytes(_LENGTH_BYTES) + each for each in encoded)
