"""Whose signatures count: read from policies, which devices, aggregators and auditors all hold.

`Trust` is what one device needs: the log's name, its keys, the two cosigners of one pair and the
authors of its analyses.
`Authority` is what the registry and an auditor need: over all policies, who may author, revoke and
publish keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from chorister.canonical import b64url_decode
from chorister.errors import InvalidInput, LogSignatureInvalid, NotAuthorized
from chorister.policy import AggregatorPair, Policy
from chorister.transparency.checkpoint import SignedCheckpoint
from chorister.transparency.entries import HPKEConfigEntry, KeyRevocation, RecipeEnd, RecipeEntry
from chorister.transparency.note import Cosignature, check_key_name
from chorister.transparency.state import Logged

__all__ = ["Authority", "CosignerKeys", "Trust"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CosignerKeys:
    """An aggregator as a cosigner."""

    # Its URL as the policy spells it.
    name: str
    # Several for rotation; any one of them will do.
    keys: tuple[bytes, ...]

    def __post_init__(self) -> None:
        check_key_name(self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trust:
    """What a device demands of a checkpoint before it believes it."""

    # The log's name. Keys alone do not tell two logs apart that one registry keeps.
    origin: str
    log_keys: tuple[bytes, ...]
    leader: CosignerKeys
    helper: CosignerKeys
    # Seconds.
    max_age: int
    # Of the analyses that this pair serves: analysis -> author keys. Nothing else is fetched.
    authors: Mapping[str, frozenset[bytes]]

    def __post_init__(self) -> None:
        # A cosignature does not name its signer: one key for both would be one signature for both.
        if self.leader.name == self.helper.name or set(self.leader.keys) & set(self.helper.keys):
            raise InvalidInput("leader and helper need two names and two sets of cosigning keys")

    @classmethod
    def of(cls, policy: Policy, pair: AggregatorPair) -> Self:
        """What a policy says for one of its pairs."""
        return cls(
            origin=policy.log.origin,
            log_keys=_decoded(policy.log_keys),
            leader=CosignerKeys(name=pair.leader.url, keys=_decoded(pair.leader.cosigning_keys)),
            helper=CosignerKeys(name=pair.helper.url, keys=_decoded(pair.helper.cosigning_keys)),
            max_age=policy.checkpoint_max_age,
            authors={
                name: frozenset(_decoded(analysis.author_keys))
                for name, analysis in policy.analyses.items()
                if pair in policy.pairs(analysis)
            },
        )

    def check_signatures(self, signed: SignedCheckpoint) -> tuple[Cosignature, Cosignature]:
        """Require the log's name, its signature and both cosignatures."""
        signed.check_log(self.origin, self.log_keys)
        return (
            signed.note.check_cosignature(self.leader.name, self.leader.keys),
            signed.note.check_cosignature(self.helper.name, self.helper.keys),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Authority:
    """Who may do what in a log, by its policies.

    Checkpoints answer to the policies of today. An entry may have been logged under a policy of
    its own day, so those who judge old entries name the earlier policies too.
    """

    # The log's name.
    origin: str
    log_keys: frozenset[bytes]
    # Name -> keys, of every aggregator that has to cosign.
    cosigners: dict[str, frozenset[bytes]]
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
        """What these policies say together."""
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
            max_age=min(policy.checkpoint_max_age for policy in today),
            authors=_authors(ever),
            hpke_signers=_cosigners(ever),
            all_log_keys=_log_keys(ever),
        )

    def knows(self, logged: Logged) -> bool:
        """Whether any policy speaks of what an entry is about; others are not ours to judge."""
        entry = logged.entry
        if isinstance(entry, KeyRevocation):
            return any(entry.key in keys for keys in self.authors.values())
        if isinstance(entry, HPKEConfigEntry):
            return entry.aggregator in self.hpke_signers
        return logged.recipe is None or logged.recipe.recipe.analysis in self.authors

    def check_entry(self, logged: Logged) -> None:
        """Require that the key which vouches for an entry may do so."""
        entry = logged.entry
        if isinstance(entry, RecipeEntry) and logged.recipe is not None:
            analysis = logged.recipe.recipe.analysis
            if entry.author_key not in self.authors.get(analysis, frozenset()):
                raise NotAuthorized(
                    f"entry {logged.index}: no policy lists this author's key for {analysis}"
                )
        elif isinstance(entry, KeyRevocation):
            peers = [keys for keys in self.authors.values() if entry.key in keys]
            if not peers:
                raise NotAuthorized(f"entry {logged.index}: no policy lists the key to be revoked")
            if entry.signer not in self.all_log_keys.union(*peers):
                raise NotAuthorized(
                    f"entry {logged.index}: a key is revoked by itself, by another author key of "
                    "its analysis or by the log"
                )
        elif isinstance(entry, HPKEConfigEntry):
            if entry.signer not in self.hpke_signers.get(entry.aggregator, frozenset()):
                raise NotAuthorized(
                    f"entry {logged.index}: no policy lists this key for {entry.aggregator}"
                )
        # The end of a recipe is signed by the recipe's own key: the log's rules see to that.
        elif not isinstance(entry, RecipeEnd):
            raise NotAuthorized(f"entry {logged.index}: nobody may log such an entry")

    def check_signatures(self, signed: SignedCheckpoint) -> tuple[Cosignature, ...]:
        """Require the log's name, its signature and every cosigner's."""
        signed.check_log(self.origin, self.log_keys)
        return tuple(
            signed.note.check_cosignature(name, keys)
            for name, keys in sorted(self.cosigners.items())
        )

    def missing(self, signed: SignedCheckpoint) -> tuple[str, ...]:
        """The cosigners whose cosignature a checkpoint still lacks."""
        absent = []
        for name, keys in sorted(self.cosigners.items()):
            try:
                signed.note.check_cosignature(name, keys)
            except LogSignatureInvalid:
                absent.append(name)
        return tuple(absent)


def _log_keys(policies: Iterable[Policy]) -> frozenset[bytes]:
    return frozenset(key for policy in policies for key in _decoded(policy.log_keys))


def _cosigners(policies: Iterable[Policy]) -> dict[str, frozenset[bytes]]:
    found: dict[str, frozenset[bytes]] = {}
    for policy in policies:
        for pair in policy.aggregators:
            for side in (pair.leader, pair.helper):
                check_key_name(side.url)
                keys = frozenset(_decoded(side.cosigning_keys))
                found[side.url] = found.get(side.url, frozenset()) | keys
    return found


def _authors(policies: Iterable[Policy]) -> dict[str, frozenset[bytes]]:
    found: dict[str, frozenset[bytes]] = {}
    for policy in policies:
        for name, analysis in policy.analyses.items():
            keys = frozenset(_decoded(analysis.author_keys))
            found[name] = found.get(name, frozenset()) | keys
    return found


def _decoded(keys: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(b64url_decode(key) for key in keys)
