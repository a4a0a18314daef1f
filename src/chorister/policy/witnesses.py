"""Which further witnesses a checkpoint needs, in the format of c2sp.org/tlog-policy.

    witness W1 example.com/w1+b0ad3d0a+BLjT…  https://w1.example.com/
    witness W2 example.org/w2+5f2c1a77+BJ2h…
    group any-of-them any W1 W2
    quorum any-of-them

The two aggregators of a pair always have to cosign; this is in addition. Lines that define logs are
refused, because a policy's `[log]` already says which log it is about. Keys are Ed25519 cosignature
keys: ML-DSA-44 is not supported yet.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

from pydantic import AfterValidator, StringConstraints

from chorister.errors import InvalidInput

MAX_WITNESS_POLICY: Final = 65_536
"""Characters."""
NO_QUORUM: Final = "none"
_MAX_NAMES: Final = 256
# What `compare_witnesses` takes on: over a second of work would be for a strange policy.
_MAX_SETS: Final = 10_000
_MAX_COMPARED: Final = 1_000_000
_COSIGNATURE: Final = 0x04
_VKEY: Final = re.compile(r"([^+\s]+)\+([0-9a-f]{8})\+([A-Za-z0-9+/]+={0,2})")
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,5}")
_FORBIDDEN: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class WitnessKey(NamedTuple):
    """A witness as signatures name it."""

    name: str
    # Ed25519.
    key: bytes
    # Its submission prefix, if one is given.
    url: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WitnessPolicy:
    """Witnesses and groups by their names, and the one of them that has to have cosigned."""

    quorum: str
    witnesses: dict[str, WitnessKey] = field(default_factory=dict)
    # How many of which members.
    groups: dict[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)

    def satisfied(self, cosigned: Collection[str]) -> bool:
        """Whether the quorum is reached if these witnesses have cosigned."""
        return self.quorum == NO_QUORUM or self._has(self.quorum, cosigned)

    def with_keys(self, keys: Collection[bytes]) -> Iterator[str]:
        """Yield the witnesses that have one of these keys."""
        return (name for name, witness in self.witnesses.items() if witness.key in keys)

    def __str__(self) -> str:
        return "no witness" if self.quorum == NO_QUORUM else self._text(self.quorum)

    def _text(self, name: str) -> str:
        if name in self.witnesses:
            return self.witnesses[name].name
        needed, members = self.groups[name]
        return f"{needed} of ({', '.join(self._text(member) for member in members)})"

    def smallest(self, limit: int) -> frozenset[frozenset[WitnessKey]] | None:
        """Return the smallest sets of witnesses that reach the quorum; None if over `limit`."""
        if self.quorum == NO_QUORUM:
            return frozenset([frozenset()])
        if self._count(self.quorum) > limit:
            return None
        return frozenset(self._sets(self.quorum))

    def _count(self, name: str) -> int:
        """The number of smallest sets: no witness is in two groups, so all of them differ."""
        if name in self.witnesses:
            return 1
        needed, members = self.groups[name]
        # ways[k]: to choose k of the members so far, and a set of each.
        ways = [1] + [0] * needed
        for count in map(self._count, members):
            for chosen in range(needed, 0, -1):
                ways[chosen] += ways[chosen - 1] * count
        return ways[needed]

    def _sets(self, name: str) -> Iterator[frozenset[WitnessKey]]:
        if name in self.witnesses:
            yield frozenset([self.witnesses[name]._replace(url=None)])
            return
        needed, members = self.groups[name]
        for chosen in combinations(members, needed):
            for parts in product(*(tuple(self._sets(member)) for member in chosen)):
                yield frozenset[WitnessKey]().union(*parts)

    def _has(self, name: str, cosigned: Collection[str]) -> bool:
        if name in self.witnesses:
            return name in cosigned
        needed, members = self.groups[name]
        return sum(self._has(member, cosigned) for member in members) >= needed


Strictness: TypeAlias = Literal["looser", "stricter", "same", "unclear"]


def compare_witnesses(old: WitnessPolicy, new: WitnessPolicy) -> Strictness:
    """Say whether fewer cosignatures suffice under `new`, or more are needed.

    It is looser if every set of witnesses that was enough still is, and others are, too; unclear if
    neither accepts all that the other does, or if there are too many sets to tell.
    """
    before, after = old.smallest(_MAX_SETS), new.smallest(_MAX_SETS)
    if before is None or after is None or len(before) * len(after) > _MAX_COMPARED:
        return "unclear"
    looser = all(any(enough <= each for enough in after) for each in before)
    stricter = all(any(enough <= each for enough in before) for each in after)
    if looser and stricter:
        return "same"
    return "looser" if looser else "stricter" if stricter else "unclear"


def parse_vkey(text: str) -> WitnessKey:
    """Read a verifier key of c2sp.org/signed-note that is for Ed25519 cosignatures."""
    match = _VKEY.fullmatch(text)
    if match is None:
        raise InvalidInput(f"{text!r} is not a verifier key, NAME+HASH+BASE64")
    name, key_id, encoded = match.groups()
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(f"the key of {name} is not base64") from error
    if len(data) != 33 or data[0] != _COSIGNATURE:
        raise InvalidInput(
            f"the key of {name} is not for Ed25519 cosignatures (type 4, 32 bytes), the only kind "
            "that Chorister knows so far"
        )
    if hashlib.sha256(name.encode() + b"\n" + data).digest()[:4].hex() != key_id:
        raise InvalidInput(f"the hash in the verifier key of {name} does not match")
    return WitnessKey(name, data[1:])


def parse_witness_policy(text: str) -> WitnessPolicy:
    """Read witnesses, groups and one quorum; raises `InvalidInput` with the line's number."""
    if len(text) > MAX_WITNESS_POLICY:
        raise InvalidInput(f"a witness policy has at most {MAX_WITNESS_POLICY} characters")
    if _FORBIDDEN.search(text):
        raise InvalidInput("a witness policy has no control characters except tabs and newlines")
    reader = _Lines()
    for number, line in enumerate(text.split("\n"), start=1):
        words = re.split(r"[ \t]+", line.strip(" \t"))
        if words != [""] and not words[0].startswith("#"):
            try:
                reader.read(words)
            except InvalidInput as error:
                raise InvalidInput(f"line {number}: {error}") from None
    if reader.quorum is None:
        raise InvalidInput("there is no quorum line")
    return WitnessPolicy(quorum=reader.quorum, witnesses=reader.witnesses, groups=reader.groups)


