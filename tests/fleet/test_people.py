"""Made-up people: the same for the same seed, with the shares that they are meant to have."""

from __future__ import annotations

from collections import Counter

import pytest
from scipy import stats

from chorister.errors import InvalidInput
from chorister.fleet.people import COMMUTES, KINDS, VOCABULARY, people


def test_a_seed_gives_the_same_people_and_more_are_added_at_the_end() -> None:
    for kind in KINDS:
        some = people(kind, 20, 3)
        assert people(kind, 30, 3)[:20] == some
        assert people(kind, 20, 4) != some


def test_phrases_are_walks_over_known_words_but_for_a_few_that_nobody_shares() -> None:
    """The share of unique phrases is 2%: outside these bounds with probability below 1e-6."""
    texts = [str(p.streams["keyboard"][0]["text"]) for p in people("phrases", 2000, 1)]
    known = [text for text in texts if set(text.split()) <= set(VOCABULARY)]
    strange = Counter(text for text in texts if text not in set(known))
    assert all(len(text.split()) == 3 for text in texts)
    assert set(strange.values()) == {1}
    law = stats.binom(2000, 0.02)
    assert law.ppf(5e-7) <= len(strange) <= law.isf(5e-7)
    assert Counter(known).most_common(1)[0][1] > 80


def test_ways_to_work_depend_on_where_people_live() -> None:
    rows = [person.profiles["user"] for person in people("profiles", 1000, 1)]
    assert {row["commute"] for row in rows} == set(COMMUTES)
    by_car = {
        area: sum(row["commute"] == "car" for row in rows if row["area"] == area)
        / sum(row["area"] == area for row in rows)
        for area in ("city", "village")
    }
    assert by_car["city"] < 0.3 < 0.5 < by_car["village"]


@pytest.mark.parametrize(
    ("kind", "count", "seed"), [("nobody", 1, 1), ("places", 0, 1), ("places", 1, -1)]
)
def test_what_can_not_be_made_is_refused(kind: str, count: int, seed: int) -> None:
    with pytest.raises(InvalidInput):
        people(kind, count, seed)
