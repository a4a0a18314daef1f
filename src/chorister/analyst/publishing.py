"""Results for everybody: a static page that runs nothing, and files in CSV, Parquet and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from chorister.analyst import report
from chorister.analyst.json_files import write_atomically
from chorister.analyst.result import Result
from chorister.errors import InvalidInput

_PAGE: Final = "index.html"
_PUBLIC: Final = 0o644


class Publishable(Protocol):
    """A result or a trend, as far as a page needs it."""

    def columns(self) -> dict[str, Any]: ...
    def explain(self) -> str: ...
    def plot(self) -> Any: ...  # noqa: ANN401 (a chart)
    def to_csv(self) -> str | None: ...
    def to_parquet(self) -> bytes | None: ...
    def to_json(self) -> str: ...


def publish(
    found: Publishable,
    results: Sequence[Result],
    folder: Path,
    *,
    title: str,
    note: str = "",
    window: int = 0,
) -> list[Path]:
    """Write the page and its files, each whole or not at all, the page last.

    A web server can serve the folder while it is written again. Nothing but what the aggregators
    released is in it. `window` is the one of a series that `results` are of.
    """
    files: dict[str, str | bytes | None] = {
        "results.csv": found.to_csv(),
        "results.parquet": found.to_parquet(),
        "results.json": found.to_json(),
    }
    page = report.html_report(
        title=title,
        note=note,
        words=found.explain(),
        columns=found.columns(),
        results=results,
        chart=found.plot().to_dict(),
        files=tuple(files),
        window=window,
    )
    written = []
    for name, data in {**files, _PAGE: page}.items():
        path = folder / name
        try:
            write_atomically(
                path, data.encode() if isinstance(data, str) else data or b"", mode=_PUBLIC
            )
        except OSError as error:
            raise InvalidInput(f"can't write {path}: {error.strerror}") from None
        written.append(path)
    return written
