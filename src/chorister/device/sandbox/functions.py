"""What a query may call: SQLite's pure functions, and table-valued ones that the device provides.

A function is offered only if it depends on its arguments and on nothing else. So there is none for
the time (it would reveal the time zone), SQLite itself (its version), files or tokenizers, whatever
a policy lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import apsw

from chorister.encoding.tokenizer import split_words

MAX_N: Final = 16
"""The longest n-gram."""

PURE_FUNCTIONS: Final = frozenset({
    "abs", "avg", "ceil", "ceiling", "char", "coalesce", "concat", "concat_ws", "count",
    "cume_dist", "dense_rank", "exp", "first_value", "floor", "format", "glob", "group_concat",
    "ifnull", "iif", "instr", "json", "json_array_length", "json_extract", "json_type",
    "json_valid", "lag", "last_value", "lead", "length", "like", "ln", "log", "log10", "log2",
    "lower", "ltrim", "max", "median", "min", "mod", "nth_value", "ntile", "nullif",
    "octet_length", "percent_rank", "percentile", "pow", "power", "printf", "quote", "random",
    "rank", "replace", "round", "row_number", "rtrim", "sign", "sqrt", "string_agg", "substr",
    "substring", "sum", "total", "trim", "trunc", "typeof", "unicode", "upper", "->", "->>",
})  # fmt: skip
"""By the names that SQLite passes to the authorizer."""


def _words(text: object) -> Iterator[tuple[object, ...]]:
    if isinstance(text, str):
        for position, word in enumerate(split_words(text)):
            yield word, position


def _ngrams(text: object, n: object) -> Iterator[tuple[object, ...]]:
    if type(n) is not int or not 1 <= n <= MAX_N:
        raise ValueError(f"ngrams(text, n) has n from 1 to {MAX_N}")
    if isinstance(text, str):
        words = split_words(text)
        for position in range(len(words) - n + 1):
            yield " ".join(words[position : position + n]), position


class _TableFunction(NamedTuple):
    columns: tuple[str, ...]
    arguments: tuple[str, ...]
    rows: Callable[..., Iterator[tuple[object, ...]]]


TABLE_FUNCTIONS: Final = {
    # Words as every encoding splits them: `FROM keyboard, ngrams(keyboard.text, 3)`.
    "ngrams": _TableFunction(columns=("ngram", "position"), arguments=("text", "n"), rows=_ngrams),
    "words": _TableFunction(columns=("word", "position"), arguments=("text",), rows=_words),
}


_ON_DEMAND: Final = ("carray", "json_each", "json_tree", "jsonb_each", "jsonb_tree")


def known_functions() -> frozenset[str]:
    """Return every function that a policy may list."""
    return PURE_FUNCTIONS | TABLE_FUNCTIONS.keys()


def register(connection: apsw.Connection, name: str) -> None:
    """Register a table-valued function. It can be called, but not be made into a table."""
    connection.create_module(
        name,
        _Module(TABLE_FUNCTIONS[name]),  # type: ignore[arg-type]  # its protocol names every method
        use_bestindex_object=True,
        eponymous=True,
        eponymous_only=True,
        read_only=True,
    )


def block_table_functions(connection: apsw.Connection) -> None:
    """Block all table-valued functions, including those that SQLite adds when they are named.

    Under their names it finds modules that let no statement compile.
    """
    connection.drop_modules(None)
    pragmas = [f"pragma_{row[0]}" for row in connection.execute("PRAGMA pragma_list")]
    for name in (*_ON_DEMAND, *pragmas):
        connection.create_module(
            name,
            _Blocked(name),  # type: ignore[arg-type]  # its protocol names every method
            eponymous=True,
            eponymous_only=True,
            read_only=True,
        )


class _Blocked:
    def __init__(self, name: str) -> None:
        self._name = name

    def Connect(self, *_: object) -> NoReturn:  # noqa: N802
        raise ValueError(f"access to {self._name} is prohibited")


class _Module:
    """A virtual table's module. The names of the methods are apsw's."""

    def __init__(self, function: _TableFunction) -> None:
        self._function = function

    def Connect(  # noqa: N802
        self, _connection: apsw.Connection, *_names: str
    ) -> tuple[str, _Table]:
        hidden = [f'"{argument}" HIDDEN' for argument in self._function.arguments]
        columns = ", ".join([*self._function.columns, *hidden])
        return f"CREATE TABLE it ({columns})", _Table(self._function)


class _Table:
    def __init__(self, function: _TableFunction) -> None:
        self._function = function

    def BestIndexObject(self, index: apsw.IndexInfo) -> bool:  # noqa: N802
        """Accept a plan only if it has a value for every argument."""
        first = len(self._function.columns)
        found: dict[int, int] = {}
        for i in range(index.nConstraint):
            column = index.get_aConstraint_iColumn(i)
            if column >= first and index.get_aConstraint_op(i) == apsw.SQLITE_INDEX_CONSTRAINT_EQ:
                if not index.get_aConstraint_usable(i):
                    return False
                found.setdefault(column - first, i)
        if len(found) != len(self._function.arguments):
            return False
        for argument, i in found.items():
            index.set_aConstraintUsage_argvIndex(i, argument + 1)
            index.set_aConstraintUsage_omit(i, True)
        index.estimatedCost = 10.0
        index.estimatedRows = 10
        return True

    def Open(self) -> _RowCursor:  # noqa: N802
        return _RowCursor(self._function)

    def Disconnect(self) -> None:  # noqa: N802
        """Nothing to release."""

    Destroy = Disconnect


class _RowCursor:
    def __init__(self, function: _TableFunction) -> None:
        self._function = function
        self._arguments: tuple[Any, ...] = ()
        self._rows: Iterator[tuple[object, ...]] = iter(())
        self._row: tuple[object, ...] | None = None
        self._number = 0

    def Filter(  # noqa: N802
        self, _number: int, _name: str | None, arguments: Sequence[Any] | None
    ) -> None:
        self._arguments = tuple(arguments or ())
        self._rows = self._function.rows(*self._arguments)
        self._number = -1
        self.Next()

    def Next(self) -> None:  # noqa: N802
        self._row = next(self._rows, None)
        self._number += 1

    def Eof(self) -> bool:  # noqa: N802
        return self._row is None

    def Column(self, number: int) -> Any:  # noqa: ANN401, N802
        if number == -1:
            return self._number
        if self._row is None:
            return None
        return (*self._row, *self._arguments)[number]

    def Rowid(self) -> int:  # noqa: N802
        return self._number

    def Close(self) -> None:  # noqa: N802
        self._rows = iter(())
