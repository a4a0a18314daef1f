"""The current list: what is open now, in the one form of bytes whose digest a checkpoint carries.

    chorister current list v1
    hpke https://helper.example/ 0b1c…
    recipe keyboard.next-word 5dc9…

One line for each, in ascending order of bytes, without repetition; `hpke` lines name an aggregator,
`recipe` lines an analysis, so that a device knows which bodies are its own to fetch. The 64 hex
digits are the address of the body, which is its leaf hash. How the list follows from the entries
is `state.LogState.current`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from chorister.errors import DecodeError, InvalidInput
from chorister.transparency.note import check_key_name

__all__ = ["MAX_LIST", "CurrentList"]

MAX_LIST: Final = 8 << 20
_HEADER: Final = "chorister current list v1\n"
_LINE: Final = re.compile(r"(hpke|recipe) ([!-*,-~]{1,255}) ([0-9a-f]{64})")


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentList:
    """Addresses of what is open now, by name."""

    # (aggregator, address): at most one each, so that no device gets to choose.
    hpke_configs: tuple[tuple[str, bytes], ...]
    # (analysis, address).
    recipes: tuple[tuple[str, bytes], ...]

    @classmethod
    def of(
        cls, *, hpke_configs: Iterable[tuple[str, bytes]], recipes: Iterable[tuple[str, bytes]]
    ) -> Self:
        """A list in its canonical order."""
        current = cls(hpke_configs=tuple(sorted(hpke_configs)), recipes=tuple(sorted(recipes)))
        for name, _ in current.hpke_configs + current.recipes:
            check_key_name(name)
        if len(dict(current.hpke_configs)) != len(current.hpke_configs):
            raise InvalidInput("an aggregator has at most one current HPKE config")
        if len(set(current.recipes)) != len(current.recipes):
            raise InvalidInput("a recipe is listed once")
        return current

    def encode(self) -> bytes:
        """The bytes that the digest is of."""
        lines = [f"hpke {name} {address.hex()}\n" for name, address in self.hpke_configs]
        lines += [f"recipe {name} {address.hex()}\n" for name, address in self.recipes]
        return (_HEADER + "".join(sorted(lines))).encode()

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
            raise DecodeError("a current list begins with its version and ends with a newline")
        rows: dict[str, list[tuple[str, bytes]]] = {"hpke": [], "recipe": []}
        for number, line in enumerate(text[len(_HEADER) :].split("\n")[:-1], start=2):
            match = _LINE.fullmatch(line)
            if match is None:
                raise DecodeError(f"line {number} of the current list is malformed")
            rows[match[1]].append((match[2], bytes.fromhex(match[3])))
        try:
            current = cls.of(hpke_configs=rows["hpke"], recipes=rows["recipe"])
        except InvalidInput as error:
            raise DecodeError(f"the current list: {error}") from error
        if current.encode() != data:
            raise DecodeError("the lines of the current list are out of order")
        return current
