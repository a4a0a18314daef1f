"""What a device checks before it trusts a question: no tree, only signatures and digests.

A checkpoint is accepted if the log and both aggregators signed it, if it is younger than the
policy's limit, and if it is neither older nor smaller than the last one accepted. The list must
have the checkpoint's digest, and a body the address on the list. As an honest aggregator cosigns
one history only, every device with the same checkpoint sees the same questions and the same keys.

**What is requested** must not depend on what this device remembers or what its clock says, or a
registry could recognise it (docs/concepts/log.md, "What a poll shows"). So `read_log` always
fetches the checkpoint and its list; and then nothing, if the files that list and policy require are
exactly those of the last complete reading, or all of them in the list's order. It forgets the last
ones before it fetches the first, so that an interrupted reading leaves no trace of them, and checks
time and size last, when everything is fetched.

The caller stores the time and the size of what it accepted and passes them as `not_before` and
`not_smaller` (a size counts only for the log of that name, 0 for any other), and keeps the bodies
of a complete reading until the next one.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from chorister.clock import Clock
from chorister.errors import (
    CheckpointTime,
    DecodeError,
    LogError,
    LogRewound,
    LogSignatureInvalid,
    LogWithheld,
    NotAuthorized,
    WrongList,
)
from chorister.transparency.checkpoint import MAX_NOTE, MAX_SKEW, Checkpoint, SignedCheckpoint
from chorister.transparency.client import CHECKPOINT, Source, list_path, read_entry
from chorister.transparency.entries import (
    MAX_HPKE_CONFIG_ENTRY,
    HPKEConfigEntry,
    RecipeEntry,
    parse_entry,
)
from chorister.transparency.state import MAX_LIST, CurrentList, ListedRecipe, check_quotas
from chorister.transparency.tree import leaf_hash
from chorister.transparency.trust import CosignerKeys, Trust


@dataclass(frozen=True, kw_only=True, slots=True)
class Current:
    """What is current according to an accepted checkpoint."""

    checkpoint: Checkpoint
    # The entries of the policy's authors, in the list's order. They are public, not yet permitted:
    # their JWS must still be verified against the policy.
    recipes: tuple[RecipeEntry, ...]
    leader_config: HPKEConfigEntry
    helper_config: HPKEConfigEntry


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a log showed."""

    # For each pair, in the order of the call: what is current, or why it is not trusted.
    outcomes: tuple[Current | LogError | DecodeError, ...]
    # By address, to keep until the next reading; None if none were needed.
    bodies: dict[bytes, bytes] | None


def read_current(source: Source, *, trust: Trust, clock: Clock) -> Current:
    """Fetch and check what is current for one pair, without remembering anything."""
    reading = read_log(source, [trust], clock=clock, kept=tuple, forget=lambda: None)
    (outcome,) = reading.outcomes
    if isinstance(outcome, Current):
        return outcome
    raise outcome


def read_log(
    source: Source,
    trusts: Sequence[Trust],
    *,
    clock: Clock,
    not_before: int = 0,
    not_smaller: int = 0,
    kept: Callable[[], Iterable[bytes]],
    forget: Callable[[], None],
) -> Reading:
    """Fetch and check what is current for a policy's pairs; raises if a file can't be fetched.

    `kept` returns the bodies of the last complete reading; `forget` deletes them.
    """
    signed = SignedCheckpoint.parse(source.read(CHECKPOINT, limit=MAX_NOTE))
    checkpoint = signed.checkpoint
    refusals: dict[int, LogError | DecodeError] = {}
    for number, trust in enumerate(trusts):
        try:
            check_cosigned(signed, trust)
        except (LogError, DecodeError) as error:
            refusals[number] = error
    cosigned = [trust for number, trust in enumerate(trusts) if number not in refusals]
    if not cosigned:
        return Reading(outcomes=tuple(refusals.values()), bodies=None)
    listed = accept_list(source.read(list_path(checkpoint.list_digest), limit=MAX_LIST), checkpoint)
    wanted = _wanted(listed, cosigned)
    bodies = {leaf_hash(body): body for body in kept()}
    if bodies.keys() != wanted.keys():
        if bodies:
            forget()
        bodies = {
            address: read_entry(source, address, limit=limit) for address, limit in wanted.items()
        }
    outcomes: list[Current | LogError | DecodeError] = []
    for number, trust in enumerate(trusts):
        try:
            if number in refusals:
                raise refusals[number]
            _check_recent(checkpoint, trust.max_age, clock, not_before, not_smaller)
            outcomes.append(_open(checkpoint, listed, bodies, trust))
        except (LogError, DecodeError) as error:
            outcomes.append(error)
    return Reading(outcomes=tuple(outcomes), bodies=bodies)


