"""What anyone can check with nothing but the files: the whole log, from its first entry.

`audit` raises an error that names the first thing that is wrong. It checks the signatures of the
checkpoint, every tile and body, the root, each entry's signature and whether the log's rules and
the policies allow it, the current list, and the candidate that waits for cosignatures. If you pass
checkpoints that you saved earlier, it also checks that the log still begins with what they covered:
so an auditor who keeps just one notices a fork or a rewind without anybody's help.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from chorister.clock import Clock
from chorister.errors import CheckpointTime, DecodeError, LogForked, LogRewound, LogWithheld
from chorister.policy import Policy
from chorister.policy.model import MAX_POLICY_BYTES
from chorister.transparency.checkpoint import (
    MAX_NOTE,
    MAX_SKEW,
    Checkpoint,
    Cosignature,
    SignedCheckpoint,
)
from chorister.transparency.client import (
    ABOUT,
    CANDIDATE,
    CHECKPOINT,
    Source,
    list_path,
    policy_path,
    read_entry,
    read_leaves,
)
from chorister.transparency.reader import accept_list
from chorister.transparency.state import MAX_LIST, CurrentList, Logged, LogState
from chorister.transparency.tree import HASH_SIZE, consistency_proof, verify_consistency
from chorister.transparency.trust import Authority

_MAX_ABOUT_BYTES: Final = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What a log contains, after everything in it was verified."""

    checkpoint: Checkpoint
    cosignatures: tuple[Cosignature, ...]
    entries: tuple[Logged, ...]
    current: CurrentList
    # The checkpoint that waits for cosignatures, if it is not the published one.
    candidate: Checkpoint | None
    # The cosigners that the candidate waits for.
    waiting_for: tuple[str, ...]
    # Entries that no given policy covers: nobody checked whether their keys may sign them.
    unjudged: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPolicies:
    """The policies that a log says it serves, and those that it served before.

    Only the log says so: compare them with your own.
    """

    policies: tuple[Policy, ...]
    earlier: tuple[Policy, ...]

    @property
    def authority(self) -> Authority:
        return Authority.of(self.policies, earlier=self.earlier)


def read_policies(source: Source) -> PublishedPolicies:
    """Fetch the policies that a log publishes."""
    try:
        about = json.loads(source.read(ABOUT, limit=_MAX_ABOUT_BYTES))
        today = [bytes.fromhex(digest) for digest in about["policies"]]
        before = [bytes.fromhex(digest) for digest in about["earlier_policies"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DecodeError(f"{ABOUT} does not name the log's policies") from error
    if any(len(digest) != HASH_SIZE for digest in (*today, *before)):
        raise DecodeError(f"{ABOUT} names a policy by something that is not a SHA-256")
    return PublishedPolicies(
        policies=tuple(_read_policy(source, digest) for digest in today),
        earlier=tuple(_read_policy(source, digest) for digest in before),
    )


def _read_policy(source: Source, digest: bytes) -> Policy:
    path = policy_path(digest)
    data = source.read(path, limit=MAX_POLICY_BYTES)
    if not hmac.compare_digest(hashlib.sha256(data).digest(), digest):
        raise LogWithheld(f"{path} is not the policy with that digest", path=path)
    return Policy.load(data)


def read_entries(source: Source, leaves: Sequence[bytes], state: LogState) -> Iterator[Logged]:
    """Fetch entries and apply the log's rules to each."""
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
    """Verify everything from scratch.

    With a `clock` the checkpoint must also be recent, which the copy of a log need not be. A log
    may serve policies other than yours: without `judge_all`, entries that your policies do not
    cover are counted instead of refused; their signatures and the log's rules are still checked.
    """
    signed = SignedCheckpoint.parse(source.read(CHECKPOINT, limit=MAX_NOTE))
    checkpoint = signed.checkpoint
    cosignatures = authority.check_signatures(signed)
    if clock is not None:
        _check_fresh(checkpoint, clock.now(), authority.max_age)
    leaves = list(read_leaves(source, 0, checkpoint.size))
    state = LogState()
    entries, unjudged = _judge(read_entries(source, leaves, state), authority, judge_all)
    if not hmac.compare_digest(state.frontier.root, checkpoint.root):
        raise LogForked("the root of the entries is not the checkpoint's")
    current = state.check_list(checkpoint)
    accept_list(source.read(list_path(checkpoint.list_digest), limit=MAX_LIST), checkpoint)
    for kept in earlier:
        _check_extends(kept, signed, leaves, authority)
    candidate, waiting_for = _check_candidate(source, checkpoint, state, authority, judge_all)
    return Audit(
        checkpoint=checkpoint,
        cosignatures=cosignatures,
        entries=entries,
        current=current,
        candidate=candidate,
        waiting_for=waiting_for,
        unjudged=unjudged,
    )


def _judge(
    entries: Iterable[Logged], authority: Authority, judge_all: bool
) -> tuple[tuple[Logged, ...], int]:
    """Check whether each entry's key may sign it; count those that no policy covers."""
    judged, unjudged = [], 0
    for logged in entries:
        if judge_all or authority.covers(logged):
            authority.check_entry(logged)
        else:
            unjudged += 1
        judged.append(logged)
    return tuple(judged), unjudged


def _check_fresh(checkpoint: Checkpoint, now: int, max_age: int) -> None:
    if checkpoint.time > now + MAX_SKEW or checkpoint.time < now - max_age:
        raise CheckpointTime(
            f"the checkpoint's time is {checkpoint.time - now:+} s from now; "
            f"devices refuse it if it is older than {max_age} s",
            time=checkpoint.time,
            now=now,
        )


def _check_extends(
    kept: SignedCheckpoint,
    signed: SignedCheckpoint,
    leaves: Sequence[bytes],
    authority: Authority,
) -> None:
    """Require that the log still begins with what an earlier checkpoint covered."""
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
    """Require that a candidate, if there is one, extends the published log by the same rules."""
    try:
        data = source.read(CANDIDATE, limit=MAX_NOTE)
    except LogWithheld:
        return None, ()  # The copy of a log need not have one.
    signed = SignedCheckpoint.parse(data)
    candidate = signed.checkpoint
    if candidate == published:
        return None, ()
    signed.check_log(authority.origin, authority.log_keys)
    if candidate.size < published.size or candidate.time <= published.time:
        raise LogRewound("the candidate is smaller than the published checkpoint, or not later")
    new = list(read_leaves(source, published.size, candidate.size))
    _judge(read_entries(source, new, state), authority, judge_all)
    if not hmac.compare_digest(state.frontier.root, candidate.root):
        raise LogForked("the candidate does not extend the published log")
    state.check_list(candidate, "candidate")
    return candidate, authority.missing(signed)
