"""Whose signatures count, according to policies, which devices, aggregators and auditors all have.

`Trust` is for a device: the log's name and keys, the two cosigners of one pair, further witnesses,
and the authors of its analyses. `Authority` is for the registry and auditors: over all policies,
who may publish recipes, revoke keys and publish HPKE configs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from chorister.canonical import b64url_decode
from chorister.errors import InvalidInput, LogSignatureInvalid, NotAuthorized
from chorister.policy import AggregatorPair, Policy
from chorister.policy.model import Aggregator
from chorister.policy.witnesses import NO_QUORUM, WitnessPolicy, parse_witness_policy
from chorister.transparency.checkpoint import SignedCheckpoint
from chorister.transparency.entries import HPKEConfigEntry, KeyRevocation, RecipeEntry
from chorister.transparency.note import (
    COSIGNATURE,
    LOG_SIGNATURE,
    Cosignature,
    check_key_name,
    key_name,
    verifier_key,
)
from chorister.transparency.state import Logged


@dataclass(frozen=True, kw_only=True, slots=True)
class CosignerKeys:
    """An aggregator as a cosigner."""

    # Its URL without the scheme.
    name: str
    # Several for rotation; a signature by any of them counts.
    keys: tuple[bytes, ...]

    def __post_init__(self) -> None:
        check_key_name(self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trust:
    """What a device requires of a checkpoint."""

    # The log's name: one registry may use the same keys for two logs.
    origin: str
    log_keys: tuple[bytes, ...]
    leader: CosignerKeys
    helper: CosignerKeys
    # Seconds.
    max_age: int
    # Which further witnesses have to have cosigned, if any.
    witnesses: WitnessPolicy | None
    # For the analyses that this pair serves: analysis -> author keys. Nothing else is fetched.
    authors: Mapping[str, frozenset[bytes]]

    def __post_init__(self) -> None:
        # One key for both would mean one signature for both.
        if self.leader.name == self.helper.name or set(self.leader.keys) & set(self.helper.keys):
            raise InvalidInput("leader and helper need two names and two sets of cosigning keys")

    @classmethod
    def of(cls, policy: Policy, pair: AggregatorPair) -> Self:
        """Read what a policy says about one of its pairs."""
        return cls(
            origin=policy.log.origin,
            log_keys=_decoded(policy.log_keys),
            leader=_cosigner(pair.leader),
            helper=_cosigner(pair.helper),
            max_age=policy.checkpoint_max_age,
            witnesses=policy.log.witness_policy,
            authors={
                name: frozenset(_decoded(analysis.author_keys))
                for name, analysis in policy.analyses.items()
                if pair in policy.pairs(analysis)
            },
        )

    def check_signatures(self, signed: SignedCheckpoint) -> tuple[Cosignature, Cosignature]:
        """Require the log's name, its signature, both cosignatures, and enough witnesses."""
        signed.check_log(self.origin, self.log_keys)
        pair = (
            signed.note.check_cosignature(self.leader.name, self.leader.keys),
            signed.note.check_cosignature(self.helper.name, self.helper.keys),
        )
        if self.witnesses is not None and not is_witnessed(signed, self.witnesses):
            raise LogSignatureInvalid(
                f"the cosignatures of witnesses do not reach the quorum {self.witnesses.quorum} "
                "of the policy"
            )
        return pair