def check_cosigned(signed: SignedCheckpoint, trust: Trust) -> None:
    """Require the log's signature and both cosignatures, at times when honest cosigners sign."""
    for cosignature in trust.check_signatures(signed):
        late = cosignature.time - signed.checkpoint.time
        if abs(late) > 2 * MAX_SKEW:
            raise LogSignatureInvalid(
                f"{cosignature.name} cosigned {late:+} s after the checkpoint's time, which no "
                "honest cosigner does"
            )


def accept_list(data: bytes, checkpoint: Checkpoint) -> CurrentList:
    """Parse a list and check that it is the checkpoint's."""
    try:
        current = CurrentList.parse(data)
    except DecodeError as error:
        raise WrongList(f"the list served is malformed: {error}") from error
    if not hmac.compare_digest(current.digest, checkpoint.list_digest):
        raise WrongList("the list served is not the one that the checkpoint names")
    return current


def _wanted(listed: CurrentList, trusts: Sequence[Trust]) -> dict[bytes, int]:
    """Return what list and policy require, in the list's order: addresses and maximum sizes."""
    names = {side.name for trust in trusts for side in (trust.leader, trust.helper)}
    ours = [row for row in listed.recipes if any(_may_ask(row, trust) for trust in trusts)]
    check_quotas(ours)
    configs = {
        address: MAX_HPKE_CONFIG_ENTRY for name, address in listed.hpke_configs if name in names
    }
    return configs | {row.address: row.size for row in ours}


def _may_ask(row: ListedRecipe, trust: Trust) -> bool:
    return row.author_key in trust.authors.get(row.analysis, ())


def _check_recent(
    checkpoint: Checkpoint, max_age: int, clock: Clock, not_before: int, not_smaller: int
) -> None:
    """Check what depends on this device alone: no request may come after it."""
    if checkpoint.time < not_before:
        raise LogRewound(
            f"a checkpoint of {not_before} was accepted before this one of {checkpoint.time}"
        )
    if checkpoint.size < not_smaller:
        raise LogRewound(
            f"a checkpoint of {not_smaller} entries was accepted before this one of "
            f"{checkpoint.size}"
        )
    now = clock.now()
    # A clock that is slow by less than the limit must not silence a device; cosigners have good
    # clocks, and sign nothing that is more than five minutes in the future.
    if abs(now - checkpoint.time) > max_age:
        raise CheckpointTime(
            f"the checkpoint's time is {checkpoint.time - now:+} s from this device's clock; "
            f"the policy allows {max_age} s",
            time=checkpoint.time,
            now=now,
        )


def _open(
    checkpoint: Checkpoint, listed: CurrentList, bodies: dict[bytes, bytes], trust: Trust
) -> Current:
    """Read one pair's recipes and configs from the bodies."""
    return Current(
        checkpoint=checkpoint,
        recipes=tuple(
            _recipe(row, bodies[row.address]) for row in listed.recipes if _may_ask(row, trust)
        ),
        leader_config=_config(listed, bodies, trust.leader, checkpoint.time),
        helper_config=_config(listed, bodies, trust.helper, checkpoint.time),
    )


def _recipe(row: ListedRecipe, body: bytes) -> RecipeEntry:
    entry = parse_entry(body)
    if not isinstance(entry, RecipeEntry):
        raise WrongList(f"the list says that {row.address.hex()} is a recipe, but it is not")
    if entry.author_key != row.author_key or len(body) != row.size:
        raise WrongList(f"the list has a wrong author or size for {row.address.hex()}")
    return entry


def _config(
    listed: CurrentList, bodies: dict[bytes, bytes], aggregator: CosignerKeys, time: int
) -> HPKEConfigEntry:
    """Return the aggregator's one current HPKE config; its signature is verified."""
    address = dict(listed.hpke_configs).get(aggregator.name)
    if address is None:
        raise LogWithheld(f"the current list has no HPKE config of {aggregator.name}", path="list")
    entry = parse_entry(bodies[address])
    if not isinstance(entry, HPKEConfigEntry) or entry.aggregator != aggregator.name:
        raise WrongList(f"{address.hex()} is not an HPKE config of {aggregator.name}")
    entry.check_signature()
    if entry.signer not in aggregator.keys:
        raise NotAuthorized(f"the HPKE config of {aggregator.name} is signed by an unknown key")
    if not entry.not_before <= time < entry.not_after:
        raise WrongList(f"the HPKE config of {aggregator.name} on the list is not valid now")
    return entry
