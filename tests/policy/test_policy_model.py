"""Policies: what is read, and what is refused with the field named."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
import tomllib
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from chorister.canonical import first_error
from chorister.errors import InvalidInput, PolicyError
from chorister.policy import Policy, Renyi
from chorister.policy.model import DURATION_FIELDS
from chorister.privacy.filters import BasicFilter, RenyiFilter
from tests.keyboard import ANALYSIS, POLICY, POLICY_FILE, REMOVE, analysis_at, policy_at
from tests.logworld import policy, vkey


def test_the_papers_tables() -> None:
    """Table 1: the analysis' row, and the rows of the three fields."""
    analysis = POLICY.analyses[ANALYSIS]
    assert (analysis.budget.epsilon, analysis.budget.reports) == (Decimal("0.5"), 1)
    rows = {
        ref: (field.local_epsilon, field.epsilon, field.reports)
        for ref, field in analysis.fields.items()
    }
    assert rows == {
        "keyboard.ngram": (Decimal(5), Decimal(1), 1),
        "user.age": (Decimal(2), Decimal("0.3"), 1),
        "keyboard.perplexity": (Decimal(8), Decimal(1), 1),
    }


def test_decimals_are_exact() -> None:
    assert POLICY.device.delta == Decimal("0.00001")
    assert str(POLICY.analyses[ANALYSIS].budget.delta) == "0.000001"


def test_the_durations_of_a_policy_are_known() -> None:
    """Those who write a policy as TOML, or in words, take their names from the model."""

    def spelled(tree: object, key: str = "") -> set[str]:
        if isinstance(tree, dict):
            return {name for each, value in tree.items() for name in spelled(value, each)}
        if isinstance(tree, list):
            return {name for value in tree for name in spelled(value)}
        return {key} if isinstance(tree, str) and re.fullmatch(r"[0-9]+[smhdw]", tree) else set()

    assert spelled(tomllib.loads(POLICY_FILE.read_text())) == DURATION_FIELDS


def test_names_that_others_rely_on() -> None:
    assert POLICY.log_keys == ("2-EUcSFkDTK5p0UjXwMIxLO0C6LVfjuniFpJuD8eDHk",)
    assert POLICY.log.origin == "registry.example/log"
    assert POLICY.checkpoint_max_age == 2 * 86_400
    assert len(POLICY.digest) == 32
    pair = POLICY.aggregators[0]
    assert pair.leader.url == "https://leader.example.org/dap/"
    assert pair.helper.cosigning_keys
    assert [p.name for p in POLICY.pairs(POLICY.analyses[ANALYSIS])] == ["main"]


def test_the_digest_ignores_layout_and_sees_everything_else() -> None:
    text = POLICY_FILE.read_bytes()
    assert Policy.load(text + b"\n# a remark\n").digest == POLICY.digest
    assert Policy.load(text.replace(b"1e-5", b"0.00001")).digest == POLICY.digest
    assert Policy.load(text.replace(b"1e-5", b"2e-5")).digest != POLICY.digest


@pytest.mark.parametrize("whose", ["leader", "helper", "log"])
def test_a_required_key_is_no_further_witness(whose: str) -> None:
    """It would count twice: two aggregators that collude would be their own witness."""
    world = policy()
    line = f"witness twice {vkey('witness.example', whose)}\nquorum twice\n"
    log = world.log.model_dump() | {"witnesses": line}
    with pytest.raises(ValidationError, match=r"twice has the key of"):
        Policy.model_validate(world.model_dump() | {"log": log})
    other = f"witness w {vkey('witness.example', 'witness')}\nquorum w\n"
    log = world.log.model_dump() | {"witnesses": other}
    assert Policy.model_validate(world.model_dump() | {"log": log}).log.witness_policy


def test_groups_have_closed_lists() -> None:
    assert POLICY.group_values("user.locale") == ("de_DE", "en_GB", "en_US", "fr_FR", "other")
    assert POLICY.group_value("user.locale", "en_US") == "en_US"
    for stranger in ("en-US", "EN_US", None, 7, "", "other"):
        assert POLICY.group_value("user.locale", stranger) == "other"
    for field in ("user.age", "user.nothing"):
        with pytest.raises(InvalidInput, match=field):
            POLICY.group_values(field)
    assert POLICY.cells(("user.locale",), 2) == 10
    assert POLICY.cells((), 0) == 1


