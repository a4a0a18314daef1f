"""What a device checks before it believes a question: no tree, only signatures and digests.

A checkpoint counts if the log and both aggregators signed it, if it is younger than the policy's
limit and neither older nor smaller than the last one accepted. The list counts if it has the
checkpoint's digest, a body if it has the address that the list gives. Since an honest aggregator
cosigns one history only, every device with the same checkpoint sees the same questions and the
same keys.

Two things are asked of the caller: that it stores the time and the size of what it accepted and
hands them back as `not_before` and `not_smaller` (a size counts for the log of that name only, 0
for any other); and that it fetches *all* bodies of its analyses, whether it will answer or not,
for the server sees what is fetched.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from dataclasses import dataclass

from chorister.clock import Clock
from chorister.errors import (
    CheckpointTime,
    DecodeError,
    LogRewound,
    LogSignatureInvalid,
    LogWithheld,
    NotAuthorized,
    WrongList,
)
from chorister.transparency.checkpoint import Checkpoint, SignedCheckpoint
from chorister.transparency.cosigner import MAX_SKEW
from chorister.transparency.entries import HPKEConfigEntry, RecipeEntry, parse_entry
from chorister.transparency.listing import MAX_LIST, CurrentList
from chorister.transparency.note import MAX_NOTE
from chorister.transparency.sources import CHECKPOINT, Source, list_path, read_entry
from chorister.transparency.trust import CosignerKeys, Trust

__all__ = ["Current", "accept_checkpoint", "accept_list", "read_current"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Current:
    """What is open now, by a checkpoint that was accepted."""

    checkpoint: Checkpoint
    # The entries of the asked-for analyses, in the list's order. Their JWS is still to be verified
    # against the policy: what the log shows is public, not permitted.
    recipes: tuple[RecipeEntry, ...]
    leader_config: HPKEConfigEntry
    helper_config: HPKEConfigEntry


def accept_checkpoint(
    data: bytes, *, trust: Trust, clock: Clock, not_before: int = 0, not_smaller: int = 0
) -> Checkpoint:
    """Check a checkpoint as a device does; raises a `LogError` that says what is wrong."""
    signed = SignedCheckpoint.parse(data)
    checkpoint = signed.checkpoint
    for cosignature in trust.check_signatures(signed):
        if abs(cosignature.time - checkpoint.time) > 2 * MAX_SKEW:
            raise LogSignatureInvalid(
                f"{cosignature.name} cosigned {cosignature.time - checkpoint.time:+} s after the "
                "checkpoint's time, which no honest cosigner does"
            )
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
    # A clock that is slow by less than the limit must not silence a device; the cosigners, who
    # have good clocks, let nothing through that is further than five minutes in the future.
    if abs(now - checkpoint.time) > trust.max_age:
        raise CheckpointTime(
            f"the checkpoint's time is {checkpoint.time - now:+} s from this device's clock; "
            f"the policy allows {trust.max_age} s",
            time=checkpoint.time,
            now=now,
        )
    return checkpoint


def accept_list(data: bytes, checkpoint: Checkpoint) -> CurrentList:
    """Check that this is the checkpoint's list."""
    try:
        current = CurrentList.parse(data)
    except DecodeError as error:
        raise WrongList(f"the list served is malformed: {error}") from error
    if not hmac.compare_digest(current.digest, checkpoint.list_digest):
        raise WrongList("the list served is not the one that the checkpoint names")
    return current


def read_current(
    source: Source,
    *,
    trust: Trust,
    clock: Clock,
    analyses: Collection[str],
    not_before: int = 0,
    not_smaller: int = 0,
) -> Current:
    """Fetch and check what is open: one checkpoint, its list, and the bodies of `analyses`."""
    data = source.read(CHECKPOINT, limit=MAX_NOTE)
    checkpoint = accept_checkpoint(
        data, trust=trust, clock=clock, not_before=not_before, not_smaller=not_smaller
    )
    served = source.read(list_path(checkpoint.list_digest), limit=MAX_LIST)
    current = accept_list(served, checkpoint)
    recipes = []
    for analysis, address in current.recipes:
        if analysis in analyses:
            entry = parse_entry(read_entry(source, address))
            if not isinstance(entry, RecipeEntry):
                raise WrongList(f"the list calls {address.hex()} a recipe, which it is not")
            recipes.append(entry)
    return Current(
        checkpoint=checkpoint,
        recipes=tuple(recipes),
        leader_config=_config(source, current, trust.leader, checkpoint.time),
        helper_config=_config(source, current, trust.helper, checkpoint.time),
    )


def _config(
    source: Source, current: CurrentList, aggregator: CosignerKeys, time: int
) -> HPKEConfigEntry:
    """The aggregator's one current HPKE config, under its own signature."""
    address = dict(current.hpke_configs).get(aggregator.name)
    if address is None:
        raise LogWithheld(
            f"the current list holds no HPKE config of {aggregator.name}", path="list"
        )
    entry = parse_entry(read_entry(source, address))
    if not isinstance(entry, HPKEConfigEntry) or entry.aggregator != aggregator.name:
        raise WrongList(f"the list calls {address.hex()} the config of {aggregator.name}")
    entry.check_signature()
    if entry.signer not in aggregator.keys:
        raise NotAuthorized(f"the HPKE config of {aggregator.name} is signed by a foreign key")
    if not entry.not_before <= time < entry.not_after:
        raise WrongList(f"the list holds an HPKE config of {aggregator.name} that is not valid")
    return entry
