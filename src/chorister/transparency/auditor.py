"""What anyone can check, from nothing but the files: the whole log, from its first entry.

`audit` stops at the first thing that is wrong and raises the error that names it. It checks the
signatures of the checkpoint, every tile and body, the root, each entry's signature and whether the
log's rules and the policies permit it, the current list, and the candidate that waits for
cosignatures. With checkpoints kept from earlier it also checks that the log still begins with what
they covered: an auditor who keeps one finds out about a fork or a rewind by itself.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from chorister.clock import Clock
from chorister.errors import (
    CheckpointTime,
    DecodeError,
    LogForked,
    LogRewound,
    LogWithheld,
    WrongList,
)
from chorister.policy import Policy
from chorister.policy.model import MAX_POLICY_BYTES as MAX_POLICY
from chorister.transparency.checkpoint import Checkpoint, SignedCheckpoint
from chorister.transparency.cosigner import MAX_SKEW
from chorister.transparency.listing import MAX_LIST, CurrentList
from chorister.transparency.note import MAX_NOTE, Cosignature
from chorister.transparency.reader import accept_list
from chorister.transparency.sources import (
    ABOUT,
    CANDIDATE,
    CHECKPOINT,
    Source,
    list_path,
    policy_path,
    read_entry,
    read_leaves,
)
from chorister.transparency.state import Logged, LogState
from chorister.transparency.tree import HASH_SIZE, consistency_proof, verify_consistency
from chorister.transparency.trust import Authority

__all__ = ["MAX_ABOUT", "Audit", "Published", "audit", "read_entries", "read_policies"]

MAX_ABOUT: Final = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What was found in a log in which nothing is wrong."""

    checkpoint: Checkpoint
    cosignatures: tuple[Cosignature, ...]
    entries: tuple[Logged, ...]
    current: CurrentList
    # The checkpoint that waits for cosignatures, if it is not the published one.
    candidate: Checkpoint | None
    # Cosigners that the candidate waits for.
    waiting_for: tuple[str, ...]
    # Entries of which no policy speaks: whether their keys may vouch was not judged.
    unjudged: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """The policies that a log says it serves, and those it served before.

    It is the log that says so: compare with your own.
    """

    policies: tuple[Policy, ...]
    earlier: tuple[Policy, ...]

    @property
    def authority(self) -> Authority:
        """Who may do what, by the log's own account."""
        return Authority.of(self.policies, earlier=self.earlier)


