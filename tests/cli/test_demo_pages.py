"""The demo begins with what it found best, says how to read it, and fits 80 columns."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from chorister.cli.demo_pages import _best, _headline, _on_the_way, _reading, _table
from chorister.cli.demo_scenarios import SCENARIOS, DemoAlgorithm, Estimate


def row(label: str, round_: int, estimate: float, truth: float | None = None) -> Estimate:
    return Estimate(
        label=label, round=round_, estimate=estimate, std_error=10.0, ci_low=estimate - 20,
        ci_high=estimate + 20, truth=estimate if truth is None else truth,
    )  # fmt: skip


def an_outcome(rows: list[Estimate], algorithm: DemoAlgorithm = DemoAlgorithm.NGRAMS) -> Any:
    rounds = [SimpleNamespace(result=SimpleNamespace(n_reports=1_000 * n)) for n in (1, 2, 3)]
    found = SimpleNamespace(explain=lambda: "What was found in words.")
    return SimpleNamespace(
        scenario=SCENARIOS[algorithm], estimates=rows, rounds=rounds, found=found
    )


ROWS = [
    row("the", 1, 900), row("you", 1, 700), row("how are", 2, 500), row("are you", 2, 450),
    row("how are you", 3, 300), row("see you soon", 3, 200), row("you how are", 3, 5, 0),
]  # fmt: skip


def test_round_one_is_not_shown_as_the_result() -> None:
    best, steps = _best(an_outcome(ROWS))
    assert [each.label for each in best] == ["how are you", "see you soon"]  # and no noise
    assert {each.round for each in steps} == {1, 2}
    headline = _headline(an_outcome(ROWS), best)
    assert headline.startswith("Found 2 phrases of 3 words")
    way = _on_the_way(an_outcome(ROWS), steps)
    assert way[0].startswith("On the way, round 1 asked 1,000 other devices")
    assert "the, you" in way[0]


def test_figures_are_explained() -> None:
    best, _ = _best(an_outcome(ROWS))
    words = _reading(an_outcome(ROWS), best)
    assert "of the 3,000 devices that answered this round" in words
    assert "what the noise allows (95%)" in words


def test_other_algorithms_begin_with_their_words() -> None:
    rows = [row("[0, 20)", 2, 500), row("OOV", 2, 900), row("[20, 40)", 2, 3, 0)]
    outcome = an_outcome(rows, DemoAlgorithm.DISTRIBUTION)
    best, steps = _best(outcome)
    assert [each.label for each in best] == ["[0, 20)"]
    assert steps == []
    assert _headline(outcome, best) == "What was found in words."


def test_nothing_above_the_noise_still_shows_rows() -> None:
    rows = [row("how are you", 3, 5, 0), row("see you soon", 3, 9, 0)]
    assert [each.label for each in _best(an_outcome(rows))[0]] == ["see you soon", "how are you"]
    assert _best(an_outcome([])) == ([], [])


def test_the_table_keeps_names_on_80_columns() -> None:
    names = ["good morning everyone", "looking forward to it", "-1.50 – -1.06, 47.00 – 4"]
    text = io.StringIO()
    console = Console(file=text, width=80, color_system=None)
    console.print(_table([row(name, 3, 123_456.0) for name in names], bars=False))
    for name in names:
        assert name in text.getvalue()
    assert all(len(line) <= 80 for line in text.getvalue().splitlines())
    assert "123,436 – 123,476" in text.getvalue()
