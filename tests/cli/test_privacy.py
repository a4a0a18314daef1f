"""`chorister privacy`: the keys that others rely on, the tables that people read, the figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chorister.cli import app

RUNNER = CliRunner()
BASE = ["--local-epsilon", "3", "--delta", "1e-6"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def run(*arguments: str, code: int = 0) -> str:
    result = RUNNER.invoke(app, ["privacy", *arguments], env={"COLUMNS": "110"})
    assert result.exit_code == code, result.output
    return result.output


def answer(*arguments: str) -> dict[str, object]:
    printed = run(*arguments, "--json")
    assert printed.count("\n") == 1
    found = json.loads(printed)
    assert isinstance(found, dict)
    return found


def test_epsilon_has_the_promised_keys() -> None:
    found = answer("epsilon", "--cohort", "1000", *BASE)
    assert list(found) == ["epsilon", "lower", "method"]
    assert found["epsilon"] == pytest.approx(0.376207, abs=6e-6)
    assert found["method"] == "exact"
    by_clones = answer("epsilon", "--cohort", "1000", *BASE, "--method", "clones")
    assert by_clones["lower"] is None
    assert by_clones["epsilon"] == pytest.approx(0.8231, abs=6e-5)
    again = answer("epsilon", "--cohort", "1000", *BASE)
    assert again == found  # from the disk this time


def test_renyi_answers_at_a_large_local_epsilon() -> None:
    arguments = ["--cohort", "1000", "--local-epsilon", "18", "--mechanism", "symmetric"]
    found = answer("epsilon", *arguments, "--delta", "1e-6", "--method", "renyi")
    exact = answer("epsilon", *arguments, "--delta", "1e-6")
    assert isinstance(found["epsilon"], float)
    assert isinstance(exact["lower"], float)
    assert exact["lower"] <= found["epsilon"] <= 36


def test_cohort_prints_what_every_method_needs() -> None:
    assert answer("cohort", "--epsilon", "0.5", *BASE)["min_cohort"] == 586
    printed = run("cohort", "--epsilon", "0.5", *BASE)
    assert "586 certified (2350 by clones, 20204 closed form)" in printed
    noised = ["--mechanism", "symmetric", "--crowd", "noised"]
    assert answer("cohort", "--epsilon", "0.5", *BASE, *noised)["min_cohort"] == 2467


def test_a_method_without_a_cohort_is_shown_as_refused() -> None:
    arguments = ["--epsilon", "0.5", "--local-epsilon", "14", "--delta", "1e-6"]
    printed = run("cohort", *arguments, "--crowd", "noised")
    assert printed.count("refused") == 1  # the closed form
    assert "certified" in printed
    run("cohort", *arguments, "--method", "closed-form", code=2)
    nothing = ["--epsilon", "0.0001", "--local-epsilon", "20", "--delta", "1e-9"]
    run("cohort", *nothing, "--crowd", "noised", "--method", "exact", code=2)


def test_a_composition_whose_grid_is_too_large_is_left_out_of_the_best() -> None:
    arguments = ["--cohort", "2", "--local-epsilon", "20", "--mechanism", "symmetric"]
    arguments += ["--crowd", "noised", "--delta", "1e-6", "--count", "2"]
    found = answer("compose", *arguments)
    assert found["exact"] is None
    assert found["best_name"] == "basic"
    assert "grid" in str(found["refused"])
    printed = run("compose", *arguments)
    assert "refused" in printed
    assert "points" in printed


def test_a_folder_is_no_figure(tmp_path: Path) -> None:
    (tmp_path / "figure.svg").mkdir()
    run("curve", "--to", str(tmp_path / "figure.svg"), code=2)


def test_every_table_says_what_it_assumes() -> None:
    for arguments in (
        ["epsilon", "--cohort", "1000", *BASE],
        ["delta", "--cohort", "1000", "--local-epsilon", "3", "--epsilon", "0.5"],
        ["local", "--cohort", "1000", "--epsilon", "0.5", "--delta", "1e-6"],
        ["compose", "--cohort", "1000", "--count", "4", *BASE],
    ):
        assert "every member of the cohort is honest" in run(*arguments)
        assert "one of the two aggregators" in run(*arguments, "--crowd", "noised")
        assert "9/10 of every" in run(*arguments, "--honest-fraction", "9/10")


def test_the_closed_form_is_shown_as_refused_outside_its_regime() -> None:
    printed = run("epsilon", "--cohort", "1000", *BASE)
    assert "refused" in printed
    assert "at least 2,448" in printed
    run("epsilon", "--cohort", "1000", *BASE, "--method", "closed-form", code=2)


def test_delta_local_and_compose_have_stable_keys() -> None:
    found = answer("delta", "--cohort", "1000", "--local-epsilon", "3", "--epsilon", "0.3")
    assert list(found) == ["delta", "lower", "method"]
    assert found["lower"] == pytest.approx(2.44086e-5, rel=1e-5)
    local = answer("local", "--cohort", "586", "--epsilon", "0.5", "--delta", "1e-6")
    assert local["local_epsilon"] == pytest.approx(3.0, abs=2e-3)
    total = answer("compose", "--cohort", "10000", "--count", "16", *BASE)
    assert list(total) == ["basic", "advanced", "renyi", "exact", "best", "best_name"]
    assert total["best_name"] == "exact"
    assert total["best"] == pytest.approx(0.48426, abs=2e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        ["epsilon", "--cohort", "0", *BASE],
        ["epsilon", "--cohort", "100", "--local-epsilon", "-1", "--delta", "1e-6"],
        ["epsilon", "--cohort", "100", "--local-epsilon", "3", "--delta", "1.5"],
        ["curve", "--to", "figure.pdf"],
        ["curve", "--to", "no-such-folder/figure.svg"],
        ["curve", "--to", "/proc/figure.svg"],
        ["cohort", "--epsilon", "0.5", "--local-epsilon", "3", "--delta", "2"],
    ],
)
def test_wrong_input_is_one_line_and_exit_code_two(arguments: list[str]) -> None:
    run(*arguments, code=2)


def test_the_curve_is_drawn_in_every_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chorister.cli import privacy

    monkeypatch.setattr(privacy, "COHORTS", (1000, 10_000))
    for ending, start in ((".svg", b"<svg"), (".png", b"\x89PNG"), (".html", b"<!DOCTYPE html>")):
        to = tmp_path / f"curve{ending}"
        printed = run("curve", "--to", str(to))
        assert to.read_bytes().lstrip().startswith(start)
        assert "0.1100" in printed
        assert "refused" in printed
    picture = (tmp_path / "curve.svg").read_text()
    for words in ("exact (enforced)", "clones 2022", "closed form", "renyi", "cohort size"):
        assert words in picture
    assert "https://cdn" not in (tmp_path / "curve.html").read_text()
    points = answer("curve", "--to", str(tmp_path / "curve.svg"))["points"]
    assert isinstance(points, list)
    assert len(points) == 2 * 2 * 4 - 3  # the closed form refuses three of them