def read_policies(source: Source) -> Published:
    """Fetch the policies that a log publishes beside its entries."""
    try:
        about = json.loads(source.read(ABOUT, limit=MAX_ABOUT))
        today = [bytes.fromhex(digest) for digest in about["policies"]]
        before = [bytes.fromhex(digest) for digest in about["earlier_policies"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DecodeError(f"{ABOUT} does not name the log's policies") from error
    if any(len(digest) != HASH_SIZE for digest in (*today, *before)):
        raise DecodeError(f"{ABOUT} names a policy by something that is not a SHA-256")
    return Published(
        policies=tuple(_read_policy(source, digest) for digest in today),
        earlier=tuple(_read_policy(source, digest) for digest in before),
    )


def _read_policy(source: Source, digest: bytes) -> Policy:
    path = policy_path(digest)
    data = source.read(path, limit=MAX_POLICY)
    if not hmac.compare_digest(hashlib.sha256(data).digest(), digest):
        raise LogWithheld(f"{path} is not the policy with that digest", path=path)
    return Policy.load(data)


def read_entries(source: Source, leaves: Sequence[bytes], state: LogState) -> Iterator[Logged]:
    """Fetch entries and apply the log's rules to them, one after the other."""
    for leaf in leaves:
        yield state.append(read_entry(source, leaf))


def audit(
    source: Source,
    *,
    authority: Authority,
    clock: Clock | None = None,
    earlier: Sequence[SignedCheckpoint] = (),
    judge_all: bool = True,
) -> Audit:
    """Verify everything from an empty state; raises the error that names the first wrong thing.

    With a `clock` the checkpoint must also be fresh; a copy of a log need not be. A log may serve
    policies that are not yours: without `judge_all`, entries of which your policies do not speak
    are counted instead of refused; their signatures and the log's rules are checked all the same.
    """
    signed = SignedCheckpoint.parse(source.read(CHECKPOINT, limit=MAX_NOTE))
    checkpoint = signed.checkpoint
    cosignatures = authority.check_signatures(signed)
    if clock is not None:
        _check_fresh(checkpoint, clock.now(), authority.max_age)
    leaves = list(read_leaves(source, 0, checkpoint.size))
    state = LogState()
    entries = []
    unjudged = 0
    for logged in read_entries(source, leaves, state):
        if judge_all or authority.knows(logged):
            authority.check_entry(logged)
        else:
            unjudged += 1
        entries.append(logged)
    if not hmac.compare_digest(state.frontier.root, checkpoint.root):
        raise LogForked("the root of the entries is not the checkpoint's")
    current = state.current(checkpoint.time)
    if not hmac.compare_digest(current.digest, checkpoint.list_digest):
        raise WrongList(
            "the checkpoint's list is not the one that follows from the entries: the log lies, or "
            "the checkpoint was made by another version of Chorister; then wait for the next"
        )
    current.check_limits()
    accept_list(source.read(list_path(checkpoint.list_digest), limit=MAX_LIST), checkpoint)
    for kept in earlier:
        _check_extends(kept, signed, leaves, authority)
    candidate, waiting_for = _check_candidate(source, checkpoint, state, authority, judge_all)
    return Audit(
        checkpoint=checkpoint,
        cosignatures=cosignatures,
        entries=tuple(entries),
        current=current,
        candidate=candidate,
        waiting_for=waiting_for,
        unjudged=unjudged,
    )


def _check_fresh(checkpoint: Checkpoint, now: int, max_age: int) -> None:
    if checkpoint.time > now + MAX_SKEW or checkpoint.time < now - max_age:
        raise CheckpointTime(
            f"the checkpoint's time is {checkpoint.time - now:+} s from now; "
            f"devices refuse what is older than {max_age} s",
            time=checkpoint.time,
            now=now,
        )


def _check_extends(
    kept: SignedCheckpoint,
    signed: SignedCheckpoint,
    leaves: Sequence[bytes],
    authority: Authority,
) -> None:
    """The log still begins with what an earlier checkpoint covered."""
    old, checkpoint = kept.checkpoint, signed.checkpoint
    kept.check_log(authority.origin, authority.all_log_keys)
    if old == checkpoint:
        return
    if old.size > checkpoint.size or old.time >= checkpoint.time:
        raise LogRewound(
            f"the log showed {old.size} entries at {old.time}, "
            f"and now {checkpoint.size} at {checkpoint.time}"
        )
    try:
        verify_consistency(
            old_size=old.size,
            old_root=old.root,
            size=checkpoint.size,
            root=checkpoint.root,
            proof=consistency_proof(old.size, leaves) if old.size else (),
        )
    except LogForked as error:
        raise LogForked(str(error), evidence=(kept.encode(), signed.encode())) from error


def _check_candidate(
    source: Source,
    published: Checkpoint,
    state: LogState,
    authority: Authority,
    judge_all: bool,
) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """A candidate, where there is one, extends what is published by the same rules."""
    try:
        data = source.read(CANDIDATE, limit=MAX_NOTE)
    except LogWithheld:
        return None, ()  # A copy of a log need not carry one.
    signed = SignedCheckpoint.parse(data)
    candidate = signed.checkpoint
    if candidate == published:
        return None, ()
    signed.check_log(authority.origin, authority.log_keys)
    if candidate.size < published.size or candidate.time <= published.time:
        raise LogRewound("the candidate is smaller than what is published, or not later")
    new = list(read_leaves(source, published.size, candidate.size))
    for logged in read_entries(source, new, state):
        if judge_all or authority.knows(logged):
            authority.check_entry(logged)
    if not hmac.compare_digest(state.frontier.root, candidate.root):
        raise LogForked("the candidate does not extend what is published")
    current = state.current(candidate.time)
    if not hmac.compare_digest(current.digest, candidate.list_digest):
        raise WrongList("the candidate's list is not the one that follows from the entries")
    current.check_limits()
    return candidate, authority.missing(signed)