def test_composition() -> None:
    policy = analysis_at({"budget/composition": {"renyi": 32}})
    budget = policy.analyses[ANALYSIS].budget
    assert budget.composition == Renyi(renyi=(32,))
    assert budget.filter() == RenyiFilter(epsilon=budget.epsilon, delta=budget.delta, orders=(32,))
    several = analysis_at({"budget/composition": {"renyi": [16, 64]}}).analyses[ANALYSIS].budget
    assert several.filter() == RenyiFilter(
        epsilon=budget.epsilon, delta=budget.delta, orders=(16, 64)
    )
    assert POLICY.device.filter() == BasicFilter(epsilon=Decimal(1), delta=Decimal("1e-5"))


LEADER = "aggregators/0/leader"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"surprise": 1}, "surprise"),
        ({"version": 2}, "version"),
        ({"version": True}, "version"),
        ({"version": Decimal("1.0")}, "version"),
        ({"version": 1.0}, "version"),
        ({"version": "1"}, "version"),
        ({"device/reports": 2**60}, "device.reports"),
        ({f"analyses/{ANALYSIS}/purpose": "Zu\u0308rich"}, f"analyses.{ANALYSIS}.purpose"),
        (
            {"profiles/user/fields/locale/group_values/1": "Zu\u0308rich"},
            "profiles.user.fields.locale.group_values.1",
        ),
        ({"device/epsilon": REMOVE}, "device.epsilon"),
        ({"device/epsilon": "a lot"}, "device.epsilon"),
        ({"device/epsilon": 0.5}, "device.epsilon"),
        ({"device/epsilon": Decimal("NaN")}, "device.epsilon"),
        ({"device/epsilon": Decimal("Infinity")}, "device.epsilon"),
        ({"device/epsilon": 0}, "device.epsilon"),
        ({"device/epsilon": Decimal(-1)}, "device.epsilon"),
        ({"device/epsilon": True}, "device.epsilon"),
        ({"device/delta": 1}, "device.delta"),
        ({"device/reports": 0}, "device.reports"),
        ({"device/reports": "4"}, "device.reports"),
        ({"device/reports": True}, "device.reports"),
        ({"device/period": "1 day"}, "device.period"),
        ({"device/period": "0d"}, "device.period"),
        ({"device/period": "47h"}, "device.period"),
        ({f"analyses/{ANALYSIS}/budget/period": "47h"}, f"analyses.{ANALYSIS}.budget.period"),
        ({"log/checkpoint_max_age": "181d"}, "device.period"),
        ({"device/composition": "advanced"}, "device.composition"),
        ({"device/composition": {"renyi": 1}}, "device.composition"),
        ({"device/composition": {"renyi": []}}, "device.composition"),
        ({"device/composition": {"renyi": [32, 16]}}, "device.composition"),
        ({"device/composition": {"renyi": True}}, "device.composition"),
        ({"log/origin": REMOVE}, "log.origin"),
        ({"log/origin": ""}, "log.origin"),
        ({"log/origin": "a log"}, "log.origin"),
        ({"log/origin": "a+log"}, "log.origin"),
        ({"log/origin": "log\n"}, "log.origin"),
        ({"log/origin": "l\N{LATIN SMALL LETTER O WITH DIAERESIS}g"}, "log.origin"),
        ({"log/origin": "x" * 256}, "log.origin"),
        ({"log/keys": []}, "log.keys"),
        ({"log/keys/0": "AAAA"}, "log.keys.0"),
        ({f"{LEADER}/url": "http://leader.example.org/"}, "aggregators.0.leader.url"),
        ({f"{LEADER}/url": "https://leader.example.org/x"}, "aggregators.0.leader.url"),
        ({f"{LEADER}/url": "https://a@leader.example.org/"}, "aggregators.0.leader.url"),
        ({f"{LEADER}/url": "https://leader.example.org/?/"}, "aggregators.0.leader.url"),
        ({f"{LEADER}/url": "https://leadér.example.org/"}, "aggregators.0.leader.url"),
        ({f"{LEADER}/url": "https://[/"}, "aggregators.0.leader.url"),
        *(
            ({f"{LEADER}/url": url}, "aggregators.0.leader.url")
            for url in (
                "https://Leader.example.org/",
                "HTTPS://leader.example.org/",
                "https://leader.example.org./",
                "https://leader.example.org:443/",
                "https://leader.example.org:/",
                "https://leader.example.org:0/",
                "https://leader.example.org:08443/",
                "https://leader.example.org:65536/",
                "http://localhost:80/",
                "https://leader.example.org/dap//",
                "https://leader.example.org//",
                "https://leader.example.org/./",
                "https://leader.example.org/a/../",
                "https://leader.example.org/%64ap/",
                "https://leader.example.org/a+b/",
                "https://leader.example.org/a b/",
                "https://leader.example.org/#/",
                "https://leader.example.org/\n",
                "https://leader.example.org\\dap/",
                "https://127.1/",
                "https://0x7f000001/",
                "https://[0::1]/",
                "https://127.0.0.1]/",
                "https://leader.example.org/" + "a" * 255 + "/",
            )
        ),
        ({f"{LEADER}/url": "https://helper.example.net/dap/"}, "aggregators.0.helper.url"),
        ({"streams/user": {"retention": "1d", "fields": {"x": {"type": "text"}}}}, "profiles.user"),
        (
            {"streams/keyboard/fields/ngram/group_values": ["a"]},
            "streams.keyboard.fields.ngram.group_values",
        ),
        (
            {"profiles/user/fields/age/group_values": ["a"]},
            "profiles.user.fields.age.group_values",
        ),
        (
            {"profiles/user/fields/locale/group_values": ["a", "other"]},
            "profiles.user.fields.locale.group_values",
        ),
        ({"streams/Keys": {"retention": "1d", "fields": {"x": {"type": "text"}}}}, "streams.Keys"),
        (
            {"streams/sqlite_x": {"retention": "1d", "fields": {"x": {"type": "text"}}}},
            "streams.sqlite_x",
        ),
        ({"streams/keyboard/fields/Ngram": {"type": "text"}}, "streams.keyboard.fields.Ngram"),
        ({"analyses": {}}, "analyses"),
    ],
)
def test_refused_with_the_field_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        policy_at(changes)
    found, message = first_error(caught.value)
    assert found is not None
    assert found.startswith(field)
    assert message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"author_keys": []}, "author_keys"),
        ({"collectors/0": "AB" * 32}, "collectors.0"),
        ({"aggregators": ["elsewhere"]}, "aggregators"),
        ({"query_class": "any"}, "query_class"),
        ({"query_class": "exact"}, "queries"),
        ({"queries": ["SELECT 1"]}, "queries"),
        ({"mechanisms": ["laplace"]}, "mechanisms.0"),
        ({"mechanisms": ["symmetric", "symmetric"]}, "mechanisms"),
        ({"crowds": ["honest"]}, "honest_fraction"),
        ({"honest_fraction": "9/10"}, "honest_fraction"),
        ({"crowds": ["honest"], "honest_fraction": "18/20"}, "honest_fraction"),
        ({"crowds": ["honest"], "honest_fraction": "11/10"}, "honest_fraction"),
        ({"crowds": ["honest"], "honest_fraction": Decimal("0.9")}, "honest_fraction"),
        ({"fields": {}}, "fields"),
        ({"fields/keyboard.nothing": {"local_epsilon": 1, "epsilon": 1, "delta": Decimal("1e-9"),
                                      "reports": 1}}, "fields.keyboard.nothing"),
        ({"group_by": ["user.age"]}, "group_by"),
        ({"group_by": ["user.nothing"]}, "group_by"),
        ({"max_bins": 1}, "max_bins"),
        ({"cohort/smallest": 1}, "cohort.smallest"),
        ({"hashed_prefixes": 1}, "hashed_prefixes"),
        ({"series": {}}, "series.windows"),
        ({"series": {"windows": 1, "longest": "1d", "answers": 1, "cells": 9}}, "series.windows"),
        ({"series": {"windows": 2, "longest": "1d", "answers": 0, "cells": 9}}, "series.answers"),
        ({"series": {"windows": 2, "longest": "1d", "answers": 1, "cells": 1}}, "series.cells"),
    ],
)  # fmt: skip
def test_analyses_refused_with_the_field_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        analysis_at(changes)
    assert (first_error(caught.value)[0] or "").startswith(f"analyses.{ANALYSIS}.{field}")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (b"version = 1\nversion = 1", None),
        (b"\xff", None),
        (b"version = 1e9999999999999999999999", None),
        (b"a = " + b"[" * 100_000, None),
        (b"#" * 4_000_001, None),
        (b"version = 2026-01-01", "version"),
        (POLICY_FILE.read_bytes().replace(b"epsilon = 1\n", b"epsilon = nan\n"), "device.epsilon"),
    ],
)
def test_documents_refused(text: bytes, field: str | None) -> None:
    with pytest.raises(PolicyError) as caught:
        Policy.load(text)
    assert caught.value.field == field


