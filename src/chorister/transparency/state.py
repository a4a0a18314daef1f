"""The log's rules: which entry may follow, and which recipes and keys are current at a time.

docs/reference/log.md states the rules, the form of the current list, and its limits, with reasons.
They are the same for the registry, a cosigner and an auditor, and need no policy: entries contain
the keys that signed them. So what may be appended follows from the entries alone, and the current
list from the entries and a time. The list gives each body's author and size, so that a device knows
which bodies it needs, and how large they are, before it fetches any.

A list is itself an entry, and closes a batch: its digest must be that of the list that follows from
the entries before it at its time, which is later than that of the list before. Time only goes
forward, so what has closed by a list's time is forgotten.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from chorister.canonical import key_id
from chorister.errors import (
    CheckpointTime,
    DecodeError,
    DuplicateEntry,
    EntryRefused,
    InternalError,
    InvalidInput,
    LogSignatureInvalid,
    QuotaExceeded,
    RecipeUnknown,
    WrongList,
)
from chorister.transparency.checkpoint import MAX_SKEW
from chorister.transparency.entries import (
    MAX_BODY,
    Entry,
    HPKEConfigEntry,
    KeyRevocation,
    ListEntry,
    RecipeEnd,
    RecipeEntry,
    parse_entry,
)
from chorister.transparency.note import check_key_name
from chorister.transparency.tree import Frontier, leaf_hash

MAX_LIST: Final = 1 << 20
"""Bytes. Every device fetches the list at every poll."""
MAX_OPEN_RECIPES: Final = 100
"""Recipes of one author on the list for one analysis."""
MAX_OPEN_BYTES: Final = MAX_BODY
"""The bytes of their bodies together: as many as one recipe may have."""

_HEADER: Final = "chorister current list v3\n"
_LINE: Final = re.compile(
    r"hpke ([!-*,-~]{1,255}) ([0-9a-f]{64})"
    r"|recipe ([!-*,-~]{1,255}) ([0-9a-f]{64}) ([0-9a-f]{64}) ([1-9][0-9]{0,7})"
)


# --- The current list ---------------------------------------------------------------------------


class ListedRecipe(NamedTuple):
    """A recipe on the list. Whoever fetches the body checks it against this line."""

    analysis: str
    author_key: bytes
    address: bytes
    size: int

    @classmethod
    def of(cls, entry: RecipeEntry) -> ListedRecipe:
        return cls(entry.analysis, entry.author_key, entry.body_digest, entry.body_size)

    def encode(self) -> str:
        return f"recipe {self.analysis} {self.author_key.hex()} {self.address.hex()} {self.size}\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentList:
    """Everything that is current."""

    # (aggregator, address): at most one each, so that no device can choose.
    hpke_configs: tuple[tuple[str, bytes], ...]
    recipes: tuple[ListedRecipe, ...]

    @classmethod
    def of(
        cls, *, hpke_configs: Iterable[tuple[str, bytes]], recipes: Iterable[ListedRecipe]
    ) -> Self:
        """Return a list in its canonical order."""
        current = cls(hpke_configs=tuple(sorted(hpke_configs)), recipes=tuple(sorted(recipes)))
        for name in (*dict(current.hpke_configs), *(each.analysis for each in current.recipes)):
            check_key_name(name)
        if len(dict(current.hpke_configs)) != len(current.hpke_configs):
            raise InvalidInput("an aggregator has at most one current HPKE config")
        if len({each.address for each in current.recipes}) != len(current.recipes):
            raise InvalidInput("a recipe is listed once")
        return current

    def encode(self) -> bytes:
        lines = [f"hpke {name} {address.hex()}\n" for name, address in self.hpke_configs]
        lines += [recipe.encode() for recipe in self.recipes]
        return (_HEADER + "".join(lines)).encode()

    @property
    def digest(self) -> bytes:
        """SHA-256 of the encoded list; in hex it is also the file's name."""
        return hashlib.sha256(self.encode()).digest()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read a list; exactly one byte string is accepted for each."""
        if len(data) > MAX_LIST:
            raise DecodeError(f"a current list has at most {MAX_LIST} bytes")
        if not data.isascii():
            raise DecodeError("a current list is ASCII")
        text = data.decode()
        if not text.startswith(_HEADER) or not text.endswith("\n"):
            raise DecodeError(
                f"a current list begins with {_HEADER.strip()!r} and ends with a newline"
            )
        hpke_configs: list[tuple[str, bytes]] = []
        recipes: list[ListedRecipe] = []
        for number, line in enumerate(text[len(_HEADER) :].split("\n")[:-1], start=2):
            match = _LINE.fullmatch(line)
            if match is None:
                raise DecodeError(f"line {number} of the current list is malformed")
            aggregator, config, analysis, key, address, size = match.groups()
            if aggregator is not None:
                hpke_configs.append((aggregator, bytes.fromhex(config)))
            else:
                key, address = bytes.fromhex(key), bytes.fromhex(address)
                recipes.append(ListedRecipe(analysis, key, address, int(size)))
        try:
            current = cls.of(hpke_configs=hpke_configs, recipes=recipes)
        except InvalidInput as error:
            raise DecodeError(f"the current list: {error}") from error
        if current.encode() != data:
            raise DecodeError("the lines of the current list are out of order")
        return current


def check_quotas(recipes: Iterable[ListedRecipe], *, max_recipes: int = MAX_OPEN_RECIPES) -> None:
    """Raise if an author has more open recipes for an analysis than allowed."""
    held: dict[tuple[str, bytes], tuple[int, int]] = {}
    for each in recipes:
        count, size = held.get((each.analysis, each.author_key), (0, 0))
        held[each.analysis, each.author_key] = count + 1, size + each.size
    for (analysis, author_key), (count, size) in held.items():
        if count > max_recipes or size > MAX_OPEN_BYTES:
            raise QuotaExceeded(
                f"author key {key_id(author_key)} would have {count} open recipes with "
                f"{size:,} bytes for {analysis}, but at most {max_recipes} with "
                f"{MAX_OPEN_BYTES:,} bytes are allowed: end some of them, or wait until they "
                "close (the next checkpoint then makes room)"
            )


# --- The rules ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Logged:
    """An entry in its place, verified."""

    index: int
    # The leaf hash.
    leaf: bytes
    entry: Entry


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedList:
    """The list that closed the last batch."""

    entry: ListEntry
    index: int
    # The inclusion proof in the tree that ends with it.
    path: tuple[bytes, ...]


class LogState:
    """Everything that follows from the entries so far."""

    def __init__(self) -> None:
        self.frontier = Frontier()
        self.last_list: ClosedList | None = None
        self._index_of: dict[bytes, int] = {}
        # By the recipe's digest: all that ever were, and those that may still be listed.
        self._recipes: dict[bytes, tuple[int, ListedRecipe]] = {}
        self._open: dict[bytes, RecipeEntry] = {}
        self._ended: set[bytes] = set()
        self._revoked: dict[bytes, int] = {}
        self._hpke: dict[str, list[HPKEConfigEntry]] = {}

    def copy(self) -> LogState:
        other = LogState()
        other.frontier = self.frontier
        other.last_list = self.last_list
        other._index_of = dict(self._index_of)
        other._recipes = dict(self._recipes)
        other._open = dict(self._open)
        other._ended = set(self._ended)
        other._revoked = dict(self._revoked)
        other._hpke = {name: list(entries) for name, entries in self._hpke.items()}
        return other

    @property
    def size(self) -> int:
        """The number of entries."""
        return self.frontier.size

    @property
    def closed(self) -> bool:
        """Whether the last entry is a list."""
        return self.last_list is not None and self.last_list.index == self.size - 1

    def check(self, data: bytes) -> Logged:
        """Check that these bytes may be the next entry, without adding them.

        Raises `EntryRefused`, which says which entry and why.
        """
        index, leaf = self.size, leaf_hash(data)
        if leaf in self._index_of:
            raise DuplicateEntry(
                f"entry {index} repeats entry {self._index_of[leaf]}", index=self._index_of[leaf]
            )
        try:
            entry = parse_entry(data)
            if isinstance(entry, ListEntry):
                self._check_list(entry)
            else:
                entry.check_signature()
                if isinstance(entry, RecipeEntry):
                    self._check_recipe(entry)
                elif isinstance(entry, RecipeEnd):
                    self._check_end(entry)
                elif isinstance(entry, KeyRevocation) and entry.key in self._revoked:
                    raise DuplicateEntry(
                        f"entry {index}: this key is already revoked",
                        index=self._revoked[entry.key],
                    )
        except (DecodeError, LogSignatureInvalid) as error:
            raise EntryRefused(f"entry {index}: {error}") from error
        return Logged(index=index, leaf=leaf, entry=entry)

    def append(self, data: bytes) -> Logged:
        """Check these bytes and add them as the next entry."""
        logged = self.check(data)
        self.apply(logged)
        return logged

    def apply(self, logged: Logged) -> None:
        """Add an entry that `check` has just allowed."""
        if logged.index != self.size:
            raise InternalError(f"entry {logged.index} was checked, but {self.size} is next")
        entry = logged.entry
        if isinstance(entry, RecipeEntry):
            self._recipes[entry.recipe_digest] = logged.index, ListedRecipe.of(entry)
            self._open[entry.recipe_digest] = entry
        elif isinstance(entry, RecipeEnd):
            self._ended.add(entry.recipe_digest)
            self._open.pop(entry.recipe_digest, None)
        elif isinstance(entry, KeyRevocation):
            self._revoked[entry.key] = logged.index
            self._keep_open(lambda recipe: recipe.author_key != entry.key)
        elif isinstance(entry, HPKEConfigEntry):
            self._hpke.setdefault(entry.aggregator, []).append(entry)
        else:
            self.last_list = ClosedList(
                entry=entry, index=logged.index, path=self.frontier.next_path
            )
            self._keep_open(lambda recipe: entry.time < recipe.closes)
        self._index_of[logged.leaf] = logged.index
        self.frontier = self.frontier.extend([logged.leaf])

    def current(self, time: int) -> CurrentList:
        """Return the current list at `time`, which must not be before the last list's."""
        if self.last_list is not None and time < self.last_list.entry.time:
            raise InternalError("what was current before the last list is forgotten")
        return CurrentList.of(
            hpke_configs=self._current_hpke(time),
            recipes=(ListedRecipe.of(entry) for entry in self.open_entries(time)),
        )

    def check_current(self, now: int) -> ListEntry:
        """Require that the log ends with a list that is current, by a clock that may be wrong.

        The list's time is at most `MAX_SKEW` after `now`, and from then until `MAX_SKEW` before
        `now` nothing has changed by time alone.
        """
        if self.last_list is None or not self.closed:
            raise WrongList("the last entry is not a list: nothing says what is current")
        entry = self.last_list.entry
        if entry.time > now + MAX_SKEW:
            raise CheckpointTime(
                f"the list's time is {entry.time - now:+} s off our clock, more than {MAX_SKEW} s",
                time=entry.time,
                now=now,
            )
        at = max(entry.time, now - MAX_SKEW)
        if not hmac.compare_digest(self.current(at).digest, entry.digest):
            raise WrongList(
                f"the list of {entry.time} is out of date: something closed, began or expired "
                "since, and the log has to add the list that follows"
            )
        return entry

    def recipes_since(self, size: int) -> Iterator[ListedRecipe]:
        """Yield the recipes that a log of `size` entries did not have, ended or not."""
        for index, listed in reversed(self._recipes.values()):
            if index < size:
                return
            yield listed

    def open_entries(self, time: int) -> Iterator[RecipeEntry]:
        """Yield the recipes on the list at `time`."""
        return (entry for entry in self._open.values() if time < entry.closes)

    def hpke_entries(self, aggregator: str) -> tuple[HPKEConfigEntry, ...]:
        """Return all configs that an aggregator ever published, in the log's order."""
        return tuple(self._hpke.get(aggregator, ()))

    def _keep_open(self, keep: Callable[[RecipeEntry], bool]) -> None:
        self._open = {digest: entry for digest, entry in self._open.items() if keep(entry)}

    def _current_hpke(self, time: int) -> Iterator[tuple[str, bytes]]:
        for name, entries in self._hpke.items():
            valid = (each for each in reversed(entries) if each.not_before <= time < each.not_after)
            newest = next(valid, None)
            if newest is not None:
                yield name, newest.address

    def _check_list(self, entry: ListEntry) -> None:
        if self.last_list is not None and entry.time <= self.last_list.entry.time:
            raise EntryRefused(
                f"entry {self.size}: the list's time {entry.time} is not after "
                f"{self.last_list.entry.time}, that of the list before"
            )
        current = self.current(entry.time)
        if not hmac.compare_digest(current.digest, entry.digest):
            raise WrongList(
                f"entry {self.size}: the list is not the one that follows from the entries: the "
                "log lies, or another version of Chorister wrote it"
            )
        check_quotas(current.recipes)
        if len(current.encode()) > MAX_LIST:
            raise QuotaExceeded(f"the current list has more than {MAX_LIST:,} bytes")

    def _check_recipe(self, entry: RecipeEntry) -> None:
        if entry.recipe_digest in self._recipes:
            before, _ = self._recipes[entry.recipe_digest]
            raise DuplicateEntry(
                f"entry {self.size}: this recipe is already in the log, as entry {before}",
                index=before,
            )
        if any(entry.body_digest == each.body_digest for each in self._open.values()):
            raise EntryRefused(f"entry {self.size}: its body is that of another recipe")
        if entry.author_key in self._revoked:
            raise EntryRefused(
                f"entry {self.size}: the author's key was revoked "
                f"by entry {self._revoked[entry.author_key]}"
            )

    def _check_end(self, entry: RecipeEnd) -> None:
        if entry.recipe_digest not in self._recipes:
            raise RecipeUnknown(f"entry {self.size} ends a recipe that is not in the log")
        if entry.recipe_digest in self._ended:
            raise EntryRefused(f"entry {self.size} ends a recipe that has already ended")
        if entry.signer != self._recipes[entry.recipe_digest][1].author_key:
            raise EntryRefused(
                f"entry {self.size} ends a recipe with a key other than the one that signed it"
            )
