"""An analyst who asks for what the policy does not allow.

In none of these cases is anything charged, queried or sent, and the audit log tells why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from joserfc import jws
from joserfc.jwk import OKPKey

from chorister.canonical import b64url_encode, dumps, key_id
from chorister.device.audit import Event
from chorister.device.ledger.ledger_entries import Charged
from chorister.transparency.entries import RecipeEntry
from tests.device.home import Home, at_home
from tests.device.world import (
    ANALYSIS,
    DAY,
    NOW,
    REGISTRY,
    a_generous_policy,
    a_policy,
    a_recipe,
    an_entry,
)
from tests.keyboard import REMOVE, changed
from tests.logworld import OTHER_ANALYSIS, body_of, key, public, with_body


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with at_home(tmp_path) as home:
        yield home


def refused(home: Home, *recipes: Any) -> str | None:
    """Ask; nothing may happen. The name of the check that refused."""
    home.donate()
    home.ask(*recipes)
    home.deliver()
    assert not home.network.posts
    assert home.charges() == 0
    entry = home.last(Event.REFUSED)
    assert entry.why
    home.device.audit.verify()
    return entry.check


YEAR = 366 * DAY
SERIES = {"windows": 2, "every": 7 * DAY, "answers": 1}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "an analysis that the policy does not have": ({"analysis": "other"}, ""),
    "another collector": ({"collector": "00" * 32}, "collector"),
    "another leader": ({"aggregators/leader": "https://evil.example/"}, "aggregators"),
    "another helper": ({"aggregators/helper": "https://evil.example/"}, "aggregators"),
    "leader and helper swapped": (
        {
            "aggregators": {
                "leader": "https://helper.example.net/dap/",
                "helper": "https://leader.example.org/dap/",
            }
        },
        "aggregators",
    ),
    "a stream that does not exist": ({"reads/secrets": ["password"]}, "fields"),
    "a field that is not open to the analysis": ({"reads/user": ["locale"]}, "fields"),
    "groups from events": ({"group_by": ["keyboard.ngram"]}, "groups"),
    "groups by a sensitive field, one group a person": ({"group_by": ["user.age"]}, "groups"),
    "more cells than allowed": (
        {"arms": [{"name": f"arm{i}", "weight": 1} for i in range(3)]},
        "cells",
    ),
    "a million bins": (
        {
            "features": [
                {"kind": "intervals", "column": "age", "edges": [str(i) for i in range(1000)]},
                {"kind": "intervals", "column": "more", "edges": [str(i) for i in range(1000)]},
            ]
        },
        "bins",
    ),
    "a lower min_cohort": ({"privacy/min_cohort": 10}, "cohort"),
    "a min_cohort beyond the policy's": ({"privacy/min_cohort": 10**9}, "cohort"),
    "a min_cohort too small for its epsilon": ({"privacy/epsilon": "0.01"}, "amplification"),
    "a larger eps0 than a field allows": ({"privacy/local_epsilon": "2.1"}, "field-budgets"),
    "a larger eps0 than the analysis allows": ({"privacy/local_epsilon": "8.1"}, "local-epsilon"),
    "symmetric, where eps0 suffices for the asymmetric only": (
        {"privacy/mechanism": "symmetric", "privacy/min_cohort": 1_000_000},
        "field-budgets",
    ),
    "more epsilon than there is": ({"privacy/epsilon": "0.6"}, "budget"),
    "more delta than there is": ({"privacy/delta": "0.0001"}, "budget"),
    "plain reports": ({"privacy/report": "plain"}, "report"),
    "an assumed honest crowd": (
        {"privacy/crowd": "honest", "privacy/honest_fraction": "1/2"},
        "crowd",
    ),
    "a window in the past": (
        {"window": {"opens": NOW - 8 * DAY, "closes": NOW - DAY, "ends": NOW}},
        "open",
    ),
    "a window in the future": (
        {"window": {"opens": NOW + DAY, "closes": NOW + 8 * DAY, "ends": NOW + 9 * DAY}},
        "open",
    ),
    "a window that closes before an upload could happen": (
        {"window": {"opens": NOW - DAY, "closes": NOW + 9, "ends": NOW + DAY}},
        "time",
    ),
    "a window of five years": (
        {"window": {"opens": NOW - DAY, "closes": NOW + 5 * YEAR, "ends": NOW + 5 * YEAR}},
        "window",
    ),
    "a window of a second": (
        {"window": {"opens": NOW, "closes": NOW + 1, "ends": NOW + DAY}},
        "window",
    ),
    "a grace of a year": (
        {"window": {"opens": NOW - DAY, "closes": NOW + DAY, "ends": NOW + YEAR}},
        "window",
    ),
    "a series, which the policy does not permit": ({"series": SERIES}, "series"),
    "a period that would show when a profile was set": ({"periods": {"user": 60}}, "periods"),
    "hashed prefixes": (
        {
            "features/1": {
                "kind": "hashed_prefix_tree",
                "column": "ngram",
                "tokenisation": 1,
                "salt": "00" * 16,
                "depths": [0],
                "prefixes": ["11" * 16],
                "vocabulary": ["22" * 16],
            }
        },
        "prefixes",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_with(name: str, home: Home) -> None:
    changes, expected = CASES[name]
    recipe = a_recipe("hostile", changes)
    if not expected:
        # Not one of the policy's analyses.
        assert_not_fetched(home, an_entry(recipe))
        return
    assert refused(home, recipe) == expected


def assert_not_fetched(home: Home, entry: RecipeEntry) -> None:
    """A device does not even look at it, and goes on as if it were not there."""
    home.network.gets.clear()
    run = home.ask(entry)
    assert (home.charges(), run.problems, run.refused) == (0, (), ())
    assert {url.removeprefix(REGISTRY).split("/")[0] for url in home.network.gets} == {
        "list.tlog-proof",
        "list",
    }


def test_a_recipe_signed_by_a_stranger(home: Home) -> None:
    assert_not_fetched(home, an_entry(a_recipe("hostile"), "stranger"))


def test_a_recipe_signed_by_another_analysis_author(home: Home) -> None:
    assert_not_fetched(home, an_entry(a_recipe("hostile"), "other author"))


def test_an_author_who_asks_under_another_s_analysis(home: Home) -> None:
    recipe = a_recipe("hostile", {"analysis": OTHER_ANALYSIS})
    assert_not_fetched(home, an_entry(recipe, "author"))


def test_an_author_whose_recipe_is_listed_under_another_analysis(home: Home) -> None:
    """Fetched, since the author may ask there; what the recipe itself says is what counts."""
    recipe = a_recipe("hostile", {"analysis": OTHER_ANALYSIS})
    home.network.log.publish_raw({ANALYSIS: [an_entry(recipe)]}, time=NOW)
    home.run()
    assert home.charges() == 0
    assert home.last(Event.REFUSED).check == "author"


def test_a_recipe_with_a_changed_field_under_the_old_signature(home: Home) -> None:
    honest = an_entry(a_recipe("hostile"))
    header, payload, signature = body_of(honest).jws.split(b".")
    other = b64url_encode(a_recipe("hostile", {"privacy/min_cohort": 2000}).canonical()).encode()
    assert payload != other
    forged = with_body(honest, b".".join([header, other, signature]))
    assert refused(home, forged) == "recipe"
    assert home.last(Event.REFUSED).question is None


def signed_tree(tree: dict[str, Any]) -> RecipeEntry:
    """Whatever JSON, under the author's good signature."""
    private = key("author")
    jwk: dict[str, str | list[str]] = {
        "kty": "OKP",
        "crv": "Ed25519",
        "x": b64url_encode(public("author")),
        "d": b64url_encode(private.private_bytes_raw()),
    }
    header = {"alg": "Ed25519", "kid": key_id(public("author")), "typ": "chorister-recipe+jws"}
    signed = jws.serialize_compact(
        header, dumps(tree), OKPKey.import_key(jwk), algorithms=["Ed25519"]
    )
    return with_body(an_entry(a_recipe("hostile")), signed.encode())


