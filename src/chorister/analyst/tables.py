"""Columns as data frames, CSV and HTML. polars, pyarrow and pandas are loaded only when used."""

from __future__ import annotations

import csv
import html
import importlib
import io
import math
import os
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chorister.errors import InvalidInput
from chorister.policy.values import legible

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow  # type: ignore[import-untyped]

ROWS_SHOWN: Final = 20
_SMALL: Final = 100.0  # numbers below are shares or in units of their own
_FORMULA: Final = tuple("=+-@＝＋－＠")
"""How a formula begins, including the full-width characters of East Asian input."""
_NUMBER: Final = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")
_NOT_IN_XML: Final = re.compile("[\ud800-\udfff\ufffe\uffff]")  # beyond what `legible` escapes


def needed(name: str) -> Any:  # noqa: ANN401 (a module)
    """Import a package of the extra `analyst`, which `pip install chorister` leaves out."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        name = name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != name:
            raise
        extra = "pip install pandas" if name == "pandas" else 'pip install "chorister[analyst]"'
        raise InvalidInput(f"this needs {name}, which is not installed: {extra}") from None


class Tabular(ABC):
    """Anything with columns: exports to data frames, CSV and Parquet."""

    __slots__ = ()

    @abstractmethod
    def columns(self) -> dict[str, Any]:
        """All columns by name: lists or arrays of the same length."""

    def to_polars(self) -> polars.DataFrame:
        """Convert to a polars data frame."""
        return to_polars(self.columns())

    def to_arrow(self) -> pyarrow.Table:
        """Convert to an Arrow table."""
        return needed("pyarrow").table(self.columns())

    def to_pandas(self) -> pandas.DataFrame:
        """Convert to a pandas data frame."""
        frame: pandas.DataFrame = needed("pandas").DataFrame(self.columns())
        return frame

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write CSV to a file, or return it as text."""
        return to_csv(self.columns(), path)

    def to_parquet(self, path: str | os.PathLike[str] | None = None) -> bytes | None:
        """Write Parquet to a file, or return it as bytes."""
        file = io.BytesIO()
        needed("pyarrow.parquet").write_table(needed("pyarrow").table(self.columns()), file)
        if path is None:
            return file.getvalue()
        Path(path).write_bytes(file.getvalue())
        return None


def to_polars(columns: dict[str, Any]) -> polars.DataFrame:
    frame: polars.DataFrame = needed("polars").DataFrame(columns)
    return frame


def to_csv(columns: dict[str, Any], path: str | os.PathLike[str] | None) -> str | None:
    """Write CSV to a file, or return it as text.

    Labels are words that other people chose. So texts are quoted, and a text that a spreadsheet
    would run as a formula gets an apostrophe in front.
    """
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(map(_harmless, columns))
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    cells = (map(_harmless, _plain(column)) for column in columns.values())
    writer.writerows(zip(*cells, strict=True))
    if path is None:
        return text.getvalue()
    Path(path).write_text(text.getvalue(), encoding="utf-8", newline="")
    return None


def _harmless(value: Any) -> Any:  # noqa: ANN401 (a text or a number)
    if not isinstance(value, str) or _NUMBER.fullmatch(value):
        return value
    # Programs differ in which spaces, marks and control characters they drop before a formula.
    first = next((c for c in value if c.isprintable() and not c.isspace()), "")
    runs = value.startswith(("\t", "\r", "\n")) or first in _FORMULA
    return f"'{value}" if runs else value


def _plain(column: Any) -> list[Any]:  # noqa: ANN401 (a list or an array)
    return column.tolist() if hasattr(column, "tolist") else list(column)


def html_table(columns: dict[str, Any], *, rows: int = ROWS_SHOWN) -> str:
    """The first rows as an HTML table. All text is escaped."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = []
    lists = [_plain(column[:rows]) for column in columns.values()]
    digits = [",.1f" if _largest(column) >= _SMALL else ",.4g" for column in lists]
    for row in zip(*lists, strict=True):
        cells = "".join(
            f'<td style="text-align:right">{value:{form}}</td>'
            if isinstance(value, float)
            else f"<td>{html.escape(legible(str(value)))}</td>"
            for value, form in zip(row, digits, strict=True)
        )
        body.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _largest(column: list[Any]) -> float:
    """The largest number of a column, which decides how many digits it needs."""
    return max((abs(value) for value in column if isinstance(value, float)), default=0.0)


def drawable(label: str) -> str:
    """Make a label safe to draw: vl-convert aborts the process if SVG can't contain a character."""
    return _NOT_IN_XML.sub(lambda found: f"\\u{{{ord(found[0]):x}}}", legible(label))


def paragraphs(text: str) -> str:
    """HTML with one paragraph per line. All text is escaped."""
    return "".join(f"<p>{html.escape(line)}</p>" for line in text.split("\n"))


def number_text(value: float, width: float) -> str:
    """Write a number with enough digits to distinguish thousandths of a range."""
    digits = max(0, 3 - math.floor(math.log10(width))) if width > 0.0 else 3
    return f"{value:,.{min(digits, 12)}f}"
