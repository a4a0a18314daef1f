"""Extensions of aggregation jobs and collection jobs. None is known, so all that come are refused.

They are mandatory to support: who does not know one must not go on without it.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from chorister.dap.codec import Reader, uint16, vector
from chorister.dap.draft import Problem
from chorister.errors import ProblemError

__all__ = ["Extension", "encode_extensions", "refuse_extensions"]


class Extension(NamedTuple):
    """One extension, as a peer may send it."""

    extension_type: int
    extension_data: bytes


def encode_extensions(extensions: tuple[Extension, ...]) -> bytes:
    """Extension extensions<0..2^16-1>."""
    encoded = (
        uint16(each.extension_type) + vector(each.extension_data, prefix=2) for each in extensions
    )
    return vector(b"".join(encoded), prefix=2)


def refuse_extensions(reader: Reader, *, misordered: Problem) -> None:
    """Read a list and raise `ProblemError` unless it is empty.

    The two kinds of jobs differ in what they call a list that is out of order.
    """
    types = []
    with Reader(reader.vector(prefix=2), "extensions") as extensions:
        while extensions.remaining:
            types.append(extensions.uint16())
            extensions.vector(prefix=2)
    if any(later <= earlier for earlier, later in itertools.pairwise(types)):
        raise ProblemError(misordered, "extensions are not in strictly increasing order")
    if types:
        raise ProblemError(
            Problem.UNSUPPORTED_EXTENSION,
            f"extensions {types} are not known here",
            extra={"unsupported_extensions": types},
        )