def _checked(text: str) -> str:
    parse_witness_policy(text)
    return text


WitnessLines: TypeAlias = Annotated[str, StringConstraints(strict=True), AfterValidator(_checked)]
"""The text of a witness policy, in a policy."""


class _Lines:
    """What was read so far."""

    def __init__(self) -> None:
        self.witnesses: dict[str, WitnessKey] = {}
        self.groups: dict[str, tuple[int, tuple[str, ...]]] = {}
        self.quorum: str | None = None
        self._members: set[str] = set()

    def read(self, words: list[str]) -> None:
        match words:
            case ["witness", name, vkey] | ["witness", name, vkey, _]:
                self._define(name)
                found = parse_vkey(vkey)
                if any(found.key == known.key for known in self.witnesses.values()):
                    raise InvalidInput(f"{name} has the key of another witness")
                url = words[3] if len(words) == 4 else None
                self.witnesses[name] = found._replace(url=url)
            case ["group", name, needed, _, *_]:
                members = tuple(words[3:])
                self._define(name)
                self.groups[name] = self._needed(needed, len(members)), members
                for member in members:
                    self._join(member, name)
            case ["quorum", name]:
                if self.quorum is not None:
                    raise InvalidInput("there is a second quorum line")
                if name != NO_QUORUM and name not in self.witnesses and name not in self.groups:
                    raise InvalidInput(f"{name} is not defined on a line above")
                self.quorum = name
            case ["log", *_]:
                raise InvalidInput("the log is the one of the policy's [log]: leave this line out")
            case _:
                raise InvalidInput(
                    "a line is 'witness NAME KEY [URL]', 'group NAME all|any|K NAME...' or "
                    "'quorum NAME'"
                )

    def _define(self, name: str) -> None:
        if name == NO_QUORUM or name in self.witnesses or name in self.groups:
            raise InvalidInput(f"{name} is already defined")
        if len(self.witnesses) + len(self.groups) >= _MAX_NAMES:
            raise InvalidInput(f"at most {_MAX_NAMES} witnesses and groups are supported")

    def _needed(self, text: str, members: int) -> int:
        if text in ("all", "any"):
            return members if text == "all" else 1
        if not _NUMBER.fullmatch(text) or int(text) > members:
            raise InvalidInput(f"a group needs all, any, or 1 to {members} of its members")
        return int(text)

    def _join(self, member: str, group: str) -> None:
        if member == group or (member not in self.witnesses and member not in self.groups):
            raise InvalidInput(f"{member} is not defined on a line above")
        if member in self._members:
            raise InvalidInput(f"{member} is already a member of a group")
        self._members.add(member)
