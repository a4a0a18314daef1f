"""A report in one HTML file that needs nothing else: words, chart, table, and the exact recipe."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from chorister.analyst.tables import drawable, html_table, needed
from chorister.canonical import decimal_text
from chorister.clock import utc_minute
from chorister.errors import InvalidInput
from chorister.policy.values import legible

if TYPE_CHECKING:
    from chorister.analyst.result import Result

ROWS: Final = 1_000
_NOTHING_ELSE: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The page runs nothing and loads nothing, whatever is in it."""
_STYLE: Final = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #1b2330; background: #fff; max-width: 60rem;
  margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.faint { color: #5b6575; } figure { margin: 1rem 0; overflow-x: auto; } svg { max-width: 100%; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9375rem; }
th, td { text-align: left; padding: .35rem .75rem; border-bottom: 1px solid #e1e5ec; }
th { color: #5b6575; font-weight: 500; } code, pre { font-family: ui-monospace, monospace; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8125rem; }
"""


def written(path: str | os.PathLike[str] | None, **content: Any) -> str | None:  # noqa: ANN401
    """Write a report to a file, or return it as text."""
    text = html_report(**content)
    if path is None:
        return text
    Path(path).write_text(text, encoding="utf-8")
    return None


def html_report(
    *,
    title: str,
    words: str,
    columns: dict[str, Any],
    results: Sequence[Result],
    chart: dict[str, Any] | None = None,
    note: str = "",
    files: Sequence[str] = (),
    window: int = 0,
) -> str:
    """Write the report. Labels are other people's words, so everything is escaped.

    `files` lie next to it, and it links to them. `window` is the one of a series that the results
    are of.
    """
    size = len(next(iter(columns.values()))) if columns else 0
    shown = {name: column[:ROWS] for name, column in columns.items()}
    more = f"<p>The first {ROWS:,} of {size:,} rows.</p>" if size > ROWS else ""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_NOTHING_ELSE}">',
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>{_text(title)}</h1>",
        f'<p class="faint">{_text(note)}</p>' if note else "",
        f"<figure>{_svg(chart)}</figure>" if chart is not None else "",
        "<h2>What this means, and what it cost</h2>",
        *(f"<p>{_text(line)}</p>" for line in words.split("\n") if line),
        f'<h2>Table</h2><div class="scroll">{html_table(shown, rows=ROWS)}</div>{more}',
        f"<p>All rows: {', '.join(map(_link, files))}</p>" if files else "",
        "<h2>Exactly what devices were asked</h2>",
        *(_asked(result, window) for result in results),
        "</main></body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def inline_chart(plot: Callable[[], Any]) -> str:
    """A chart for a notebook; nothing where the packages that draw are not installed."""
    try:
        return f"<figure>{_svg(plot().to_dict())}</figure>"
    except InvalidInput:
        return ""


def _asked(result: Result, window: int) -> str:
    recipe = result.recipe
    document = json.dumps(json.loads(recipe.canonical()), indent=1, ensure_ascii=False)
    names = [f"round {result.round}"] if result.round is not None else []
    names += [f"window {window}"] if recipe.series is not None else []
    number = f"{', '.join(names).capitalize()}: " if names else ""
    opens = recipe.window_at(window).opens
    facts = (
        f"{number}{result.n_reports:,} reports, epsilon {decimal_text(recipe.privacy.epsilon)}, "
        f"delta {decimal_text(recipe.privacy.delta)}, asked {utc_minute(opens)}, "
        f"recipe {recipe.digest.hex()}"
    )
    return (
        f"<details><summary>{_text(facts)}</summary>"
        f"<p><code>{_text(recipe.query)}</code></p><pre>{_text(document)}</pre></details>"
    )


def _link(file: str) -> str:
    return f'<a href="{html.escape(quote(file))}">{_text(file)}</a>'


def _text(value: str) -> str:
    return html.escape("\n".join(legible(line) for line in value.split("\n")))


def _svg(chart: dict[str, Any]) -> str:
    """The chart inside the page: it runs no script and loads nothing."""
    drawn: str = needed("vl_convert").vegalite_to_svg(_safe(chart), allowed_base_urls=[])
    return drawn


def _safe(node: Any) -> Any:  # noqa: ANN401 (JSON values)
    """Escape what SVG can't contain."""
    if isinstance(node, dict):
        return {name: _safe(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_safe(value) for value in node]
    return drawable(node) if isinstance(node, str) else node
