"""What anyone can check with nothing but the files: the whole log, from its first entry.

`audit` raises an error that names the first thing that is wrong. It checks the signatures of the
checkpoint, every tile, bundle and body, the root, each entry's signature and whether the log's
rules and the policies allow it, the list that devices get and its proof, and the candidate that
waits for cosignatures. If you pass checkpoints that you saved earlier, it also checks that the log
still begins with what they covered: so an auditor who keeps just one notices a fork or a rewind
without anybody's help.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator, Sequence
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
from chorister.policy.document import MAX_POLICY_BYTES
from chorister.recipe import SignedRecipe
from chorister.transparency.checkpoint import (
    MAX_PROOF,
    MAX_SKEW,
    Checkpoint,
    ListProof,
    SignedCheckpoint,
)
from chorister.transparency.client import (
    ABOUT,
    CANDIDATE,
    CHECKPOINT,
    PROOF,
    list_path,
    policy_path,
)
from chorister.transparency.cosigner import check_body, fetch_body
from chorister.transparency.entries import ListEntry
from chorister.transparency.note import MAX_NOTE, Cosignature
from chorister.transparency.reader import accept_list
from chorister.transparency.state import MAX_LIST, CurrentList, Logged, LogState
from chorister.transparency.tiles import Source, TileTree, check_tiles, read_entries
from chorister.transparency.tree import (
    HASH_SIZE,
    Frontier,
    consistency_proof,
    leaf_hash,
    verify_consistency,
)
from chorister.transparency.trust import Authority

_MAX_ABOUT_BYTES: Final = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What a log contains, after everything in it was verified."""

    checkpoint: Checkpoint
    cosignatures: tuple[Cosignature, ...]
    # The earliest time at which a cosigner said that this is the newest checkpoint.
    time: int
    entries: tuple[Logged, ...]
    # The recipes of the entries that are one, by the entry's index.
    recipes: dict[int, SignedRecipe]
    # The list that closes the log, and what it says.
    last_list: ListEntry
    current: CurrentList
    # The checkpoint that waits for cosignatures, if it is not the published one.
    candidate: Checkpoint | None
    # The cosigners that the candidate waits for.
    waiting_for: tuple[str, ...]
    # Entries that no given policy covers: nobody checked whether their keys may sign them.
    unjudged: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPolicies:
    """The policies of a log, and those that it had before.

    If they come from the log (`read_policies`), only the log says so: compare them with your own.
    """

    policies: tuple[Policy, ...]
    earlier: tuple[Policy, ...]

    @property
    def authority(self) -> Authority:
        return Authority.of(self.policies, earlier=self.earlier)


def read_policies(source: Source) -> LogPolicies:
    """Fetch the policies that a log publishes."""
    try:
        about = json.loads(source.read(ABOUT, limit=_MAX_ABOUT_BYTES))
        today = [bytes.fromhex(digest) for digest in about["policies"]]
        before = [bytes.fromhex(digest) for digest in about["earlier_policies"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DecodeError(f"{ABOUT} does not name the log's policies") from error
    if any(len(digest) != HASH_SIZE for digest in (*today, *before)):
        raise DecodeError(f"{ABOUT} names a policy by something that is not a SHA-256")
    return LogPolicies(
        policies=tuple(_read_policy(source, digest) for digest in today),
        earlier=tuple(_read_policy(source, digest) for digest in before),
    )


def _read_policy(source: Source, digest: bytes) -> Policy:
    path = policy_path(digest)
    data = source.read(path, limit=MAX_POLICY_BYTES)
    if not hmac.compare_digest(hashlib.sha256(data).digest(), digest):
        raise LogWithheld(f"{path} is not the policy with that digest", path=path)
    return Policy.load(data)


def replay(
    source: Source, state: LogState, entries: Iterable[bytes], recipes: dict[int, SignedRecipe]
) -> Iterator[Logged]:
    """Apply the log's rules to entries that follow, and fetch and verify their bodies.

    Recipes are added to `recipes` by the index of their entry.
    """
    for data in entries:
        logged = state.append(data)
        recipe = check_body(logged, fetch_body(source, logged.entry))
        if recipe is not None:
            recipes[logged.index] = recipe
        yield logged


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
    time = min(cosignature.time for cosignature in cosignatures)
    if clock is not None:
        check_fresh(time, clock.now(), authority.max_age)
    state, recipes = LogState(), dict[int, SignedRecipe]()
    logged = read_entries(source, 0, checkpoint.size)
    entries, unjudged = _judge(replay(source, state, logged, recipes), authority, judge_all)
    if not hmac.compare_digest(state.frontier.root, checkpoint.root):
        raise LogForked("the root of the entries is not the checkpoint's")
    tree = TileTree()
    tree.extend(logged.leaf for logged in entries)
    check_tiles(source, tree)
    last_list = state.check_current(time)
    current = accept_list(
        source.read(list_path(last_list.digest), limit=MAX_LIST), last_list.digest
    )
    check_proof(source, signed, tree.leaves, authority)
    for kept in earlier:
        check_extends(kept, signed, tree.leaves, authority)
    candidate, waiting_for = _check_candidate(source, signed, state, authority, judge_all)
    return Audit(
        checkpoint=checkpoint,
        cosignatures=cosignatures,
        time=time,
        entries=entries,
        recipes=recipes,
        last_list=last_list,
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


def check_fresh(time: int, now: int, max_age: int) -> None:
    if time > now + MAX_SKEW or time < now - max_age:
        raise CheckpointTime(
            f"the checkpoint was cosigned {time - now:+} s from now; "
            f"devices refuse it if it is older than {max_age} s",
            time=time,
            now=now,
        )


def check_proof(
    source: Source, signed: SignedCheckpoint, leaves: Sequence[bytes], authority: Authority
) -> None:
    """Require that devices are shown this log; their file may be a checkpoint older or newer.

    `leaves` are those of `signed`.
    """
    proof = ListProof.parse(source.read(PROOF, limit=MAX_PROOF))
    proof.check_last()
    shown = proof.signed
    shown.check_log(authority.origin, authority.log_keys)
    size = shown.checkpoint.size
    newer = (leaf_hash(data) for data in read_entries(source, len(leaves), size))
    root = Frontier().extend(leaves[:size]).extend(newer).root
    if not hmac.compare_digest(root, shown.checkpoint.root):
        raise LogForked(
            "devices are shown another log than everybody else",
            evidence=(signed.encode(), shown.encode()),
        )


def check_extends(
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
    if old.size > checkpoint.size:
        raise LogRewound(f"the log showed {old.size} entries, and now {checkpoint.size}")
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
    published: SignedCheckpoint,
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
    if candidate == published.checkpoint:
        return None, ()
    signed.check_log(authority.origin, authority.log_keys)
    if candidate.size < published.checkpoint.size:
        raise LogRewound("the candidate is smaller than the published checkpoint")
    new = list(read_entries(source, state.size, candidate.size))
    root = state.frontier.extend(leaf_hash(data) for data in new).root
    if not hmac.compare_digest(root, candidate.root):
        raise LogForked("the candidate does not extend the published log")
    _judge(replay(source, state, new, {}), authority, judge_all)
    if not state.closed:
        raise WrongList("the candidate's last entry is not a list")
    return candidate, authority.missing(signed)
