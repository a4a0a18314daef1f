"""Every example of an algorithm, run as its reader would, finds what is there."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "examples" / "algorithms"


def said(name: str) -> str:
    run = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,  # the machine may be busy
    )
    assert run.returncode == 0, run.stderr
    assert "rounds; every device answers" in run.stdout  # the plan comes first
    return run.stdout


def two_numbers(line: str) -> tuple[float, float]:
    found, truth = re.findall(r"[\d,]*\.?\d+", line.split(": ", 1)[1].replace(",", ""))
    return float(found), float(truth)


def test_phrases_are_found() -> None:
    lines = said("ngrams").splitlines()
    found = lines[-1].removeprefix("found: ").split(", ")
    assert {"good morning to", "morning to all", "see you soon", "how are you"} <= set(found)


def test_words_on_no_list_are_found() -> None:
    lines = said("words").splitlines()
    found = set(lines[-1].removeprefix("found: ").split(", "))
    assert found >= {"rizz", "bussin", "e4711"}
    assert len(found) <= 5  # one false word is expected


@pytest.mark.parametrize("name", ["map", "table"])
def test_what_is_found_is_near_the_truth(name: str) -> None:
    found, truth = two_numbers(said(name).splitlines()[-1])
    assert found == pytest.approx(truth, rel=0.05)


def test_quantiles_are_near_the_truth() -> None:
    lines = said("fares").splitlines()[-3:]
    for line in lines:
        numbers = [float(each) for each in re.findall(r"\d+\.\d+", line)]
        assert numbers[0] == pytest.approx(numbers[-1], rel=0.1)