def test_a_missing_file_is_an_error_of_ours() -> None:
    with pytest.raises(PolicyError, match="can't read"):
        Policy.load("/nowhere/policy.toml")


LINES = POLICY_FILE.read_bytes().splitlines(keepends=True)
LITERALS = st.sampled_from(
    [
        b"1e400", b"nan", b"-inf", b"-1", b"0", b"1.5", b"[]", b"{}", b"''", b"true", b"'a'",
        b"1979-05-27", b"12:30:00", b"0x10", b"'\xc3\xa9'", b"[[1]]", b"['a', 1]", b"{a = 1}",
        b"9" * 400, b"9" * 5000,
    ]
)  # fmt: skip


@settings(max_examples=150)
@given(st.integers(0, len(LINES) - 1), st.one_of(st.binary(max_size=20), LITERALS))
def test_fuzz(line: int, junk: bytes) -> None:
    """A line, or the value in it, replaced."""
    key, equals, _ = LINES[line].partition(b"=")
    for changed in (junk, key + equals + junk):
        text = b"".join([*LINES[:line], changed, b"\n", *LINES[line + 1 :]])
        with contextlib.suppress(PolicyError):
            Policy.load(text)


@pytest.mark.parametrize(
    "url",
    [
        "https://leader.example.org/",
        "https://leader.example.org:8443/dap/v1.2/~a/",
        "https://192.0.2.1/",
        "https://[2001:db8::1]:8443/",
        "http://localhost:8000/",
        "http://127.0.0.1:8000/dap/",
        "http://[::1]/",
    ],
)
def test_urls_that_have_one_spelling(url: str) -> None:
    assert policy_at({f"{LEADER}/url": url}).aggregators[0].leader.url == url