@dataclass(frozen=True, kw_only=True, slots=True)
class Authority:
    """Who may do what in a log, according to its policies.

    Checkpoints are judged by today's policies. An old entry may have been logged under an earlier
    one, so whoever judges entries passes earlier policies, too.
    """

    # The log's name.
    origin: str
    log_keys: frozenset[bytes]
    # Name -> keys, of every aggregator that has to cosign.
    cosigners: dict[str, frozenset[bytes]]
    # Further witnesses, of each policy that requires any.
    witnesses: tuple[WitnessPolicy, ...]
    # The shortest of the policies' limits, seconds.
    max_age: int
    # Of today's and earlier policies: analysis -> author keys,
    authors: dict[str, frozenset[bytes]]
    # aggregator -> keys that may publish an HPKE config,
    hpke_signers: dict[str, frozenset[bytes]]
    # and the log's keys.
    all_log_keys: frozenset[bytes]

    @classmethod
    def of(cls, policies: Iterable[Policy], *, earlier: Iterable[Policy] = ()) -> Self:
        """Combine what these policies say."""
        today = tuple(policies)
        ever = (*today, *earlier)
        if not today:
            raise InvalidInput("a log has at least one policy")
        origins = sorted({policy.log.origin for policy in ever})
        if len(origins) > 1:
            raise InvalidInput(f"these policies name different logs: {', '.join(origins)}")
        return cls(
            origin=origins[0],
            log_keys=_log_keys(today),
            cosigners=_cosigners(today),
            witnesses=tuple(
                policy.log.witness_policy
                for policy in today
                if policy.log.witness_policy is not None
            ),
            max_age=min(policy.checkpoint_max_age for policy in today),
            authors=_authors(ever),
            hpke_signers=_cosigners(ever),
            all_log_keys=_log_keys(ever),
        )

    def covers(self, logged: Logged) -> bool:
        """Whether any policy says something about an entry; others are not ours to judge."""
        entry = logged.entry
        if isinstance(entry, KeyRevocation):
            return any(entry.key in keys for keys in self.authors.values())
        if isinstance(entry, HPKEConfigEntry):
            return entry.aggregator in self.hpke_signers
        return not isinstance(entry, RecipeEntry) or entry.analysis in self.authors

    def check_entry(self, logged: Logged) -> None:
        """Require that the key that signed an entry may do so."""
        entry = logged.entry
        if isinstance(entry, RecipeEntry):
            if entry.author_key not in self.authors.get(entry.analysis, frozenset()):
                raise NotAuthorized(
                    f"entry {logged.index}: no policy lists this author's key for {entry.analysis}"
                )
        elif isinstance(entry, KeyRevocation):
            peers = [keys for keys in self.authors.values() if entry.key in keys]
            if not peers:
                raise NotAuthorized(f"entry {logged.index}: no policy lists the revoked key")
            if entry.signer not in self.all_log_keys.union(*peers):
                raise NotAuthorized(
                    f"entry {logged.index}: only the key itself, another author key of its "
                    "analysis or the log can revoke a key"
                )
        elif isinstance(entry, HPKEConfigEntry) and entry.signer not in self.hpke_signers.get(
            entry.aggregator, frozenset()
        ):
            raise NotAuthorized(
                f"entry {logged.index}: no policy lists this key for {entry.aggregator}"
            )
        # The log's rules make sure that the end of a recipe is signed with the recipe's own key,
        # and that a list follows from the entries before it.

    def check_signatures(self, signed: SignedCheckpoint) -> tuple[Cosignature, ...]:
        """Require the log's name, its signature, every cosigner's, and enough witnesses."""
        signed.check_log(self.origin, self.log_keys)
        found = tuple(
            signed.note.check_cosignature(name, keys)
            for name, keys in sorted(self.cosigners.items())
        )
        missing = self.missing(signed)
        if missing:
            raise LogSignatureInvalid(f"cosignatures are missing: {', '.join(missing)}")
        return found

    def oldest(self, signed: SignedCheckpoint) -> int:
        """Return the time of the oldest cosignature that counts; 0 if there is none."""
        return min(self.cosigned_at(signed).values(), default=0)

    def cosigned_at(self, signed: SignedCheckpoint) -> dict[str, int]:
        """Return when each cosigner signed a checkpoint, of those that did."""
        found = (signed.note.cosignature(name, keys) for name, keys in self.cosigners.items())
        return {each.name: each.time for each in found if each is not None}

    def missing(self, signed: SignedCheckpoint) -> tuple[str, ...]:
        """Return who has not signed a checkpoint yet: cosigners, and quorums of witnesses."""
        absent = []
        for name, keys in sorted(self.cosigners.items()):
            try:
                signed.note.check_cosignature(name, keys)
            except LogSignatureInvalid:
                absent.append(name)
        quorums = {each.quorum for each in self.witnesses if not is_witnessed(signed, each)}
        return (*absent, *(f"witnesses of quorum {name}" for name in sorted(quorums)))


def standard_policy(policy: Policy) -> str:
    """Return who has to have signed a checkpoint, for standard tools (c2sp.org/tlog-policy).

    They know nothing of devices' further checks: that a list is the last entry, and the times.
    """
    origin, required = policy.log.origin, []
    lines = [f"log {verifier_key(origin, LOG_SIGNATURE, key)}" for key in _decoded(policy.log_keys)]
    for name, keys in sorted(_cosigners([policy]).items()):
        vkeys = sorted(verifier_key(name, COSIGNATURE, key) for key in keys)
        names = [name] if len(vkeys) == 1 else [f"{name}#{n}" for n in range(1, 1 + len(vkeys))]
        lines += [f"witness {each} {vkey}" for each, vkey in zip(names, vkeys, strict=True)]
        if len(names) > 1:
            lines.append(f"group {name} any {' '.join(names)}")
        required.append(name)
    witnesses = policy.log.witnesses
    if witnesses is not None:
        found = parse_witness_policy(witnesses)
        each_line = (line.strip(" \t") for line in witnesses.split("\n"))
        lines += [line for line in each_line if line and not line.startswith("quorum")]
        if found.quorum != NO_QUORUM:
            required.append(found.quorum)
    lines += [f"group all-of-them all {' '.join(required)}", "quorum all-of-them"]
    # The names of witnesses may contradict ours.
    parse_witness_policy("\n".join(line for line in lines if not line.startswith("log ")))
    return "".join(f"{line}\n" for line in lines)


def is_witnessed(signed: SignedCheckpoint, policy: WitnessPolicy) -> bool:
    """Whether enough witnesses have cosigned; those that claim to have must verify."""
    cosigned = {
        name
        for name, witness in policy.witnesses.items()
        if signed.note.cosignature(witness.name, [witness.key]) is not None
    }
    return policy.satisfied(cosigned)


def _cosigner(side: Aggregator) -> CosignerKeys:
    return CosignerKeys(name=key_name(side.url), keys=_decoded(side.cosigning_keys))


def _log_keys(policies: Iterable[Policy]) -> frozenset[bytes]:
    return frozenset(key for policy in policies for key in _decoded(policy.log_keys))


def _cosigners(policies: Iterable[Policy]) -> dict[str, frozenset[bytes]]:
    pairs = [pair for policy in policies for pair in policy.aggregators]
    sides = [side for pair in pairs for side in (pair.leader, pair.helper)]
    for side in sides:
        check_key_name(key_name(side.url))
    return _by_name((key_name(side.url), side.cosigning_keys) for side in sides)


def _authors(policies: Iterable[Policy]) -> dict[str, frozenset[bytes]]:
    return _by_name(
        (name, analysis.author_keys)
        for policy in policies
        for name, analysis in policy.analyses.items()
    )


def _by_name(named: Iterable[tuple[str, Iterable[str]]]) -> dict[str, frozenset[bytes]]:
    found: dict[str, frozenset[bytes]] = {}
    for name, keys in named:
        found[name] = found.get(name, frozenset()).union(_decoded(keys))
    return found


def _decoded(keys: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(b64url_decode(key) for key in keys)