MALFORMED: dict[str, dict[str, Any]] = {
    "a window of a century": {"window/closes": NOW + 100 * YEAR, "window/ends": NOW + 100 * YEAR},
    "windows that overlap": {"series": SERIES | {"every": 7 * DAY - 1}},
    "a window every second": {"series": SERIES | {"windows": 1000, "every": 1}},
    "more windows than anybody enumerates": {"series": SERIES | {"windows": 10**9}},
    "a series of a century": {"series": SERIES | {"windows": 1000, "every": 30 * DAY}},
    "more answers than windows": {"series": SERIES | {"answers": 3}},
    "a series that is no question at all": {"series": SERIES | {"answers": 0}},
    "a period of events to come": {"periods": {"keyboard": -DAY}},
    "a period for what is not read": {"periods": {"elsewhere": DAY}},
    "an unknown field": {"surprise": 1},
    "another version": {"version": 2},
    "one bin": {"features": []},
    "an eps0 that hides nothing": {"privacy/local_epsilon": "1000000"},
    "a cohort of one": {"privacy/min_cohort": 1},
    "a participation above one": {"participation/probability": "1.1"},
    "a number in two spellings": {"privacy/epsilon": "0.20"},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_signed_recipe_with(name: str, home: Home) -> None:
    tree = changed(json.loads(a_recipe("hostile").canonical()), MALFORMED[name])
    home.network.log.publish([], time=NOW)
    home.network.log.publish_raw({ANALYSIS: [signed_tree(tree)]}, time=NOW)
    home.run()
    home.deliver()
    assert not home.network.posts
    assert home.charges() == 0
    assert home.last(Event.REFUSED).check == "recipe"


def test_a_bad_recipe_does_not_stop_a_good_one(home: Home) -> None:
    home.ask(a_recipe("bad", {"privacy/min_cohort": 10}), a_recipe("good"))
    home.deliver()
    assert len(home.network.posts) == 1


def test_the_same_recipe_replayed_after_it_was_answered(home: Home) -> None:
    recipe = a_recipe("one")
    home.ask(recipe)
    home.deliver()
    for _ in range(3):
        home.clock.advance(DAY)
        home.ask(recipe)
        home.restart()
        home.deliver()
    assert (home.charges(), len(home.network.posts)) == (1, 1)


def test_the_same_question_under_another_name_is_charged_again_and_refused(home: Home) -> None:
    home.ask(a_recipe("one"))
    home.ask(a_recipe("one"), a_recipe("two", {"study": "another"}))
    home.deliver()
    assert (home.charges(), len(home.network.posts)) == (1, 1)
    assert home.last(Event.REFUSED).check == f"analyses.{ANALYSIS}.budget.delta"


def test_many_analyses_together_stay_within_the_device_s_budget(tmp_path: Path) -> None:
    limits = {"device/epsilon": 1, "device/reports": 100}
    with at_home(tmp_path, a_generous_policy(limits)) as home:
        recipes = [a_recipe(f"r{i}", {"study": f"s{i}"}) for i in range(12)]
        home.ask(*recipes)
        # Each costs 0.2 of the device's 1, whatever the analysis has left.
        assert home.charges() == 5
        assert home.last(Event.REFUSED).check == "device.epsilon"
        for _ in range(2):
            home.clock.advance(60)
            home.ask(*recipes)
        assert home.charges() == 5


def test_a_group_value_outside_the_closed_list_is_other(home: Home) -> None:
    home.device.set_profile("user", {"age": 33, "locale": "xx_ONLY_ME"})
    home.ask(a_recipe("one"))
    sent = home.last(Event.REPORTED).sent
    assert sent is not None
    assert sent.group == {"user.locale": "other"}


def test_more_cells_than_allowed_by_the_values_of_groups(tmp_path: Path) -> None:
    """Each field alone is within `max_cells`; together they make a group a person."""
    region = {"type": "text", "group_values": ["north", "south"]}
    changes = {
        "profiles/user/fields/region": region,
        f"analyses/{ANALYSIS}/group_by": ["user.locale", "user.region"],
    }
    with at_home(tmp_path, a_policy(changes)) as home:
        home.device.set_profile("user", {"age": 33, "locale": "de_DE", "region": "north"})
        both = a_recipe("hostile", {"group_by": ["user.locale", "user.region"]})
        home.ask(both)
        assert home.charges() == 0
        told = home.last(Event.REFUSED)
        assert told.check == "cells"
        assert "15 parts" in told.why
        home.ask(a_recipe("one", {"group_by": ["user.region"]}))
        assert home.charges() == 1


def test_a_refusal_is_said_once_not_at_every_poll(home: Home) -> None:
    for _ in range(3):
        home.ask(a_recipe("hostile", {"privacy/min_cohort": 10}))
    assert home.events().count(Event.REFUSED) == 1


# --- series ---------------------------------------------------------------------------------------


def series_home(folder: Path, **limits: Any) -> Any:
    changes = {"windows": 100, "longest": "300d", "answers": 100, "cells": 1000} | limits
    return at_home(folder, a_generous_policy({f"analyses/{ANALYSIS}/series": changes}))


def windows_charged(home: Home) -> list[int | None]:
    entries = home.device._opened().ledger.entries()
    return [entry.charge.window for entry in entries if isinstance(entry, Charged)]


WEEKLY = {"windows": 4, "every": 7 * DAY, "answers": 4}


@pytest.mark.parametrize(
    ("series", "limits"),
    [
        (WEEKLY, {"windows": 3}),
        (WEEKLY, {"longest": "27d"}),
        (WEEKLY, {"answers": 3}),
        (WEEKLY, {"cells": 19}),  # four windows of five groups
        (WEEKLY | {"windows": 100}, {"windows": 99}),
    ],
)
def test_a_series_beyond_the_policy(
    tmp_path: Path, series: dict[str, int], limits: dict[str, Any]
) -> None:
    with series_home(tmp_path, **limits) as home:
        assert refused(home, a_recipe("series", {"series": series})) == "series"


def test_a_clock_that_is_fast_opens_no_window_twice(tmp_path: Path) -> None:
    """As far as a checkpoint may be old: the device lives in a later window than everybody else."""
    window = {"opens": NOW - DAY, "closes": NOW + DAY, "ends": NOW + 3 * DAY}
    recipe = a_recipe(
        "series", {"window": window, "series": WEEKLY | {"every": 2 * DAY, "answers": 2}}
    )
    with series_home(tmp_path) as home:
        for true in range(NOW, recipe.closes + DAY, DAY // 2):
            for clock in (true + 2 * DAY - 1, true, true + DAY):
                home.clock.set(clock)
                home.network.log.publish([recipe], time=true)
                home.clock.advance(home.device.quiet_seconds())
                home.device.run_once()
        charged = windows_charged(home)
        assert len(charged) == len(set(charged)) <= 2


def test_the_same_series_under_another_name_is_charged_to_the_same_budget(tmp_path: Path) -> None:
    """`answers` bounds one series; what all of them cost together is the budget's business.

    The budget never renews: a period would end between the two windows in one of 26 runs.
    """
    changes: dict[str, Any] = {
        f"analyses/{ANALYSIS}/series": {"windows": 2, "longest": "30d", "answers": 1, "cells": 100},
        f"analyses/{ANALYSIS}/budget/period": REMOVE,
        "device/period": REMOVE,
    }
    policy = a_policy(changes)  # one report for the analysis
    with at_home(tmp_path, policy) as home:
        every = [a_recipe(f"series-{i}", {"series": SERIES}) for i in range(20)]
        home.ask(*every)
        home.clock.set(NOW + 7 * DAY)
        home.ask(*every)
        assert home.charges() <= 1


def test_a_series_is_not_replayed_after_its_author_ended_it(tmp_path: Path) -> None:
    """A log can't make a device forget: what was drawn and charged stays so."""
    recipe = a_recipe("series", {"series": WEEKLY})
    with series_home(tmp_path) as home:
        home.ask(recipe)
        home.ask()
        home.ask(recipe)
        assert windows_charged(home) == [0]