def test_a_copy_has_its_own_digest() -> None:
    _ = POLICY.digest, POLICY.fields
    other = POLICY.model_copy(update={"profiles": {}, "name": "other"} | _without_profiles())
    assert other.digest == Policy.model_validate(other.model_dump()).digest != POLICY.digest
    assert "user.age" not in other.fields
    with pytest.raises(ValidationError):
        POLICY.model_copy(update={"profiles": {}})


def _without_profiles() -> dict[str, Any]:
    analysis = POLICY.analyses[ANALYSIS]
    fields = {ref: field for ref, field in analysis.fields.items() if ref.startswith("keyboard.")}
    return {"analyses": {ANALYSIS: analysis.model_copy(update={"fields": fields, "group_by": ()})}}


def test_the_dictionaries_of_a_policy_are_frozen() -> None:
    analysis = POLICY.analyses[ANALYSIS]
    changes: list[Callable[[], object]] = [
        lambda: POLICY.analyses.update(second=analysis),
        lambda: POLICY.analyses.pop(ANALYSIS),
        lambda: POLICY.profiles.clear(),
        lambda: POLICY.streams.setdefault("a", POLICY.streams["keyboard"]),
        lambda: analysis.fields.popitem(),
        lambda: POLICY.streams["keyboard"].fields.__setitem__("a", POLICY.fields["user.age"]),
        lambda: POLICY.streams["keyboard"].fields.__delitem__("ngram"),
        lambda: POLICY.streams.__ior__({}),
    ]
    for change in changes:
        with pytest.raises(TypeError, match="frozen"):
            change()
    for copied in (copy.deepcopy(POLICY), pickle.loads(pickle.dumps(POLICY))):  # noqa: S301
        assert copied == POLICY
        assert copied.digest == POLICY.digest


def test_keys_nested_without_end_are_refused_at_once() -> None:
    """tomllib takes the square of a dotted key's depth: 100,000 levels would be minutes."""
    with pytest.raises(PolicyError, match="more than 200 dots"):
        Policy.load(b".".join([b"a"] * 100_000) + b" = 1")
    with pytest.raises(PolicyError, match="at most 1000000"):
        Policy.load(b"#" * 1_000_001)
