"""One look at the public log: what is open now, and to which keys reports are sealed.

The files are fetched before anything is decided, and all bodies of the policy's analyses are
fetched, whether they will be answered or not: what a server sees of a poll depends on the policy,
on what is listed and on what was fetched before, never on data, budget or decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from chorister.clock import Clock
from chorister.errors import ChoristerError, DecodeError, LogError
from chorister.policy import AggregatorPair, Policy
from chorister.recipe import SignedRecipe
from chorister.transparency.checkpoint import Checkpoint
from chorister.transparency.entries import RecipeEntry, open_recipe
from chorister.transparency.reader import Current, read_current
from chorister.transparency.sources import CHECKPOINT, Source
from chorister.transparency.trust import Trust

__all__ = ["Listed", "Poll", "Unreadable", "poll"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A recipe in the current list, under the checkpoint that its own pair cosigned."""

    signed: SignedRecipe
    # The keys of the recipe's pair, from the log; None if the policy has no such pair.
    leader_config: bytes | None
    helper_config: bytes | None
    signers: bytes = b""  # the cosigning keys that vouch for the two, one after the other


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreadable:
    """A body in the current list that is no recipe which this software understands."""

    address: bytes
    error: ChoristerError


@dataclass(frozen=True, kw_only=True, slots=True)
class Poll:
    """What was found, for all pairs of the policy."""

    checkpoint: Checkpoint | None  # the newest accepted; None if no pair's was
    listed: tuple[Listed, ...]
    unreadable: tuple[Unreadable, ...]
    problems: tuple[
        tuple[str, LogError | DecodeError], ...
    ]  # (pair, why nothing of it is believed)
    files: dict[str, bytes]  # of the log, to be kept until the next poll

    @classmethod
    def nothing(cls) -> Poll:
        """As if the log had not been asked."""
        return cls(checkpoint=None, listed=(), unreadable=(), problems=(), files={})


class _KeptFiles:
    """A log whose files are fetched once: the checkpoint once a poll, all others once ever."""

    def __init__(self, source: Source, kept: Callable[[str], bytes | None]) -> None:
        self._source = source
        self._kept = kept
        self.files: dict[str, bytes] = {}

    def read(self, path: str, *, limit: int) -> bytes:
        """The file; the caller compares it with the digest in its name, as ever."""
        data = self.files.get(path)
        if data is None and path != CHECKPOINT:
            data = self._kept(path)
        if data is None or len(data) > limit:
            data = self._source.read(path, limit=limit)
        self.files[path] = data
        return data


def poll(
    source: Source,
    *,
    policy: Policy,
    clock: Clock,
    not_before: int,
    not_smaller: int,
    kept: Callable[[str], bytes | None],
) -> Poll:
    """Read and check everything that is open to this policy's analyses."""
    files = _KeptFiles(source, kept)
    currents: list[tuple[AggregatorPair, Current]] = []
    problems: list[tuple[str, LogError | DecodeError]] = []
    for pair in policy.aggregators:
        analyses = {
            name for name, analysis in policy.analyses.items() if pair in policy.pairs(analysis)
        }
        try:
            current = read_current(
                files,
                trust=Trust.of(policy, pair),
                clock=clock,
                analyses=analyses,
                not_before=not_before,
                not_smaller=not_smaller,
            )
        except (LogError, DecodeError) as error:
            problems.append((pair.name, error))
        else:
            currents.append((pair, current))
    listed: dict[bytes, Listed] = {}
    unreadable: dict[bytes, Unreadable] = {}
    for entry in _entries(currents):
        try:
            signed = _open(entry)
        except ChoristerError as error:
            unreadable[entry.address] = Unreadable(address=entry.address, error=error)
        else:
            listed[signed.digest] = _with_keys(signed, currents)
    accepted = [current.checkpoint for _, current in currents]
    files.files.pop(CHECKPOINT, None)
    return Poll(
        checkpoint=max(accepted, key=lambda each: each.time, default=None),
        listed=tuple(listed.values()),
        unreadable=tuple(unreadable.values()),
        problems=tuple(problems),
        files=files.files,
    )


# A recipe is listed for days, and a process may run many devices. One that is no recipe raises
# each time: only what was verified is remembered.
_open = lru_cache(maxsize=64)(open_recipe)


def _entries(currents: list[tuple[AggregatorPair, Current]]) -> Iterator[RecipeEntry]:
    """Each listed recipe once, though several pairs may list it."""
    seen = set()
    for _, current in currents:
        for entry in current.recipes:
            if entry.address not in seen:
                seen.add(entry.address)
                yield entry


def _with_keys(signed: SignedRecipe, currents: list[tuple[AggregatorPair, Current]]) -> Listed:
    """A recipe with its own pair's keys: a checkpoint that another pair cosigned won't do."""
    wanted = signed.recipe.aggregators
    for pair, current in currents:
        if (pair.leader.url, pair.helper.url) == (wanted.leader, wanted.helper):
            return Listed(
                signed=signed,
                leader_config=current.leader_config.config,
                helper_config=current.helper_config.config,
                signers=current.leader_config.signer + current.helper_config.signer,
            )
    return Listed(signed=signed, leader_config=None, helper_config=None)
