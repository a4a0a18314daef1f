"""The current list: what is open now, in the one form of bytes whose digest a checkpoint carries.

    chorister current list v2
    hpke https://helper.example/ 0b1c…
    recipe keyboard.next-word 7e2a… 5dc9… 4211

One line for each, in ascending order of bytes, without repetition. `hpke` lines name an aggregator
and the address of its config. `recipe` lines name an analysis, the author's key, the address of
the body and its size in bytes: so a device knows before it fetches anything which bodies are its
own, and how much they are together. An address is the leaf hash of the body. How the list follows
from the entries is `state.LogState.current`.

**Limits.** An author has at most `MAX_OPEN_RECIPES` recipes of `MAX_OPEN_BYTES` together on the
list for one analysis, and the list has at most `MAX_LIST` bytes. The registry takes no entry that
would break these limits, a cosigner signs no list that does, and a device fetches nothing of one.
They count by author because anyone can make a key: recipes by strangers, which no device fetches,
take nothing away from those whom a policy names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from chorister.canonical import key_id
from chorister.errors import DecodeError, InvalidInput, QuotaExceeded
from chorister.transparency.entries import MAX_ENTRY, RecipeEntry
from chorister.transparency.note import check_key_name
from chorister.transparency.tree import leaf_hash

__all__ = [
    "MAX_LIST",
    "MAX_OPEN_BYTES",
    "MAX_OPEN_RECIPES",
    "CurrentList",
    "ListedRecipe",
    "check_quotas",
]

MAX_LIST: Final = 1 << 20
"""Bytes. Every device fetches the list at every poll."""
MAX_OPEN_RECIPES: Final = 100
"""Recipes of one author on the list for one analysis."""
MAX_OPEN_BYTES: Final = MAX_ENTRY
"""Their bodies' bytes together: as much as one recipe may have."""

_HEADER: Final = "chorister current list v2\n"
_LINE: Final = re.compile(
    r"hpke ([!-*,-~]{1,255}) ([0-9a-f]{64})"
    r"|recipe ([!-*,-~]{1,255}) ([0-9a-f]{64}) ([0-9a-f]{64}) ([1-9][0-9]{0,7})"
)


class ListedRecipe(NamedTuple):
    """A recipe on the list; what the line says of the body is checked when it is fetched."""

    analysis: str
    author_key: bytes
    address: bytes
    size: int

    @classmethod
    def of(cls, analysis: str, entry: RecipeEntry) -> ListedRecipe:
        """How the list names a recipe of this analysis."""
        data = entry.encode()
        return cls(analysis, entry.author_key, leaf_hash(data), len(data))

    def encode(self) -> str:
        """Its line."""
        return f"recipe {self.analysis} {self.author_key.hex()} {self.address.hex()} {self.size}\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentList:
    """What is open now."""

    # (aggregator, address): at most one each, so that no device gets to choose.
    hpke_configs: tuple[tuple[str, bytes], ...]
    recipes: tuple[ListedRecipe, ...]

    @classmethod
    def of(
        cls, *, hpke_configs: Iterable[tuple[str, bytes]], recipes: Iterable[ListedRecipe]
    ) -> Self:
        """A list in its canonical order."""
        current = cls(hpke_configs=tuple(sorted(hpke_configs)), recipes=tuple(sorted(recipes)))
        for name in (*dict(current.hpke_configs), *(each.analysis for each in current.recipes)):
            check_key_name(name)
        if len(dict(current.hpke_configs)) != len(current.hpke_configs):
            raise InvalidInput("an aggregator has at most one current HPKE config")
        if len({each.address for each in current.recipes}) != len(current.recipes):
            raise InvalidInput("a recipe is listed once")
        return current

    def encode(self) -> bytes:
        """The bytes that the digest is of."""
        lines = [f"hpke {name} {address.hex()}\n" for name, address in self.hpke_configs]
        lines += [recipe.encode() for recipe in self.recipes]
        return (_HEADER + "".join(lines)).encode()

    @property
    def digest(self) -> bytes:
        """SHA-256 of the bytes; its hex is also the file's name."""
        return hashlib.sha256(self.encode()).digest()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read a list; exactly one byte string is accepted for each list."""
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
            aggregator, config, analysis, author_key, address, size = match.groups()
            if aggregator is not None:
                hpke_configs.append((aggregator, bytes.fromhex(config)))
            else:
                recipes.append(
                    ListedRecipe(
                        analysis=analysis,
                        author_key=bytes.fromhex(author_key),
                        address=bytes.fromhex(address),
                        size=int(size),
                    )
                )
        try:
            current = cls.of(hpke_configs=hpke_configs, recipes=recipes)
        except InvalidInput as error:
            raise DecodeError(f"the current list: {error}") from error
        if current.encode() != data:
            raise DecodeError("the lines of the current list are out of order")
        return current

    def check_limits(self) -> None:
        """Require that the list and each author's part of it are within the limits."""
        check_quotas(self.recipes)
        if len(self.encode()) > MAX_LIST:
            raise QuotaExceeded(f"the current list has more than {MAX_LIST:,} bytes")


def check_quotas(recipes: Iterable[ListedRecipe], *, max_recipes: int = MAX_OPEN_RECIPES) -> None:
    """Require that no author has more open for an analysis than is permitted."""
    held: dict[tuple[str, bytes], tuple[int, int]] = {}
    for each in recipes:
        count, size = held.get((each.analysis, each.author_key), (0, 0))
        held[each.analysis, each.author_key] = count + 1, size + each.size
    for (analysis, author_key), (count, size) in held.items():
        if count > max_recipes or size > MAX_OPEN_BYTES:
            raise QuotaExceeded(
                f"{count} open recipes with {size:,} bytes for {analysis} by author key "
                f"{key_id(author_key)}, where {max_recipes} with {MAX_OPEN_BYTES:,} bytes are "
                "permitted: end those that are no longer asked, or wait until they close (with the "
                "next checkpoint either makes room)"
            )
