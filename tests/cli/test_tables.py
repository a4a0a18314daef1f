"""Tables of commands keep names whole, however narrow the terminal."""

from __future__ import annotations

import io

from rich.console import Console

from chorister.cli import print_table

NAME = "analyses.keyboard.next-word.fields.keyboard.perplexity"
TITLES = ("budget", "epsilon left", "delta left", "reports left", "renews")
ROW = (NAME, "0.5 of 1", "1e-06 of 1e-06", "1 of 1", "2026-11-18 03:00 UTC")


def printed(width: int, row: tuple[str, ...] = ROW) -> str:
    text = io.StringIO()
    print_table(TITLES, [row], to=Console(file=text, width=width, color_system=None))
    return text.getvalue()


def test_names_are_whole_on_80_columns() -> None:
    assert NAME in printed(80)
    assert "epsilon left: 0.5 of 1" in printed(80)


def test_a_wide_terminal_has_a_table() -> None:
    assert NAME in printed(160)
    assert "epsilon left: " not in printed(160)
    assert "│" in printed(160)


def test_markup_in_a_name_is_printed_as_it_is() -> None:
    assert "[bold]x[/]" in printed(160, ("[bold]x[/]", *ROW[1:]))
    assert "[bold]x[/]" in printed(20, ("[bold]x[/]", *ROW[1:]))
