"""The log's rules as a fold over its entries: what may follow what, and what is open at a time.

`LogState` is the same for the registry, a cosigner and an auditor. It needs no policy: entries
carry the keys that vouch for them, so the rules are a pure function of the entries, and the
current list a pure function of the entries and a time.

**May be appended:** an entry that is not in the log yet, whose signature verifies, and

- a *recipe*, if its digest is new and its author's key is not revoked;
- the *end* of a recipe that is in the log and has not ended, signed by the recipe's own key;
- the *revocation* of a key that is not revoked yet;
- an *HPKE config*.

**Is current at time t:**

- a recipe that has not ended, whose author's key is not revoked, and whose answer period ends
  after t (it is listed from the moment it is logged, so that a device that looks in rarely knows
  of it when its answer period begins);
- of each aggregator the HPKE config that was logged last among those valid at t.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from chorister.errors import (
    DecodeError,
    DuplicateEntry,
    EntryRefused,
    InternalError,
    LogSignatureInvalid,
)
from chorister.recipe import SignedRecipe
from chorister.transparency.entries import (
    EndReason,
    Entry,
    HPKEConfigEntry,
    KeyRevocation,
    RecipeEnd,
    RecipeEntry,
    open_recipe,
    parse_entry,
)
from chorister.transparency.listing import CurrentList, ListedRecipe
from chorister.transparency.tree import Frontier, leaf_hash

__all__ = ["LogState", "Logged", "LoggedRecipe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedRecipe:
    """What the rules remember of a recipe."""

    index: int
    # How the current list names it, as long as it is open.
    listed: ListedRecipe
    # When its answer period ends, POSIX seconds.
    closes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Logged:
    """An entry in its place, verified."""

    index: int
    address: bytes
    entry: Entry
    # The opened question, if the entry is a recipe.
    recipe: SignedRecipe | None = None


class LogState:
    """Everything that follows from the entries so far."""

    def __init__(self) -> None:
        self.frontier = Frontier()
        self._index_of: dict[bytes, int] = {}
        self._recipes: dict[bytes, LoggedRecipe] = {}
        self._ended: dict[bytes, EndReason] = {}
        self._revoked: dict[bytes, int] = {}
        self._hpke: dict[str, list[tuple[HPKEConfigEntry, bytes]]] = {}

    def copy(self) -> LogState:
        """An independent copy, to try entries on."""
        other = LogState()
        other.frontier = self.frontier
        other._index_of = dict(self._index_of)
        other._recipes = dict(self._recipes)
        other._ended = dict(self._ended)
        other._revoked = dict(self._revoked)
        other._hpke = {name: list(entries) for name, entries in self._hpke.items()}
        return other

    @property
    def size(self) -> int:
        """How many entries there are."""
        return self.frontier.size

    def check(self, data: bytes) -> Logged:
        """Verify that these bytes may be the next entry; changes nothing.

        Raises `EntryRefused` that says which entry and why.
        """
        index, address = self.size, leaf_hash(data)
        if address in self._index_of:
            raise DuplicateEntry(
                f"entry {index} repeats entry {self._index_of[address]}",
                index=self._index_of[address],
            )
        try:
            entry = parse_entry(data)
            recipe = None
            if isinstance(entry, RecipeEntry):
                recipe = open_recipe(entry)
                self._check_recipe(entry, recipe)
            else:
                entry.check_signature()
                if isinstance(entry, RecipeEnd):
                    self._check_end(entry)
                elif isinstance(entry, KeyRevocation) and entry.key in self._revoked:
                    raise DuplicateEntry(
                        f"entry {index}: this key is revoked already",
                        index=self._revoked[entry.key],
                    )
        except (DecodeError, LogSignatureInvalid) as error:
            raise EntryRefused(f"entry {index}: {error}") from error
        return Logged(index=index, address=address, entry=entry, recipe=recipe)

    def append(self, data: bytes) -> Logged:
        """Take these bytes as the next entry, if the rules permit it."""
        logged = self.check(data)
        self.apply(logged)
        return logged

    def apply(self, logged: Logged) -> None:
        """Take an entry that `check` just let through."""
        if logged.index != self.size:
            raise InternalError(f"entry {logged.index} was checked, but {self.size} is next")
        entry = logged.entry
        if logged.recipe is not None and isinstance(entry, RecipeEntry):
            self._recipes[logged.recipe.digest] = LoggedRecipe(
                index=logged.index,
                listed=ListedRecipe.of(logged.recipe.recipe.analysis, entry),
                closes=logged.recipe.recipe.window.closes,
            )
        elif isinstance(entry, RecipeEnd):
            self._ended[entry.recipe_digest] = entry.reason
        elif isinstance(entry, KeyRevocation):
            self._revoked[entry.key] = logged.index
        elif isinstance(entry, HPKEConfigEntry):
            self._hpke.setdefault(entry.aggregator, []).append((entry, logged.address))
        self._index_of[logged.address] = logged.index
        self.frontier = self.frontier.extend([logged.address])

    def current(self, time: int) -> CurrentList:
        """The list at `time`."""
        return CurrentList.of(
            hpke_configs=self._current_hpke(time),
            recipes=(recipe.listed for recipe in self._open(time)),
        )

    def recipes_since(self, size: int) -> Iterator[ListedRecipe]:
        """The recipes that a log of `size` entries did not have, ended or not."""
        return (each.listed for each in self._recipes.values() if each.index >= size)

    def open_recipes(self, time: int) -> frozenset[bytes]:
        """The addresses of the recipes on the list at `time`."""
        return frozenset(recipe.listed.address for recipe in self._open(time))

    def _open(self, time: int) -> Iterator[LoggedRecipe]:
        for digest, recipe in self._recipes.items():
            revoked = recipe.listed.author_key in self._revoked
            if digest not in self._ended and not revoked and time < recipe.closes:
                yield recipe

    def hpke_entries(self, aggregator: str) -> tuple[HPKEConfigEntry, ...]:
        """All that an aggregator ever published, in the log's order."""
        return tuple(entry for entry, _ in self._hpke.get(aggregator, ()))

    def _current_hpke(self, time: int) -> Iterator[tuple[str, bytes]]:
        for name, entries in self._hpke.items():
            valid = [at for entry, at in entries if entry.not_before <= time < entry.not_after]
            if valid:
                yield name, valid[-1]

    def _check_recipe(self, entry: RecipeEntry, recipe: SignedRecipe) -> None:
        if recipe.digest in self._recipes:
            before = self._recipes[recipe.digest].index
            raise DuplicateEntry(
                f"entry {self.size}: this recipe is entry {before} already", index=before
            )
        if entry.author_key in self._revoked:
            raise EntryRefused(
                f"entry {self.size}: the author's key was revoked "
                f"by entry {self._revoked[entry.author_key]}"
            )

    def _check_end(self, entry: RecipeEnd) -> None:
        recipe = self._recipes.get(entry.recipe_digest)
        if recipe is None:
            raise EntryRefused(f"entry {self.size} ends a recipe that is not in the log")
        if entry.recipe_digest in self._ended:
            raise EntryRefused(f"entry {self.size} ends a recipe that has ended before")
        if entry.signer != recipe.listed.author_key:
            raise EntryRefused(
                f"entry {self.size} ends a recipe with a key other than the one that signed it"
            )
