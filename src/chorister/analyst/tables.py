"""Results as frames, CSV and HTML. polars, pyarrow and pandas are loaded when asked for."""

from __future__ import annotations

import csv
import html as escaping
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chorister.analyst.extras import needed

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow  # type: ignore[import-untyped]

    from chorister.analyst.result import Result

__all__ = ["arrow_stream", "html", "html_table", "to_arrow", "to_csv", "to_pandas", "to_polars"]

_ROWS_SHOWN = 20


def to_polars(columns: dict[str, Any]) -> polars.DataFrame:
    """Columns as a polars frame."""
    frame: polars.DataFrame = needed("polars").DataFrame(columns)
    return frame


def to_arrow(columns: dict[str, Any]) -> pyarrow.Table:
    """Columns as an Arrow table."""
    return needed("pyarrow").table(columns)


def to_pandas(columns: dict[str, Any]) -> pandas.DataFrame:
    """Columns as a pandas frame."""
    frame: pandas.DataFrame = needed("pandas").DataFrame(columns)
    return frame


def arrow_stream(columns: dict[str, Any], requested_schema: object | None) -> object:
    """Columns through the Arrow PyCapsule interface."""
    return to_arrow(columns).__arrow_c_stream__(requested_schema)


def to_csv(columns: dict[str, Any], path: str | os.PathLike[str] | None) -> str | None:
    """Columns as CSV: into a file, or as text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(_plain(column) for column in columns.values()), strict=True))
    if path is None:
        return text.getvalue()
    Path(path).write_text(text.getvalue(), encoding="utf-8")
    return None


def _plain(column: Any) -> list[Any]:  # noqa: ANN401 (a list or an array)
    return column.tolist() if hasattr(column, "tolist") else list(column)


def html_table(columns: dict[str, Any], *, rows: int = _ROWS_SHOWN) -> str:
    """The first rows as an HTML table; every text is escaped."""
    head = "".join(f"<th>{escaping.escape(name)}</th>" for name in columns)
    body = []
    lists = [_plain(column[:rows]) for column in columns.values()]
    for row in zip(*lists, strict=True):
        cells = "".join(
            f'<td style="text-align:right">{value:,.1f}</td>'
            if isinstance(value, float)
            else f"<td>{escaping.escape(str(value))}</td>"
            for value in row
        )
        body.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def html(result: Result) -> str:
    """What a notebook shows: the largest rows, and how to read them."""
    shown = result.top(_ROWS_SHOWN) if len(result) > _ROWS_SHOWN else result
    more = ""
    if len(result) > len(shown):
        more = f"<p>The {len(shown):,} largest of {len(result):,} rows.</p>"
    summary = result.explain().split("\n")[0]
    mark = ""
    if result.marked:
        checks = " ".join(check.explain() for check in result.weight if check.marked)
        mark = f"<p><strong>{escaping.escape(checks)}</strong></p>"
    return f"<div><p>{escaping.escape(summary)}</p>{mark}{html_table(shown.columns())}{more}</div>"
