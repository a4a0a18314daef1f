"""Pages of results: nothing that is noise looks like signal, and groups are compared."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

import chorister as ch
from chorister.console.workspace import StudyView
from tests.console.world import PHRASES, TOKENS, ConsoleWorld, people_in_two_places, running
from tests.keyboard import ANALYSIS


@contextlib.contextmanager
def signed_in(world: ConsoleWorld, name: str = "ada") -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=world.url, headers={"origin": world.url}, timeout=120) as client:
        assert client.post("/sign-in", data={"token": TOKENS[name]}).status_code == 303
        yield client


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ConsoleWorld, StudyView]]:
    """A study with a round by locale, one of many words, and two of a map."""
    folder = tmp_path_factory.mktemp("console")
    with running(folder, population=people_in_two_places(), reports=8) as world:
        view = world.workspace.create("ada", "rehearsal", "results", ANALYSIS)
        study, epsilon = view.study, "0.6"
        ages = ch.intervals("age", range(10, 90, 10))
        study.histogram(ages, group_by=["user.locale"], epsilon=epsilon).run()
        words = [phrase for phrase, _ in PHRASES] + [f"nobody {i}" for i in range(300)]
        study.histogram(ch.categories("ngram", words), epsilon=epsilon).run()
        box = ch.grid(("age", "perplexity"), (0, 0, 80, 40), level=3)
        query = "SELECT user.age, keyboard.perplexity FROM user, keyboard"
        study.histogram(box, query=query, epsilon=epsilon).run()
        study.histogram(box, query=query, epsilon=epsilon, group_by=["user.locale"]).run()
        yield world, view


def test_noise_is_apart_from_signal_in_the_table(asked: tuple[ConsoleWorld, StudyView]) -> None:
    """No word that nobody has is above the line; their share is not shown as if it were real."""
    world, view = asked
    with signed_in(world) as client:
        page = client.get(f"{view.path}/rounds/2").text
    above, below = page.split("Not above the noise")
    assert "how are you" in above
    assert "nobody" not in above.split("<tbody>")[1]
    assert "nobody" in below
    assert below.count('class="noise"') <= 12
    assert "the intervals of all 307 rows contain the truth" in text_of(page)


def test_shares_of_each_group_add_up(asked: tuple[ConsoleWorld, StudyView]) -> None:
    world, view = asked
    with signed_in(world) as client:
        page = client.get(f"{view.path}/rounds/1").text
    rows = re.findall(
        r'<tr(?: class="noise")?><th scope="row">(\w+)</th>.*?([\d.]+)%</td></tr>', page
    )
    for locale in ("de_DE", "en_US"):
        shares = [float(share) for name, share in rows if name == locale]
        assert len(shares) == 8
        assert sum(shares) == pytest.approx(100.0, abs=0.05)


def test_two_groups_are_compared(asked: tuple[ConsoleWorld, StudyView]) -> None:
    """The younger group is younger, whatever its size; and only what differs is said to."""
    world, view = asked
    with signed_in(world) as client:
        page = client.get(f"{view.path}/rounds/1").text
        assert 'name="second"' in page
        found = client.get(f"{view.path}/rounds/1/compare?first=1.0&second=1.1").text
        chart = client.get(f"{view.path}/rounds/1/compare.svg?first=1.0&second=1.1")
        for wrong in (
            "first=1.0&second=1.0",
            "first=1.0",
            "first=9.9&second=1.0",
            "first=2&second=1.0",
        ):
            assert client.get(f"{view.path}/rounds/1/compare?{wrong}").status_code == 404
    assert chart.headers["content-type"].startswith("image/svg+xml")
    assert "shares differ by more than chance" in text_of(chart.text)
    words = text_of(found)
    assert re.search(r"[67] of 8 shares differ by more than their 95% interval", words)
    young = re.search(r"\[10, 20\)\s+([\d.]+)%\s+([\d.]+)%", words)
    assert young is not None
    assert float(young[1]) > float(young[2]) + 10


def test_a_map_has_coordinates_and_one_scale(asked: tuple[ConsoleWorld, StudyView]) -> None:
    """Rounds and groups are drawn like heat maps: one map each, on the same scale."""
    world, view = asked
    with signed_in(world) as client:
        single, double = (
            client.get(f"{view.path}/rounds/{number}/chart.svg?theme=light&width=wide").text
            for number in (3, 4)
        )
        page = client.get(f"{view.path}/rounds/3").text
    assert single.count(">times the mean<") == 1
    assert double.count(">times the mean<") == 1  # one scale for both groups
    assert "de_DE: " in double
    assert "en_US: " in double
    for svg in (single, double):
        assert ">perplexity<" in svg
        assert ">80<" in svg
        assert ">0<" in svg
    assert re.search(r"age \d+ to \d+, perplexity \d+ to \d+", text_of(page))
    assert "Nothing" not in page
    assert "age" in (re.search(r'class="chart"[^>]*alt="([^"]*)"', page) or [""])[0]


def test_what_is_not_shared_stays_hidden(
    asked: tuple[ConsoleWorld, StudyView], tmp_path: Path
) -> None:
    world, view = asked
    del tmp_path
    with signed_in(world, "ben") as client:
        for place in (
            "/rounds/1/compare?first=1.0&second=1.1",
            "/rounds/1/compare.svg?first=1.0&second=1.1",
        ):
            assert client.get(view.path + place).status_code == 404
