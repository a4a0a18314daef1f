"""What a device checks before it trusts a question: one proof, some signatures and digests.

A device fetches one `ListProof`: a list, the path from it to the root, and the checkpoint. It is
accepted if the list is the *last* entry of the tree (an old list is in the tree, too); if the log,
both aggregators and enough witnesses signed the checkpoint; if each aggregator signed within the
policy's maximum age; if the **device time** T, the earlier of the two, is not before the last one
accepted; and if the tree is not smaller than the last one, and the same if it has the same size.
The list must have the digest of its entry, and a body the address on the list. As an honest
aggregator cosigns one history only, and only with the current list at its end, every device sees
the same questions and the same keys, and none that ended earlier.

**What is requested** must not depend on what this device remembers or what its clock says, or a
registry could recognise it (docs/concepts/log.md, "What a poll shows"). So `read_log` always
fetches the proof and its list; and then nothing, if the files that list and policy require are
exactly those of the last complete reading, or all of them in the list's order. It forgets the last
ones before it fetches the first, so that an interrupted reading leaves no trace of them, and checks
time and size last, when everything is fetched.

The caller stores what it accepted and passes it as `last` (its size and root only for the log of
that name), and keeps the bodies of a complete reading until the next one.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from chorister.canonical import sha256
from chorister.clock import SECOND, Clock
from chorister.errors import (
    CheckpointTime,
    DecodeError,
    LogError,
    LogForked,
    LogRewound,
    LogWithheld,
    NotAuthorized,
    WrongList,
)
from chorister.transparency.checkpoint import MAX_PROOF, Checkpoint, ListProof
from chorister.transparency.client import PROOF, list_path, read_body
from chorister.transparency.entries import (
    MAX_HPKE_CONFIG_ENTRY,
    HPKEConfigEntry,
    RecipeBody,
    parse_entry,
)
from chorister.transparency.state import MAX_LIST, CurrentList, ListedRecipe, check_quotas
from chorister.transparency.tiles import Source
from chorister.transparency.trust import CosignerKeys, Trust


class LastAccepted(NamedTuple):
    """What a device remembers of a log; the defaults are for one that it never read."""

    # The device time, POSIX seconds.
    time: int = 0
    size: int = 0
    # Empty if it is not known.
    root: bytes = b""


NOTHING_ACCEPTED: Final = LastAccepted()


@dataclass(frozen=True, kw_only=True, slots=True)
class Current:
    """What is current according to an accepted checkpoint."""

    checkpoint: Checkpoint
    # The device time: when both aggregators still said that this is the newest checkpoint.
    time: int
    # The bodies of the policy's authors, in the list's order. They are public, not yet permitted:
    # their JWS must still be verified against the policy.
    recipes: tuple[RecipeBody, ...]
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
    last: LastAccepted = NOTHING_ACCEPTED,
    kept: Callable[[], Iterable[bytes]],
    forget: Callable[[], None],
    fetched: Callable[[], None] = lambda: None,
) -> Reading:
    """Fetch and check what is current for a policy's pairs; raises if a file can't be fetched.

    `kept` returns the bodies of the last complete reading; `forget` deletes them. `fetched` is
    called after the last request, and before anything is checked that depends on this device: a
    connection that closed later would show how that went.
    """
    proof = ListProof.parse(source.read(PROOF, limit=MAX_PROOF))
    proof.check_last()
    refusals: dict[int, LogError | DecodeError] = {}
    times: dict[int, tuple[int, int]] = {}
    for number, trust in enumerate(trusts):
        try:
            leader, helper = trust.check_signatures(proof.signed)
            times[number] = leader.time, helper.time
        except (LogError, DecodeError) as error:
            refusals[number] = error
    cosigned = [trust for number, trust in enumerate(trusts) if number not in refusals]
    if not cosigned:
        return Reading(outcomes=tuple(refusals.values()), bodies=None)
    digest = proof.entry.digest
    listed = accept_list(source.read(list_path(digest), limit=MAX_LIST), digest)
    wanted = _wanted(listed, cosigned)
    bodies = {sha256(body): body for body in kept()}
    if bodies.keys() != wanted.keys():
        if bodies:
            forget()
        bodies = {
            address: read_body(source, address, limit=limit) for address, limit in wanted.items()
        }
    fetched()
    outcomes: list[Current | LogError | DecodeError] = []
    for number, trust in enumerate(trusts):
        try:
            if number in refusals:
                raise refusals[number]
            _check_recent(proof.signed.checkpoint, times[number], trust.max_age, clock, last)
            outcomes.append(_open(proof, listed, bodies, trust, min(times[number])))
        except (LogError, DecodeError) as error:
            outcomes.append(error)
    return Reading(outcomes=tuple(outcomes), bodies=bodies)


def accept_list(data: bytes, digest: bytes) -> CurrentList:
    """Parse a list and check that it is the one that the log names."""
    try:
        current = CurrentList.parse(data)
    except DecodeError as error:
        raise WrongList(f"the list served is malformed: {error}") from error
    if not hmac.compare_digest(current.digest, digest):
        raise WrongList("the list served is not the one that the log names")
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
    checkpoint: Checkpoint, times: tuple[int, int], max_age: int, clock: Clock, last: LastAccepted
) -> None:
    """Check what depends on this device alone: no request may come after it."""
    if min(times) < last.time:
        raise LogRewound(
            f"a checkpoint of {last.time} was accepted before this one of {min(times)}"
        )
    if checkpoint.size < last.size:
        raise LogRewound(
            f"a checkpoint of {last.size} entries was accepted before this one of {checkpoint.size}"
        )
    same_size = checkpoint.size == last.size
    if same_size and last.root and not hmac.compare_digest(checkpoint.root, last.root):
        raise LogForked(f"two different logs of {last.size} entries are signed")
    # A clock that is slow by less than the limit must not silence a device; cosigners have good
    # clocks. Both times count: one aggregator alone can neither age a checkpoint nor renew it.
    # How far ahead a checkpoint is, the system's clock decides, which no checkpoint has moved:
    # otherwise both aggregators together could make the time pass, step by step.
    now, system = clock.now(), clock.microseconds() // SECOND
    for time in times:
        off = time - system if time > now else time - now
        if abs(off) > max_age:
            raise CheckpointTime(
                f"an aggregator cosigned the checkpoint {off:+} s from this device's clock; the "
                f"policy allows {max_age} s",
                time=time,
                now=now,
            )


def _open(
    proof: ListProof, listed: CurrentList, bodies: dict[bytes, bytes], trust: Trust, time: int
) -> Current:
    """Read one pair's recipes and configs from the bodies."""
    # Valid when the list was made, and when both aggregators still vouched for it.
    valid = (proof.entry.time, time)
    return Current(
        checkpoint=proof.signed.checkpoint,
        time=time,
        recipes=tuple(
            _recipe(row, bodies[row.address]) for row in listed.recipes if _may_ask(row, trust)
        ),
        leader_config=_config(listed, bodies, trust.leader, valid),
        helper_config=_config(listed, bodies, trust.helper, valid),
    )


def _recipe(row: ListedRecipe, body: bytes) -> RecipeBody:
    if len(body) != row.size:
        raise WrongList(f"the list has a wrong size for {row.address.hex()}")
    return RecipeBody(author_key=row.author_key, jws=body)


def _config(
    listed: CurrentList,
    bodies: dict[bytes, bytes],
    aggregator: CosignerKeys,
    times: tuple[int, ...],
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
    if not all(entry.not_before <= time < entry.not_after for time in times):
        raise WrongList(f"the HPKE config of {aggregator.name} on the list is not valid now")
    return entry
