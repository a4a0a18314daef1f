"""A poll of the public log: which recipes are open now, and to which keys reports are sealed.

Everything is fetched before anything is decided: all bodies of the policy's authors, whether they
will be answered or not. What a server sees of a poll follows from the list that it serves and from
the policy, with one exception: whether these are the files of the device's last complete poll
(`transparency.reader`). Data, budget, decisions, clock and earlier checkpoints do not show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from chorister.clock import Clock
from chorister.device.device_clock import DeviceClock
from chorister.device.records import Settings
from chorister.errors import ChoristerError, DecodeError, LedgerError, LogError
from chorister.policy import AggregatorPair, Policy
from chorister.recipe import SignedRecipe
from chorister.recipe.signature import KEPT_JWS_BYTES
from chorister.transparency.client import body_path
from chorister.transparency.entries import RecipeBody, open_recipe
from chorister.transparency.reader import Current, LastAccepted, read_log
from chorister.transparency.tiles import Source
from chorister.transparency.trust import Trust


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
    """A body in the current list that this software can't read as a recipe."""

    address: bytes
    error: ChoristerError


@dataclass(frozen=True, kw_only=True, slots=True)
class Poll:
    """What was found, for all pairs of the policy."""

    accepted: LastAccepted | None  # the checkpoint; None if no pair accepts it
    listed: tuple[Listed, ...]
    unreadable: tuple[Unreadable, ...]
    problems: tuple[
        tuple[str, LogError | DecodeError], ...
    ]  # (pair, why nothing of it is believed)
    # The bodies by their paths, to be kept until the next poll; None if they stay as they are.
    files: dict[str, bytes] | None

    @classmethod
    def nothing(cls) -> Poll:
        """Return the result of a poll that did not happen."""
        return cls(accepted=None, listed=(), unreadable=(), problems=(), files=None)


class LogMemory:
    """What was accepted last of the log with a name, in the device's settings and its clock.

    A size is only valid for the log of that name: a policy update may name another. The log of
    earlier versions had another format, and other sizes.
    """

    def __init__(self, settings: Settings, clock: DeviceClock, origin: str) -> None:
        self._settings = settings
        self._clock = clock
        self._size = f"size of log v2 {origin}"
        # Settings are integers of 64 bits; a root is four of them.
        self._root = [f"root {part} of log v2 {origin}" for part in range(4)]

    def remember(self, accepted: LastAccepted) -> None:
        """Store it, inside the caller's transaction."""
        self._clock.accept_checkpoint(accepted.time)
        self._settings.set(self._size, accepted.size)
        for part, name in enumerate(self._root):
            self._settings.set(name, int.from_bytes(accepted.root[8 * part :][:8], signed=True))

    def last(self) -> LastAccepted:
        root = b"".join(self._settings.get(name).to_bytes(8, signed=True) for name in self._root)
        return LastAccepted(time=self.newest(), size=self._settings.get(self._size), root=root)

    def newest(self) -> int:
        """Return the time of the newest checkpoint that was ever accepted, or 0."""
        try:
            return self._clock.decision_time()
        except LedgerError:
            return 0


def poll(
    source: Source,
    *,
    policy: Policy,
    clock: Clock,
    last: LastAccepted,
    kept: Callable[[], Iterable[bytes]],
    forget: Callable[[], None],
    fetched: Callable[[], None] = lambda: None,
) -> Poll:
    """Read and check everything that is open to this policy's analyses.

    `kept` returns the bodies of the last complete poll; `forget` deletes them. `fetched` is called
    after the last request.
    """
    pairs = policy.aggregators
    try:
        reading = read_log(
            source,
            [Trust.of(policy, pair) for pair in pairs],
            clock=clock,
            last=last,
            kept=kept,
            forget=forget,
            fetched=fetched,
        )
    except (LogError, DecodeError) as error:
        problems = tuple((pair.name, error) for pair in pairs)
        return Poll(accepted=None, listed=(), unreadable=(), problems=problems, files=None)
    outcomes = list(zip(pairs, reading.outcomes, strict=True))
    currents = [(pair, each) for pair, each in outcomes if isinstance(each, Current)]
    listed: dict[bytes, Listed] = {}
    unreadable: dict[bytes, Unreadable] = {}
    for entry in _entries(currents):
        try:
            signed = _open(entry)
        except ChoristerError as error:
            unreadable[entry.address] = Unreadable(address=entry.address, error=error)
        else:
            listed[signed.digest] = _with_keys(signed, currents)
    files = None
    if reading.bodies is not None:
        files = {body_path(address): body for address, body in reading.bodies.items()}
    return Poll(
        accepted=_accepted([current for _, current in currents]),
        listed=tuple(listed.values()),
        unreadable=tuple(unreadable.values()),
        problems=tuple(
            (pair.name, each) for pair, each in outcomes if not isinstance(each, Current)
        ),
        files=files,
    )


# A recipe is listed for days, and a process may run many devices. Only verified recipes are cached.
# This poll has sent all its requests by now, so a cache hit moves none of them. Long recipes are
# parsed each time, or an author could fill the app's memory with one list after the other.
_open_short = lru_cache(maxsize=64)(open_recipe)


def _accepted(currents: list[Current]) -> LastAccepted | None:
    """What to remember: the pairs share a checkpoint, and the earliest of their times counts."""
    if not currents:
        return None
    checkpoint = currents[0].checkpoint
    time = min(current.time for current in currents)
    return LastAccepted(time=time, size=checkpoint.size, root=checkpoint.root)


def _open(entry: RecipeBody) -> SignedRecipe:
    return (_open_short if len(entry.jws) <= KEPT_JWS_BYTES else open_recipe)(entry)


def _entries(currents: list[tuple[AggregatorPair, Current]]) -> Iterator[RecipeBody]:
    """Iterate over the listed recipes, each once even if several pairs list it."""
    seen = set()
    for _, current in currents:
        for entry in current.recipes:
            if entry.address not in seen:
                seen.add(entry.address)
                yield entry


def _with_keys(signed: SignedRecipe, currents: list[tuple[AggregatorPair, Current]]) -> Listed:
    """Return a recipe with its own pair's keys: only that pair's checkpoint vouches for them."""
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
